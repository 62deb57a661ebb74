"""The ledger of a run as a launcher reads it while it grows: which replicas train, and how much counts."""

import json
from collections.abc import Collection
from itertools import groupby
from pathlib import Path

from bireme.sync.coordinator.messages import TERM
from bireme.sync.coordinator.samples import in_force


class LedgerTail:
    """The lines that are added to a ledger after this was made. Each is of a batch of all members or, if the
    run averages weights (`averages`), of a batch of one replica.
    """

    def __init__(self, path: Path, *, averages: bool = False) -> None:
        self._path, self._averages = path, averages
        # A half line at the end goes when the coordinator opens the ledger.
        self._place = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        self._epochs: set[int] = set()
        self._last_term = -1
        self._rounds: list[tuple[int, int, int]] = []
        """Of each batch that counts its number, the term, and the samples that had come back in that term."""
        self._known = self._known_before = 0
        """The samples of the run that count, after the last line and before the first."""

    def read(self) -> Collection[int]:
        """The members of the last round that was added since the last call, or of all such rounds if the run
        averages weights.
        """
        members: set[int] = set()
        lines = dict(enumerate(map(json.loads, self._lines())))
        for record in in_force(lines, self._last_term).values():
            is_first, self._last_term = not self._epochs, record["epoch"] // TERM
            self._epochs.add(record["epoch"])
            self._known = record["fresh"] - sum(end - begin for begin, end in record["open"])
            num_samples = 0
            if record["kind"] == "round":
                members = {*record["members"], *(members if self._averages else ())}
                num_samples = sum(end - begin for own in record["samples"] for begin, end in own)
                self._rounds.append((record["batch"], self._last_term, record.get("returned", 0)))
            elif not self._averages:  # lines that no rank heard of before a coordinator died do not count
                self._rounds = [one for one in self._rounds if one[0] < record["batch"]]
            if is_first:
                self._known_before = self._known - num_samples
        return members

    @property
    def num_rounds(self) -> int:
        """The number of batches that count."""
        return len(self._rounds)

    @property
    def num_committed(self) -> int:
        """The number of samples that count."""
        return self._known - self._known_before

    @property
    def num_epochs(self) -> int:
        """The number of epochs of the membership up to the last line. The epochs of one coordinator are
        numbered in a row, so an epoch without a line is counted too.
        """
        terms = (list(own) for _, own in groupby(sorted(self._epochs), key=lambda epoch: epoch // TERM))
        return sum(own[-1] - own[0] + 1 for own in terms)

    @property
    def num_redone(self) -> int:
        """The number of samples that did not count in their batch, and were assigned again."""
        return sum({term: returned for _, term, returned in self._rounds}.values())

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
