"""What a pipeline needs where its replica is one of several that may die: its agent, and how to join.

The pipeline itself is of one replica, with a plan of width 1, and knows no rank of another one.
"""

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from zlib import crc32

import torch
from torch import Tensor

from bireme.codec.sum_description import DENSE, SumCodec
from bireme.devices import is_accelerator, properties_of
from bireme.runtime.fabric import Fabric
from bireme.runtime.layout import Layout
from bireme.runtime.quorum.agent import Agent, TiedSums
from bireme.runtime.quorum.peer_agent import DroppedError, fetched, heal_in
from bireme.runtime.quorum.reducer import QuorumReducer, SiteSums
from bireme.runtime.snapshot import Snapshot, feedback_sections, own_sections
from bireme.runtime.stage import Stage
from bireme.runtime.stage_messages import Transport
from bireme.sync.coded import Feedback
from bireme.sync.coordinator.messages import CoordinatorReply, Heal
from bireme.sync.coordinator.state import HealTimes
from bireme.sync.group import Group, SharingGroup, Sums
from bireme.sync.quorum.line import Digest, digest_of

# When a rank takes the digest of its weights: at its first batch, where a replica has come, and every so
# many batches, which are the same for all replicas.


class _Digests:
    """Those of one rank's stages, on a device; they go with the contributions of its reducer. `every` so many
    batches, never for that reason if 0.
    """

    def __init__(
        self, reducer: QuorumReducer, stages: Mapping[int, Stage], device: torch.device, every: int
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

    agent: Agent
    num_replicas: int
    num_samples: int
    balances: bool = True
    """Whether its ranks say how long batches keep them busy, so that samples are dealt by speed."""
    compare_every: int = 0
    """After so many batches all replicas compare their weights; 0 is only where one has come."""
    rebuilt: frozenset[str] = frozenset()
    """The weights that every life of a replica has by itself, and that none is sent."""

    def reducer(
        self,
        fabric: Fabric,
        layout: Layout,
        transport: Transport,
        device: torch.device,
        codec: SumCodec = DENSE,
        sharers: SharingGroup | None = None,
    ) -> QuorumReducer:
        """What brings the batches of a rank together; sums over replicas go through `codec`. In a site
        `sharers` are the ranks that share what this one has.
        """
        of_transport = fabric.sums(transport) if sharers is None else None
        control: Sums | None = of_transport or fabric.group(range(fabric.size))
        assert control is not None, "every rank is one of all"
        # Every rank makes all groups, in the same order, and keeps its own.
        of_ranks = {ranks: fabric.group(ranks) for ranks in sorted(set(layout.tied.values()))}
        tied: dict[str, Group] = {
            name: own for name, ranks in layout.tied.items() if (own := of_ranks[ranks]) is not None
        }
        if sharers is not None:
            # A rank's stages cut what they share at other places each, so all of it is summed everywhere.
            tied |= {name: sharers for name in layout.repeated if name not in tied}
        return QuorumReducer(
            control,
            self.agent,
            num_replicas=self.num_replicas,
            speaks=layout.rank == 0,
            device=None if device.type == "cpu" else device,
            counted=layout.counted,
            tied=TiedSums(tied),
            codec=codec,
            site=None if sharers is None else SiteSums(sharers, tied),
        )

    def before_updates(
        self,
        reducer: QuorumReducer,
        stages: Mapping[int, Stage],
        layout: Layout,
        device: torch.device,
        scale: _ClipScale,
    ) -> _BeforeUpdate:
        """What a rank with these stages does before each of them makes the update of a batch."""
        digests = _Digests(reducer, stages, device, self.compare_every)
        donations = _Donations(self.agent, stages, scale, self.rebuilt, reducer.feedback, layout)

        def before(stage: Stage, batch: int) -> None:
            digests.before_update(stage, batch)
            donations.before_update(stage, batch)

        return before


class _Donations:
    """Takes snapshots for other replicas, of each stage right before the update that they go on with, but not
    of what they have `rebuilt` by themselves.

    What the replica that heals had not sent through a codec is lost with it. In its place it takes what the
    donor has not sent, as an estimate.
    """

    def __init__(
        self,
        agent: Agent,
        stages: Mapping[int, Stage],
        clip_scale: _ClipScale,
        rebuilt: frozenset[str],
        feedback: Feedback | None,
        layout: Layout,
    ) -> None:
        self._agent = agent
        self._stages = stages
        self._clip_scale = clip_scale
        self._rebuilt, self._feedback, self._layout = rebuilt, feedback, layout
        self._begun: dict[int, dict[int, dict[str, Tensor]]] = {}

    def before_update(self, stage: Stage, batch: int) -> None:
        """A stage is about to make the update of a batch."""
        if not self._agent.offers.is_due(batch):
            return
        names = {*stage.banks.names, *stage.buffers} - self._rebuilt
        begun = self._begun.setdefault(batch, {})
        begun[stage.index] = own_sections(stage, names, replica=self._layout.replica)
        if len(begun) == len(self._stages):
            tensors = {name: tensor for part in begun.values() for name, tensor in part.items()}
            self._begun.clear()
            if self._feedback is not None:
                tensors |= feedback_sections(self._feedback, self._feedback.num_batches, self._layout)
            self._agent.offers.provide(Snapshot(batch, self._clip_scale(), tensors))


def join(
    agent: Agent,
    held: int,
    restore: Callable[[Snapshot], None],
    follow: Callable[[int], None],
    on_first: Callable[[int], None] | None = None,
) -> int:
    """Come to where this replica contributes; gives the first batch that it does so in.

    It has the state after `held` batches. If others have gone on it gets a snapshot from one of them, which
    `restore` takes, and all sums that were committed since, each of which `follow` waits for and applies.
    `on_first` is told the first batch as soon as it is known, which is while those sums come.
    """
    agent.begin(held)
    own = agent.own
    named_s = fetched_s = 0.0
    asked: Heal | None = None
    """The last one whose snapshot was asked for."""
    is_healed = False

    def is_new(heal: Heal) -> bool:
        return asked is None or (heal.donor, heal.batch) != (asked.donor, asked.batch)

    def first_in(word: CoordinatorReply) -> int | None:
        heal = heal_in(word, own)
        if heal is not None:
            return heal.first
        return next((one.first for one in word.members if one.own_life == own.own_life), None)

    def goes_on(word: CoordinatorReply) -> bool:
        heal, first = heal_in(word, own), first_in(word)
        if heal is not None and is_new(heal):
            return True
        if (heal is None and first is None) or (heal is not None and not is_healed):
            return False
        return (first is not None and held >= first) or word.committed[0] > held

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
                agent.begin(held)  # a donor that was lost may be asked again
            asked, named_s = heal, named_s or monotonic()
            if (found := fetched(agent, heal)) is not None:
                fetched_s = monotonic()
                restore(found[0])
                held, is_healed = heal.batch, True
                agent.begin(held, is_healed=True)
        elif first is not None and held >= first:
            if is_healed:
                agent.heal_times = HealTimes(fetched_s - named_s, monotonic() - fetched_s)
            return held
        else:  # the sum is committed without this replica, so it comes
            follow(held)
            held += 1
