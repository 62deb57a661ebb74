"""The ledger of replicas that train batches of their own, as who started the run reads it while it grows."""

import json
from collections.abc import Collection
from pathlib import Path

from bireme.runtime.quorum.ledger_tail import LedgerTail

__all__ = ["AveragingTail"]


class AveragingTail(LedgerTail):
    """Each line is of one replica's batch, so all whose batches came to count are members."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._num_rounds = self._num_committed = self._num_returned = 0

    def read(self) -> Collection[int]:
        """The replicas whose batches were added since this was last asked."""
        members: set[int] = set()
        for line in self._lines():
            record = json.loads(line)
            self._epochs.add(record["epoch"])
            if record["kind"] == "round":
                members.update(record["members"])
                self._num_rounds += 1
                self._num_committed += sum(end - begin for own in record["samples"] for begin, end in own)
                self._num_returned = record.get("returned", 0)
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
        return self._num_returned
