"""`bireme report`, `watch` and `ledger`: the page of runs, and whether every sample of one counts once."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bireme import __version__
from bireme.cli.options import check_writable, print_json, say_written
from bireme.errors import BiremeError, tell

if TYPE_CHECKING:
    from bireme.report.page.run import Run
    from bireme.sync.coordinator.ledger_check import CheckedLedger


PAGE = "report.html"


def report(
    folders: list[Path],
    output: Path | None = None,
    force: bool = False,
    trace: Path | None = None,
    as_json: bool = False,
) -> None:
    """Write one HTML page about a run: curves, timeline, memory, plan. It needs no network.

    [dim]bireme report runs/my-run[/dim]

    Arguments:
        folders (RUN): Folder of a run; give several to compare them.

    Options:
        output (--output, --to, -o FILE.html): File for the page; by default RUN/report.html.
        trace (FILE.json): Write a Chrome trace of the recorded batches, for ui.perfetto.dev.
    """
    from datetime import datetime

    from bireme.report.page.charts import MOST_RUNS

    if len(folders) > MOST_RUNS:
        raise BiremeError(f"{len(folders)} runs are too many for one page; give at most {MOST_RUNS}.")
    check_writable(output, trace, force=force)
    from bireme.report.page.run import read_run

    runs = [read_run(folder) for folder in folders]
    now = datetime.now().astimezone()
    if trace is not None:
        _write_trace(runs[0], trace)
    written = output if as_json or output is not None else folders[0] / PAGE
    if written is not None:
        from bireme.files import write_text_atomically
        from bireme.report.page.page import page

        write_text_atomically(written, page(runs, now, __version__))
    if as_json:
        from bireme.report.page.figures import runs_document

        files = {
            "page": None if written is None else str(written),
            "trace": None if trace is None else str(trace),
        }
        print_json(runs_document(runs, now.timestamp()) | files)
        return
    say_written(written, trace)


def _write_trace(run: "Run", path: Path) -> None:
    from bireme.report.timeline_document import write_trace

    timeline = run.predicted if run.measured is None else run.measured
    if timeline is None:
        why = "".join(f" {note}" for note in run.notes if "timeline-" in note)
        raise BiremeError(
            f"{run.folder} has no timeline that can be traced.{why} `bireme train --set log.trace=true` "
            "records a few batches."
        )
    write_trace(timeline, path, has_replicas=run.plan is None or run.plan.plan.width > 1)


# `bireme watch`: the page of a run in the browser, while the run trains.


def watch(
    folder: Path | None = None,
    port: Annotated[int, {"min": 0, "max": 65535}] = 0,
    no_open: bool = False,
    as_json: bool = False,
) -> None:
    """Show the page of a run in the browser, with new figures while the run trains. Ctrl-C ends it.

    [dim]bireme watch runs/first-run[/dim]

    Arguments:
        folder (RUN): Folder of a run that trains, has ended, or has not begun; by default the newest in runs.

    Options:
        port: Port of this machine for the page; 0 is a free one.
        no_open: Print the address only, and open no browser.
    """
    from bireme.report.page.page import LivePage, PageServer
    from bireme.report.page.run import read_run

    if folder is None:
        folder = _newest_run(Path("runs"))
    if folder.exists() and (not folder.is_dir() or any(folder.glob("*/metrics.jsonl"))):
        read_run(folder)  # refuses a folder of runs, and names one of them
    has_begun = (folder / "metrics.jsonl").is_file()
    with PageServer(LivePage(folder, __version__).newest, port) as server, suppress(KeyboardInterrupt):
        if as_json:
            print_json({"run": str(folder), "address": server.address, "has_begun": has_begun})
        else:
            typer.echo(f"{folder} is at {server.address}")
        if not has_begun:
            tell(f"No run has begun in {folder}. The page waits for it.")
        typer.echo("Ctrl-C ends the page, and not the run.", err=True)
        if not no_open and _has_screen():
            import webbrowser

            webbrowser.open(server.address)
        server.serve_forever()


def _newest_run(folder: Path) -> Path:
    begun = {path.stat().st_mtime: path.parent for path in folder.glob("*/metrics.jsonl")}
    if not begun:
        raise BiremeError(f"There is no run in {folder}. Name the folder of a run.")
    return begun[max(begun)]


def _has_screen() -> bool:
    """Whether a browser with windows can be opened. Others would take the terminal."""
    if sys.platform != "linux":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


# `bireme ledger`: whether every sample of a run counts once.


SHOWN = 10
"""Places that are listed; the document has all."""


def ledger(folder: Path, as_json: bool = False) -> None:
    """Check the ledger of a run: every sample in one committed round of each finished epoch.

    [dim]bireme ledger runs/my-run[/dim]

    Arguments:
        folder (RUN): Folder of a run whose replicas may die.
    """
    from bireme.sync.coordinator.ledger_check import check_ledger
    from bireme.sync.coordinator.samples import LEDGER

    if not folder.is_dir():
        raise BiremeError(f"{folder} is not a folder. Name the folder of a run.")
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
