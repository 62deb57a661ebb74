"""A model of language that is made much faster than a GPT: rows of a table, layers of one matrix, a head.

It has what an engine must get right: a table that the head may share, a residual stream, draws, labels that
do not count, and the eight units of a GPT of three layers, so that the same plans cut it.
"""

from dataclasses import replace
from fnmatch import fnmatch
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.small_models import VOCAB, Model, captured, num_tokens, token_batches

__all__ = ["TinyText", "tiny_text", "tiny_text_module"]

WIDTH, LAYERS = 16, 6


class TinyText(nn.Module):
    """Each place sees its own token alone."""

    def __init__(self, *, tied: bool, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(_Layer(dropout) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return {"loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


class _Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.dropout(torch.tanh(self.linear(x)))
        return made


def tiny_text_module(*, tied: bool = False, dropout: float = 0.0, dtype: str = "float64") -> TinyText:
    """The module, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return TinyText(tied=tied, dropout=dropout).to(getattr(torch, dtype))


@cache
def tiny_text(
    *,
    tied: bool = False,
    dropout: float = 0.0,
    dtype: str = "float64",
    evaluates: bool = False,
    freeze: tuple[str, ...] = (),
) -> Model:
    """Its graph and weights, made once in a process. In bfloat16 the weights that are stepped are float32.
    What the patterns of `freeze` match does not learn, which changes nothing else in the graph.
    """
    model = captured(
        tiny_text_module(tied=tied, dropout=dropout, dtype=dtype),
        token_batches(2, 1)[0],
        name=f"tiny text {tied} {dropout} {dtype}",
        evaluates=evaluates,
        is_kept=True,
        count=num_tokens,
    )
    weights = model.weights
    if dtype == "bfloat16":
        weights = {name: tensor.float() for name, tensor in weights.items()}
    states = tuple(
        replace(state, trainable=not any(fnmatch(state.name, one) for one in freeze))
        for state in model.graph.parameters
    )
    return replace(model, graph=replace(model.graph, parameters=states), weights=weights)
