"""`bireme evaluate`: the loss of a run, or of any model in a folder, on some data."""

from math import isfinite
from typing import Annotated, Any

import typer

from bireme.cli.options import Json, Sets, print_json, settings_of
from bireme.errors import tell


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL",
            help="The folder of a run, of an exported model, or of any transformers model.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Data, as in data.source; by default what the run held out for evaluation.",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help="Tokens per sample; by default as in training, else the model's context, at most 1,024."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="FOLDER|bytes", help="Tokenizer; by default the model's own.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", "-B", help="Samples that run at a time.")
    ] = None,
    batches: Annotated[
        int | None,
        typer.Option(
            help="Most batches, 0 for all; by default all of --data, and of a run's own data as many as it "
            "evaluates itself.",
            min=0,
            metavar="N",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that share the model as a pipeline; by default as many as its weights need.",
            min=1,
            metavar="N",
        ),
    ] = None,
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model: its loss, perplexity, bits per byte of text, and tokens per second.

    [dim]bireme evaluate runs/first-run --data book.txt[/dim]
    """
    from bireme.report.terminal import progress_bar
    from bireme.runtime.board import RankFailed
    from bireme.train.evaluating import evaluate as evaluated
    from bireme.train.subject import subject_of

    own = settings_of(
        ("--length", "data.length", length),
        ("--tokenizer", "data.tokenizer", tokenizer),
        ("--batch-size", "training.batch_size", batch_size),
    )
    sets = [*(set_ or ()), *own]
    try:
        with progress_bar("loading the model") as progress:
            subject = subject_of(model, sets, tell)
            found = evaluated(subject, data, most_batches=batches, workers=workers, progress=progress)
    except RankFailed as error:
        tell(str(error))
        raise typer.Exit(1) from None
    for warning in found["warnings"]:
        tell(warning)
    if as_json:
        infinite = {name for name, one in found.items() if isinstance(one, float) and not isfinite(one)}
        print_json(found | dict.fromkeys(infinite))
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    step = "" if found["step"] is None else f" after step {found['step']}"
    typer.echo(f"{found['model']}{step}, on {found['data']}")
    parts = [f"loss {found['loss']:.4f}"]
    if found["perplexity"] is not None:
        parts.append(f"perplexity {found['perplexity']:,.4g}")
    if found["bits_per_byte"] is not None:
        parts.append(f"{found['bits_per_byte']:.4f} bits per byte")
    typer.echo(", ".join(parts))
    samples, tokens, rate = found["num_samples"], found["tokens"], found["tokens_per_s"]
    of_samples = "" if found["samples_given"] in (None, samples) else f" of {found['samples_given']:,}"
    counted = f"{samples:,}{of_samples} samples"
    if tokens is not None and rate is not None:
        given = "" if found["tokens_given"] is None else f" of {found['tokens_given']:,}"
        counted = f"{tokens:,}{given} tokens in {counted}, {rate:,.0f} tokens/s"
    typer.echo(counted)
    words = [] if found["tokenizer"] is None else [f"tokenizer: {found['tokenizer']}"]
    words += [] if found["length"] is None else [f"{found['length']:,} tokens in a sample"]
    typer.echo("; ".join([*words, f"loss on {found['loss_on']}"]))
