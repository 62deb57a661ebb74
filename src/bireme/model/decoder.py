"""Decoders of transformers that write with a cache of keys and values: a whole one, or some of its layers.

The model's own forward runs, so masks, positions and the code between layers are the model's own. In a
process that has some of the layers, a stand-in takes the place of each other layer. The first stand-in after
the own layers keeps their result; the last one before them gives the result of the process before. A forward
without numbers shows whether a model can be run so.
"""

import copy
import importlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bireme.model.convert import aliases_of, dtype_name, first_names, named_tensors, tensors_within
from bireme.model.graph import Graph, ModelState, PackedMatrix
from bireme.model.nf4_operator import nf4_linear, unpacked
from bireme.model.torch_private import tensor_places
from bireme.model.units import units_of
from bireme.model.weights import Weights

_CACHES = ("past_key_values", "cache_params")
"""Names of the cache among the arguments of a model."""

_LIST_CACHES = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""The caches of layers that only grow by the keys and values of more tokens."""


@dataclass(frozen=True, slots=True)
class LayerList:
    """The layers of a decoder: where they are, and what passes between them.

    `width` and `dtype` are those of the hidden state, `embedded` is the width of the embedding. A layer
    returns the hidden state alone, or as the first of a tuple with `num_results` entries.
    """

    name: str
    count: int
    width: int
    dtype: torch.dtype
    embedded: int
    num_results: int | None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model that writes with a cache. It can be cut between its `layers`; if there are none, it runs whole.

    `model` is a copy on the meta device. `cache` is the argument of its forward for the cache.
    """

    model: Any
    cache: str
    layers: LayerList | None

    def sizes(self, states: Graph) -> list[int]:
        """The bytes of each layer, with the embedding in the first and the head in the last one; those of the
        whole model if it cannot be cut.
        """
        if self.layers is None:
            return [sum(state.num_bytes for state in (*states.parameters, *states.buffers))]
        found = [0] * self.layers.count
        head = self.model.get_output_embeddings()
        of_head = set() if head is None else {id(one) for one in head.parameters()}
        of_embedding = {id(one) for one in self.model.get_input_embeddings().parameters()}
        tensors = dict(named_tensors(self.model))
        for state in (*states.parameters, *states.buffers):
            index = _layer_of(state.name, self.layers)
            own = id(tensors[state.name])
            places = [index] if index is not None else [-1] if own in of_head else [0]
            for place in {*places, *([0] if own in of_head & of_embedding else [])}:
                found[place] += state.num_bytes
        return found

    def cuts(self, graph: Graph, cuts: Sequence[int]) -> tuple[int, ...]:
        """The layers at which stages begin that begin at the units `cuts` of the captured model. A cut within
        a layer moves to the next layer; each stage has a layer.
        """
        assert self.layers is not None
        units, found = units_of(graph), list[int]()
        for number, cut in enumerate(cuts, 1):
            before = {name for unit in units[:cut] for name in unit.parameters}
            indexes = [index for name in before if (index := _layer_of(name, self.layers)) is not None]
            wanted, least = max(indexes, default=-1) + 1, found[-1] + 1 if found else 1
            found.append(min(max(wanted, least), self.layers.count - len(cuts) - 1 + number))
        return tuple(found)


def _layer_of(name: str, layers: LayerList) -> int | None:
    """The index of the layer that has the parameter of this name."""
    rest = name.removeprefix(f"{layers.name}.")
    return None if rest == name else int(rest.partition(".")[0])


def state_graph(model: nn.Module, captured: Graph | None = None) -> Graph:
    """The states of a model as a graph without operators, for reading weights. Nothing in it learns. Weights
    that the `captured` graph of the model has packed are packed.
    """
    tensors, kept = named_tensors(model), model.state_dict().keys()
    first = first_names(tensors)
    aliases, by_name = aliases_of(first), dict(tensors)
    packed = {} if captured is None else {one.name: one for one in captured.parameters if one.packed}

    def state(name: str) -> ModelState:
        tensor, names = by_name[name], (name, *aliases[name])
        is_parameter, is_kept = isinstance(tensor, nn.Parameter), any(one in kept for one in names)
        plain = ModelState(
            name,
            tuple(tensor.shape),
            dtype_name(tensor.dtype),
            is_parameter=is_parameter,
            persistent=is_kept,
            aliases=names[1:],
        )
        return packed.get(name, plain)

    found = [state(name) for name in aliases]
    parameters, buffers = (tuple(one for one in found if one.is_parameter is kind) for kind in (True, False))
    name = type(model).__name__
    return Graph(name, False, 1, False, (), parameters, buffers, (), (), ())


def decoder_of(model: Any) -> Decoder | None:
    """A model on the meta device as a decoder with a cache; None if it is none."""
    config = getattr(model, "config", None)
    parameters = inspect.signature(model.forward).parameters
    cache = next((name for name in _CACHES if name in parameters), None)
    if cache is None or config is None or getattr(config, "is_encoder_decoder", False):
        return None
    own = copy.deepcopy(model).eval().requires_grad_(False)
    own.config.pad_token_id = None  # or transformers looks for padding in the prompt
    trial = Decoder(copy.deepcopy(own), cache, None)  # some models keep what they have read
    try:
        if hasattr(own, "set_experts_implementation"):
            trial.model.set_experts_implementation("batched_mm")  # the one that runs without numbers
        with torch.no_grad():
            run = CachedDecoder(trial)
            for count in (3, 1):
                run(torch.zeros((1, count), dtype=torch.int64, device="meta"))
        return Decoder(own, cache, _layers_of(trial))
    except Exception:  # the code of any model, which may need other arguments
        return None


class CachedDecoder:
    """A decoder with the keys and values of all tokens of a text so far."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        parameters = inspect.signature(decoder.model.forward).parameters
        self._extra = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.begin()

    def begin(self) -> None:
        """Start a new text."""
        transformers: Any = importlib.import_module("transformers")
        self.cache = transformers.DynamicCache(config=self._decoder.model.config)

    def __call__(self, ids: Tensor) -> Tensor:
        """The scores of the token after some more tokens."""
        known = {self._decoder.cache: self.cache}
        made = self._decoder.model(input_ids=ids, use_cache=True, **known, **self._extra)
        scores: Tensor = made["logits"][0, -1]
        return scores


def _layers_of(decoder: Decoder) -> LayerList | None:
    """The layers between which a decoder can be cut; None if anything but the hidden state passes there.

    The embedding is watched by its gradient: what depends on it must not go around a layer.
    """
    model = decoder.model
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", 0)
    named = {name: one for name, one in model.named_modules() if isinstance(one, nn.ModuleList)}
    depths = sorted((name.count("."), name) for name, one in named.items() if len(one) == count)
    cached = CachedDecoder(decoder)
    caches = [type(one).__name__ for one in cached.cache.layers]
    is_shared = getattr(config, "num_kv_shared_layers", 0)
    if not depths or depths[0][0] in [depth for depth, _ in depths[1:]] or is_shared:
        return None
    if len(caches) != count or not set(caches) <= {*_LIST_CACHES}:
        return None
    layers, passed = list(named[depths[0][1]]), _Passed()
    try:
        embedding = model.get_input_embeddings()
        hooks = [embedding.register_forward_hook(passed.embed)]
    except (AttributeError, NotImplementedError):  # what transformers raises for a model without embeddings
        return None
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(passed.enter, with_kwargs=True))
        hooks.append(layer.register_forward_hook(passed.leave))
    hooks.append(layers[-1].register_forward_hook(passed.end))
    with torch.enable_grad():
        scores = cached(torch.zeros((1, 3), dtype=torch.int64, device="meta"))
    for hook in hooks:
        hook.remove()
    if passed.modules != layers or passed.goes_around or scores.requires_grad or passed.embedded is None:
        return None
    hidden = passed.hidden
    assert hidden is not None
    return LayerList(
        depths[0][1], count, hidden.shape[-1], hidden.dtype, passed.embedded.shape[-1], passed.num_results
    )


class _Passed:
    """The tensors that pass through the layers of a model in one forward."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.embedded: Tensor | None = None
        self.hidden: Tensor | None = None
        """The result of the last layer so far."""
        self.goes_around = False
        """Whether a layer was given anything else that depends on the embedding, or on a layer."""
        self.num_results: int | None = None

    def embed(self, _module: nn.Module, _given: Any, made: Tensor) -> Tensor:
        self.embedded = made.detach().requires_grad_()
        return self.embedded

    def enter(self, module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        first, *rest = (*positional, *named.values())
        is_first = not self.modules and isinstance(first, Tensor) and first.requires_grad
        self.goes_around |= not (is_first or (self.modules and first is self.hidden))
        self.goes_around |= any(one.requires_grad for one in tensors_within(rest))
        self.modules.append(module)

    def leave(self, _module: nn.Module, _given: Any, made: Any) -> None:
        self.num_results = len(made) if isinstance(made, tuple) else None
        self.hidden = made[0] if isinstance(made, tuple) else made

    def end(self, _module: nn.Module, _given: Any, made: Any) -> Any:
        """Let nothing depend on the embedding any more that the last layer made."""
        return (made[0].detach(), *made[1:]) if isinstance(made, tuple) else made.detach()


class DecoderLayers:
    """The layers `own` of a decoder, or all of one without a list, with weights on a device. The decoder must
    not be used for anything else.

    Weights stay on the device as far as they have `room` there. Those of other layers are read whenever the
    layer runs; `num_read` is the number of these layers.
    """

    def __init__(
        self,
        decoder: Decoder,
        own: range,
        states: Graph,
        weights: Weights,
        *,
        device: torch.device,
        room: float,
    ) -> None:
        self._model, self._device, self._weights = decoder.model, device, weights
        self._states = {state.name: state for state in (*states.parameters, *states.buffers)}
        self._first = first_names(named_tensors(self._model))
        self._cached = CachedDecoder(decoder)
        self._before: _Elsewhere | None = None
        self._after: _Elsewhere | None = None
        self.num_read = 0
        layers, begins = decoder.layers, list[str]()
        if layers is not None:
            self._leave_to_others(layers, own)
            begins = [f"{layers.name}.{index}" for index in own]
        self._place_packed()
        tied: dict[str, Tensor] = {}
        of_layers = {begin: list(self._slots(begin)) for begin in begins}
        inside = {id(slot.place) for slots in of_layers.values() for slot in slots}
        room -= self._fill([one for one in self._slots("") if id(one.place) not in inside], tied)
        for begin, slots in of_layers.items():
            room -= self._bytes(slots)
            if room >= 0:
                self._fill(slots, tied)
                continue
            self.num_read += 1
            layer = self._model.get_submodule(begin)
            layer.register_forward_pre_hook(partial(self._read, slots))
            layer.register_forward_hook(partial(_empty, slots))

    @torch.no_grad()
    def __call__(self, ids: Tensor, hidden: Tensor | None, *, begins: bool) -> Tensor:
        """The hidden state after the own layers, or the scores of the next token if they are the last ones.

        `ids` are the tokens that are new, `hidden` is their state before the own layers; None if these are
        the first ones. With `begins` the tokens are the first ones of a text.
        """
        if begins:
            self._cached.begin()
        if self._before is not None:
            self._before.hidden = hidden
        scores = self._cached(ids)
        if self._after is None:
            return scores
        assert self._after.hidden is not None
        return self._after.hidden

    def _leave_to_others(self, layers: LayerList, own: range) -> None:
        """Put stand-ins in the places of modules that other processes run."""
        listed = self._model.get_submodule(layers.name)
        for index in range(layers.count):
            if index not in own:
                listed[index] = _Elsewhere(self._cached, index, layers.num_results, keeps=index == own.stop)
        if own.start:
            self._before = listed[own.start - 1]
            stand_in = _NoEmbedding(layers.embedded, torch.empty(0, dtype=layers.dtype, device=self._device))
            self._replace(self._model.get_input_embeddings(), stand_in)
        if own.stop < layers.count:
            self._after = listed[own.stop]
            self._replace(self._model.get_output_embeddings(), nn.Identity())

    def _replace(self, module: nn.Module | None, other: nn.Module) -> None:
        if module is not None:
            name = next(name for name, one in self._model.named_modules() if one is module)
            self._model.set_submodule(name, other)

    def _place_packed(self) -> None:
        """Put layers that multiply by packed weights in the places of those with such weights."""
        modules = dict(self._model.named_modules())
        for state in self._states.values():
            path = state.name.removesuffix(".weight")
            if state.packed is not None and path in modules:
                self._model.set_submodule(path, _PackedLinear(modules[path], state.packed))

    def _slots(self, begin: str) -> Iterator["_Slot"]:
        """The places of the weights of a module; those of the whole model if it has no name."""
        for name, _, table, key in tensor_places(self._model.get_submodule(begin), begin):
            own = f"{name.removesuffix(_PACKED)}weight" if key == _PACKED else name
            yield _Slot(table, key, self._first[own])

    def _bytes(self, slots: Iterable["_Slot"]) -> int:
        return sum(self._states[name].num_bytes for name in {one.state for one in slots})

    def _fill(self, slots: Sequence["_Slot"], tied: dict[str, Tensor]) -> int:
        """Read weights into their places, unless they are among the `tied` ones; gives their bytes."""
        names = [*dict.fromkeys(one.state for one in slots if one.state not in tied)]
        for name, tensor in self._weights(names).items():
            tied[name] = tensor.to(self._device, getattr(torch, self._states[name].dtype))
        for slot in slots:
            slot.put(tied[slot.state])
        return self._bytes(slots)

    def _read(self, slots: Sequence["_Slot"], *_given: Any) -> None:
        """Before a layer runs whose weights do not stay."""
        self._fill(slots, {})


_PACKED = "packed_weight"


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place of a tensor among those of a module; `state` is the name of its content."""

    place: dict[str, Any]
    local: str
    state: str

    def put(self, tensor: Tensor) -> None:
        """Have this tensor there."""
        is_parameter = isinstance(self.place[self.local], nn.Parameter)
        self.place[self.local] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def _empty(slots: Sequence[_Slot], *_given: Any) -> None:
    """After a layer has run whose weights do not stay."""
    for slot in slots:
        slot.put(torch.empty_like(slot.place[slot.local], device="meta"))


class _Elsewhere(nn.Module):
    """The place of a layer that another process runs.

    The cache gets keys of one number for it, because models ask the first layer's cache for the number of
    tokens that they have read.
    """

    def __init__(self, cached: CachedDecoder, index: int, num_results: int | None, *, keeps: bool) -> None:
        super().__init__()
        self._cached, self._index, self._num_results, self._keeps = cached, index, num_results, keeps
        self.hidden: Tensor | None = None
        """The hidden state that comes from another process, or goes there."""

    def forward(self, hidden_states: Tensor, *_positional: Any, **_named: Any) -> Any:
        """The hidden state of the other process; the one given if there is none."""
        blank = hidden_states.new_zeros(1, 1, hidden_states.shape[1], 1)
        self._cached.cache.update(blank, blank, self._index)
        if self._keeps:
            self.hidden = hidden_states
        made = hidden_states if self.hidden is None else self.hidden
        return made if self._num_results is None else (made, *[None] * (self._num_results - 1))


class _NoEmbedding(nn.Module):
    """The place of an embedding in a process whose layers are given hidden states. Some models ask its weight
    for the device.
    """

    def __init__(self, width: int, weight: Tensor) -> None:
        super().__init__()
        self._width, self.weight = width, weight

    def forward(self, ids: Tensor) -> Tensor:
        """Zeros for the tokens."""
        return self.weight.new_zeros((*ids.shape, self._width))


class _PackedLinear(nn.Module):
    """A linear layer whose weight is NF4 bytes."""

    def __init__(self, layer: Any, matrix: PackedMatrix) -> None:
        super().__init__()
        self.bias = layer.bias
        self._matrix = matrix
        self.register_buffer(_PACKED, torch.empty(0, dtype=torch.uint8, device="meta"))

    @property
    def weight(self) -> Tensor:
        """The weight unpacked, for adapters that measure its rows."""
        dtype: torch.dtype = getattr(torch, self._matrix.dtype)
        return unpacked(self.get_buffer(_PACKED), *self._matrix.shape, dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """The product with the weight, and the bias."""
        return nf4_linear(hidden, self.get_buffer(_PACKED), self.bias, *self._matrix.shape)
