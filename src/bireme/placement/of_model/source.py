"""What the workload of a model is made from: its graph and units, and what they cost at one micro-batch size.

Which of their parameters count where they are tied, and what training adds, is settled here.
"""

from dataclasses import dataclass

from bireme.model.graph import Graph
from bireme.model.learned import learned_values
from bireme.model.units import Unit, units_of
from bireme.profile.profile import Profile, UnitProfile

__all__ = ["PiecesSource", "StateBytes"]


@dataclass(frozen=True, slots=True)
class PiecesSource:
    """What pieces are made of: a graph with its units, and a profile of it at one size of micro-batch.

    With `training` there are backwards, gradients, the optimiser's state and what is kept for the backward.
    With `copy_tied` each unit holds a parameter that it shares with others by itself.
    """

    graph: Graph
    profile: Profile
    units: tuple[Unit, ...]
    learned: frozenset[str]
    micro_batch: int
    training: bool
    copy_tied: bool

    @staticmethod
    def of(
        graph: Graph, profile: Profile, *, micro_batch: int, training: bool, copy_tied: bool
    ) -> "PiecesSource":
        """The source of a graph that the profile is known to fit."""
        learned = learned_values(graph)
        return PiecesSource(graph, profile, units_of(graph), learned, micro_batch, training, copy_tied)

    def forward_s(self, unit: int) -> float:
        """The seconds of a unit's forward."""
        return self.profile.units[unit].at(self.micro_batch).forward_s

    def backward_s(self, unit: int) -> float:
        """The seconds of its backward, zero where there is no training."""
        return self.profile.units[unit].at(self.micro_batch).backward_s if self.training else 0.0

    def learns(self, place: int) -> bool:
        """Whether a gradient comes to an operator in training."""
        outputs = self.graph.operators[place].outputs
        return self.training and any(v is not None and v.name in self.learned for v in outputs)

    def state_bytes(self) -> "list[StateBytes]":
        """What stays of each unit from one micro-batch to the next; what is placed together is there once."""
        counted: set[str] = set()
        found = []
        for unit, known in zip(self.units, self.profile.units, strict=True):
            together = () if self.copy_tied else unit.parameters
            found.append(StateBytes.of(known, counted.intersection(together), training=self.training))
            counted.update(together)
        return found

    def saved_bytes(self, unit: int) -> int:
        """What a unit keeps of a micro-batch for its backward; its neighbours may keep some of it too."""
        return self.profile.units[unit].at(self.micro_batch).saved_bytes if self.training else 0


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a unit: of all its parameters, of what training adds to those that learn, of its buffers."""

    parameter_bytes: int
    training_bytes: int
    buffer_bytes: int

    @staticmethod
    def of(unit: UnitProfile, counted: set[str], *, training: bool) -> "StateBytes":
        """Of a unit, without the parameters that are counted elsewhere."""
        again = [held for held in unit.tied if held.name in counted]
        added = unit.gradient_bytes + unit.optimizer_bytes
        added -= sum(held.gradient_bytes + held.optimizer_bytes for held in again)
        return StateBytes(
            unit.parameter_bytes - sum(held.parameter_bytes for held in again),
            added if training else 0,
            unit.buffer_bytes,
        )

    @property
    def num_bytes(self) -> int:
        """The bytes of all its states."""
        return self.parameter_bytes + self.training_bytes + self.buffer_bytes
