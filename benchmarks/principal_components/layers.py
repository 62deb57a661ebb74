"""Linear maps and convolutions whose weights never get a gradient: their pairs go into a stream instead."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.principal_components.stream import PIECE, PrincipalComponents

__all__ = ["streamed", "streams_of"]

PLACES = 16
"""So many times more pairs of a convolution go in a step: each image has one at each of its places."""


class _Map(torch.autograd.Function):
    """x WT of rows x. Its backward gives the gradient of x, and feeds the pairs.

    The anchor is a number that asks for a gradient and gets none, so that there is a backward in any case.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, stream: PrincipalComponents, anchor: Tensor
    ) -> Tensor:
        del anchor
        ctx.save_for_backward(rows, weight)
        ctx.stream = stream
        return rows @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        rows, weight = ctx.saved_tensors
        ctx.stream.feed(rows, gradients[0])
        return gradients[0] @ weight if ctx.needs_input_grad[0] else None, None, None, None


class _Streamed(nn.Module):
    """A layer and the stream of its weight."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int, seed: int, piece: int = PIECE) -> None:
        super().__init__()
        self.layer = layer
        layer.weight.requires_grad_(False)
        num_inputs = layer.weight[0].numel()
        self.stream = PrincipalComponents(len(layer.weight), num_inputs, rank, seed=seed, piece=piece)
        self._anchor = torch.zeros((), requires_grad=True)

    def mapped(self, rows: Tensor) -> Tensor:
        """Rows times the weight."""
        weight = self.layer.weight.view(len(self.layer.weight), -1)
        made = _Map.apply(rows, weight, self.stream, self._anchor)  # type: ignore[no-untyped-call]
        assert isinstance(made, Tensor)
        return made

    def step(self, rate: float) -> None:
        """Subtract the gradient times a rate, as the product of two thin matrices, and end the batch."""
        left, right = self.stream.factors()
        self.layer.weight.view(len(left), -1).addmm_(left, right.T, alpha=-rate)
        self.stream.close()


class _Linear(_Streamed):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.mapped(x)
        return rows if self.layer.bias is None else rows + self.layer.bias


class _Convolution(_Streamed):
    """By unfolding: each place of each image is a row."""

    def forward(self, images: Tensor) -> Tensor:
        layer = self.layer
        assert isinstance(layer, nn.Conv2d)
        if layer.groups != 1 or not isinstance(layer.padding, tuple):
            raise NotImplementedError("convolutions of one group, padded by numbers")
        how = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        patches = functional.unfold(images, *how).transpose(1, 2)
        rows = self.mapped(patches.reshape(-1, patches.shape[2]))
        height = (
            images.shape[2] + 2 * layer.padding[0] - layer.dilation[0] * (layer.kernel_size[0] - 1) - 1
        ) // layer.stride[0] + 1
        made = rows.view(len(images), height, -1, len(layer.weight)).permute(0, 3, 1, 2)
        return made if layer.bias is None else made + layer.bias[:, None, None]


def streamed(model: nn.Sequential, rank: int) -> nn.Sequential:
    """The model with all its linear maps and convolutions streamed."""
    layers: list[nn.Module] = []
    for number, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            layers.append(_Linear(layer, rank, number))
        elif isinstance(layer, nn.Conv2d):
            layers.append(_Convolution(layer, rank, number, PLACES * PIECE))
        else:
            layers.append(layer)
    return nn.Sequential(*layers)


def streams_of(model: nn.Sequential) -> list[_Streamed]:
    """The layers of a model whose weights are streamed."""
    return [layer for layer in model if isinstance(layer, _Streamed)]
