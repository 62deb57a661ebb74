"""`bireme merge`: the adapter of a run added to its base, as a model folder."""

from pathlib import Path
from typing import Annotated

import typer

from bireme.cli.export import export
from bireme.cli.options import Json


def merge(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run with model.lora.")],
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="New or empty folder for the model.")],
    as_json: Json = False,
) -> None:
    """Add the adapter of a run to its base, and export the whole model: `bireme export --merged`.

    [dim]bireme merge runs/chats --to model[/dim]
    """
    export(run_dir, to, merged=True, as_json=as_json)
