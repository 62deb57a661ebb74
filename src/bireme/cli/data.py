"""`bireme data`: samples as the model will see them, token by token, and what counts in the loss."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bireme.cli.options import Json, Sets, settings_of, show
from bireme.errors import tell

_WITHOUT_MODEL = 1024
"""Tokens of a sample if neither a model nor an option says."""


def data(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|RUN.toml", help="Data, as in data.source, or a run file, or the folder of a run."
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder of the transformers model that is to learn the data."),
    ] = None,
    samples: Annotated[
        int, typer.Option(metavar="N", min=0, max=1000, help="Samples to show of each source.")
    ] = 3,
    length: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Tokens of a sample; by default as in the run or as for the model, else 1,024."
        ),
    ] = None,
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """Show samples as the model will see them, token by token, and what counts in the loss.

    [dim]bireme data chats.jsonl --model Llama-3.2-1B-Instruct[/dim]
    """
    from bireme.report.terminal import progress_bar

    sets = [*settings_of(("--length", "data.length", length)), *(set_ or ())]
    with progress_bar("loading the data") as progress:
        from bireme.train.data.viewing import view_of
        from bireme.train.folder import load_asked
        from bireme.train.model import RunModel
        from bireme.train.run_data import data_of, tokenizer_name, with_length_of_data
        from bireme.train.run_file import load_run_file

        path = Path(source)
        run_file = path / "run.toml" if (path / "run.toml").is_file() else path
        is_run = run_file.suffix == ".toml"
        own = settings_of(
            ("--model", "model.source", None if model is None else f"hf:{model.removeprefix('hf:')}"),
            ("SOURCE", "data.source", None if is_run else source),
            ("SOURCE", "data.evaluation_fraction", None if is_run else 0.0),
        )
        default = [] if is_run or model is not None else [f"data.length={_WITHOUT_MODEL}"]
        sets = [*default, *own, *sets]
        run = load_asked(run_file, sets) if is_run else load_run_file(None, sets)
        run = with_length_of_data(run, progress)
        # One sample is enough to be shown, however large the batches of the run are.
        run = run.with_keys("training", batch_size=1)
        has_model = is_run or model is not None or any(text.startswith("model.") for text in sets)
        found = data_of(run, RunModel.of(run, 1) if has_model else None, progress)
        view = view_of(found, tokenizer_name(found.tokenizer), run.data.length, samples)
    for warning in view.warnings:
        tell(warning)
    from bireme.report.data_table import print_data

    show(view.document, partial(print_data, view), as_json=as_json)
