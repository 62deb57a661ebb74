"""The task of the race, the same for all who take part: model, first weights, batches and evaluation.

A GPT of eight layers learns the next byte of the sources of Python's standard library. A layer sleeps for as
long as its arithmetic would take on a device of the race (`benchmarks/common/paced.py`). Batches are those of
`bireme train`, sample for sample.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from benchmarks.common.paced import awake, pace
from benchmarks.delay_study.task import BYTES, text
from bireme.model.gpt import GPT, GPTConfig
from bireme.model.weights import materialize
from bireme.train.data.placing import Order

CONFIG = GPTConfig(layers=8, width=64, heads=2, vocab=BYTES, context=48, tied=False)
BATCH = 16
FLOPS_PER_S = 4e9
"""Of a device of speed 1: a layer's forward of a sample takes about 1.3 ms."""
NUM_SAMPLES, NUM_EVALUATED = 16_000, 96
"""Windows to learn from, and windows of the held-out files to evaluate on."""
WARMUP_STEPS = 20
"""In which the learning rate rises; it is constant from then on, so that nobody need know when it ends."""
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.01


def forward_s() -> float:
    """Seconds of the forward of a sample in a layer on a device of speed 1, by its multiplications."""
    width, context = CONFIG.width, CONFIG.context
    return 2 * context * (12 * width * width + 2 * context * width) / FLOPS_PER_S


def model() -> tuple[nn.Module, dict[str, Tensor]]:
    """For `model.source`."""
    made = GPT(CONFIG)
    pace(made, forward_s())
    ids = torch.zeros(2, CONFIG.context, dtype=torch.int64)
    return made, {"input_ids": ids, "labels": ids.clone()}


def samples() -> dict[str, Tensor]:
    """For `data.source`."""
    return _rows(text().learned, NUM_SAMPLES)


def held_out() -> dict[str, Tensor]:
    """For `data.evaluation_source`."""
    return _rows(text().held_out, NUM_EVALUATED)


def _rows(source: Tensor, num: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    starts = torch.randint(len(source) - CONFIG.context, (num, 1), generator=draw)
    ids = source[starts + torch.arange(CONFIG.context)].long()
    return {"input_ids": ids, "labels": ids}


def first_model(seed: int) -> GPT:
    """The model with the weights that `bireme train` begins with."""
    made, _ = model()
    made.load_state_dict(materialize(made, [*made.state_dict()], seed=seed))
    assert isinstance(made, GPT)
    return made


class Batches:
    """The batches of a seed, by their numbers."""

    def __init__(self, seed: int) -> None:
        self._ids, self._order = samples()["input_ids"], Order(NUM_SAMPLES, seed)

    def __getitem__(self, number: int) -> Tensor:
        return self._ids[[int(one) for one in self._order.numbers(number * BATCH, BATCH)]]


class Judge:
    """Evaluates weights."""

    def __init__(self) -> None:
        self._model, self._rows = model()[0], held_out()

    @torch.no_grad()
    def loss(self, weights: Iterable[Mapping[str, Tensor]]) -> float:
        """Of the model whose weights several ranks have; the mean of those that more than one rank has."""
        ranks = list(weights)
        for name, parameter in self._model.named_parameters():
            parameter.copy_(torch.stack([rank[name] for rank in ranks if name in rank]).mean(0))
        with awake():
            return float(self._model(**self._rows)["loss"])


def adamw(module: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """The optimizer that all have: weight decay for matrices only, as in `bireme train`."""
    parameters = list(module.parameters())
    groups = [
        {"params": [one for one in parameters if one.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [one for one in parameters if one.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS)


def set_rate(optimizer: torch.optim.Optimizer, learning_rate: float, step: int) -> None:
    """Set the learning rate of a step, counted from 0."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * min(1.0, (step + 1) / WARMUP_STEPS)
