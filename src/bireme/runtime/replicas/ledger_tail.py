"""The ledger of a run as a launcher reads it while it grows: which replicas train, and how much counts."""

import json
from collections.abc import Collection
from itertools import groupby
from pathlib import Path

from bireme.sync.coordinator.messages import TERM
from bireme.sync.coordinator.samples import in_force


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


class AveragingTail(LedgerTail):
    """The same for replicas that train batches of their own: each line is of one replica's batch, so all
    replicas whose batches came to count are members.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._num_rounds = self._num_committed = 0
        self._num_returned: dict[int, int] = {}
        """By the term that they came back in."""
        self._begins_at: int | None = None
        """How many samples counted before the first line."""

    def read(self) -> Collection[int]:
        """The replicas whose batches were added since this was last asked."""
        members: set[int] = set()
        lines = dict(enumerate(map(json.loads, self._lines())))
        for record in in_force(lines, self._last_term).values():
            self._last_term = record["epoch"] // TERM
            self._epochs.add(record["epoch"])
            if record["kind"] == "round":
                members.update(record["members"])
                self._num_rounds += 1
                self._num_committed += sum(end - begin for own in record["samples"] for begin, end in own)
                self._num_returned[self._last_term] = record.get("returned", 0)
            else:  # which may undo what the ranks had not heard of from a coordinator that died
                known = record["fresh"] - sum(end - begin for begin, end in record["open"])
                if self._begins_at is None:
                    self._begins_at = known - self._num_committed
                self._num_committed = known - self._begins_at
        return members

    @property
    def num_rounds(self) -> int:
        """How many batches count, each of one replica."""
        return self._num_rounds

    @property
    def num_committed(self) -> int:
        """How many samples count."""
        return self._num_committed

    @property
    def num_redone(self) -> int:
        """How many samples came back from replicas that died before they counted."""
        return sum(self._num_returned.values())
