"""A built-in GPT in plain PyTorch: a decoder-only transformer with layer norm ahead of each half.

It is small enough to read, needs nothing but torch, and is treated like any other module. Every module that
owns parameters fills them in its own `reset_parameters`, so any part of the model can be made alone.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bireme.errors import BiremeError

_DEVIATION = 0.02
"""The standard deviation of new weights; of those that write to the residual stream less."""

_LARGEST = {"layers": 1000, "width": 2**17, "heads": 2**17, "vocab": 2**24, "context": 2**24}
"""The bounds of a GPT's sizes. Beyond them a capture would take minutes, or its examples the whole memory."""

_IGNORED = -100
"""A label that does not count in the loss."""


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The sizes of a GPT.

    `width` is the length of a token's vector, `vocab` how many tokens there are, `context` how many of them
    the model can look at. With `tied` the head multiplies by the weights of the token embedding.
    """

    layers: int
    width: int
    heads: int
    vocab: int
    context: int
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            if not 1 <= (size := getattr(self, name)) <= largest:
                raise BiremeError(f"A GPT's {name} is {size}; it must be at least 1 and at most {largest:,}.")
        if self.width % self.heads:
            raise BiremeError(
                f"A GPT's width is {self.width} and its heads are {self.heads}. Every head gets an equal "
                f"part: make the width a multiple, such as {-(-self.width // self.heads) * self.heads}."
            )
        if not 0 <= self.dropout < 1:
            raise BiremeError(f"A GPT's dropout is {self.dropout}; it must be at least 0 and less than 1.")


class GPT(nn.Module):
    """Token and position embedding, the layers, a norm and the head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = _Embedding(config.vocab, config.width)
        self.positions = _Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = _Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The `logits` for every place in a batch of token ids, and with labels the mean `loss`.

        Labels are token ids in the same places as the input's: the shift to the next token happens here. A
        label of -100 does not count. With `position_ids` several documents may share a sequence: each begins
        with a position of 0, and none looks at another.
        """
        length = input_ids.shape[1]
        if length > self.config.context:
            raise BiremeError(
                f"A sequence has {length} tokens, but this GPT looks at {self.config.context}. Give a larger "
                "context, or shorter sequences."
            )
        positions = torch.arange(length, device=input_ids.device) if position_ids is None else position_ids
        mask = None if position_ids is None else _mask(position_ids)
        x = self.dropout(self.tokens(input_ids) + self.positions(positions))
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        predicted, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"loss": functional.cross_entropy(predicted, wanted, ignore_index=_IGNORED), "logits": logits}


class _Layer(nn.Module):
    """The attention half and the feed-forward half, each added to what it reads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = _Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = _FeedForward(config)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        attended: Tensor = x + self.attention(self.attention_norm(x), mask)
        fed: Tensor = attended + self.feed_forward(self.feed_forward_norm(attended))
        return fed


class _Attention(nn.Module):
    """Every token looks at itself and at those before it, or of these at what the mask lets it see."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = _Linear(config.width, 3 * config.width)
        self.out = _Linear(config.width, config.width, deviation=_residual_deviation(config))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        dropout = self.dropout.p if self.training else 0.0
        seen = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )
        out: Tensor = self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        return out


class _FeedForward(nn.Module):
    """Up to four times the width and down again."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = _Linear(config.width, 4 * config.width)
        self.down = _Linear(4 * config.width, config.width, deviation=_residual_deviation(config))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.dropout(self.down(functional.gelu(self.up(x))))
        return down


def _mask(position_ids: Tensor) -> Tensor:
    """For each sequence, one head for all, which places see which: those before them of the same document."""
    document = (position_ids == 0).cumsum(1)
    is_same = document[:, None, :, None] == document[:, None, None, :]
    place = torch.arange(position_ids.shape[1], device=position_ids.device)
    return is_same & (place[:, None] >= place[None, :])


def _residual_deviation(config: GPTConfig) -> float:
    # Two halves of every layer add to the residual stream; so their sum keeps its size with any depth.
    return _DEVIATION / math.sqrt(2 * config.layers)


class _Linear(nn.Linear):
    """A linear map with normally distributed weights and a bias of zero."""

    def __init__(self, wide: int, out: int, *, bias: bool = True, deviation: float = _DEVIATION) -> None:
        self.deviation = deviation  # read by reset_parameters, which the base class calls
        super().__init__(wide, out, bias=bias)

    def reset_parameters(self) -> None:
        if self.weight.is_meta:  # where torch takes its time for nothing
            return
        nn.init.normal_(self.weight, std=self.deviation)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class _Embedding(nn.Embedding):
    """A table with normally distributed rows."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=_DEVIATION)
