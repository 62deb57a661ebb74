"""What the end of a batch takes for some parameters: REDUCE, TRIAL and UPDATE, run by the engine.

The parameters of a unit are put into a model that does nothing with them but give each a gradient, and the
engine trains that on this process alone under the rule that has all three instructions. Between batches other
memory is gone through, for in training a step finds the caches full of activations.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from bireme.model.argument import Reference
from bireme.model.graph import Graph, ModelState, Operator, Output, Value
from bireme.model.units import Unit
from bireme.plan.plan import Plan
from bireme.profile.measuring import BatchEndTimes
from bireme.profile.waits import waited_s
from bireme.runtime.optimizers import named_optimizer
from bireme.runtime.pipeline import Pipeline
from bireme.schedule.instruction import Instruction, Kind

__all__ = ["batch_end_of", "batch_end_of_next_to_nothing"]

NUM_SETTLING, NUM_COUNTED = 3, 7
"""Batches: an optimiser makes its state in the first ones."""

OTHER_BYTES = 32 * 2**20
"""More than a core's own cache."""

RATE = 1e-6


def batch_end_of(graph: Graph, unit: Unit, optimizer: str, num_counted: int = NUM_COUNTED) -> BatchEndTimes:
    """The medians of so many batches for the parameters of a unit; nothing where none of them learns. On the
    CPU.
    """
    states = [state for state in graph.parameters if state.name in unit.parameters and state.trainable]
    return _batch_end_of(states, optimizer, num_counted) if states else BatchEndTimes(0.0, 0.0, 0.0)


def batch_end_of_next_to_nothing(optimizer: str) -> BatchEndTimes:
    """The same for one parameter of a few numbers: what the instructions themselves take."""
    return _batch_end_of(
        [ModelState("weight", (8,), "float32", is_parameter=True, trainable=True)], optimizer
    )


def _batch_end_of(
    states: Sequence[ModelState], optimizer: str, num_counted: int = NUM_COUNTED
) -> BatchEndTimes:
    shortest = min((getattr(torch, state.dtype) for state in states), key=lambda one: one.itemsize)
    laps = _Laps()
    pipeline = Pipeline(
        _graph_of(states),
        Plan((), 1, "2bw-fresh"),
        weights=lambda names: {
            one.name: torch.full(one.shape, 0.01, dtype=getattr(torch, one.dtype))
            for one in states
            if one.name in names
        },
        optimizer=named_optimizer(optimizer, lr=RATE),
        clip_norm=1.0,
        on_instruction=laps,
        bank_dtype=shortest if shortest.itemsize < torch.float32.itemsize else None,
    )
    other = torch.zeros(OTHER_BYTES // 4)

    def batches() -> Iterator[dict[str, Tensor]]:
        for _ in range(NUM_SETTLING + num_counted):
            laps.pause()
            other.add_(1.0)
            yield {"given": torch.ones(2, 1)}

    for _ in pipeline.train(batches()):
        laps.pause()
    pipeline.close()
    reduce_s, update_s, trial_s = (
        median(laps.seconds[kind][-num_counted:]) for kind in (Kind.REDUCE, Kind.UPDATE, Kind.TRIAL)
    )
    return BatchEndTimes(reduce_s, update_s, trial_s)


def _graph_of(states: Sequence[ModelState]) -> Graph:
    """A model of these parameters alone, whose loss is the sum of the first number of each.

    It is written down and not captured, which would take longer than what is measured.
    """
    given = Value("given", ("b", 1), "float32")
    operators = [_call("mean.default", "sum", Reference("given"))]
    for place, state in enumerate(states):
        flat, first = Value(f"flat{place}", (state.num_elements,), state.dtype), f"first{place}"
        before = operators[-1].outputs[0]
        assert before is not None, "each has a result"
        operators += [
            Operator("aten.reshape.default", (Reference(state.name), (-1,)), (), (flat,)),
            Operator("aten.select.int", (Reference(flat.name), 0, 0), (), (Value(first, (), state.dtype),)),
            _call("add.Tensor", f"sum{place}", Reference(before.name), Reference(first)),
        ]
    loss = operators[-1].outputs[0]
    assert loss is not None, "each has a result"
    return Graph(
        name="the end of a batch",
        training=True,
        batch=2,
        any_batch=True,
        inputs=(given,),
        parameters=tuple(states),
        buffers=(),
        constants=(),
        operators=tuple(operators),
        outputs=(Output("loss", Reference(loss.name)),),
    )


def _call(name: str, result: str, *arguments: Reference) -> Operator:
    """An operator that makes a number."""
    return Operator(f"aten.{name}", arguments, (), (Value(result, (), "float32"),))


class _Laps:
    """How long instructions took, by kind; waits for a core are left out, as in all of a profile."""

    def __init__(self) -> None:
        self.seconds: dict[Kind, list[float]] = {}
        self._kind: Kind | None = None
        self._began_s = self._waited_s = 0.0

    def __call__(self, step: Instruction) -> None:
        """The next instruction begins."""
        self.pause()
        self._kind, self._waited_s, self._began_s = step.kind, waited_s(), perf_counter()

    def pause(self) -> None:
        """The instruction under way, if there is one, is over."""
        if self._kind is not None:
            took_s = perf_counter() - self._began_s
            took_s -= waited_s() - self._waited_s
            self.seconds.setdefault(self._kind, []).append(max(took_s, 0.0))
            self._kind = None
