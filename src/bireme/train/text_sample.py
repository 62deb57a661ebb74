"""A sample of what a trained language model writes."""

from typing import Any

import torch
from torch import Tensor

from bireme.model.sources import load_source
from bireme.train.data.tokenizer import Tokenizer
from bireme.train.export import NewestWeights
from bireme.train.run_file import RunFile

__all__ = ["written"]

TEMPERATURE = 0.8

LEAST_SHARED_BYTES = 64 * 2**20
"""Of a model whose products are worth several threads: in a smaller one these mostly wait."""

LARGEST_BYTES = 8 * 2**30
"""Of a model that is loaded whole only to write a sample."""


@torch.no_grad()
def written(run: RunFile, weights: NewestWeights, tokenizer: Tokenizer | None) -> str:
    """What the model writes after the run's prompt; nothing where it does not write text, or is large."""
    if tokenizer is None or not run.log.sample_tokens or weights.num_bytes > LARGEST_BYTES:
        return ""
    model = _model(run, weights)
    first = tokenizer.encode(run.log.prompt) or [tokenizer.end_of_text or 0]
    before = torch.get_num_threads()
    if weights.num_bytes < LEAST_SHARED_BYTES:
        torch.set_num_threads(1)
    try:
        return tokenizer.decode(_continued(model, first, run.log.sample_tokens, run.data.length, tokenizer))
    finally:
        torch.set_num_threads(before)


def _model(run: RunFile, weights: NewestWeights) -> Any:
    model: Any = load_source(
        run.model.source, length=run.data.length, device="cpu", training=False, part=run.model.part
    ).model
    own = model.state_dict()
    for name in weights.keys() & own.keys():
        own[name].copy_(weights[name])
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model


def _continued(model: Any, first: list[int], count: int, context: int, tokenizer: Tokenizer) -> list[int]:
    """Samples token by token from the model's prediction after the last `context` tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = list(first)
    for _ in range(count):
        outputs = model(input_ids=torch.tensor([ids[-context:]]))
        logits: Tensor = outputs["logits"][0, -1].float()
        logits[tokenizer.num_tokens :] = -torch.inf
        shares = torch.softmax(logits / TEMPERATURE, dim=-1)
        chosen = int(torch.multinomial(shares, 1, generator=generator))
        if chosen == tokenizer.end_of_text:
            break
        ids.append(chosen)
    return ids
