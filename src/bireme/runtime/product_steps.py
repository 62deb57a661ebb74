"""Steps of weights whose gradients are products of two thin matrices, a chunk of rows at a time.

The gradient of a whole weight is so never there, unless its optimiser needs it whole.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bireme.codec.principal import Product
from bireme.runtime.stepper import Home, Stepped, Stepper
from bireme.runtime.trial import ParameterRows, pieces_of

__all__ = ["most_piece_elements", "step_all"]


@torch.no_grad()
def step_all(
    stepper: Stepper,
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor | Product | None],
    *,
    lr_factor: float,
    scale: float,
    cut: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
) -> None:
    """Step the weights that have gradients, times `scale`, in place; gradients are changed.

    `cut` gives the pieces of gradients that are stepped, where not all of them is.
    """
    whole = {name: one for name, one in gradients.items() if isinstance(one, Tensor)}
    own = whole if cut is None else cut(whole)
    given = {name: gradient.to(weights[name].dtype) for name, gradient in own.items()}
    if scale != 1.0 and given:
        torch._foreach_mul_([*given.values()], scale)
    products = {
        name: gradient.scaled(scale) for name, gradient in gradients.items() if isinstance(gradient, Product)
    }
    _step_products(stepper, weights, given, products, lr_factor=lr_factor)


def _step_products(
    stepper: Stepper,
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    products: Mapping[str, Product],
    *,
    lr_factor: float,
) -> None:
    """Step the weights that have gradients or products, in place.

    An optimiser that is not known to treat parameters apart gets all of them at once, products too.
    """
    own = [home for home in stepper.homes if home.name in products]
    together = {home.name: products[home.name].rows() for home in own if not home.may_be_apart}
    stepper.step(weights, {**gradients, **together}, lr_factor=lr_factor)
    for home in own:
        if home.may_be_apart:
            _step(stepper, home, weights[home.name], products[home.name], lr_factor)


def most_piece_elements(stepper: Stepper, names: Collection[str]) -> int:
    """How much of a gradient is there at once at most."""
    pieces = (piece for home in stepper.homes if home.name in names for piece in pieces_of(home))
    return max((num_elements for _, num_elements in pieces), default=0)


def _step(stepper: Stepper, home: Home, weight: Tensor, product: Product, lr_factor: float) -> None:
    known = stepper.state(home.name)
    state: dict[str, Any] = {}
    for piece, _ in pieces_of(home):
        own = dict(_own_state(known, piece))
        one = Stepped(home, piece.of(weight), product.rows(piece.rows).to(weight.dtype), own)
        stepper.run([one], lr_factor)
        for key, value in one.state.items():
            if isinstance(value, Tensor) and value.ndim and value.shape == one.tensor.shape:
                state[key] = stepper.room(home.name, key, value)
                place = piece.of(state[key])
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)
            else:
                state[key] = value
    stepper.keep(Stepped(home, weight, weight, state))


def _own_state(known: Mapping[str, Any], piece: ParameterRows) -> Iterator[tuple[str, Any]]:
    """What a piece is stepped with: its rows of what there is for each element, and copies of the rest."""
    for key, value in known.items():
        if isinstance(value, Tensor):
            is_of_each_element = value.ndim > 0 and value.shape == piece.home.shape
            yield key, piece.of(value) if is_of_each_element else value.clone()
        else:
            yield key, value
