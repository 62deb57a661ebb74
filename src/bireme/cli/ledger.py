"""`bireme ledger`: whether every sample of a run counts once."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bireme.cli.options import Json, print_json
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.sync.coordinator.ledger_check import CheckedLedger


SHOWN = 10
"""Places that are listed; the document has all."""


def ledger(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run whose replicas may die.")],
    as_json: Json = False,
) -> None:
    """Check the ledger of a run: every sample in one committed round of each finished epoch.

    [dim]bireme ledger runs/my-run[/dim]
    """
    from bireme.sync.coordinator.ledger_check import check_ledger
    from bireme.sync.coordinator.samples import LEDGER

    if not folder.is_dir():
        raise BiremeError(f"There is no folder {folder}. Name the folder of a run.")
    found = check_ledger(folder / LEDGER)
    if as_json:
        print_json(found.document())
    else:
        _show(found)
    if not found.is_whole:
        raise typer.Exit(1)


def _show(found: "CheckedLedger") -> None:
    document = found.document()
    finished = f"{found.num_finished} epochs finished, " if found.per_epoch else ""
    typer.echo(
        f"{found.rounds:,} rounds, {found.samples:,} samples committed, {finished}"
        f"{document['samples_open']:,} samples assigned and not committed yet"
    )
    for one in found.members:
        typer.echo(f"from batch {one.batch}: replicas {', '.join(map(str, one.members))}")
    for what in ("missing", "doubled"):
        places = document[what]
        for one in places[:SHOWN]:
            typer.echo(f"{what} in epoch {one['epoch']}: the samples {one['begin']} to {one['end'] - 1}")
        if len(places) > SHOWN:
            typer.echo(f"{what}: {len(places) - SHOWN} more")
    for number in found.damaged:
        typer.echo(f"line {number} cannot be read")
    if found.is_whole:
        typer.echo("Every sample counts once.")
