"""`bireme watch`: the page of a run in the browser, while the run trains."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from bireme import __version__


def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run that trains, has ended, or has not begun.")
    ],
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of this machine for the page; 0 is a free one."),
    ] = 0,
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Print the address only, and open no browser.")
    ] = False,
) -> None:
    """Show the page of a run in the browser, with new figures while the run trains. Ctrl-C ends it.

    [dim]bireme watch runs/my-run[/dim]
    """
    from bireme.report.page.run import read_run
    from bireme.report.page.server import LivePage, PageServer

    if folder.exists() and (not folder.is_dir() or any(folder.glob("*/metrics.jsonl"))):
        read_run(folder)  # refuses a folder of runs, and names one of them
    with PageServer(LivePage(folder, __version__).newest, port) as server, suppress(KeyboardInterrupt):
        typer.echo(f"{folder} is at {server.address}")
        typer.echo("Ctrl-C ends the page, and not the run.", err=True)
        if not no_open and _has_screen():
            import webbrowser

            webbrowser.open(server.address)
        server.serve_forever()


def _has_screen() -> bool:
    """Whether a browser with windows can be opened. Others would take the terminal."""
    if sys.platform != "linux":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
