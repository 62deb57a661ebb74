"""What a rank of a pipeline holds between batches: to be looked at, saved, and gone on from."""

from array import array
from collections.abc import Collection, Sequence

from torch import Tensor

from bireme.codec.above import Thresholds
from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.runtime.balancer import Balancer
from bireme.runtime.exchange.averages import Averages
from bireme.runtime.gathering import gather_rows, gather_tensors
from bireme.runtime.layout import Layout
from bireme.runtime.snapshot import Snapshot, feedback_sections, load_feedback, load_stage, sections_of
from bireme.runtime.stage import Stage
from bireme.runtime.stage_messages import StageMessages
from bireme.runtime.updates import Updates
from bireme.sync.group import MessageGroup
from bireme.sync.reducer import Reducer

# The thresholds of a rank's codecs as sections of a snapshot: `threshold/REPLICA-of-WIDTH/NAME/CODEC`, by the
# replicas of the stage.
#
# A run that goes on with as many replicas takes them up again. With another number of replicas they are found
# anew, by the first message of each tensor.


def _threshold_sections(thresholds: Thresholds, num_trained: int, layout: Layout) -> dict[str, Tensor]:
    """What the batch after so many takes from earlier ones, by the names of a snapshot."""
    found = thresholds.after(num_trained)
    return {f"{_section(layout)}{name}": value.to("cpu", copy=True) for name, value in found.items()}


def _load_thresholds(thresholds: Thresholds, saved: Snapshot, layout: Layout) -> None:
    """Go on from what was saved."""
    section = _section(layout)
    found = {
        key.removeprefix(section): saved.tensors[key] for key in saved.tensors if key.startswith(section)
    }
    thresholds.load(found, saved.num_trained)


def _section(layout: Layout) -> str:
    return f"threshold/{layout.member}-of-{len(layout.peers)}/"


class HeldState:
    """The state of one rank; whoever trains it sets these."""

    graph: Graph
    layout: Layout
    stages: dict[int, Stage]
    num_trained = 0
    balancer: Balancer | None
    _averages: Averages | None
    _stage_messages: StageMessages
    _reducer: Reducer
    _spare: MessageGroup
    _updates: Updates
    _is_running = False
    _failure: Exception | None = None

    def parameters(self) -> dict[str, Tensor]:
        """The newest weights of this rank's stages, by the model's own names. They are the engine's: only
        look.
        """
        return {
            name: tensor for stage in self.stages.values() for name, tensor in stage.banks.newest().items()
        }

    def gather(self, row: Sequence[float]) -> list["array[float]"]:
        """Every rank's row of numbers. All ranks must call it, when nothing is under way."""
        return gather_rows(self._spare, row)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of this rank's newest weights and of its persistent buffers, by the model's own names."""
        return {name: tensor.detach().clone() for name, tensor in self._held().items()}

    def _held(self) -> dict[str, Tensor]:
        """What there are copies of in `state_dict`."""
        persistent = {state.name for state in self.graph.buffers if state.persistent}
        buffers = {
            name: tensor
            for stage in self.stages.values()
            for name, tensor in stage.buffers.items()
            if name in persistent
        }
        return self.parameters() | buffers

    def snapshot(self, *, all_held: bool = False, but: Collection[str] = ()) -> Snapshot:
        """Copies of this rank's share of the state after the last batch whose result it has taken.

        To be called while `train` goes on, right when it gives a result, or when nothing is under way: then
        all ranks' snapshots after the same batch belong together. One rank answers for each tensor; with
        `all_held` there is all that this rank holds instead, shared or not, for its own next pipeline. What
        `but` names is left out: who restores the snapshot has it already, as frozen weights.
        """
        owners, layout = self.layout.owners, self.layout
        is_owner = layout.replica == 0
        own = {
            name for name, rank in owners.items() if all_held or (is_owner and rank == layout.pipeline_rank)
        }.difference(but)
        pieces_of = {name for name, rank in owners.items() if rank == layout.pipeline_rank}.difference(but)
        tensors: dict[str, Tensor] = {}
        for stage in self.stages.values():
            tensors |= sections_of(stage, own, replica=layout.replica, pieces_of=pieces_of, alone=all_held)
            pieces_of.difference_update(stage.banks.names)
        if self._averages is not None:
            of_rank = {name for name, rank in owners.items() if rank == layout.pipeline_rank}
            tensors |= self._averages.sections(own, None if all_held else of_rank)
        tensors |= feedback_sections(self._reducer.feedback, self.num_trained, layout)
        tensors |= _threshold_sections(self._stage_messages.thresholds, self.num_trained, layout)
        shares = None if self.balancer is None else self.balancer.state()
        return Snapshot(self.num_trained, self._updates.scale, tensors, shares)

    def restore(self, saved: Snapshot) -> None:
        """Go on from a snapshot, which must have all tensors of this rank's stages that training changes,
        before the first batch. Of the others, what it lacks stays as it is.

        The next batch's number is that of the batches trained. With the same plan it goes on to the last bit
        as if it had never stopped.
        """
        self._check_drained()
        for stage in self.stages.values():
            load_stage(stage, saved.tensors, version=saved.num_trained, replica=self.layout.replica)
        if self._averages is not None:
            self._averages.load(saved.tensors)
        load_feedback(self._reducer.feedback, saved, self.layout)
        _load_thresholds(self._stage_messages.thresholds, saved, self.layout)
        self.num_trained = saved.num_trained
        self._updates.scale = saved.clip_scale
        if self.balancer is not None:
            self.balancer.load(saved.shares, saved.num_trained)

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's newest weights and persistent buffers, on the CPU of rank 0; empty on all others.

        All ranks must call it. Shared weights are there under each of their names.
        """
        wanted = [state for state in (*self.graph.parameters, *self.graph.buffers) if state.persistent]
        owners = self.layout.owners
        held = [state for state in wanted if state.name in owners]
        whole = dict(gather_tensors(self._spare, held, self._held(), owners))
        return {
            name: whole[state.name]
            for state in held
            if state.name in whole
            for name in (state.name, *state.aliases)
        }

    def _make_whole(self) -> None:
        """Have the newest weights here whole where replicas share the optimizer; all of them must call it."""
        for stage in self.stages.values():
            if stage.banks.shared is not None:
                stage.banks.settle()
                stage.banks.shared.arrive_all()

    def _check_drained(self) -> None:
        """Refuse to go on from where nothing can."""
        if self._failure is not None:
            raise BiremeError(
                f"Training has failed in this pipeline ({self._failure}) and cannot continue. Fix that "
                "and make a new pipeline."
            ) from self._failure
        if self._is_running:
            raise BiremeError(
                "The pipeline is not drained: it is training, or a training was left before its batches had "
                "ended. Take all results of train(); to end early, end the batches."
            )
