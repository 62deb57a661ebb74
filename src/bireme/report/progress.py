"""A progress bar on standard error, so that what a verb prints stays clean."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_REFRESHES_PER_S = 4
"""Few, as what is measured meanwhile has to wait for them."""


@contextmanager
def progress_bar(first: str) -> Iterator[Callable[[float, str], None]]:
    """A bar while the block runs; the block tells it which part is done, and what comes next.

    Until it first does, nobody knows how long `first` will take, and the bar only shows that something
    happens. Where nobody watches, as when standard error is a file, nothing is drawn.
    """
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        refresh_per_second=_REFRESHES_PER_S,
    ) as bar:
        task = bar.add_task(first, total=None)
        yield lambda done, what: bar.update(task, total=1.0, completed=done, description=what)
