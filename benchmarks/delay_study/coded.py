"""A GPT with codecs at the cuts between its stages, in one process."""

from functools import partial
from math import prod
from typing import Any

from torch import Tensor, nn

from benchmarks.delay_study.simulation import stage_of_half
from bireme.codec import BoundaryCodecs, through
from bireme.codec.description import AS_IT_IS, BLOCK, encoded_bytes
from bireme.model.gpt import GPT

__all__ = ["CodedCuts", "codecs_named", "mean_bits"]

VALUE_BYTES = 4
"""Models of the study compute in float32."""


class CodedCuts:
    """Lets the residual stream of a model go through `codecs` wherever a stage ends. They may be changed."""

    def __init__(self, model: GPT, num_stages: int) -> None:
        self.codecs = AS_IT_IS
        num_layers = model.config.layers
        for number, layer in enumerate(model.layers):
            assert isinstance(layer, nn.Module)
            begins = [
                half > 0
                and stage_of_half(half - 1, num_layers, num_stages)
                != stage_of_half(half, num_layers, num_stages)
                for half in (2 * number, 2 * number + 1)
            ]
            if any(begins):
                layer.forward = partial(self._run, layer, begins)

    def _run(self, layer: Any, begins: list[bool], x: Tensor, mask: Tensor | None) -> Tensor:
        """The two halves of a layer, each after the cut before it."""
        x = through(self.codecs, x) if begins[0] else x
        attended: Tensor = x + layer.attention(layer.attention_norm(x), mask)
        attended = through(self.codecs, attended) if begins[1] else attended
        fed: Tensor = attended + layer.feed_forward(layer.feed_forward_norm(attended))
        return fed


def codecs_named(word: str) -> BoundaryCodecs:
    """Such as `int8`, or `int8/int4` where gradients have another one."""
    forward, _, backward = word.partition("/")
    return BoundaryCodecs(forward, backward or forward)


def mean_bits(word: str, width: int, *, ending: float = 0.0, ending_word: str = "int8") -> float:
    """Bits a value in rows of that width, scales and masks counted, in the mean of both ways and over a run
    whose last part has another codec.
    """
    shape = (BLOCK, width)

    def of(codecs: BoundaryCodecs) -> float:
        there = encoded_bytes(codecs.choice(forward=True), shape, VALUE_BYTES)
        back = encoded_bytes(codecs.choice(forward=False), shape, VALUE_BYTES, is_back=True)
        return 8 * (there + back) / (2 * prod(shape))

    return (1 - ending) * of(codecs_named(word)) + ending * of(codecs_named(ending_word))
