"""Second copies of a run: when its ranks copy, how old the copies are, and how a run starts from them."""

import hashlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Self

import torch

import bireme
from bireme.errors import BiremeError
from bireme.runtime.copies.copier import CLIP_SCALE, TENSORS, Copier, CopyOrders, CopySource
from bireme.runtime.copies.keeper import (
    KeeperAddress,
    KeeperProcess,
    KeptShard,
    follow,
    newest_of,
    shards_at,
)
from bireme.runtime.copies.versions import CopyVersion
from bireme.runtime.snapshot import Snapshot
from bireme.train.checkpoint.checkpoint import Checkpoint, find_checkpoints, newest_good, step_of
from bireme.train.checkpoint.manifest import CheckpointMeta, FileEntry, Manifest, TensorEntry, plain_extra
from bireme.train.joined_processes import Attended
from bireme.train.run_file import RunFile

_READY = 2.0**-14
"""The vote of a rank that may begin the next copy, beside the whole numbers of reasons to stop."""
_MOST_PAUSE = 0.02
"""Of a run's time at most that it waits while tensors are copied."""
_META = "meta"
_FOLLOW_S = 10.0


class RunCopies:
    """The second copies of one rank, of `num_ranks` that copy together. `leads` says whether they do.

    All of them copy the state after the same batch. Each rank votes with every batch whether it is ready for
    the next copy: then its last one is whole at the keepers. Once the votes of all have come, that version is
    settled, and all of them begin the next one.
    """

    def __init__(self, copier: Copier, num_ranks: int, leads: Callable[[], bool]) -> None:
        self._copier, self._num_ranks, self._leads = copier, num_ranks, leads
        self._begun: CopyVersion | None = None
        self._ignored = -1
        """Votes of batches up to that one may be older than the last copy."""
        self._rests_until_s = 0.0
        self._failure = ""
        self.settled: CopyVersion | None = None
        """The newest version that is whole in every shard."""

    def votes(self, others: Callable[[], float]) -> Callable[[], float]:
        """What this rank votes with a batch, beside its other votes, which are whole numbers."""
        return lambda: others() + (_READY if self.is_ready else 0.0)

    @property
    def is_ready(self) -> bool:
        """Whether this rank may begin the next copy: the last one is whole, and it has trained since."""
        copier = self._copier
        is_whole = copier.newest == self._begun and not copier.is_busy
        return is_whole and monotonic() > self._rests_until_s and self._leads()

    def is_due(self, batch: int, votes: float) -> bool:
        """Whether a copy begins after a batch, by the votes of all ranks."""
        is_new = batch > self._ignored and self._leads()
        return is_new and round(votes % 1.0 / _READY) == self._num_ranks

    def begin(self, snapshot: Snapshot, meta: CheckpointMeta, *, copied_s: float, ignored: int) -> None:
        """Begin to copy a snapshot, which took `copied_s` to take: all ranks are ready. Votes for the next
        copy count from batches after `ignored`.
        """
        self.settled = self._begun
        words = {_META: asdict(replace(meta, extra=plain_extra(meta.extra)))}
        self._begun = self._copier.begin(snapshot, words, self.settled)
        self._ignored = ignored
        self._rests_until_s = monotonic() + copied_s / _MOST_PAUSE

    @property
    def step(self) -> int | None:
        """The step of the newest version that is whole in every shard; None if there is none."""
        return None if self.settled is None else self.settled.step

    def age(self, step: int) -> int | None:
        """The batches since that version."""
        return None if self.step is None else step - self.step

    def trouble(self) -> str:
        """The sentence about a new failure, empty if there is none."""
        failure, before, self._failure = self._copier.failure, self._failure, self._copier.failure
        return "" if failure == before else failure

    @property
    def sent_bytes(self) -> int:
        """Sent to other hosts so far."""
        return self._copier.sent_bytes


# Starting from second copies: they are a checkpoint that lies in the memory of keepers.


def start_name(number: int) -> str:
    """The name of a start of a run in its copies: no two starts have one, and a later one has a greater."""
    return f"{number:08d}-{secrets.token_hex(4)}"


def start_number(name: str) -> int:
    """The number in the name of a start."""
    return int(name.partition("-")[0])


def checkpoint_of(source: CopySource, shards: Mapping[int, Sequence[KeptShard]]) -> Checkpoint:
    """Second copies, whose shards are these, as a checkpoint."""

    def listed(one: KeptShard) -> list[TensorEntry]:
        return [TensorEntry(name=name, dtype=dtype, shape=shape) for name, dtype, shape in one.words[TENSORS]]

    firsts = {number: own[0] for number, own in sorted(shards.items())}
    words = firsts[0].words
    meta = CheckpointMeta(**words[_META])
    files = [
        FileEntry(
            name=f"rank-{number:04d}.safetensors",
            num_bytes=one.num_bytes,
            sha256=hashlib.sha256(b"".join(one.digests)).hexdigest(),
            tensors=listed(one),
        )
        for number, one in firsts.items()
    ]
    manifest = Manifest(
        step=source.version.step,
        clip_scale=words[CLIP_SCALE],
        torch_version=str(torch.__version__),
        bireme_version=bireme.__version__,
        files=files,
        **asdict(meta),
    )
    return Checkpoint(Path(f"second copies after step {source.version.step}"), manifest, copies=source)


class HostKeeper:
    """The keeper that this process starts for the ranks of its host, in all starts of the run. If `bireme
    join` has started this process, it starts the keeper, which holds copies from phase to phase.
    """

    def __init__(self, attended: Attended | None = None) -> None:
        self._attended = attended
        self._process: KeeperProcess | None = None
        self._num_starts = 0
        """Of a run that has all of its ranks on this host."""

    def started(self, run: RunFile) -> KeeperAddress:
        """Where it listens."""
        if self._attended is not None:
            return self._attended.keeper(run.memory.copy_bytes_per_s, run.cluster.timeout_s)
        self._process = self._process or KeeperProcess(run.memory.copy_bytes_per_s, run.cluster.timeout_s)
        return self._process.started()

    @property
    def address(self) -> KeeperAddress | None:
        """Where it listens, if it was started."""
        if self._attended is not None:
            return self._attended.kept()
        return None if self._process is None else self._process.started()

    def follow(self, follower: KeeperAddress | None) -> None:
        """Send copies to the keeper of another host."""
        if (own := None if self._attended is None else self._attended.kept()) is not None:
            with suppress(OSError):  # a keeper that is gone is reported by the ranks that copy
                follow(own, follower, _FOLLOW_S)
        if self._process is not None:
            self._process.follow(follower)

    def orders(self, run: RunFile, began: int) -> CopyOrders:
        """Where ranks give their copies, if all of them are on this host; the start begins after `began`
        batches.
        """
        self._num_starts += 1
        return CopyOrders(self.started(run), start_name(self._num_starts), began)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._process is not None:
            self._process.close()


def newest_state(
    folder: Path,
    keepers: Sequence[KeeperAddress],
    run: RunFile,
    on_bad: Callable[[str], None] | None = None,
    *,
    but: Collection[Path] = (),
) -> tuple[Checkpoint | None, int]:
    """The newest of the checkpoints in a folder and the second copies at keepers that is whole and intact,
    and the number of the next start of the run, by the starts that the keepers know. Of two states after the
    same step it is the checkpoint.

    Checkpoints older than the copies are not read. Raises a `BiremeError` if there are checkpoints, all are
    damaged, and there are no copies. Checkpoints in `but` are passed over.
    """
    shards = shards_at(keepers, run.cluster.timeout_s, checks=True)
    number = max((start_number(one.version.start) for one in shards), default=-1) + 1
    whole = newest_of(shards)
    if not whole:
        return newest_good(folder, on_bad, but=but), number
    version = whole[0][0].version
    saved = find_checkpoints(folder)
    if saved and step_of(saved[-1]) >= version.step:
        with suppress(BiremeError):
            checkpoint = newest_good(folder, on_bad, but=but)
            if checkpoint is not None and checkpoint.manifest.step >= version.step:
                return checkpoint, number
    source = CopySource(version, tuple(keepers), run.cluster.timeout_s)
    return checkpoint_of(source, whole), number
