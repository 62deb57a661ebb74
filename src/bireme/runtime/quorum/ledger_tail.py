"""The ledger as who started a run reads it while it grows: who trains now, and how much counts."""

import json
from collections.abc import Collection
from itertools import groupby
from pathlib import Path

from bireme.sync.coordinator.ledger_line import in_force
from bireme.sync.coordinator.messages import TERM

__all__ = ["LedgerTail"]


class LedgerTail:
    """What has been added to a ledger since this was made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A half line at the end goes when the coordinator opens it.
        self._place = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        self._epochs: set[int] = set()
        self._last_term = -1
        self._samples: dict[int, int] = {}
        """The samples of each batch that counts."""
        self._returned: dict[int, tuple[int, int]] = {}
        """How many had come back by then, to be dealt again, since the term began that is named first."""

    def read(self) -> Collection[int]:
        """The members of the last round that was added since this was last asked; nobody if none was."""
        members: tuple[int, ...] = ()
        lines = dict(enumerate(map(json.loads, self._lines())))
        for record in in_force(lines, self._last_term).values():
            self._last_term = record["epoch"] // TERM
            self._epochs.add(record["epoch"])
            if record["kind"] == "round":
                members = tuple(record["members"])
                own = (end - begin for pairs in record["samples"] for begin, end in pairs)
                self._samples[record["batch"]] = sum(own)
                self._returned[record["batch"]] = record["epoch"] // TERM, record.get("returned", 0)
            else:  # what was written after the last word of a coordinator that died is undone
                undone = [batch for batch in self._samples if batch >= record["batch"]]
                for batch in undone:
                    del self._samples[batch], self._returned[batch]
        return members

    @property
    def num_rounds(self) -> int:
        """How many batches count."""
        return len(self._samples)

    @property
    def num_committed(self) -> int:
        """How many samples count."""
        return sum(self._samples.values())

    @property
    def num_epochs(self) -> int:
        """How many epochs the membership has had up to that of the last round. Those of one coordinator are
        numbered in a row, so that those are counted, too, in which nothing came to count.
        """
        terms = (list(own) for _, own in groupby(sorted(self._epochs), key=lambda epoch: epoch // TERM))
        return sum(own[-1] - own[0] + 1 for own in terms)

    @property
    def num_redone(self) -> int:
        """How many samples were dealt and did not count in their batch, so that they are dealt again."""
        return sum(dict(sorted(self._returned.values())).values())

    def _lines(self) -> list[bytes]:
        """The whole lines that have been added."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._place)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        return whole.splitlines()
