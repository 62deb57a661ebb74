"""The ledger of replicas that train batches of their own, as who started the run reads it while it grows."""

import json
from collections.abc import Collection
from pathlib import Path

from bireme.runtime.quorum.ledger_tail import LedgerTail
from bireme.sync.coordinator.ledger_line import in_force
from bireme.sync.coordinator.messages import TERM

__all__ = ["AveragingTail"]


class AveragingTail(LedgerTail):
    """Each line is of one replica's batch, so all whose batches came to count are members."""

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
