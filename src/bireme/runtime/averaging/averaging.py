"""What a pipeline needs where its replica averages weights with others: its agent, and how to join.

The pipeline itself is of one replica, with a plan of width 1, and knows no rank of another one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.plan.program_plan import ProgramPlan
from bireme.runtime.averaging.agent import AveragingAgent
from bireme.runtime.averaging.averages import Averages, GroupAverages
from bireme.runtime.averaging.outer import OuterAverages, OuterSettings
from bireme.runtime.layout import Layout
from bireme.runtime.quorum.job import DroppedError, heal_in
from bireme.runtime.quorum.peer_agent import fetched
from bireme.runtime.runnable import AnyPlan
from bireme.runtime.snapshot import Snapshot, sections_of
from bireme.runtime.stage import Stage
from bireme.sync.coordinator.messages import CoordinatorReply, Heal, Window

__all__ = ["Averaging", "WeightDonations", "check_untied", "join_averaging"]


@dataclass(frozen=True, slots=True)
class Averaging:
    """How a pipeline averages with others: in groups, or by `outer` steps that come `lag` batches late.

    A batch of the run has `batch_size` samples, of which each replica trains its own; it begins with `first`.
    With `averages_optimizer` what optimisers remember of the weights is averaged along with these.
    """

    agent: AveragingAgent
    batch_size: int
    outer: OuterSettings | None = None
    lag: int = 0
    first: int = 0
    averages_optimizer: bool = False

    def programs(self, plan: AnyPlan) -> ProgramPlan:
        """What a plan runs with averages in it."""
        named = plan.plan if isinstance(plan, SavedPlan) else plan
        if not isinstance(named, Plan):
            raise BiremeError("Replicas average weights in programs of a plan, not in one that is given.")
        if named.paging is not None:
            raise BiremeError(
                "Replicas average weights that lie on their devices, but the plan pages them. Make a plan "
                "that does not page."
            )
        return named.averaging(self.lag)

    def averages(self, stages: Mapping[int, Stage], layout: Layout, device: torch.device) -> Averages:
        """The averages of a rank."""
        check_untied(layout)
        if self.outer is None:
            return GroupAverages(self.agent, stages, device, averages_optimizer=self.averages_optimizer)
        return OuterAverages(
            self.agent,
            stages,
            device,
            self.outer,
            self.batch_size,
            self.first,
            averages_optimizer=self.averages_optimizer,
        )


def check_untied(layout: Layout) -> None:
    """Refuse weights that ranks share: each rank averages its own."""
    if layout.tied:
        raise BiremeError(
            f"{next(iter(layout.tied))} is shared by stages on several ranks, and replicas average "
            'weights rank by rank, so its copies would part. Untie it, or use sync.mode = "quorum".'
        )


class WeightDonations:
    """Takes snapshots for other replicas, of the rank's stage right before an update."""

    def __init__(self, averages: Averages, clip_scale: Callable[[], float]) -> None:
        self._averages, self._clip_scale = averages, clip_scale

    def before_update(self, stage: Stage, batch: int) -> None:
        """The stage is about to make the update of a batch."""
        agent = self._averages.agent
        name = agent.due(batch)
        if name is None:
            return
        names = [*stage.banks.newest(), *stage.buffers]
        tensors = sections_of(stage, names, replica=0) | self._averages.donated()
        agent.provide(name, Snapshot(batch, self._clip_scale(), tensors))


def join_averaging(agent: AveragingAgent, held: int, until: int, restore: Callable[[Snapshot], None]) -> int:
    """Come to where this replica has a part; gives the first batch that it has.

    It has the state after `held` batches. If others have gone on it gets a snapshot from one of them, which
    `restore` takes. The first window has the places below `until`.
    """
    agent.begin(Window(0, until))
    own = agent.own

    def is_member(word: CoordinatorReply) -> bool:
        """Whether that is certain, whoever coordinates next."""
        return word.is_installed and any(one.own_life == own.own_life for one in word.members)

    asked: Heal | None = None
    while True:
        before = asked

        def goes_on(word: CoordinatorReply, before: Heal | None = before) -> bool:
            heal = heal_in(word, own)
            is_new = heal is not None and (before is None or _key(heal) != _key(before))
            return is_new or is_member(word)

        word = agent.wait_for(goes_on)
        heal = heal_in(word, own)
        if heal is None or is_member(word):
            return held
        if asked is not None and held == asked.batch:
            raise DroppedError(f"replica {own.replica} has lost its donor.")
        if asked is not None:  # a donor that was lost may be asked again
            agent.begin(Window(0, until), used=[0] * len(agent.lines))
        asked = heal
        found = fetched(agent, heal)
        if found is not None:
            snapshot, words = found
            restore(snapshot)
            held = snapshot.num_trained
            agent.begin(Window(words["window"], words["until"]), used=words["used"], healed=heal.batch)


def _key(heal: Heal) -> tuple[int, int]:
    return heal.donor, heal.batch
