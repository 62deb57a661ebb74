"""The ledger as who started a run reads it while it grows: who trains now, and how much counts."""

import json
from collections.abc import Collection
from pathlib import Path

__all__ = ["LedgerTail"]


class LedgerTail:
    """What has been added to a ledger since this was made; a whole batch has `batch_size` samples."""

    def __init__(self, path: Path, batch_size: int) -> None:
        self._path, self._batch_size = path, batch_size
        # A half line at the end goes when the coordinator opens it.
        self._place = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        self._epochs: set[int] = set()
        self._samples: dict[int, int] = {}
        """The samples of each batch that counts."""

    def read(self) -> Collection[int]:
        """The members of the last round that was added since this was last asked; nobody if none was."""
        members: tuple[int, ...] = ()
        for line in self._lines():
            record = json.loads(line)
            self._epochs.add(record["epoch"])
            if record["kind"] == "round":
                members = tuple(record["members"])
                own = (end - begin for pairs in record["samples"] for begin, end in pairs)
                self._samples[record["batch"]] = sum(own)
            else:  # what was written after the last word of a coordinator that died is undone
                undone = [batch for batch in self._samples if batch >= record["batch"]]
                for batch in undone:
                    del self._samples[batch]
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
        """How many epochs the membership has had, as far as a round was in them."""
        return len(self._epochs)

    @property
    def num_redone(self) -> int:
        """How many samples were dealt and did not count in their batch, so that they are dealt again."""
        return self.num_rounds * self._batch_size - self.num_committed

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
