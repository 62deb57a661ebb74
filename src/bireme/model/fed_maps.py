"""Linear maps whose weights get no gradient: their backward feeds pairs of rows to whoever asks for them.

An operator of the graph runs as it is, so a forward has the same bits. Its backward gives the gradients of
its input and its bias. That of its weight would be a sum of products of pairs: it gives these pairs instead.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bireme.model.argument import Reference
from bireme.model.graph import Operator
from bireme.model.linear_maps import LinearMap, MapKind
from bireme.model.stage import Resolve

__all__ = ["Feed", "GradientHook", "feeding"]

Feed = Callable[[str, Tensor, Tensor], None]
"""Takes pairs of a weight, by its name: rows for its first axis, and for all others together."""


class GradientHook:
    """Where pairs go: to the batch whose backward is running. One stage has one."""

    __slots__ = ("feed",)

    def __init__(self) -> None:
        self.feed: Feed | None = None

    def __call__(self, name: str, left: Tensor, right: Tensor) -> None:
        """Pass pairs on."""
        assert self.feed is not None, "a backward says first whose pairs are coming"
        self.feed(name, left, right)


def feeding(resolve: Resolve, maps: Mapping[str, LinearMap], outlet: GradientHook) -> Resolve:
    """Resolves operators as before, but those that use one of these weights feed the outlet."""

    def resolved(operator: Operator) -> Callable[..., Any]:
        plain = resolve(operator)
        used = [maps[name] for name in operator.reads() if name in maps]
        return _fed(plain, operator, used[0], outlet) if used else plain

    return resolved


def _fed(
    plain: Callable[..., Any], operator: Operator, one: LinearMap, outlet: GradientHook
) -> Callable[..., Any]:
    place = operator.arguments.index(Reference(one.name))
    has_bias_first = one.kind is MapKind.PRODUCT and place == 2
    use: _Use = USES[one.kind](one)

    def call(*given: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*given)
        if has_bias_first:
            bias, rows, weight = given
            return _Fed.apply(use, outlet, lambda x, w, b: plain(b, x, w), rows, weight, bias)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        rows, weight, *rest = given
        bias, settings = (rest[0], tuple(rest[1:])) if rest else (None, ())

        def run(x: Tensor, w: Tensor, b: Tensor | None) -> Any:
            return plain(x, w, b, *settings) if rest else plain(x, w)

        return _Fed.apply(use.with_settings(settings), outlet, run, rows, weight, bias)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    return call


class _Fed(torch.autograd.Function):
    """A map of rows by a weight. The weight is asked for a gradient and gets none."""

    @staticmethod
    def forward(
        ctx: Any,
        use: "_Use",
        outlet: GradientHook,
        run: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        given: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.use, ctx.outlet, ctx.bias_shape = use, outlet, None if bias is None else bias.shape
        return run(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (given, weight), back, use = ctx.saved_tensors, gradients[0], ctx.use
        ctx.outlet(use.name, *use.pairs(given, back, weight))
        of_given = use.into_given(given, back, weight) if ctx.needs_input_grad[3] else None
        of_bias = use.into_bias(back, ctx.bias_shape) if ctx.needs_input_grad[5] else None
        return None, None, None, of_given, None, of_bias


class _Use:
    """How a weight is used: y = x WT, rows of x and y in their last axes."""

    def __init__(self, one: LinearMap) -> None:
        self.name = one.name

    def with_settings(self, _settings: Sequence[Any]) -> "_Use":
        """The same for one call's further arguments."""
        return self

    def pairs(self, given: Tensor, back: Tensor, _weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rows whose products add up to the gradient of the weight."""
        return _rows(back), _rows(given)

    def into_given(self, _given: Tensor, back: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the input."""
        return back @ weight

    def into_bias(self, back: Tensor, shape: Sequence[int]) -> Tensor:
        """The gradient of the bias, which may have fewer axes than the output."""
        return back.sum_to_size(tuple(shape))


class _Product(_Use):
    """y = x W."""

    def pairs(self, given: Tensor, back: Tensor, _weight: Tensor) -> tuple[Tensor, Tensor]:
        return _rows(given), _rows(back)

    def into_given(self, _given: Tensor, back: Tensor, weight: Tensor) -> Tensor:
        return back @ weight.T


class _Convolution(_Use):
    """Rows of the input are its patches, which are unfolded for the backward alone."""

    def __init__(self, one: LinearMap, settings: Sequence[Any] = ()) -> None:
        super().__init__(one)
        self._map = one
        self._num_axes = len(one.shape) - 2
        every = (*settings, *(1, 0, 1)[len(settings) :])
        self._stride, self._padding, self._dilation = (self._each(value) for value in every[:3])

    def with_settings(self, settings: Sequence[Any]) -> "_Use":
        return _Convolution(self._map, settings[:3])

    def pairs(self, given: Tensor, back: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        images, kernel = given, tuple(weight.shape[2:])
        dilation, padding, stride = (tuple(one) for one in (self._dilation, self._padding, self._stride))
        if self._num_axes == 1:
            images, kernel = given.unsqueeze(-2), (1, *kernel)
            dilation, padding, stride = (1, *dilation), (0, *padding), (1, *stride)
        patches = functional.unfold(images, kernel, dilation, padding, stride).transpose(1, 2)
        return _rows(back.flatten(2).transpose(1, 2)), _rows(patches)

    def into_given(self, given: Tensor, back: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.convolution_backward(
            back,
            given,
            weight,
            None,
            self._stride,
            self._padding,
            self._dilation,
            False,
            [0] * self._num_axes,
            1,
            [True, False, False],
        )[0]
        return found

    def into_bias(self, back: Tensor, shape: Sequence[int]) -> Tensor:
        return back.sum([axis for axis in range(back.ndim) if axis != 1])

    def _each(self, value: Any) -> list[int]:
        given = list(value) if isinstance(value, list | tuple) else [value]
        return given * self._num_axes if len(given) == 1 else given


USES: dict[MapKind, type[_Use]] = {
    MapKind.LINEAR: _Use,
    MapKind.PRODUCT: _Product,
    MapKind.CONVOLUTION: _Convolution,
}


def _rows(tensor: Tensor) -> Tensor:
    """All rows of a tensor, one after the other."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
