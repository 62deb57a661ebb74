"""The model and the data of the home lab: a GPT with tied weights on a device that takes its time.

Each layer sleeps in proportion to its samples (`benchmarks/common/paced.py`).
"""

import torch
from torch import Tensor, nn

from benchmarks.common.paced import pace
from bireme.model.gpt import GPT, GPTConfig

FORWARD_S = 0.003
"""Of a sample in a layer, on a device of speed 1; a backward takes twice as long."""
CONFIG = GPTConfig(layers=6, width=128, heads=4, vocab=64, context=16)
NUM_SAMPLES, IN_USE, CHOICES = 6000, 8, 4
"""Samples, tokens that occur in them, and tokens that may follow each: few, so that a short run learns all
there is to learn, and its loss tells what faults cost.
"""


def model() -> tuple[nn.Module, dict[str, Tensor]]:
    """For `model.source`."""
    made = GPT(CONFIG)
    pace(made, FORWARD_S)
    ids = torch.zeros(2, CONFIG.context, dtype=torch.int64)
    return made, {"input_ids": ids, "labels": ids.clone()}


def samples() -> dict[str, Tensor]:
    """For `data.source`: walks over the tokens. From each token a walk goes on to one of a few, the first of
    them in most cases.
    """
    generator = torch.Generator().manual_seed(1)
    following = torch.randint(IN_USE, (IN_USE, CHOICES), generator=generator)
    likely = 0.5 ** torch.arange(1.0, CHOICES + 1)
    ids = torch.empty(NUM_SAMPLES, CONFIG.context, dtype=torch.int64)
    ids[:, 0] = torch.randint(IN_USE, (NUM_SAMPLES,), generator=generator)
    for place in range(1, CONFIG.context):
        choice = torch.multinomial(likely, NUM_SAMPLES, replacement=True, generator=generator)
        ids[:, place] = following[ids[:, place - 1], choice]
    return {"input_ids": ids, "labels": ids}
