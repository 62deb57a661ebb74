"""How a replica comes to the state of the others: a snapshot from one of them, and the sums since then."""

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from bireme.devices import is_accelerator, properties_of
from bireme.runtime.coordinator_client import DroppedError
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.deals import heal_in
from bireme.runtime.exchange.round_reducer import RoundReducer
from bireme.runtime.layout import Layout
from bireme.runtime.snapshot import Snapshot, feedback_sections, own_sections
from bireme.runtime.stage import Stage
from bireme.sync.coordinator.messages import CoordinatorReply, Heal, Window
from bireme.sync.coordinator.recoveries import HealTimes
from bireme.sync.rounds.contribution import Digest, digest_of
from bireme.sync.rounds.round_group import LineBroken


@dataclass(eq=False)
class Donations:
    """Takes snapshots for other replicas, of all stages of a rank right before the first of them is updated
    from a batch: updates of a batch follow each other. What replicas have `rebuilt` by themselves is not in
    them; what `more` gives is.
    """

    _agent: ExchangeAgent
    _stages: Mapping[int, Stage]
    _clip_scale: Callable[[], float]
    _rebuilt: frozenset[str]
    _more: Callable[[], Mapping[str, Tensor]]
    _replica: int
    _updated: int = field(default=-1, init=False)
    """The last batch that a stage was updated from."""

    def before_update(self, _stage: Stage, batch: int) -> None:
        """A stage is about to make the update of a batch."""
        if batch == self._updated:
            return
        self._updated = batch
        name = self._agent.due(batch)
        if name is None:
            return
        tensors = dict(self._more())
        for stage in self._stages.values():
            names = {*stage.banks.names, *stage.buffers} - self._rebuilt
            tensors |= own_sections(stage, names, replica=self._replica)
        self._agent.provide(name, Snapshot(batch, self._clip_scale(), tensors))


def join(
    agent: ExchangeAgent,
    held: int,
    restore: Callable[[Snapshot], None],
    *,
    window: Window | None = None,
    follow: Callable[[int], None] | None = None,
    on_first: Callable[[int], None] | None = None,
) -> int:
    """Come to where this replica has a part; gives the first batch that it has.

    It has the state after `held` batches. If others have gone on it gets a snapshot from one of them, which
    `restore` takes. Replicas that train batches of their own are in a `window` then. Else the replica also
    gets all sums that were committed since, each of which `follow` waits for and applies; `on_first` is told
    the first batch as soon as it is known, which is while those sums come.
    """
    own = agent.own
    named_s = fetched_s = 0.0
    asked: Heal | None = None
    """The last one whose snapshot was asked for."""
    is_healed = False

    def begin() -> None:
        agent.begin(window, used=[held] if window is None else [0] * len(agent.lines))

    def is_new(heal: Heal) -> bool:
        return asked is None or (heal.donor, heal.batch) != (asked.donor, asked.batch)

    def first_in(word: CoordinatorReply) -> int | None:
        """The first batch, once that is certain."""
        heal = heal_in(word, own)
        if heal is not None:
            return heal.first
        is_certain = window is None or word.is_installed  # whichever host coordinates next
        members = (one for one in word.members if is_certain and one.own_life == own.own_life)
        return next((one.first for one in members), None)

    def is_there(word: CoordinatorReply) -> bool:
        first = first_in(word)
        return first is not None and held >= first

    def goes_on(word: CoordinatorReply) -> bool:
        heal = heal_in(word, own)
        if heal is not None and (is_new(heal) or not is_healed):
            return is_new(heal)
        has_begun = heal is not None or first_in(word) is not None
        return is_there(word) or (follow is not None and has_begun and word.committed[0] > held)

    begin()
    while True:
        word = agent.wait_for(goes_on)
        heal, first = heal_in(word, own), first_in(word)
        if first is not None and on_first is not None:
            on_first(max(first, held))
            on_first = None
        if heal is not None and is_new(heal):
            if is_healed:  # another rank of this replica may wait for a sum that only the first donor had
                raise DroppedError(f"replica {own.replica} has lost its donor.")
            if asked is not None:
                begin()  # a donor that was lost may be asked again
            asked, named_s = heal, named_s or monotonic()
            if (found := fetched(agent, heal)) is not None:
                fetched_s = monotonic()
                snapshot, words = found
                restore(snapshot)
                held, is_healed = snapshot.num_trained, True
                if window is not None:
                    window = Window(words["window"], words["until"])
                agent.begin(window, used=words["used"], healed=heal.batch)
        elif is_there(word):
            if is_healed:
                agent.heal_times = HealTimes(fetched_s - named_s, monotonic() - fetched_s)
            return held
        elif follow is not None:  # the sum is committed without this replica, so it comes
            follow(held)
            held += 1


def fetched(agent: ExchangeAgent, heal: Heal) -> tuple[Snapshot, dict[str, Any]] | None:
    """What a donor sends, and what it says along with it; None if it could not be had, and the coordinator is
    to name a donor again.
    """
    try:
        with agent.fetch(heal) as parcel:
            words = parcel.hear()
            tensors = parcel.named(words)
    except (LineBroken, OSError):
        if heal in agent.word.heals:
            agent.tell_lost(heal.donor)
        return None
    return Snapshot(words["num_trained"], words["clip_scale"], tensors), words


# The needs of a pipeline whose replica is one of several that may die: its agent, and how to join.
#
# The pipeline itself is of one replica, with a plan of width 1, and knows no rank of another one.


# When a rank takes the digest of its weights: at its first batch, where a replica has come, and every so
# many batches, which are the same for all replicas.


class _Digests:
    """Those of one rank's stages, on a device; they go with the contributions of its reducer. Taken after
    `every` batches, never for that reason if 0.
    """

    def __init__(
        self, reducer: RoundReducer, stages: Mapping[int, Stage], device: torch.device, every: int
    ) -> None:
        self._reducer, self._stages, self._every = reducer, stages, every
        # The arithmetic of another kind of device may differ in the last bit.
        self._kind = crc32(_kind_of(device).encode())
        self._begun: dict[int, dict[str, int]] = {}

    def before_update(self, stage: Stage, batch: int) -> None:
        """A stage is about to make the update of a batch."""
        if not self._is_due(batch):
            return
        begun = self._begun.setdefault(batch, {})
        begun[str(stage.index)] = digest_of(_compared(stage))
        if len(begun) == len(self._stages):
            self._begun.clear()
            value = digest_of({name: torch.tensor(one) for name, one in begun.items()})
            self._reducer.digest = Digest(batch, value, self._kind, self._reducer.first)

    def _is_due(self, batch: int) -> bool:
        if batch == self._reducer.first or (self._every and batch % self._every == 0):
            return True
        return any(one.first == batch for one in self._reducer.agent.word.members)


def _compared(stage: Stage) -> Mapping[str, Tensor]:
    """The newest weights of a stage, or what this rank owns of them: the same in all replicas or sites."""
    if stage.banks.shared is None:
        return stage.banks.newest()
    return {str(place): flat for place, (_, flat) in enumerate(stage.banks.averaged)}


def _kind_of(device: torch.device) -> str:
    """What devices with the same arithmetic have in common."""
    if is_accelerator(device):
        return properties_of(device).name
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


_ClipScale = Callable[[], float]
_BeforeUpdate = Callable[[Stage, int], None]


@dataclass(frozen=True, slots=True)
class QuorumAgreement:
    """How a pipeline agrees with others like it. A whole batch has `num_samples`; of `num_replicas` there are
    at most, this one gets its part. A pipeline of several replicas, which must share an optimizer or weights,
    is a site, and counts as one replica here.
    """

    agent: ExchangeAgent
    num_replicas: int
    num_samples: int
    balances: bool = True
    """Whether its ranks say how long batches keep them busy, so that samples are assigned by speed."""
    compare_every: int = 0
    """After that many batches all replicas compare their weights; 0 is only where one has come."""
    rebuilt: frozenset[str] = frozenset()
    """The weights that every incarnation of a replica has by itself, and that none is sent."""

    def before_updates(
        self,
        reducer: RoundReducer,
        stages: Mapping[int, Stage],
        layout: Layout,
        device: torch.device,
        scale: _ClipScale,
    ) -> _BeforeUpdate:
        """What a rank with these stages does before each of them makes the update of a batch."""
        digests = _Digests(reducer, stages, device, self.compare_every)
        feedback = reducer.feedback

        def unsent() -> Mapping[str, Tensor]:
            """What a replica that heals had not sent through a codec is lost with it. In its place it takes
            what the donor has not sent, as an estimate.
            """
            return {} if feedback is None else feedback_sections(feedback, feedback.num_batches, layout)

        donations = Donations(self.agent, stages, scale, self.rebuilt, unsent, layout.replica)

        def before(stage: Stage, batch: int) -> None:
            digests.before_update(stage, batch)
            donations.before_update(stage, batch)

        return before
