"""A model and data of your own, for own-model.toml: a small classifier of made-up points."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


def model() -> tuple[nn.Module, dict[str, Tensor]]:
    """The module with example inputs, named like the arguments of its forward."""
    network = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    return network, {"input": torch.zeros(2, 4)}


class Points(Dataset[dict[str, Tensor]]):
    """Points in four dimensions; the class of each is its largest coordinate among the first three."""

    def __len__(self) -> int:
        return 2048

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        point = torch.randn(4, generator=torch.Generator().manual_seed(number))
        return {"input": point, "labels": point[:3].argmax()}


def samples() -> Points:
    """The dataset: it has a length, and its items are dicts of tensors."""
    return Points()
