"""Tables in the terminal: no lines, bold headings, numbers to the right and words to the left."""

from collections.abc import Collection, Sequence

from rich.table import Table

GAP = 2
"""Letters between two columns."""


def columns(
    headings: Sequence[str],
    *,
    words: Collection[str] = (),
    wrapped: Collection[str] = (),
) -> Table:
    """A table without rows; columns of `words` hold no numbers alone, and those `wrapped` may break."""
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        is_left, may_wrap = heading in words, heading in wrapped
        table.add_column(heading, justify="left" if is_left else "right", no_wrap=not may_wrap)
    return table
