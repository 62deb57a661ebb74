"""`bireme resume`: continue a run as if it had never stopped."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from bireme.cli.options import Json, Restarts
from bireme.cli.supervised import supervised
from bireme.cli.train import resumed


def resume(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="TABLE.KEY=VALUE",
            help="Set a key for the rest of the run, such as its steps or its plan. Repeatable.",
        ),
    ] = None,
    restarts: Restarts = None,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="Resume although the last starts reached no new checkpoint, or the disk has no room for "
            "what the run saves.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Resume a run from its most recent intact checkpoint.

    The exit status is 3 if three starts in a row reached no new checkpoint: another start would not help.

    [dim]bireme resume runs/20260101-120000-gpt-layers-4[/dim]
    """
    supervised(partial(resumed, sets=set_, restarts=restarts, anyway=anyway, as_json=as_json))
    resumed(run_dir, set_, restarts=restarts, anyway=anyway, as_json=as_json)
