"""The state of a run while it trains: its checkpoints on disk and its second copies in memory.

When one of them is due, what goes into it, and who writes it; and how a run starts from second copies.
"""

import hashlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from statistics import fmean, median
from time import monotonic, perf_counter, sleep
from typing import Any

from bireme.bounds import bytes_text, seconds_text
from bireme.errors import BiremeError, Tell
from bireme.files import free_bytes
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
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.snapshot import Snapshot
from bireme.runtime.updates import BatchResult
from bireme.train.checkpoint.checkpoint import Checkpoint, find_checkpoints, newest_good, step_of
from bireme.train.checkpoint.manifest import (
    SHARES,
    CheckpointMeta,
    FileEntry,
    Manifest,
    TensorEntry,
    plain_extra,
)
from bireme.train.checkpoint.writer import CheckpointWriter
from bireme.train.joined_processes import Attended
from bireme.train.outcome import Reason, Stops
from bireme.train.replica import LeaderWriter, MortalReplica
from bireme.train.run_file import RunFile

# Second copies of a run: when its ranks copy, how old the copies are, and how a run starts from them.

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
    manifest = Manifest.of(meta, source.version.step, words[CLIP_SCALE], files)
    return Checkpoint(Path(f"second copies after step {source.version.step}"), manifest, copies=source)


class HostKeeper:
    """The keeper that this process starts for the ranks of its host, in all starts of the run. If `bireme
    join` has started this process, it starts the keeper, which holds copies from phase to phase.
    """

    def __init__(self, attended: Attended | None = None) -> None:
        self.attended = attended
        self._process: KeeperProcess | None = None
        self._num_starts = 0
        """Of a run that has all of its ranks on this host."""

    def started(self, run: RunFile) -> KeeperAddress:
        """Where it listens."""
        if self.attended is not None:
            return self.attended.keeper(run.memory.copy_bytes_per_s, run.cluster.timeout_s)
        self._process = self._process or KeeperProcess(run.memory.copy_bytes_per_s, run.cluster.timeout_s)
        return self._process.started()

    @property
    def address(self) -> KeeperAddress | None:
        """Where it listens, if it was started."""
        if self.attended is not None:
            return self.attended.kept()
        return None if self._process is None else self._process.started()

    def follow(self, follower: KeeperAddress | None) -> None:
        """Send copies to the keeper of another host."""
        if (own := None if self.attended is None else self.attended.kept()) is not None:
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

    def close(self) -> None:
        """End the keeper, unless `bireme join` has it."""
        if self._process is not None:
            self._process.close()


def newest_state(
    folder: Path,
    keepers: Sequence[KeeperAddress],
    run: RunFile,
    on_bad: Tell | None = None,
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


# What the batches of a run come to: seconds, samples, tokens, the training loss, skipped steps.

_SMOOTHED = 20
"""Batches whose mean is the training loss that a run ends with."""

TellEvent = Callable[..., None]
"""Is told what happens: its kind, the step, and values by name. Does nothing but on rank 0."""


class Tally:
    """Sums over the batches since this start of the run, which was after `step` steps, and since the last
    line of the log. A sample has `tokens` tokens. Skipped steps are warned of.
    """

    def __init__(
        self, run: RunFile, tokens: int, tell: TellEvent, warn: Callable[[str, int | None], None], step: int
    ) -> None:
        self._run, self._tokens, self._tell, self._warn = run, tokens, tell, warn
        self.num_skipped = self._skipped_in_a_row = self._told_skipped = 0
        self._losses: list[float] = []
        self._batch_s: list[float] = []
        self._since = [0.0, 0.0, 0.0]  # seconds, samples, tokens since the last line
        self._all = [0.0, 0.0, 0.0]
        self._noted = step
        """The step of the last batch that was noted."""

    def begin_at(self, step: int) -> None:
        """The run went on to that step without this replica."""
        self._noted = step

    def figures(self) -> dict[str, Any]:
        """What an `Outcome` has of the batches: the mean loss of the last ones that were not skipped, the
        median of their seconds under the schedule that stays, rates over all of them. Unknown ones are None.
        """
        seconds, samples, tokens = self._all
        return {
            "train_loss": fmean(self._losses) if self._losses else None,
            "batch_s": median(self._batch_s) if self._batch_s else None,
            "samples_per_s": samples / seconds if seconds else None,
            "tokens_per_s": tokens / seconds if seconds and tokens else None,
            "num_skipped": self.num_skipped,
        }

    def add(self, result: BatchResult, num_samples: int, *, is_first: bool) -> None:
        """Count a batch. The first of a window fills the pipeline, so its seconds do not make `batch_s`."""
        for sums in (self._since, self._all):
            for place, value in enumerate((result.seconds, num_samples, num_samples * self._tokens)):
                sums[place] += value
        if not is_first:
            self._batch_s.append(result.seconds)

    def add_meeting(self, seconds: float, num_samples: int) -> None:
        """Count a meeting of replicas, and the samples that others trained meanwhile."""
        self._all[0] += seconds
        self._all[1] += num_samples
        self._all[2] += num_samples * self._tokens

    def forget_pace(self) -> None:
        """Leave the batches so far out of `batch_s`."""
        self._batch_s.clear()

    def note_outcome(self, result: BatchResult) -> None:
        """Note the loss of a batch, or that it was skipped; too many skipped in a row end the run."""
        self._note_skipped(result)
        if not result.is_skipped:
            self._losses = [*self._losses[1 - _SMOOTHED :], result.loss]

    def is_to_log(self, step: int) -> bool:
        """Whether a line of the log is due. Where replicas train batches of their own, a slow one passes
        several steps of the run at once, and a fast one is at the same step twice.
        """
        every, before, self._noted = self._run.log.every_steps, self._noted, max(step, self._noted)
        return step > before and (step // every > before // every or step == self._run.training.steps)

    def line(self, result: BatchResult, batch_size: int) -> dict[str, Any]:
        """What a line of the log says of the batches since the one before."""
        seconds, samples, tokens = self._since
        self._since = [0.0, 0.0, 0.0]
        num_steps = max(1, round(samples / max(1, batch_size)))
        num_skipped, self._told_skipped = self.num_skipped - self._told_skipped, self.num_skipped
        return {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": self._run.training.learning_rate * result.lr_factor,
            "tokens_per_s": tokens / seconds if tokens and seconds else None,
            "samples_per_s": samples / seconds if seconds else None,
            "seconds": seconds / num_steps,
            "num_skipped": num_skipped,
        }

    def _note_skipped(self, result: BatchResult) -> None:
        self.num_skipped += result.is_skipped
        if not result.weight:
            self._warn(
                f"Step {result.batch + 1} is skipped: nothing in its batch counts for the loss.",
                result.batch + 1,
            )
            return
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if result.is_skipped else 0
        most = self._run.training.most_skipped_in_a_row
        if result.is_skipped:
            self._warn(f"Step {result.batch + 1} is skipped: its gradient is not finite.", result.batch + 1)
        if self._skipped_in_a_row > most:
            self._tell("stop", result.batch + 1, reason="not finite")
            raise BiremeError(
                f"The gradient was not finite in {self._skipped_in_a_row} steps in a row, up to step "
                f"{result.batch + 1}, so the run stops. Lower training.learning_rate, clip more, or check "
                f"the data of these steps. training.most_skipped_in_a_row = {most} is the limit."
            )


_MOST_TRIES = 3
"""To save what another replica was to save, whose processes may not be gone yet."""
LOOK_S = 0.5
"""Between two looks for room on the disk."""
AGAIN_S = 30.0
"""Between two tries to write where the disk seems to have room, as under a quota."""


class _Wish(IntEnum):
    """What a rank wants while the last checkpoint waits for room; the largest wish of all ranks counts."""

    WAIT = 0
    TRY = 1
    GIVE_UP = 2
    DONE = 3


@dataclass(eq=False)
class RunCheckpoints:
    """`newest` is the step of the last one that was written, `has_led` whether no other replica led to the
    end of the run, as far as is known here. `meta` is what each of them says of the run.
    """

    _run: RunFile
    _writer: CheckpointWriter | LeaderWriter
    meta: CheckpointMeta
    _stops: Stops
    _member: MortalReplica | None
    _not_saved: frozenset[str]
    newest: int | None = None
    has_led: bool = True
    tries_again: bool = False
    """Whether the last checkpoint failed before, and waits for room."""
    _snapshot_bytes: int = field(default=0, init=False)
    """Of this rank's part of the last checkpoint that was asked for."""
    _asked: int | None = field(default=None, init=False)
    """The step of the last checkpoint that was asked for."""

    def is_due(self, step: int) -> bool:
        """Whether so many steps have passed that a checkpoint is due."""
        every = self._run.checkpoint.every_steps
        return bool(every) and step % every == 0 and step < self._run.training.steps

    def save(self, pipeline: Pipeline, step: int) -> None:
        """Save the pipeline as it is after so many steps, if it is for this replica to do."""
        self._stops.saved()
        self._asked = step
        if self._member is not None and not self._member.leads:
            self._writer.close()
            return
        begin_s = perf_counter()
        snapshot, meta = self._taken(pipeline, step)
        self._snapshot_bytes = sum(tensor.nbytes for tensor in snapshot.tensors.values())
        self._writer.save(snapshot, meta, copied_s=perf_counter() - begin_s)
        if not self._run.checkpoint.background:
            self._writer.wait()

    def copy(self, copies: RunCopies, pipeline: Pipeline, step: int, *, ignored: int) -> None:
        """Begin a second copy of the pipeline as it is after `step` steps."""
        begin_s = perf_counter()
        snapshot, meta = self._taken(pipeline, step)
        copies.begin(snapshot, meta, copied_s=perf_counter() - begin_s, ignored=ignored)

    def _taken(self, pipeline: Pipeline, step: int) -> tuple[Snapshot, CheckpointMeta]:
        snapshot = replace(pipeline.snapshot(but=self._not_saved), num_trained=step)
        extra = dict(self.meta.extra)
        if snapshot.shares is not None:
            extra[SHARES] = dict(snapshot.shares)
        return snapshot, replace(self.meta, next_batch=snapshot.num_trained, extra=extra)

    def finish(self, pipeline: Pipeline, step: int) -> None:
        """Wait until all is written. Save what the replica that led was asked to save last, if it died
        before it had.
        """
        self._writer.wait()
        member, writer = self._member, self._writer
        if self._asked is None or member is None or member.leads:
            return
        assert isinstance(writer, LeaderWriter), "replicas that may die write in turns"
        member.succeed()
        for place in range(_MOST_TRIES):
            # All ranks of a replica do alike, whatever each of them sees.
            if pipeline.gather([float(writer.has(self._asked))])[0][0]:
                self.newest, self.has_led = self._asked, place > 0
                return
            self.save(pipeline, step)
            writer.wait()

    def insist(self, pipeline: Pipeline, step: int, warn: Tell) -> None:
        """Have the checkpoint after the last step written: without it all since the one before is lost.

        If it failed, all ranks wait until there is room, at most `checkpoint.wait_for_room_s`, or until
        a signal asks the run to stop. If there is room, they try a few times more: another cause stays.
        """
        if self._has(step) or (self._member is not None and not self._member.leads):
            return
        ends_s = monotonic() + self._run.checkpoint.wait_for_room_s
        needed, num_tries, was_short, again_s = 0, 0, False, monotonic() + AGAIN_S
        while True:
            free = free_bytes(self._writer.folder)
            is_short = free is not None and free <= needed
            wish = _Wish.WAIT
            if self._has(step):
                wish = _Wish.DONE
            elif self._stops.vote() >= Reason.SIGNAL or monotonic() > ends_s or num_tries == _MOST_TRIES:
                wish = _Wish.GIVE_UP
            elif needed and not is_short and (was_short or monotonic() > again_s):
                wish = _Wish.TRY
            rows = pipeline.gather([self._snapshot_bytes, float(wish)])
            agreed = _Wish(int(max(row[1] for row in rows)))
            if agreed >= _Wish.GIVE_UP:
                return
            if not needed:
                needed = int(sum(row[0] for row in rows))
                warn(self._about_waiting(needed, free))
            self.tries_again = True
            if agreed is _Wish.TRY:
                again_s, num_tries = monotonic() + AGAIN_S, num_tries + 1
                self.save(pipeline, step)
                self._writer.wait()
            num_tries = 0 if is_short else num_tries
            was_short = is_short
            sleep(LOOK_S)

    def _has(self, step: int) -> bool:
        return self.newest == step or self._writer.has(step)

    def _about_waiting(self, needed: int, free: int | None) -> str:
        limit_s = self._run.checkpoint.wait_for_room_s
        limit = f"{limit_s / 3600:.3g} hours" if limit_s >= 3600 else seconds_text(limit_s)
        folder = self._writer.folder
        if free is not None and free > needed:
            return (
                f"The last checkpoint is not written, though {folder} has room for it "
                f"({bytes_text(free)}). The run tries {_MOST_TRIES} times more, every {AGAIN_S:g} s, and "
                "then ends without it."
            )
        room = "" if free is None else f", and {bytes_text(free)} is free"
        return (
            f"The last checkpoint is not written: it needs {bytes_text(needed)} in {folder}{room}. The run "
            f"waits up to {limit} for room and keeps what it has learned. Free space there. To end without "
            "it, press Ctrl-C, or send SIGTERM."
        )
