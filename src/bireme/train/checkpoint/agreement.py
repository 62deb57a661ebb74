"""How ranks agree on a checkpoint: each reports on its own part, and rank 0 gives the verdict.

The store between them may be slow or lose its server; then there is no word, and no rank waits for longer
than it was told to. Nothing here touches files.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from bireme.errors import first_line
from bireme.runtime.stores import Store
from bireme.train.checkpoint.manifest import FileEntry

POLL_S = 0.02


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Opening(_Message):
    """Rank 0's answer on opening a folder: the token to find there and the intact steps, or an error."""

    token: str = ""
    good_steps: list[int] = []
    error: str | None = None


class PartReport(_Message):
    """Result of one rank's part: its file, written and read back, or an error."""

    rank: int
    step: int
    clip_scale: float = 1.0
    file: FileEntry | None = None
    error: str | None = None


class CheckpointVerdict(_Message):
    """Whether the draft became a checkpoint, with its bytes, or why not. If machines share no folder,
    `manifest` is for the others to write.
    """

    num_bytes: int = 0
    error: str | None = None
    manifest: str = ""


class NoWordError(Exception):
    """Nothing came from another rank in time, or the store is gone; the text says which."""


Message = TypeVar("Message", bound=_Message)


class CheckpointAgreement:
    """What ranks tell each other about checkpoints, each message once; one store is for one writer a rank.

    `timeout_s` is how long one waits for another, unless `give_up` was called.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, *, timeout_s: float) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s
        self._store = store
        self._given_up = threading.Event()
        self._old: list[str] = []
        """Keys of verdicts, which all ranks have read once all have told of a later checkpoint."""

    def give_up(self) -> None:
        """Let who waits, wait no more."""
        self._given_up.set()

    def open(self, opening: Opening) -> None:
        """Let the others begin. Only for rank 0."""
        self._tell("open", opening)

    def opening(self) -> Opening:
        """How rank 0 opened the folder."""
        return self._hear("open", Opening, "rank 0 did not open the folder", self.timeout_s)

    def report(self, name: str, report: PartReport) -> None:
        """Tell rank 0 of this rank's part of the checkpoint `name`."""
        self._tell(f"{name}/{self.rank}", report)

    def reports(self, name: str) -> list[PartReport | str]:
        """The reports of the other ranks, in order, or a sentence on which rank sent none."""
        began_s = time.monotonic()
        found: list[PartReport | str] = []
        for rank in range(1, self.num_ranks):
            try:
                what = f"rank {rank} did not report its part"
                found.append(self._hear(f"{name}/{rank}", PartReport, what, self.timeout_s, began_s))
            except NoWordError as error:
                found.append(f"{str(error)[0].upper()}{str(error)[1:]}.")
        if all(isinstance(report, PartReport) for report in found):
            self._forget(self._old)
            self._old.clear()
        return found

    def judge(self, name: str, verdict: CheckpointVerdict) -> None:
        """Tell the others what became of the checkpoint `name`. Only for rank 0, with all reports heard."""
        self._tell(f"{name}/verdict", verdict)
        self.forget_reports(name)
        self._old.append(f"{name}/verdict")

    def forget_reports(self, name: str) -> None:
        """Take the reports on `name`, which were all heard, out of the store. Only for rank 0."""
        self._forget([f"{name}/{rank}" for rank in range(1, self.num_ranks)])

    def verdict(self, name: str) -> CheckpointVerdict:
        """What became of the checkpoint `name`."""
        # Rank 0 itself waits this long for the slowest report, and may have begun later.
        what = "rank 0 did not report the result"
        return self._hear(f"{name}/verdict", CheckpointVerdict, what, 2 * self.timeout_s)

    def _tell(self, key: str, message: _Message) -> None:
        try:
            self._store.set(f"checkpoint/{key}", message.model_dump_json())
        except Exception as error:  # whatever a store has for its server being gone
            raise NoWordError(f"the other ranks cannot be reached ({first_line(error)})") from error

    def _hear(
        self, key: str, kind: type[Message], what: str, timeout_s: float, began_s: float | None = None
    ) -> Message:
        began_s = time.monotonic() if began_s is None else began_s
        while (value := self._look(f"checkpoint/{key}", what)) is None:
            if self._given_up.is_set():
                raise NoWordError(f"{what}, and the run is ending")
            if time.monotonic() > began_s + timeout_s:
                raise NoWordError(f"{what} within {timeout_s:g} s")
            self._given_up.wait(POLL_S)
        try:
            return kind.model_validate_json(value)
        except ValidationError as error:
            raise NoWordError(f"{what} in a format that this version of Bireme knows") from error

    def _look(self, key: str, what: str) -> bytes | None:
        try:
            return self._store.get(key) if self._store.check([key]) else None
        except Exception as error:  # as above
            raise NoWordError(f"{what}: the store does not answer ({first_line(error)})") from error

    def _forget(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(Exception):  # some stores cannot, and a few bytes more do no harm
                self._store.delete_key(f"checkpoint/{key}")
