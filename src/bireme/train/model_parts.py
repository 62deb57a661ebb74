"""The parts of a model that writes: some layers of a decoder with a cache, or some units of a captured graph.

Weights that have room in the memory of a process stay there, the others are read whenever they are needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from time import perf_counter

import torch
from torch import Tensor

from bireme.bounds import counted
from bireme.cluster.machine import available_bytes
from bireme.devices import properties_of
from bireme.errors import BiremeError
from bireme.model.decoder import Decoder, DecoderLayers
from bireme.model.graph import Graph, Reference, Value, evaluate
from bireme.model.stage import StageFunction, stage_function
from bireme.model.units import Unit, units_of
from bireme.model.weights import Weights
from bireme.runtime.message_format import TensorSpec
from bireme.runtime.token_line import SCORES, ModelPart, Tensors

_FILLED = 0.8
"""Share of the free memory that weights may take, so that there is room for what goes through them."""

IDS = "input_ids"
_LOGITS, _HIDDEN = "logits", "hidden"

_READ_BYTES, _NUM_TRIES = 2**27, 3
_DISK_SLOWNESS = 20
"""Memory is about so many times as fast as a disk."""


def room_on(device: torch.device) -> float:
    """The bytes that weights may take on a device."""
    return _FILLED * (available_bytes() if device.type == "cpu" else properties_of(device).memory_bytes)


@dataclass(frozen=True, slots=True)
class PartPlace:
    """The process of a part: the bytes that weights may take there, and how fast they are read."""

    room: float
    bytes_per_s: float = 1.0


def reading_speed(device: torch.device) -> float:
    """The bytes per second that a sum of numbers reads, in the best of a few tries."""
    numbers, best_s = torch.ones(_READ_BYTES // 4, device=device), inf
    for _ in range(_NUM_TRIES):
        begin_s = perf_counter()
        float(numbers.sum())
        best_s = min(best_s, perf_counter() - begin_s)
    return _READ_BYTES / best_s


@dataclass(frozen=True, slots=True)
class DividedModel:
    """A model in parts: a decoder with a cache, else a captured graph. `states` are the decoder's, or the
    graph. The model is called `name` in errors, and reads at most `context` tokens.
    """

    name: str
    states: Graph
    decoder: Decoder | None
    context: int

    def sizes(self) -> list[int]:
        """The bytes of the weights of each layer or unit."""
        if self.decoder is not None:
            return self.decoder.sizes(self.states)
        held = {state.name: state.num_bytes for state in (*self.states.parameters, *self.states.buffers)}
        units = _units(self.states, self.name)
        return [sum(held[one] for one in (*unit.parameters, *unit.buffers)) for unit in units]

    def part(
        self,
        weights: Weights,
        device: torch.device,
        places: Sequence[PartPlace],
        rank: int = 0,
        cuts: Sequence[int] | None = None,
    ) -> "DecoderPart | CapturedPart":
        """The part of a rank, with its weights. `places` are those of all ranks; without `cuts` they divide
        the model.
        """
        sizes = self.sizes()
        cuts = divided(sizes, places) if cuts is None else cuts
        own = range(*list(pairwise([0, *cuts, len(sizes)]))[rank])
        if self.decoder is None:
            return CapturedPart(self, own, weights, device, places[rank].room)
        return DecoderPart(self.decoder, self, own, weights, device, places[rank].room)


def divided(sizes: Sequence[int], places: Sequence[PartPlace]) -> tuple[int, ...]:
    """Where each part but the first begins, so that a token is through all parts soonest: one after the other
    reads its weights, those without room from a disk. Places of equal speed get equal parts if they can.
    """
    so_far = [0, *accumulate(sizes)]
    # For each end of the parts so far: the seconds of all of them and of the slowest one, and where they end.
    ways: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for place in places:
        more: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {}
        for begin, (total_s, most_s, ends) in ways.items():
            for end in range(begin + 1, len(so_far)):
                held = so_far[end] - so_far[begin]
                own_s = (held + _DISK_SLOWNESS * max(held - place.room, 0)) / place.bytes_per_s
                more.setdefault(end, []).append((total_s + own_s, max(most_s, own_s), (*ends, end)))
        ways = {end: min(found) for end, found in more.items()}
    return ways[len(sizes)][2][:-1]


class DecoderPart(ModelPart):
    """Some layers of a decoder of transformers."""

    has_cache = True

    def __init__(
        self,
        decoder: Decoder,
        model: DividedModel,
        own: range,
        weights: Weights,
        device: torch.device,
        room: float,
    ) -> None:
        self.context, self.device = model.context, device
        self._list = decoder.layers
        self._layers = DecoderLayers(decoder, own, model.states, weights, device=device, room=room)
        self.how = "with a cache of keys and values"
        if self._layers.num_read:
            self.how += f", {counted(self._layers.num_read, 'layer')} read for each token"

    def run(self, ids: Sequence[int], count: int, received: Tensors) -> Tensors:
        """Run the new tokens."""
        fresh = torch.tensor([ids[-count:]], device=self.device)
        made = self._layers(fresh, received.get(_HIDDEN), begins=count == len(ids))
        return {SCORES if made.ndim == 1 else _HIDDEN: made}

    def receives(self, count: int) -> tuple[TensorSpec, ...]:
        """The hidden state of the new tokens."""
        assert self._list is not None, "a decoder without a list of layers is whole"
        return (TensorSpec(_HIDDEN, (1, count, self._list.width), self._list.dtype),)

    sends = receives


class CapturedPart(ModelPart):
    """Some units of a graph, each a stage of its own, without gradients and without a cache."""

    def __init__(
        self, model: DividedModel, own: range, weights: Weights, device: torch.device, room: float
    ) -> None:
        graph = model.states
        self.context, self.device = _length_of(graph), device
        self._output = _logits_of(graph, model.name)
        self._weights = weights
        self._inputs = [value.name for value in graph.inputs]
        self._values = graph.values
        states = {state.name: state for state in (*graph.parameters, *graph.buffers)}
        self._dtypes = {name: getattr(torch, state.dtype) for name, state in states.items()}
        units = _units(graph, model.name)[own.start : own.stop]
        self._functions = [stage_function(graph, [unit], outputs=(self._output,)) for unit in units]
        self._kept: list[Mapping[str, Tensor] | None] = []
        for function in self._functions:
            room -= sum(states[name].num_bytes for name in (*function.parameters, *function.buffers))
            self._kept.append(self._read(function) if room >= 0 else None)
        num_read = sum(one is None for one in self._kept)
        self.how = "without a cache, so that each token takes all tokens before it again"
        if num_read:
            self.how += f", {counted(num_read, 'unit')} read for each token"

    @torch.no_grad()
    def run(self, ids: Sequence[int], count: int, received: Tensors) -> Tensors:
        """Run all tokens. Attention is causal, so the padding after them is not seen."""
        given = torch.zeros((1, self.context), dtype=torch.int64, device=self.device)
        given[0, : len(ids)] = torch.tensor(list(ids))
        values = {**dict.fromkeys(self._inputs, given), **received}
        for function, kept in zip(self._functions, self._kept, strict=True):
            weights = self._read(function) if kept is None else kept
            values |= function(weights, weights, values, device=self.device)
        if self._output in values:
            return {SCORES: values[self._output][0, len(ids) - 1]}
        return {name: values[name] for name in self._functions[-1].sends}

    def receives(self, count: int) -> tuple[TensorSpec, ...]:
        """The values that the first unit receives, for all places of a text."""
        return self._specs(self._functions[0].receives)

    def sends(self, count: int) -> tuple[TensorSpec, ...]:
        """The values that the last unit sends."""
        return self._specs(self._functions[-1].sends)

    def _specs(self, names: Sequence[str]) -> tuple[TensorSpec, ...]:
        found = [self._values[name] for name in names]
        shapes = [tuple(evaluate(length, 1) for length in value.shape) for value in found]
        return tuple(
            TensorSpec(value.name, shape, getattr(torch, value.dtype))
            for value, shape in zip(found, shapes, strict=True)
        )

    def _read(self, function: StageFunction) -> dict[str, Tensor]:
        found = self._weights((*function.parameters, *function.buffers))
        return {name: one.to(self.device, self._dtypes[name]) for name, one in found.items()}


def _length_of(graph: Graph) -> int:
    """The tokens that a graph reads."""
    ids = next(value for value in graph.inputs if value.name == IDS)
    return evaluate(ids.shape[1], 1)


def _units(graph: Graph, name: str) -> tuple[Unit, ...]:
    """The units of a graph up to the one that makes the scores."""
    output = next(one for one in graph.outputs if one.name == _logits_of(graph, name))
    assert isinstance(output.value, Reference)
    place, units = graph.made_by[output.value.name], units_of(graph)
    return units[: 1 + max(unit.index for unit in units if place in unit.operators)]


def _logits_of(graph: Graph, name: str) -> str:
    """The output with a score for each place and token."""
    values: dict[str, Value] = graph.values
    for output in sorted(graph.outputs, key=lambda one: one.name != _LOGITS):
        value = values.get(output.value.name) if isinstance(output.value, Reference) else None
        if value is not None and len(value.shape) == 3 and value.shape[1] == _length_of(graph):
            return output.name
    raise BiremeError(
        f"{name} holds a model that returns no scores for the next token. Let its forward return them as "
        "`logits`, beside its loss."
    )
