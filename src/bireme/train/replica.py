"""One rank of a replica that may die, as the loop of a run sees it: its samples, and who speaks for the run.

Of the replicas that have a part in a batch, the one that has trained for longest leads: it writes the log and
the checkpoints. All learn who leads from the batch's result, or from a meeting where they average weights, so
all ranks of a replica know the same.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from bireme.documents import read_json_lines
from bireme.errors import BiremeError
from bireme.runtime.quorum.agent import Agent
from bireme.runtime.quorum.agreement import QuorumAgreement
from bireme.runtime.quorum.launch import ReplicaOrder
from bireme.runtime.quorum.peer_agent import PeerAgent
from bireme.runtime.quorum.talk import LazyCoordinatorClient
from bireme.runtime.result import BatchResult
from bireme.runtime.snapshot import Snapshot
from bireme.runtime.world import World
from bireme.sync.coordinator.membership import Changes, MembershipChange
from bireme.sync.coordinator.messages import Incarnation, RankId
from bireme.train.checkpoint.checkpoint import step_folder
from bireme.train.checkpoint.manifest import CheckpointMeta
from bireme.train.checkpoint.writer import CheckpointWriter
from bireme.train.data.loader import SEED_FACTOR, SEED_LIMIT
from bireme.train.data.rank_batches import RankBatches
from bireme.train.data.workers import Task
from bireme.train.outcome import Outcome
from bireme.train.run_log import RunLog
from bireme.train.stops import Reason, Stops

__all__ = ["DealtBatches", "LeaderLog", "LeaderWriter", "MortalReplica", "Replica"]

KEPT_KINDS = frozenset({"train", "evaluation", "membership"})
KEPT_LINES = 64
"""More lines than a rank leaves unwritten when it dies."""


class MortalReplica:
    """A rank of a replica that may die, in one of its lives, and its `agent`. `order` are the replicas that
    have a part in the run, as all of their ranks know it: the first of them leads.
    """

    def __init__(self, life: Incarnation, agent: PeerAgent, order: Sequence[int], changes: Changes) -> None:
        self._changes = changes
        self.number = life.replica
        self.has_come_late = life.life > 0
        self._peer, self._order = agent, tuple(order)

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
        return self._changes.in_word(self._peer.word)

    @property
    def kept_bytes(self) -> int:
        """The most that this rank held at a time for other replicas."""
        return 0

    def succeed(self) -> None:
        """Wait until all that lead before this replica are gone, as they may still write. It leads then."""
        for one in takewhile(lambda one: one != self.number, self._order):
            self._peer.wait_until_gone(one)
        self._order = (self.number,)


class Replica(MortalReplica):
    """What this rank knows of the replicas of its run; `num_replicas` there are at most."""

    def __init__(
        self,
        world: World,
        order: ReplicaOrder,
        num_replicas: int,
        batch_size: int,
        *,
        spare: int,
        balances: bool,
        compare_every: int,
        rebuilt: frozenset[str],
        kept_bytes: int,
    ) -> None:
        rank = RankId(order.life.replica, order.life.life, world.rank)
        talk = LazyCoordinatorClient(
            order.hosts, order.token, rank, lease_s=order.lease_s, is_empty=order.is_empty
        )
        # The rank itself may be waiting for another one, which is stopped.
        self._agent = Agent(
            rank,
            talk,
            timeout_s=world.timeout_s,
            device=world.device,
            on_error=world.watch.failed,
            spare=spare,
            kept_bytes=kept_bytes,
        )
        world.watch.abort_on_failure(self._agent)
        self.agreement = QuorumAgreement(
            self._agent, num_replicas, batch_size, balances, compare_every, rebuilt
        )
        changes = Changes(batch_size, is_quorum=True)
        super().__init__(order.life, self._agent, () if order.life.life else (0,), changes)

    @property
    def kept_bytes(self) -> int:
        """The most that this rank held at a time for other replicas: sums, and snapshots."""
        return self._agent.offers.peak_bytes

    def begin(self, step: int) -> int:
        """Report to the coordinator; gives the step that this replica has to be made for, which is later than
        its own where others have gone on.
        """
        self._agent.begin(step)
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

    def votes(self, stops: Stops) -> Callable[[], float]:
        """What this rank gives along with a batch: time and saving are for who leads to ask for."""

        def vote() -> float:
            found = stops.vote()
            return found if self.leads or found >= Reason.SIGNAL else 0.0

        return vote

    def batches(self, *words: Any, **more: Any) -> "DealtBatches":
        """What this rank reads."""
        return DealtBatches(*words, deal=self.deal, **more)

    def deal(self, batch: int) -> Sequence[range]:
        """The places in the run's order of the samples that this replica trains in a batch."""
        return [range(one.begin, one.end) for one in self._agent.dealt(batch).samples]

    def leave(self, step: int) -> None:
        """This rank has done all steps up to that one. Who leads goes first."""
        self._agent.wait_until_kept_by_all(step)
        self.succeed()
        self._agent.close(is_leaving=True)


class DealtBatches(RankBatches):
    """Batches of the samples that are dealt to a replica; `deal` waits until they are, or gives None where
    there are no more in this iteration.
    """

    keeps_workers = True

    def __init__(self, *words: Any, deal: Callable[[int], Sequence[range] | None], **more: Any) -> None:
        super().__init__(*words, **more)
        self._deal = deal

    def _tasks(self) -> Iterator[Task]:
        assert self._end is not None, "a run has a last batch"
        for number in range(self._next, self._end):
            if (places := self._deal(number)) is None:
                return
            chosen = tuple(int(one) for own in places for one in self._order.numbers(own.start, len(own)))
            seed = (self._order.seed * SEED_FACTOR + (places[0].start if places else 0)) % SEED_LIMIT
            wanted = None if self._wants is None else self._wants(number, len(chosen))
            yield Task(number, chosen, seed, wanted)


class Speaks(Protocol):
    """One of several replicas."""

    @property
    def speaks(self) -> bool:
        """Whether it writes the log."""


class LeaderLog:
    """The log of a run, which is written to `path` by the first rank of the replica that speaks.

    Whoever did so before may have died with lines unwritten, or before the log began. So the others keep the
    last lines that they would have written, and who takes over adds those that are missing.
    """

    def __init__(self, make: Callable[[], RunLog], replica: Speaks, path: Path) -> None:
        self._make, self._replica, self._path = make, replica, path
        self._log: RunLog | None = None
        self._kept: deque[tuple[str, int, dict[str, Any]]] = deque(maxlen=KEPT_LINES)

    def tell(self, kind: str, step: int, **values: Any) -> None:
        """For the loop."""
        if not self._replica.speaks:
            if kind in KEPT_KINDS:
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
        last = dict.fromkeys(KEPT_KINDS, -1)
        for one in read_json_lines(self._path, start="start").records.values():
            if one["kind"] == "start":
                last = dict.fromkeys(KEPT_KINDS, one["step"])
            elif one["kind"] in KEPT_KINDS:
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

    def __init__(
        self, folder: Path, make: Callable[[int], CheckpointWriter], warn: Callable[[str], None]
    ) -> None:
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
        return step_folder(self.folder, step).is_dir()

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            with suppress(BiremeError):
                self._writer.__exit__(kind, error, trace)
