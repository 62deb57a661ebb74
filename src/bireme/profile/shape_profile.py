"""The profile of a transformer that is only a shape, on a device of the catalogue: without torch, at once.

A unit is half a layer, as in a captured model. Bytes are those that capture counts for the same model, as
formulas of its sizes; tests compare them with captures. Seconds are the operations of the unit's matrices at
the share of the device's rate that training attains, or the time to read the unit's weights, or to start its
operators, if that takes longer. The share was measured on whole steps of training, so it contains all work
that is no product of matrices.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from bireme.cluster.catalogue import CatalogueDevice
from bireme.model.fused_loss import LEAST_LOGITS, keeps_logits, rows_at_once
from bireme.model.nf4 import BITS, UNPACKING_BYTES
from bireme.model.shapes import TransformerShape
from bireme.profile.estimate import ATTAINED_BYTES, START_S, estimated_update_s
from bireme.profile.profile import KeptMemory, Profile, SharedState, UnitCost, UnitProfile


class TrainedShare(StrEnum):
    """Which weights of a model learn."""

    FULL = "full"
    """All."""
    LORA = "lora"
    """Adapters beside all linear maps but the head; the weights are frozen, in bfloat16."""
    QLORA = "qlora"
    """The same, but the frozen linear maps have weights of four bits."""


RANK = 16
"""Of an adapter."""

_SHORT, _WHOLE, _WORD = 2, 4, 8
"""Bytes of a value in bfloat16, of sums and optimizer state in float32, and of a token's number."""

_MOMENTS = 2
"""Values that AdamW remembers of each weight, beside its float32 copy."""

QUANTIZED_BYTES = BITS / 8
"""Of a weight of four bits, with its share of the scales: 4.127 bits."""


@dataclass(frozen=True, slots=True)
class _Half:
    """A unit. `maps` are the lengths of input and output of its linear maps that a token passes, `idle` the
    weights of experts that it does not, `others` the weights beside maps. Adapters are beside maps if
    `adapts`.

    For each token, `normed` are the values that norms give, `products` are operations without weights,
    `saved` bytes are kept for the backward, `alive` bytes are in use at its worst moment unless all gradients
    of the weights take more, and `in_halves` bytes while its first half runs. `starts` are the operators of a
    forward, `shared` names a table that another unit uses too.
    """

    name: str
    maps: tuple[tuple[int, int], ...]
    others: int
    normed: int
    products: float
    saved: float
    alive: float
    in_halves: float
    starts: int
    shared: str = ""
    idle: int = 0
    adapts: bool = True

    @property
    def num_mapped(self) -> int:
        """The weights of the maps that a token passes."""
        return _num_weights(self.maps)


def _num_weights(maps: Iterable[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in maps)


def profile_of_shape(
    shape: TransformerShape,
    device: CatalogueDevice,
    attained: float,
    length: int,
    micro_batches: Sequence[int],
    trained: TrainedShare = TrainedShare.FULL,
) -> Profile:
    """The costs of a shape in bfloat16 with AdamW, for micro-batches of sequences of `length` tokens, on a
    device that attains a share of its matrix rate.
    """
    learns = trained is TrainedShare.FULL
    attention, feed_forward = _attention(shape, length, learns), _feed_forward(shape, learns)
    halves = [_embedding(shape, learns)]
    for layer in range(shape.layers):
        halves += [replace(one, name=f"layers.{layer}.{one.name}") for one in (attention, feed_forward)]
    halves.append(_head(shape, learns))
    last = len(halves) - 1
    units = tuple(
        _Unit(shape, device, attained, length, trained, half, place, place == last).profile(micro_batches)
        for place, half in enumerate(halves)
    )
    return Profile(
        model=shape.name,
        graph=f"{shape.name}, a shape, {trained}",
        device=device.name,
        device_kind=device.kind,
        num_threads=0,
        versions="",
        is_measured=False,
        optimizer="adamw",
        num_operators=sum(half.starts for half in halves),
        parameter_bytes=_SHORT * shape.num_parameters,
        units=units,
        master_weights=True,
    )


# Bytes and operations of a token in each kind of unit. h is the width, f the inner width, q the width of all
# queries, k that of all keys, V the number of tokens, T the length of a sequence.
#
# A norm over root mean squares keeps its input in float32 (4 h), the normalized value if its weight learns
# (2 h) and its result (2 h). An expert keeps its input and its result too (4 h), and where a token lies among
# all. Attention keeps queries, and keys and values repeated for all heads, and its result (8 q), a sum for
# each head, and the mask (2 T). A gated half keeps both results up, the activation and the product (8 f). A
# layer norm keeps its input and its result.


def _normed(shape: TransformerShape, learns: bool) -> float:
    """The bytes that the first norm of a half keeps, with the input of the maps."""
    h = shape.width
    if shape.norm_values > 1:
        return 4 * h + 4
    result = (8 if shape.has_sinks else 6) * h + 4 + (2 * h if learns else 0)
    # The norms of Gemma multiply in float32, and a second one follows the maps.
    return result if shape.num_norms == 1 else result + 2 * h + 8 * h + 4


def _attention(shape: TransformerShape, length: int, learns: bool) -> _Half:
    h, q, k, heads = shape.width, shape.query_width, shape.key_width, shape.heads
    kept = 2 * (q + 2 * k) + 2 * q if shape.has_biases else 8 * q
    kept += 6 * (q + k) + 4 * (heads + shape.shared_heads) if shape.norms_heads else 0
    # A kernel keeps the sums of scores. Scores that are capped are matrices: in bfloat16 twice, in float32
    # once. So are those of transformers with sinks, which have a column for the sink.
    scores, alive = 4 * heads + 2 * length, max(9 * q, 6 * length)
    in_halves = max(4 * h if shape.norm_values > 1 else 20 * h, 18 * q if shape.norms_heads else 0)
    if shape.family == "gemma2":
        scores, alive, in_halves = 8 * heads * length, 5 * heads * length + 8 * h, 8 * heads * length
    elif shape.has_sinks:
        scores, alive, in_halves = heads * (2 * length + 10), 4 * heads * length, 4 * heads * length
    return _Half(
        "attention",
        shape.attention_maps,
        shape.attention_parameters - _num_weights(shape.attention_maps),
        normed=(4 if shape.num_norms > 1 else 1) * h + (q + k if shape.norms_heads else 0),
        products=4 * q * length,
        saved=_normed(shape, learns) + kept + scores,
        alive=alive,
        in_halves=in_halves,
        starts=29 if shape.norm_values > 1 else 57,
    )


def _experts(shape: TransformerShape, learns: bool) -> _Half:
    h, f, active = shape.width, shape.inner_width, shape.active_experts
    maps = ((h, shape.experts), *shape.feed_forward_maps * active)
    idle = (shape.experts - active) * _num_weights(shape.feed_forward_maps)
    # Biases and clamped gates are kept too.
    kept = active * (4 * h + 14 * f + 44)
    if not shape.has_sinks:
        kept = active * (4 * h + 8 * f + 40) + 4 * shape.experts
    return _Half(
        "experts",
        maps,
        shape.feed_forward_parameters - _num_weights(maps) - idle,
        normed=(2 if shape.has_sinks else 1) * h,
        products=0,
        saved=_normed(shape, learns) + kept,
        alive=(2 + (14 if shape.family == "mixtral" else 6) * active) * h,
        in_halves=22 * h,
        starts=60,
        idle=idle,
        adapts=False,
    )


def _feed_forward(shape: TransformerShape, learns: bool) -> _Half:
    if shape.is_mixture:
        return _experts(shape, learns)
    h, f = shape.width, shape.inner_width
    return _Half(
        "feed_forward",
        shape.feed_forward_maps,
        shape.feed_forward_parameters - _num_weights(shape.feed_forward_maps),
        normed=(4 if shape.num_norms > 1 else 1) * h,
        products=0,
        saved=_normed(shape, learns) + (8 if shape.is_gated else 10) * f,
        alive=2 * h + 4 * f + (8 * h if shape.num_norms > 1 else 0),
        in_halves=20 * h if shape.is_gated else 2 * h + 9 * f,
        starts=14,
    )


def _embedding(shape: TransformerShape, learns: bool) -> _Half:
    saved = (2 if shape.learns_positions else 1) * _WORD if learns else 0
    shared = "tokens" if shape.tied else ""
    return _Half(
        "embedding", (), shape.embedding_parameters, shape.width, 0, saved, 2 * shape.width, 0, 1, shared
    )


def _head(shape: TransformerShape, learns: bool) -> _Half:
    """The last norm, the head and the loss, whose scores are in float32."""
    h, vocab = shape.width, shape.vocab
    norm = (2 * h if shape.norm_values > 1 else 6 * h if shape.has_sinks else 4 * h) + 4
    if learns:
        norm += 2 * h * (1 if shape.norm_values > 1 else 2 * shape.num_norms - (shape.num_norms > 1))
    capped = 2 * vocab if shape.family == "gemma2" else 0
    return _Half(
        "head",
        ((h, vocab),),
        shape.norm_values * h,
        normed=shape.num_norms * h,
        products=0,
        saved=norm + 4 * vocab + capped + _WORD,
        alive=8 * vocab,
        in_halves=(6 if learns else 8) * vocab,
        starts=14,
        shared="tokens" if shape.tied else "",
    )


# Units from these.


@dataclass(frozen=True, slots=True)
class _Unit:
    """A half of a layer at its place, with the weights that learn and the device."""

    shape: TransformerShape
    device: CatalogueDevice
    attained: float
    length: int
    trained: TrainedShare
    half: _Half
    place: int
    is_last: bool

    def profile(self, micro_batches: Sequence[int]) -> UnitProfile:
        """The profile of the unit at each size of a micro-batch."""
        place, is_first, is_last = self.place, self.place == 0, self.is_last
        optimizer_bytes = (_MOMENTS + 1) * _WHOLE * self._learning
        update_s = estimated_update_s(_WHOLE * self._learning, optimizer_bytes, 0, self.device.device)
        first = place if is_first or is_last else 2 - place % 2
        return UnitProfile(
            name=self.half.name,
            structure=self.half.name.rpartition(".")[2],
            same_as=None if first == place else first,
            receives=() if is_first else (f"x{place}",),
            sends=() if is_last else (f"x{place + 1}",),
            inputs=("input_ids",) if is_first else ("labels",) if is_last else (),
            parameter_bytes=_SHORT * self._learning,
            gradient_bytes=_WHOLE * self._learning,
            optimizer_bytes=optimizer_bytes,
            buffer_bytes=self._frozen_bytes,
            frozen_bytes=self._frozen_bytes,
            reduce_s=0.0,
            update_s=update_s,
            trial_s=update_s,
            tied=self._tied(),
            costs=tuple(map(self._cost, micro_batches)),
        )

    @property
    def _learns_all(self) -> bool:
        return self.trained is TrainedShare.FULL

    @property
    def _is_adapted(self) -> bool:
        return self.half.adapts and not self._learns_all and not self.is_last

    @property
    def _learning(self) -> int:
        """The weights that learn."""
        if self._learns_all:
            return self.half.num_mapped + self.half.idle + self.half.others
        if self.is_last or not self.half.adapts:
            return 0
        return sum(RANK * (rows + columns) for rows, columns in self.half.maps)

    @property
    def _packs(self) -> bool:
        """Whether its maps are in four bits. Experts are no linear layers, and stay as they are."""
        return self.trained is TrainedShare.QLORA and self._is_adapted

    @property
    def _frozen_bytes(self) -> int:
        if self._learns_all:
            return 0
        mapped = (self.half.num_mapped + self.half.idle) * (QUANTIZED_BYTES if self._packs else _SHORT)
        return round(mapped) + _SHORT * self.half.others

    def _tied(self) -> tuple[SharedState, ...]:
        if not self.half.shared:
            return ()
        num = self.shape.vocab * self.shape.width
        if self._learns_all:
            optimizer_bytes = (_MOMENTS + 1) * _WHOLE * num
            return (SharedState(self.half.shared, _SHORT * num, _WHOLE * num, optimizer_bytes, 0),)
        return (SharedState(self.half.shared, 0, 0, 0, _SHORT * num, _SHORT * num),)

    def _cost(self, size: int) -> UnitCost:
        place, is_first, is_last = self.place, self.place == 0, self.is_last
        tokens = size * self.length
        forward_s, input_s, weight_s = self._seconds(tokens)
        if is_first:
            input_s = 0.0
        is_saved = self.shape.norm_values > 1
        crossing = _SHORT * self.shape.width * tokens
        shared = (
            *(() if is_first else (KeptMemory((f"x{place}",), crossing, is_saved),)),
            *(() if is_last else (KeptMemory((f"x{place + 1}",), crossing, is_saved=False),)),
        )
        if is_last and self._fuses_loss:
            saved, workspace, waiting, in_halves = self._fused_bytes(tokens)
        else:
            saved, workspace = self._saved * tokens, self._workspace_bytes(tokens)
            waiting, in_halves = float(self._waiting * tokens), self.half.in_halves * tokens
        return UnitCost(
            micro_batch=size,
            forward_s=forward_s,
            backward_s=input_s + weight_s,
            recompute_backward_s=forward_s + input_s + weight_s,
            backward_input_s=input_s,
            backward_weight_s=weight_s,
            spread=0.0,
            saved_bytes=round(saved),
            boundary_bytes=0 if is_last else crossing,
            workspace_bytes=round(workspace),
            shared=shared,
            returned_bytes=0 if is_first and not self._learns_all else None,
            waiting_bytes=round(waiting),
            halves_workspace_bytes=round(in_halves),
        )

    @property
    def _fuses_loss(self) -> bool:
        """Whether a run fuses the head and its loss by default. Gemma 2 caps its scores, which keeps them."""
        return self.shape.vocab * self.length >= LEAST_LOGITS and self.shape.family != "gemma2"

    def _fused_bytes(self, tokens: int) -> tuple[float, float, float, float]:
        """Of a head that is fused with its loss: kept, workspace, waiting for the second half of a backward,
        and workspace in halves. It keeps the gradient of the scores or those of its input and weight.
        """
        h, vocab = self.shape.width, self.shape.vocab
        scores = 4 * vocab + _WORD
        normed = (self.half.saved - scores + (0 if self._learns_all else 2 * h)) * tokens
        weight, pieces = _SHORT * h * vocab, _SHORT * vocab * rows_at_once(tokens, h)
        crossing, waiting = (2 * h + 8) * tokens, 2 * h * tokens if self._learns_all else 0
        if keeps_logits(tokens, h, _SHORT, learns=self._learns_all):
            gradient = _SHORT * vocab * tokens
            return normed + gradient, max(3 * weight - gradient, crossing), waiting, 20 * h * tokens
        kept, parts = (2 * weight, weight / 8) if self._learns_all else (0, 0)
        return normed + kept, pieces + parts + crossing, waiting, pieces + crossing

    @property
    def _waiting(self) -> int:
        """Gradients that wait for the second half of a backward: of the results of maps and norms."""
        if not self._learning:
            return 0
        given = sum(columns for _, columns in self.half.maps)
        given += self.half.normed if self._learns_all else RANK * len(self.half.maps)
        return _SHORT * given

    @property
    def _saved(self) -> float:
        """The kept bytes of a token. An adapter keeps its result of low rank."""
        return self.half.saved + self._is_adapted * _SHORT * RANK * len(self.half.maps)

    def _workspace_bytes(self, tokens: int) -> float:
        """In addition to the kept bytes: activations of the backward, or the gradients of all weights of the
        unit. The gradient of a table takes three times its bytes while it is made.
        """
        half, width = self.half, self.shape.width
        gradients, alive = _SHORT * self._learning, half.alive * tokens
        if not self._learns_all:
            largest = max((rows * columns for rows, columns in half.maps), default=0)
            return self._packs * _SHORT * largest + alive + 2 * width * tokens if self.place else 0
        if self.place == 0:
            return 3 * _SHORT * self.shape.vocab * width + alive
        if self.is_last:
            return max(alive, 2 * gradients + alive / 4)
        return max(alive, gradients + (10 if half.idle else 2 * _SHORT) * width * tokens)

    def _seconds(self, tokens: int) -> tuple[float, float, float]:
        """A forward, and the halves of a backward: the gradient of the input, and those of the weights."""
        half, rate = self.half, self.device.rate("bfloat16") * self.attained
        bytes_per_s = self.device.memory_bytes_per_s * ATTAINED_BYTES
        starts_s = half.starts * START_S[self.device.kind]
        if not half.maps:  # a table is looked up
            table_s = starts_s + 2 * _SHORT * self.shape.width * tokens / bytes_per_s
            return table_s, 0.0, table_s if self._learns_all else 0.0
        unpacked_s = UNPACKING_BYTES * half.num_mapped / bytes_per_s if self._packs else 0.0
        least_s = max((self._frozen_bytes + _SHORT * self._learning) / bytes_per_s, starts_s)
        maps_s, products_s = 2 * half.num_mapped * tokens / rate, half.products * tokens / rate
        learning = half.num_mapped if self._learns_all else self._learning
        weight_s = 2 * learning * tokens / rate
        adapters_s = 0.0 if self._learns_all else weight_s
        forward_s = max(maps_s + products_s + adapters_s, least_s) + unpacked_s
        input_s = max(maps_s + 2 * products_s + adapters_s, least_s) + unpacked_s
        return forward_s, input_s, weight_s
