"""What is written down of each committed round, and what a coordinator writes when it begins."""

from dataclasses import dataclass
from typing import Any

from bireme.sync.coordinator.messages import Samples

__all__ = ["LEDGER", "Began", "Committed"]

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
    open: tuple[Samples, ...]
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
    samples: tuple[tuple[Samples, ...], ...]
    fresh: int
    open: tuple[Samples, ...]
    returned: int = 0
    """Samples that came back so far because they did not count where they were dealt first, in `groups` and
    `outer`."""

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


def _pairs(samples: tuple[Samples, ...]) -> list[list[int]]:
    return [[one.begin, one.end] for one in samples]
