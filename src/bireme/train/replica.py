"""One rank of a replica that may die, as the loop of a run sees it: its samples, and who speaks for the run.

Of the replicas that have a part in a batch, the one that has trained for longest leads: it writes the log and
the checkpoints. All learn who leads from the batch's result, or from a meeting where they average weights, so
all ranks of a replica know the same.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

from bireme.codec.sum_description import parse_sum_codec
from bireme.documents import read_json_lines
from bireme.errors import BiremeError, Tell
from bireme.runtime.board import RunFailed
from bireme.runtime.coordinator_client import CoordinatorClient
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.averages import Averaging, DilocoSettings
from bireme.runtime.exchange.joining import QuorumAgreement
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.replicas.launch import ReplicaOrder
from bireme.runtime.snapshot import Snapshot
from bireme.runtime.updates import BatchResult
from bireme.runtime.world import World
from bireme.sync.coordinator.messages import Incarnation, RankId, Window
from bireme.sync.coordinator.recoveries import HealTimes, Recovery, healed_in, numbers_of_healing
from bireme.sync.coordinator.state import Changes, MembershipChange
from bireme.train.checkpoint.checkpoint import is_elsewhere, step_folder
from bireme.train.checkpoint.manifest import CheckpointMeta
from bireme.train.checkpoint.writer import CheckpointWriter
from bireme.train.data.loader import SEED_FACTOR, SEED_LIMIT, RankBatches
from bireme.train.data.placing import Numbers
from bireme.train.data.samples import Samples
from bireme.train.data.workers import Task
from bireme.train.outcome import Outcome, Reason, Stops
from bireme.train.run_file import RunFile
from bireme.train.run_log import RunLog

_KEPT_KINDS = frozenset({"train", "evaluation", "membership", "recovery"})
_KEPT_LINES = 64
"""More lines than a rank leaves unwritten when it dies."""


class MortalReplica:
    """A rank of a replica that may die, in one of its incarnations. `members` are the replicas that begin the
    run. Of the replicas that have a part in it, as all of their ranks know them, the first leads. Further
    arguments are those of the rank's agent.
    """

    def __init__(
        self,
        world: World,
        order: ReplicaOrder,
        members: Sequence[int],
        batch_size: int,
        *,
        of_batches: bool,
        **more: int,
    ) -> None:
        rank = RankId(order.life.replica, order.life.life, world.rank)
        client = CoordinatorClient(
            order.hosts, order.token, rank, lease_s=order.lease_s, is_empty=order.is_empty
        )
        # The rank itself may be waiting for another one, which is stopped.
        self._agent = ExchangeAgent(
            rank,
            client,
            timeout_s=world.timeout_s,
            device=world.device,
            on_error=world.watch.failed,
            of_batches=of_batches,
            **more,
        )
        world.watch.abort_on_failure(self._agent)
        self._changes = Changes(batch_size, is_quorum=of_batches)
        self.number = order.life.replica
        self.has_come_late = order.life.life > 0
        self._order = () if self.has_come_late else tuple(members)
        self._dealt = 0
        """Samples that were assigned to this replica, in `groups` and `diloco` since the last meeting."""

    @property
    def leads(self) -> bool:
        """Whether this replica writes the checkpoints."""
        return self._order[:1] == (self.number,)

    @property
    def speaks(self) -> bool:
        """Whether this replica writes the log."""
        return self.leads

    def changes(self) -> list[MembershipChange]:
        """Which replicas have gone and come back since this was last asked."""
        return self._changes.in_word(self._agent.word)

    def recoveries(self, healed: Mapping[int, HealTimes], step: int) -> list[Recovery]:
        """The replicas among those that have `healed` that were members of the run before."""
        if not healed:
            return []
        gone = {one.replica for one in self._agent.word.gone}
        detect_s = self._agent.losses.detect_s
        return [
            Recovery(replica, step, detect_s.get(replica), times.transfer_s, times.catch_up_s)
            for replica, times in healed.items()
            if replica in gone
        ]

    @property
    def kept_bytes(self) -> int:
        """The most that this rank held at a time for other replicas."""
        return 0

    def deal(self, batch: int) -> Sequence[range] | None:
        """The places in the run's order of the samples that this replica trains in a batch; None if there are
        no more in its window.
        """
        deal = self._agent.deals.dealt(batch)
        if deal is None:
            return None
        self._dealt += deal.num_samples
        return [range(one.begin, one.end) for one in deal.samples]

    def votes(self, stops: Stops) -> Callable[[], float]:
        """The vote that this rank gives along with a batch. Only the replica that writes the log asks for an
        end or a checkpoint by time.
        """

        def vote() -> float:
            found = stops.vote()
            return found if found >= Reason.SIGNAL or self.speaks else 0.0

        return vote

    def succeed(self) -> None:
        """Wait until all that lead before this replica are gone, as they may still write. It leads then."""
        for one in takewhile(lambda one: one != self.number, self._order):
            self._agent.wait_until_gone(one)
        self._order = (self.number,)

    def leave(self) -> None:
        """This rank has done all steps. Who leads goes first."""
        self._agent.wait_until_used_by_all()
        self.succeed()
        self._agent.close(is_leaving=True)


class Replica(MortalReplica):
    """What this rank knows of the replicas of its run; `num_replicas` there are at most."""

    def __init__(
        self,
        world: World,
        order: ReplicaOrder,
        run: RunFile,
        num_replicas: int,
        *,
        spare: int,
        balances: bool,
        rebuilt: frozenset[str],
        kept_bytes: int,
    ) -> None:
        batch_size, more = run.training.batch_size, {"spare": spare, "kept_bytes": kept_bytes}
        super().__init__(world, order, (0,), batch_size, of_batches=True, **more)
        self.agreement = QuorumAgreement(
            self._agent, num_replicas, batch_size, balances, run.sync.compare_every, rebuilt
        )

    @property
    def kept_bytes(self) -> int:
        """The most that this rank held at a time for other replicas: sums, and snapshots."""
        return self._agent.for_others.peak_bytes

    def begin(self, step: int) -> int:
        """Report to the coordinator; gives the step that this replica has to be made for, which is later than
        its own where others have gone on.
        """
        self._agent.begin(used=[step])
        word = self._agent.wait_for(
            lambda word: (
                any(one.replica == self.number for one in word.heals)
                or any(one.own_life == self._agent.own.own_life for one in word.members)
            )
        )
        heal = next((one for one in word.heals if one.replica == self.number), None)
        return step if heal is None else max(step, heal.batch)

    def note(self, result: BatchResult) -> None:
        """A batch is done, which says who leads now."""
        self._order = result.order

    def batches(self, *words: Any, **more: Any) -> "DealtBatches":
        """What this rank reads."""
        return DealtBatches(*words, deal=self.deal, **more)


PREFETCH = 1
"""Batches that are read ahead of the pipeline at most if that takes no time, or if replicas average weights.
A replica that joins has no part in those that were assigned before, and at the end of a window the others
wait for what a slow replica was assigned.
"""


class DealtBatches(RankBatches):
    """Batches of the samples that are assigned to a replica; `deal` waits until they are, or gives None where
    there are no more in this iteration. `private` gives the private samples that come after them. Of quick
    samples no more than `PREFETCH` batches are read ahead.
    """

    keeps_workers = True

    def __init__(
        self,
        samples: Samples,
        *words: Any,
        deal: Callable[[int], Sequence[range] | None],
        private: Callable[[int], Numbers] | None = None,
        prefetch: int = PREFETCH,
        **more: Any,
    ) -> None:
        ahead = min(prefetch, PREFETCH) if samples.is_quick else prefetch
        super().__init__(samples, *words, prefetch=ahead, **more)
        self._deal, self._private = deal, private

    def _tasks(self) -> Iterator[Task]:
        assert self._end is not None, "a run has a last batch"
        for number in range(self._next, self._end):
            if (places := self._deal(number)) is None:
                return
            chosen = tuple(int(one) for own in places for one in self._order.numbers(own.start, len(own)))
            if self._private is not None:
                chosen += tuple(map(int, self._private(number)))
            seed = (self._order.seed * SEED_FACTOR + (places[0].start if places else 0)) % SEED_LIMIT
            wanted = None if self._wants is None else self._wants(number, len(chosen))
            yield Task(number, chosen, seed, wanted)


class LeaderLog:
    """The log of a run, which is written to `path` by the first rank of the replica that speaks.

    Whoever did so before may have died with lines unwritten, or before the log began. So the others keep the
    last lines that they would have written, and who takes over adds those that are missing.
    """

    def __init__(self, make: Callable[[], RunLog], replica: MortalReplica, path: Path) -> None:
        self._make, self._replica, self._path = make, replica, path
        self._log: RunLog | None = None
        self._kept: deque[tuple[str, int, dict[str, Any]]] = deque(maxlen=_KEPT_LINES)

    def tell(self, kind: str, step: int, **values: Any) -> None:
        """For the loop."""
        if not self._replica.speaks:
            if kind in _KEPT_KINDS:
                self._kept.append((kind, step, values))
            return
        if self._log is None and not self._path.is_file():
            self._opened().begin(step)
        self._tell_missing()
        self._opened().tell(kind, step, **values)

    def begin(self, step: int) -> None:
        """The run begins."""
        if self._replica.speaks:
            self._opened().begin(step)

    def end(self, outcome: Outcome) -> None:
        """The run is over. One that leads only because all others are gone has nothing to add."""
        if outcome.leads:
            self._tell_missing()
            self._opened().end(outcome)

    def _tell_missing(self) -> None:
        """What this replica has kept of the time after the last line that was written."""
        if not self._kept or not self._path.is_file():
            return
        last = dict.fromkeys(_KEPT_KINDS, -1)
        for one in read_json_lines(self._path, start="start").records.values():
            if one["kind"] == "start":
                last = dict.fromkeys(_KEPT_KINDS, one["step"])
            elif one["kind"] in _KEPT_KINDS:
                last[one["kind"]] = one["step"]
        for kind, step, values in self._kept:
            if step > last[kind]:
                self._opened().tell(kind, step, **values)
        self._kept.clear()

    def _opened(self) -> RunLog:
        self._log = self._log or self._make()
        return self._log


class LeaderWriter:
    """Checkpoints of a run, which are written by the replica that leads. All its ranks save the same steps.

    `make` opens a writer to `folder`, if it can: its number tells apart what the ranks say to each other each
    time.
    """

    def __init__(self, folder: Path, make: Callable[[int], CheckpointWriter], warn: Tell) -> None:
        self.folder, self._make, self._warn = folder, make, warn
        self._num_tried = 0
        self._writer: CheckpointWriter | None = None

    def save(self, snapshot: Snapshot, meta: CheckpointMeta, *, copied_s: float = 0.0) -> None:
        """Start writing a checkpoint."""
        if self._writer is None:
            self._num_tried += 1
            try:
                self._writer = self._make(self._num_tried)
            except BiremeError as error:  # as where a replica that led before has not ended yet
                self._warn(f"There is no checkpoint of step {snapshot.num_trained}: {error}")
                return
        self._writer.save(snapshot, meta, copied_s=copied_s)

    def has(self, step: int) -> bool:
        """Whether some replica has written the checkpoint of that step."""
        return step_folder(self.folder, step).is_dir() or is_elsewhere(step_folder(self.folder, step))

    def close(self) -> None:
        """Let another replica write, if this one did. One that leads again opens a writer again."""
        if self._writer is not None:
            with suppress(BiremeError):
                self._writer.close()
            self._writer = None

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._writer is not None:
            self._writer.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._writer is not None:
            with suppress(BiremeError):
                self._writer.__exit__(kind, error, trace)


# One rank of a replica that averages weights with others, as the loop of a run sees it.
#
# Each replica trains batches of its own, so what counts for the run is not their number but the places of
# their samples in the run's order: they say at which step the run is, and which learning rate holds. The run
# goes from one meeting of all replicas to the next: at a meeting all have the same weights, and the same
# step.

_MOST_BATCHES = 1 << 40
"""Of a window; it ends where no more are assigned."""
_STEP = "averaging/step"
"""Under this name a replica's first rank says in the store of the replica which step the run is at."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """What all replicas agree on: the step, why the run ends if it does, who met, and the samples of each
    replica since the meeting before. `num_samples` of them were trained since this rank's last batch. The
    replicas in `healed` met for the first time since they healed.
    """

    step: int
    reason: Reason
    members: tuple[int, ...]
    shares: tuple[int, ...]
    num_samples: int
    healed: Mapping[int, HealTimes] = field(default_factory=dict)


class AveragingReplica(MortalReplica):
    """What this rank knows of the replicas of its run, of which there are `num_replicas` at most."""

    agreement = None

    def __init__(
        self,
        world: World,
        order: ReplicaOrder,
        run: RunFile,
        num_replicas: int,
        *,
        rebuilt: frozenset[str] = frozenset(),
    ) -> None:
        self._life = order.life
        super().__init__(world, order, range(num_replicas), run.training.batch_size, of_batches=False)
        self._store, self._is_first_rank = world.store, not world.rank
        self._lives = dict.fromkeys(self._order, 0)
        """Of the replicas that were at the last meeting, the incarnations in which they were there."""
        sync = run.sync
        diloco = None
        if sync.mode == "diloco":
            diloco = DilocoSettings(
                sync.diloco_every, sync.diloco_rate, sync.diloco_momentum, sync.diloco_fragments
            )
        self._batch_size, self._num_replicas = run.training.batch_size, num_replicas
        lag = 0 if diloco is None else sync.diloco_overlap
        self.averaging = Averaging(
            self._agent,
            self._batch_size,
            diloco,
            lag,
            order.first,
            sync.average_optimizer,
            rebuilt,
            parse_sum_codec(sync.codec),
        )
        self.step = order.first
        """How many batches of the run were trained by the last meeting."""
        self._reason = Reason.NONE
        self._place = order.first * self._batch_size

    @property
    def speaks(self) -> bool:
        """Whether this replica writes the log: the first one that was at the last meeting and still lives; if
        none does, the one that has been there for longest. It is for one rank of a replica to ask, as others
        may not know yet who has died since.
        """
        members = self._agent.word.members
        living = {one.own_life for one in members}
        known = [one for one in self._order if Incarnation(one, self._lives[one]) in living]
        others = [one.replica for one in sorted(members, key=lambda one: (one.life, one.first, one.replica))]
        return (known or others)[:1] == [self.number]

    def begin(self, step: int) -> int:
        """The step that this replica's pipeline is to be made for, the same on all of its ranks: it may have
        another schedule from some step on.
        """
        if not self.has_come_late:
            return step
        self._agent.begin(Window(0, 0))
        if self._is_first_rank:
            # While the last sample that is assigned trains, its window is the last one that has begun.
            found = max(self._known_place() - 1, 0) // self._batch_size
            self._store.set(_STEP, str(found))
            return found
        # By now this rank may have heard of later samples.
        self._agent.wait_for(lambda _word: self._store.check([_STEP]))
        return int(self._store.get(_STEP))

    def join(self, pipeline: Pipeline) -> None:
        """Come to the first batch of this replica, with the state of the others."""
        pipeline.join()
        window = self._agent.deals.window
        if window is not None and (until := window.until):
            # The donor is within a window, which ends where the next one of this step does.
            self.step = min(self._known_place() // self._batch_size, max(until // self._batch_size - 1, 0))
            self._place = self.step * self._batch_size

    def rate(self, factor: Callable[[int], float]) -> Callable[[int], float]:
        """The factor on the learning rate of this replica's batches."""
        return lambda batch: factor(self._batch_of_run(batch))

    def note(self, result: BatchResult) -> None:
        """A batch is done."""
        reason = Reason.of(result.votes) if result.votes else Reason.NONE
        self._reason = max(self._reason, reason)
        if self._reason is not Reason.NONE:
            self._agent.deals.ask_end()

    def step_after(self, result: BatchResult) -> int:
        """The step of the run after one of this replica's batches."""
        return self._batch_of_run(result.batch) + 1

    def num_samples(self, result: BatchResult) -> int:
        """How many samples all replicas were given since this one's batch before."""
        place = self._agent.deals.of(result.batch).samples[0].begin
        found, self._place = max(place - self._place, 0), max(place, self._place)
        return found

    def batches(self, *words: Any, prefetch: int, **more: Any) -> DealtBatches:
        """What this rank reads, from its first batch on. Each iteration ends with its window."""
        *known, _num_batches = words
        ahead = min(prefetch, PREFETCH)
        return DealtBatches(*known, _MOST_BATCHES, prefetch=ahead, deal=self.deal, **more)

    def enter(self, until: int) -> None:
        """The next batches are of the window that ends after the step `until`."""
        self._agent.enter(until * self._batch_size)

    def meet(self, pipeline: Pipeline) -> Meeting:
        """Make one mean of all replicas' weights, when the window has drained."""
        samples, lives = [0.0] * self._num_replicas, [0.0] * self._num_replicas
        samples[self.number], lives[self.number] = float(self._dealt), float(self._life.life)
        healing = numbers_of_healing(self._agent.heal_times, self.number, self._num_replicas)
        met = pipeline.meet(
            float(self._reason), float(self._agent.deals.ended_at), *samples, *lives, *healing
        )
        votes, ends, *told = met.numbers
        num = self._num_replicas
        shares, lives, healing = told[:num], told[num : 2 * num], told[2 * num :]
        self._reason, self._dealt = Reason.NONE, 0
        if self.number in met.parts:
            self._agent.heal_times = None  # the others have it now
        # By what all were told, for all ranks must find the same one.
        self._order = tuple(sorted(met.parts, key=lambda one: (lives[one], one)))
        self._lives = {one: round(lives[one]) for one in met.parts}
        end = self._agreed_end(met.parts, ends)
        self.step = end // self._batch_size
        num_samples, self._place = max(end - self._place, 0), end
        return Meeting(
            self.step,
            Reason.of(votes),
            met.parts,
            tuple(map(round, shares)),
            num_samples,
            healed_in(healing),
        )

    def succeed(self) -> None:
        """Wait until all that lead before this replica are gone. It leads then, even if it never met them."""
        super().succeed()
        self._lives = {self.number: self._life.life}

    def _agreed_end(self, members: Sequence[int], ends: float) -> int:
        """The place at which all who met say that their window ended; it is so in `ends` often. Who came late
        to a window that was over knows it from the others.
        """
        own, mean = self._agent.deals.ended_at, ends / len(members)
        if mean != (own if self.number in members else int(mean)):
            raise RunFailed(
                f"Replica {self.number} ended its window at place {own} of the run's samples, but the "
                f"{len(members)} replicas that met ended theirs at place {mean:g} on average: they are not "
                "at the same step. This is a bug in Bireme: please report it."
            )
        return int(mean)

    def _known_place(self) -> int:
        """The first sample of the run that has not been assigned."""
        return self._agent.wait_for(lambda word: bool(word.members)).fresh

    def _batch_of_run(self, batch: int) -> int:
        """The batch of the run that the samples of this replica's batch would be of."""
        return self._agent.deals.of(batch).samples[0].begin // self._batch_size
