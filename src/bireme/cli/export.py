"""`bireme export` and `bireme merge`: the most recent weights of a run as a model folder."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bireme.cli.options import Json, print_json
from bireme.errors import BiremeError, tell


class ExportFormat(StrEnum):
    """A format of exported weights."""

    SAFETENSORS = "safetensors"
    DCP = "dcp"


def export(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="New or empty folder for the model.")],
    merged: Annotated[
        bool,
        typer.Option(
            "--merged",
            help="Add the adapter of model.lora to its base, and export the whole model.",
        ),
    ] = False,
    form: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="Files of the weights: safetensors, or dcp for torch.distributed.checkpoint.",
        ),
    ] = ExportFormat.SAFETENSORS,
    as_json: Json = False,
) -> None:
    """Export the latest model of a run: a transformers folder, or safetensors with the model's names.

    Of a run with model.lora it is the adapter, as the peft library loads it.

    [dim]bireme export runs/first-run --to model[/dim]
    """
    from bireme.model.graph_file import load_graph
    from bireme.train.checkpoint.checkpoint import newest_good
    from bireme.train.export import export_checkpoint
    from bireme.train.folder import RunFolder

    folder = RunFolder.of(run_dir)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise BiremeError(f"{to} already exists and is not empty. Name a new folder.")
    run = folder.load_run()
    if merged and run.model.lora.rank is None:
        raise BiremeError(
            f"{run_dir} has trained no adapter, so there is nothing to merge. Export the model as it is: "
            f"bireme export {shlex.quote(str(run_dir))} --to {shlex.quote(str(to))}"
        )
    as_dcp = form is ExportFormat.DCP
    if as_dcp and run.model.lora.rank is not None and not merged and not run.model.lora.merge:
        raise BiremeError(
            f"{run_dir} has trained an adapter, which peft reads from safetensors. Leave out --format dcp, "
            "or add --merged to export the whole model."
        )
    checkpoint = newest_good(folder.checkpoints(run), on_bad=tell)
    if checkpoint is None:
        raise BiremeError(
            f"{run_dir} has no checkpoint yet, so there is nothing to export. Train until there is one: "
            f"bireme resume {shlex.quote(str(run_dir))}"
        )
    graph = load_graph(folder.graph)
    export_checkpoint(run, graph, checkpoint, to.resolve(), merged=merged or None, as_dcp=as_dcp)
    step = checkpoint.manifest.step
    if as_json:
        print_json({"step": step, "folder": str(to), "files": sorted(path.name for path in to.iterdir())})
        return
    typer.echo(f"Wrote the model after step {step} to {to}.")


# `bireme merge`: the adapter of a run added to its base, as a model folder.


def merge(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run with model.lora.")],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="New or empty folder for the model.")],
    as_json: Json = False,
) -> None:
    """Add the adapter of a run to its base, and export the whole model: `bireme export --merged`.

    [dim]bireme merge runs/chats --to model[/dim]
    """
    export(run_dir, to, merged=True, as_json=as_json)
