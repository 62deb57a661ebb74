"""What all benchmarks share: the command line, the one JSON document and the tables.

A benchmark is a function from its options to what it found. With `--json` standard output has the document
and nothing else: what is printed meanwhile, by this process or by those it starts, goes to standard error.
"""

import json
import multiprocessing
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from benchmarks.common.made import made_text
from benchmarks.common.verdicts import Verdict, print_verdicts, shown, verdict_documents
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Findings", "Found", "Row", "Section", "benchmark", "in_process", "log"]

Row = Mapping[str, Any]


T = TypeVar("T")


class Found(Protocol):
    """What a benchmark comes to."""

    def document(self) -> dict[str, Any]:
        """As plain data with `rows` and `verdicts`."""

    def show(self, console: "Console") -> None:
        """Print it as tables."""


@dataclass(frozen=True, slots=True)
class Section:
    """A table: rows with the same fields, whose names say their units."""

    title: str
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Findings:
    """Tables and verdicts. In the document a row says its section, if there are several."""

    sections: Sequence[Section]
    verdicts: Sequence[Verdict]

    def document(self) -> dict[str, Any]:
        """As plain data."""
        if len(self.sections) == 1:
            rows = [dict(row) for row in self.sections[0].rows]
        else:
            rows = [{"section": section.title, **row} for section in self.sections for row in section.rows]
        return {"rows": rows, "verdicts": verdict_documents(self.verdicts)}

    def show(self, console: "Console") -> None:
        """Print it as tables; the first row of each says what its columns are."""
        from rich.markup import escape
        from rich.table import Table

        for section in self.sections:
            console.print(f"[italic]{escape(section.title)}[/italic]", highlight=False)
            table = Table(box=None, pad_edge=False)
            for name, value in (section.rows[0] if section.rows else {}).items():
                justify: Literal["left", "right"] = "left" if isinstance(value, str) else "right"
                table.add_column(name.replace("_", " "), justify=justify)
            for row in section.rows:
                table.add_row(*map(shown, row.values()))
            console.print(table)
            console.print()
        print_verdicts(self.verdicts, console)


def benchmark(
    about: str | None,
    measure: Callable[[Namespace], Found],
    *,
    quick: str,
    options: Callable[[ArgumentParser], None] = lambda _parser: None,
) -> None:
    """Be the program of a benchmark. `about` is its docstring; `quick` says what its smoke run leaves out."""
    parser = ArgumentParser(description=about.splitlines()[0] if about else None)
    parser.add_argument("--quick", action="store_true", help=f"a smoke run: {quick}")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    options(parser)
    asked = parser.parse_args()
    try:
        if asked.json:
            with _output_to_error():
                document = measure(asked).document()
            print(json.dumps(document, default=_plain, allow_nan=False))
        else:
            from rich.console import Console

            found, console = measure(asked), Console(width=170)
            console.print(f"{made_text()}\n", highlight=False, soft_wrap=True)
            found.show(console)
    except BiremeError as error:
        parser.exit(2, f"{error}\n")


def log(text: str) -> None:
    """Tell whoever waits what is being done."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def in_process(work: Callable[..., T], *words: Any) -> T:
    """What a function comes to in a process of its own, whose peak of memory is then the function's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, words)


def _plain(value: Any) -> Any:
    """What `json` does not know by itself."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no place in a JSON document")


@contextmanager
def _output_to_error() -> Iterator[None]:
    """Let what anything writes to standard output come out on standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
