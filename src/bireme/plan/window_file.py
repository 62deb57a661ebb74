"""The windows of a plan that pages, in a file: who starts a run plans copies once, and its ranks read them.

A file of another plan, or one that lacks a window, does no harm: what it does not say is planned.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from bireme.bounds import Count, Place
from bireme.documents import read_dataclass
from bireme.files import write_text_atomically
from bireme.plan.plan import Plan, know_window
from bireme.schedule.instruction import Instruction, Kind, Page
from bireme.schedule.program import Program, Track
from bireme.schedule.rule import Rule
from bireme.schedule.source import SETTLED
from bireme.schedule.stream import LONG
from bireme.schedule.tiers import Chunk

__all__ = ["read_windows", "write_windows"]

WINDOWS_FORMAT = 1


class _Row(NamedTuple):
    """An instruction."""

    kind: Kind
    stage: Place
    batch: Place
    microbatch: Place | None
    version: int | None
    half: Place | None
    seen: Place | None
    page: Page | None
    is_apart: bool = False


@dataclass(frozen=True, slots=True)
class _Rows:
    """A track, and on which tier each chunk lies when the window begins; None where the rank pages none."""

    head: tuple[_Row, ...]
    body: tuple[_Row, ...]
    repeats: Place
    tail: tuple[_Row, ...]
    versions_per_batch: Place
    begin: tuple[tuple[Chunk, Place], ...] | None


@dataclass(frozen=True, slots=True)
class _Window:
    plan: str
    num_batches: Count
    first_batch: Place
    ranks: tuple[_Rows, ...]


@dataclass(frozen=True, slots=True)
class _Windows:
    windows: tuple[_Window, ...]


def write_windows(path: Path, plans: Sequence[Plan]) -> None:
    """Write what the ranks of a run ask for; nothing if none of its plans pages."""
    paged = [plan for plan in plans if plan.paging is not None]
    if paged:
        windows = [
            _window(_digest(plan), plan.program(num_batches, first_batch))
            for plan in paged
            for num_batches, first_batch in _asked_for(plan)
        ]
        document = {"format": WINDOWS_FORMAT, "windows": windows}
        write_text_atomically(path, json.dumps(document, separators=(",", ":")) + "\n")


def read_windows(path: Path, plans: Sequence[Plan]) -> None:
    """Have the windows in a file at hand, as far as they are of these plans."""
    digests = {_digest(plan): plan for plan in plans if plan.paging is not None}
    if digests and path.is_file():
        for window in read_dataclass(path, _Windows, number=WINDOWS_FORMAT).windows:
            plan = digests.get(window.plan)
            if plan is not None:
                tracks = [_track(rows) for rows in window.ranks]
                begins = [None if rows.begin is None else dict(rows.begin) for rows in window.ranks]
                know_window(plan, window.num_batches, window.first_batch, tracks, begins)


def _asked_for(plan: Plan) -> list[tuple[int, int]]:
    """The windows that an engine asks for: a settled one, and the loops of the first and of later ones."""
    later = [(LONG, 1)] if plan.source.rule is Rule.DELAYED else []
    return [(SETTLED, 0), (LONG, 0), *later]


def _digest(plan: Plan) -> str:
    return hashlib.sha256(json.dumps(asdict(plan), sort_keys=True).encode()).hexdigest()


def _window(plan: str, program: Program) -> dict[str, object]:
    ranks = [
        {
            "head": _plain(track.head),
            "body": _plain(track.body),
            "repeats": track.repeats,
            "tail": _plain(track.tail),
            "versions_per_batch": track.versions_per_batch,
            "begin": None if tiers is None else sorted(tiers.begin.items()),
        }
        for track, tiers in zip(program.tracks, program.tiers, strict=True)
    ]
    return {
        "plan": plan,
        "num_batches": program.num_batches,
        "first_batch": program.first_batch,
        "ranks": ranks,
    }


def _plain(steps: Sequence[Instruction]) -> list[_Row]:
    return [
        _Row(
            step.kind,
            step.stage,
            step.batch,
            step.microbatch,
            step.version,
            step.half,
            step.seen,
            step.page,
            step.is_apart,
        )
        for step in steps
    ]


def _track(rows: _Rows) -> Track:
    head, body, tail = (
        tuple(Instruction(*row) for row in part) for part in (rows.head, rows.body, rows.tail)
    )
    return Track(head, body, rows.repeats, tail, rows.versions_per_batch)
