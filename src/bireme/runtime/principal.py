"""Gradients of a stage that are kept as principal components: a stream for each batch, and what streams go
on from.

What one batch has found takes effect at the stage's UPDATE, as its weights do, so it depends on the program
alone. A batch goes on from what was settled when its weights were: one batch before it, or two where updates
are delayed.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from bireme.codec.lowrank import Components, PrincipalStream, Product, first_components
from bireme.codec.sum_description import GradientForm
from bireme.model.units import LinearMap
from bireme.runtime.stepper import Home, Stepped, Stepper
from bireme.runtime.trial import ParameterRows, pieces_of
from bireme.schedule.program import Rule

# Steps of weights whose gradients are products of two thin matrices, a chunk of rows at a time.
#
# The gradient of a whole weight is so never there, unless its optimizer needs it whole.


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

    An optimizer that is not known to treat parameters apart gets all of them at once, products too.
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


_Settled = Mapping[str, Components]

_PARTS = ("left", "values", "right")


class BatchStreams:
    """The streams of one batch, and the components of the whole batch once they are known."""

    __slots__ = ("components", "shapes", "streams")

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], streams: Mapping[str, PrincipalStream]) -> None:
        self.shapes = shapes
        self.streams = streams
        self.components: Mapping[str, Components] | None = None

    def feed(self, name: str, left: Tensor, right: Tensor) -> None:
        """Take pairs of a weight."""
        self.streams[name].feed(left, right)

    def items(self) -> Iterator[tuple[str, Product | None]]:
        """Each weight with its gradient, if it has one: of the whole batch where that is known."""
        for name, stream in self.streams.items():
            if self.components is None:
                found = Product(*stream.factors(), self.shapes[name]) if stream.num_pairs else None
            else:
                known = self.components.get(name)
                found = None if known is None else known.product(self.shapes[name])
            yield name, found

    def summed(self) -> "BatchStreams":
        """The same streams, for components of their own."""
        return BatchStreams(self.shapes, self.streams)

    @property
    def num_bytes(self) -> int:
        """What streams and components take."""
        found = sum(stream.num_bytes for stream in self.streams.values())
        return found + sum(one.num_bytes for one in (self.components or {}).values())


class PrincipalGradients:
    """The components of some weights of one stage. With `is_delayed` a batch goes on from those that the
    batch two before it has left.
    """

    def __init__(
        self,
        maps: Mapping[str, LinearMap],
        form: GradientForm,
        dtypes: Mapping[str, torch.dtype],
        *,
        is_delayed: bool,
        device: torch.device,
    ) -> None:
        self._form = form
        self._delay = int(is_delayed)
        self._dtypes, self._device = {name: dtypes[name] for name in maps}, device
        self.shapes = {name: one.shape for name, one in maps.items()}
        """The weights, by name."""
        self._settled: dict[int, _Settled] = {
            0: {
                name: first_components(
                    one.rows,
                    one.columns,
                    form.rank,
                    seed=crc32(name.encode()),
                    dtype=dtypes[name],
                    device=device,
                )
                for name, one in maps.items()
            }
        }
        """What there was after so many updates; the last of them, and where updates are delayed one more."""

    def open(self, batch: int) -> BatchStreams:
        """Streams for a batch that begins."""
        before = self.after(batch - self._delay)
        return BatchStreams(
            self.shapes,
            {name: PrincipalStream(one, piece=self._form.piece) for name, one in before.items()},
        )

    def after(self, num_updates: int) -> _Settled:
        """What was settled after so many updates, or after the first that is known."""
        return self._settled[max(num_updates, min(self._settled))]

    def settle(self, num_updates: int, found: _Settled) -> None:
        """Keep what a batch has found after so many updates; the rest stays as it was."""
        last = self.after(num_updates - 1)
        self._settled = {
            num_updates - 1: last,
            num_updates: {name: found.get(name, one) for name, one in last.items()},
        }
        if not self._delay:
            del self._settled[num_updates - 1]

    def state(self, num_updates: int) -> dict[str, Tensor]:
        """What the next batches go on from, as `AGE/NAME/PART`: age 0 is after so many updates. No copies."""
        return {
            f"{age}/{name}/{part}": getattr(one, part)
            for age in range(self._delay + 1)
            for name, one in self.after(num_updates - age).items()
            for part in _PARTS
        }

    def load(self, saved: Mapping[str, Tensor], *, num_updates: int) -> None:
        """Go on from such a state after so many updates. What is missing or of another rank starts again."""
        first = self.after(0)
        found: dict[int, _Settled] = {}
        for age in range(self._delay + 1):
            own = {name: self._loaded(saved, f"{age}/{name}", one) for name, one in first.items()}
            newest = found.get(num_updates, first)
            found[num_updates - age] = {name: one or newest[name] for name, one in own.items()}
        self._settled = {number: one for number, one in found.items() if number >= 0}

    def _loaded(self, saved: Mapping[str, Tensor], key: str, like: Components) -> Components | None:
        parts = [saved.get(f"{key}/{part}") for part in _PARTS]
        wanted = [getattr(like, part) for part in _PARTS]
        found = [
            part.to(self._device, one.dtype, copy=True)
            for part, one in zip(parts, wanted, strict=True)
            if part is not None and part.shape == one.shape
        ]
        return Components(*found) if len(found) == len(_PARTS) else None

    @property
    def most_itemsize(self) -> int:
        """The bytes of the largest kind of number."""
        return max(dtype.itemsize for dtype in self._dtypes.values())

    @property
    def num_bytes(self) -> int:
        """What is settled takes, after each number of updates that is kept."""
        return sum(one.num_bytes for settled in self._settled.values() for one in settled.values())


def principal_of(
    maps: Mapping[str, LinearMap],
    form: GradientForm | None,
    dtypes: Mapping[str, torch.dtype],
    rule: Rule,
    device: torch.device,
) -> PrincipalGradients | None:
    """The components of those in `maps` among a stage's weights, which have these types; None if no gradients
    are kept so.
    """
    own = {name: one for name, one in maps.items() if name in dtypes}
    if form is None or not own:
        return None
    return PrincipalGradients(own, form, dtypes, is_delayed=rule is not Rule.SYNCHRONOUS, device=device)
