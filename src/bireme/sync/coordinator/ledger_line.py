"""What is written down of each committed round, and what a coordinator writes when it begins."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bireme.sync.coordinator.messages import TERM, SamplePlaces

__all__ = ["LEDGER", "Began", "Committed", "in_force"]

LEDGER = "ledger.jsonl"
"""Its name in the folder of a run."""


@dataclass(frozen=True, slots=True)
class Began:
    """A coordinator begins, or takes up, before the batch `batch`: the places below `fresh` are committed,
    but for those in `open`. The `mode` is named where each line is of one replica's batch.
    """

    epoch: int
    batch: int
    num_samples: int
    fresh: int
    open: tuple[SamplePlaces, ...]
    mode: str = ""

    def document(self) -> dict[str, Any]:
        """As a line of the ledger."""
        return {
            "kind": "start",
            "batch": self.batch,
            "epoch": self.epoch,
            "num_samples": self.num_samples,
            "fresh": self.fresh,
            "open": _pairs(self.open),
        } | ({"mode": self.mode} if self.mode else {})


@dataclass(frozen=True, slots=True)
class Committed:
    """A batch counts: `samples` of each of its `members`; `fresh` and `open` as they are after it."""

    epoch: int
    batch: int
    attempt: int
    members: tuple[int, ...]
    samples: tuple[tuple[SamplePlaces, ...], ...]
    fresh: int
    open: tuple[SamplePlaces, ...]
    returned: int = 0
    """Samples that came back so far because they did not count where they were dealt first."""

    @property
    def num_samples(self) -> int:
        """How many samples it has."""
        return sum(one.count for own in self.samples for one in own)

    def document(self) -> dict[str, Any]:
        """As a line of the ledger."""
        return {
            "kind": "round",
            "batch": self.batch,
            "epoch": self.epoch,
            "attempt": self.attempt,
            "members": list(self.members),
            "samples": [_pairs(own) for own in self.samples],
            "fresh": self.fresh,
            "open": _pairs(self.open),
        } | ({"returned": self.returned} if self.returned else {})


def in_force(records: Mapping[int, dict[str, Any]], last_term: int = -1) -> dict[int, dict[str, Any]]:
    """The lines that count, by their numbers, after lines of that term at the latest.

    A coordinator that was stopped, and wakes up after another one has taken up, may still write: nobody hears
    of it. Its lines are of an earlier term than some before them.
    """
    found = {}
    for number, record in records.items():
        epoch = record.get("epoch")
        term = epoch // TERM if isinstance(epoch, int) else last_term
        if term >= last_term:
            found[number], last_term = record, term
    return found


def _pairs(samples: tuple[SamplePlaces, ...]) -> list[list[int]]:
    return [[one.begin, one.end] for one in samples]
