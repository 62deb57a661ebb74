"""torch.distributed.pipelining: four stages, or eight in turns, on four ranks."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.nn import functional

from benchmarks.racing.task import BATCH, CONFIG, adamw, first_model, set_rate
from bireme.model.gpt import GPT

CPU = torch.device("cpu")


class _Stage(nn.Module):
    """Some layers of the model, with the embedding or the head at its ends. In bfloat16 products and what is
    sent are of that type, and weights of float32.
    """

    def __init__(self, whole: GPT, first: int, end: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(place): whole.layers[place] for place in range(first, end)})
        is_first, is_last = first == 0, end == len(whole.layers)
        self.tokens: nn.Module | None = whole.tokens if is_first else None
        self.positions: nn.Module | None = whole.positions if is_first else None
        self.norm: nn.Module | None = whole.norm if is_last else None
        self.head: nn.Module | None = whole.head if is_last else None
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype is torch.bfloat16):
            if self.tokens is not None and self.positions is not None:
                x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
            else:
                x = x.float()
            for layer in self.layers.values():
                x = layer(x, None)
            if self.norm is not None and self.head is not None:
                logits: Tensor = self.head(self.norm(x))
                return logits.float()
            return x.to(self.dtype)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class _Pipeline:
    """`choice`: schedule, microbatches, dtype, learning_rate."""

    def __init__(self, choice: Mapping[str, Any], seed: int) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        is_interleaved, num = choice["schedule"] == "interleaved-zb", choice["microbatches"]
        num_stages = 2 * size if is_interleaved else size
        numbers = [rank, rank + size] if is_interleaved else [rank]
        dtype, layers = getattr(torch, choice["dtype"]), CONFIG.layers // num_stages
        whole, samples = first_model(seed), BATCH // num
        ids = torch.empty(samples, CONFIG.context, dtype=torch.int64, device="meta")
        between = torch.empty(samples, CONFIG.context, CONFIG.width, dtype=dtype, device="meta")
        logits = torch.empty(samples, CONFIG.context, CONFIG.vocab, device="meta")
        self._parts = nn.ModuleList(
            _Stage(whole, layers * number, layers * (number + 1), dtype) for number in numbers
        )
        stages: list[Any] = [
            PipelineStage(
                part,
                number,
                num_stages,
                CPU,
                input_args=((between if number else ids).requires_grad_(bool(number)),),
                output_args=((logits if number == num_stages - 1 else between).requires_grad_(),),
            )
            for part, number in zip(self._parts, numbers, strict=True)
        ]
        self._schedule: Any = (
            ScheduleInterleavedZeroBubble(stages, num, _loss)
            if is_interleaved
            else Schedule1F1B(stages[0], num, _loss)
        )
        self._is_first, self._is_last = rank == 0, rank == size - 1
        self._rate = choice["learning_rate"]
        self._optimizer = adamw(self._parts, self._rate)

    def step(self, number: int, batch: Tensor) -> None:
        set_rate(self._optimizer, self._rate, number)
        self._optimizer.zero_grad()
        given = (batch,) if self._is_first else ()
        self._schedule.step(*given, target=batch if self._is_last else None, return_outputs=False)
        self._optimizer.step()

    def weights(self) -> Mapping[str, Tensor]:
        return {
            name: parameter.detach() for part in self._parts for name, parameter in part.named_parameters()
        }


def enter(choice: Mapping[str, Any], seed: int) -> _Pipeline:
    """A rank of the pipeline."""
    return _Pipeline(choice, seed)
