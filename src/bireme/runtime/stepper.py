"""One optimiser state for any number of weight versions: steps in place, and trial steps that leave no trace.

Ordinary torch optimisers do the arithmetic. They own parameters of their own, which are pointed at whatever
weights are to be stepped. What may be assumed of an optimiser is that it treats each parameter apart from the
others and keeps what it remembers of it in `optimizer.state`; all of torch's do but LBFGS.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from bireme.errors import BiremeError
from bireme.runtime.optimizers import OptimizerFactory

__all__ = ["Stepper"]

Tensors = Mapping[str, Tensor]
Gradients = Mapping[str, Tensor | None]

CHUNK_ELEMENTS = 4 * 2**20
"""How much of the weights is copied at a time where copies are needed: 16 MiB in float32."""

ELEMENTWISE = frozenset(
    {
        optim.ASGD,
        optim.Adadelta,
        optim.Adagrad,
        optim.Adam,
        optim.AdamW,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.SGD,
    }
)
"""Optimisers that treat each element apart, so that a large parameter can be tried slice by slice."""


@dataclass(frozen=True, slots=True, eq=False)
class _Home:
    """Where a parameter is stepped: its optimiser, and which of its groups."""

    name: str
    parameter: nn.Parameter
    optimizer: Optimizer
    group: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of a parameter, or all of it."""

    home: _Home
    rows: slice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor of the parameter's shape, as a view."""
        return tensor if self.rows is None else tensor[self.rows]


@dataclass(frozen=True, slots=True)
class _Try:
    """A piece to be tried, and its part of the weights before and after and of the gradient."""

    piece: _Piece
    start: Tensor
    goal: Tensor
    gradient: Tensor


class Stepper:
    """Steps the weights that it is given, which have the names, shapes and dtypes of `parameters`.

    The factory's optimisers must hold every parameter once. Until the first step they point at `parameters`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], factory: OptimizerFactory) -> None:
        # By `.data`, so that a step counts as a write to what is stepped and not, for autograd, to these.
        self._own = {name: nn.Parameter(tensor.data) for name, tensor in parameters.items()}
        self._factory = factory
        self._start_anew()

    def _start_anew(self) -> None:
        made = self._factory([*self._own.items()]) if self._own else ()
        self._optimizers = (made,) if isinstance(made, Optimizer) else tuple(made)
        homes = {home.name: home for home in _homes(self._own, self._optimizers)}
        self._homes = [homes[name] for name in self._own]
        self._all = [_Piece(home) for home in self._homes]
        self._chunks = list(_chunks(self._homes, slices=False))
        self._trial_chunks = list(_chunks(self._homes, slices=True))

    @torch.no_grad()
    def step(
        self, weights: Tensors, gradients: Gradients, *, lr_factor: float = 1.0, scale: float = 1.0
    ) -> None:
        """Step the weights in place with the gradients times `scale`, at the groups' rates times `lr_factor`.

        Parameters whose gradient is None are left alone. The gradients stay as they are: where they must be
        scaled, or cast to the weights' dtype, that is done on a copy of one chunk (see `trial`) at a time.
        """
        given = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        are_ready = scale == 1.0 and all(given[name].dtype == weights[name].dtype for name in given)
        for chunk in [self._all] if are_ready else self._chunks:
            homes = [piece.home for piece in chunk if piece.home.name in given]
            try:
                for home in homes:
                    weight, gradient = weights[home.name], given[home.name]
                    home.parameter.data = weight.detach()
                    home.parameter.grad = _scaled(gradient, weight.dtype, scale)
                _run([(home, home.parameter) for home in homes], lr_factor)
            finally:
                for home in homes:
                    home.parameter.grad = None

    @torch.no_grad()
    def trial(
        self,
        source: Tensors,
        target: Tensors,
        gradients: Gradients,
        *,
        lr_factor: float = 1.0,
        scale: float = 1.0,
        gradient_scale: float = 1.0,
    ) -> None:
        """Write into `target` what `step` would make of `source` with the gradients times `gradient_scale`.

        Neither the optimisers' state, nor `source`, nor the gradients change. `target` may be of another
        dtype. Memory for a few copies of one chunk is taken and given back; a chunk is 16 MiB, or one
        parameter where an optimiser, as Muon, needs it whole.
        """
        given = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        factor = gradient_scale * scale
        for chunk in self._trial_chunks:
            tries: list[_Try] = []
            for piece in chunk:
                name = piece.home.name
                start, goal = piece.of(source[name]), piece.of(target[name].detach())
                if name in given:
                    tries.append(_Try(piece, start, goal, piece.of(given[name])))
                else:
                    goal.copy_(start)
            _try(tries, lr_factor, factor)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """What the optimisers remember of each parameter, by its name; the tensors themselves, not copies."""
        found = {home.name: home.optimizer.state.get(home.parameter) for home in self._homes}
        return {name: dict(state) for name, state in found.items() if state}

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over copies of the entries of `states` under this stepper's names; the others are not for it.

        A parameter without an entry starts anew, as one that has never had a gradient. The factory is called
        again to that end.
        """
        self._start_anew()
        for home in self._homes:
            state = states.get(home.name)
            if state:
                home.optimizer.state[home.parameter] = {
                    key: _adopted(key, value, home) for key, value in state.items()
                }

    def state_bytes(self) -> int:
        """The bytes of all that the optimisers remember so far."""
        values = (value for state in self.state_dict().values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _homes(own: Mapping[str, nn.Parameter], optimizers: Iterable[Optimizer]) -> Iterator[_Home]:
    """Find each parameter in the optimisers, and refuse optimisers that cannot be used."""
    names = {parameter: name for name, parameter in own.items()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, optim.LBFGS):
            raise BiremeError("LBFGS steps all parameters as one, which no stage has. Use another optimiser.")
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                name = names.pop(parameter, None)
                if name is None:
                    raise BiremeError(
                        f"An optimiser {kind} holds a tensor of shape {tuple(parameter.shape)} that is not "
                        "among the parameters it was given, or that another one holds too. Give each "
                        "parameter that the factory is called with to one optimiser, as it is."
                    )
                yield _Home(name, parameter, optimizer, index)
    if names:
        raise BiremeError(
            f"No optimiser holds the parameter {next(iter(names.values()))}. Give every parameter that the "
            "factory is called with to one optimiser; a parameter that is to stay as it is must not require "
            "gradients in the model."
        )


def _chunks(homes: Iterable[_Home], *, slices: bool) -> Iterator[list[_Piece]]:
    """All parameters, in chunks of bounded size as far as they may be sliced."""
    chunk: list[_Piece] = []
    size = 0
    for home in homes:
        for piece in _pieces(home) if slices else [_Piece(home)]:
            elements = piece.of(home.parameter).numel()
            if chunk and size + elements > CHUNK_ELEMENTS:
                yield chunk
                chunk, size = [], 0
            chunk.append(piece)
            size += elements
    if chunk:
        yield chunk


def _pieces(home: _Home) -> Iterator[_Piece]:
    parameter = home.parameter
    if parameter.numel() <= CHUNK_ELEMENTS or type(home.optimizer) not in ELEMENTWISE:
        yield _Piece(home)
        return
    rows = max(CHUNK_ELEMENTS // (parameter.numel() // parameter.shape[0]), 1)
    for begin in range(0, parameter.shape[0], rows):
        yield _Piece(home, slice(begin, min(begin + rows, parameter.shape[0])))


def _try(tries: Sequence[_Try], lr_factor: float, factor: float) -> None:
    """Step stand-ins with copies of gradients and state; write where they get to, and forget the rest.

    A stand-in lives in its goal already where the dtypes agree.
    """
    stand_ins: list[tuple[_Home, nn.Parameter]] = []
    try:
        for one in tries:
            home = one.piece.home
            fits = one.goal.dtype == one.start.dtype
            stand_in = nn.Parameter(one.goal.copy_(one.start) if fits else one.start.clone())
            stand_in.grad = _scaled(one.gradient, one.start.dtype, factor, copy=True)
            stand_ins.append((home, stand_in))
            state = home.optimizer.state.get(home.parameter)
            if state:
                home.optimizer.state[stand_in] = {
                    key: _copied(value, one.piece) for key, value in state.items()
                }
        _run(stand_ins, lr_factor)
        for one, (_, stand_in) in zip(tries, stand_ins, strict=True):
            if one.goal.dtype != stand_in.dtype:
                one.goal.copy_(stand_in)
    finally:
        for home, stand_in in stand_ins:
            home.optimizer.state.pop(stand_in, None)


def _run(stepped: Iterable[tuple[_Home, nn.Parameter]], lr_factor: float) -> None:
    """One step of the optimisers, with nothing but these parameters in their groups."""
    chosen: dict[Optimizer, dict[int, list[nn.Parameter]]] = {}
    for home, parameter in stepped:
        chosen.setdefault(home.optimizer, {}).setdefault(home.group, []).append(parameter)
    for optimizer, by_group in chosen.items():
        groups = optimizer.param_groups
        optimizer.param_groups = [
            {**groups[index], "params": parameters, "lr": groups[index]["lr"] * lr_factor}
            for index, parameters in by_group.items()
        ]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups


def _scaled(gradient: Tensor, dtype: torch.dtype, scale: float, *, copy: bool = False) -> Tensor:
    """The gradient in the dtype of the weights, times `scale`; cast first, which loses less."""
    cast = gradient.to(dtype, copy=copy or scale != 1.0)
    return cast.mul_(scale) if scale != 1.0 else cast


def _copied(value: Any, piece: _Piece | None = None) -> Any:
    """A copy of a state's value; for a piece, the same rows of a tensor in the parameter's shape."""
    if not isinstance(value, Tensor):
        return value
    if piece is not None and value.shape == piece.home.parameter.shape:
        value = piece.of(value)
    return value.clone()


def _adopted(key: str, value: Any, home: _Home) -> Any:
    """A copy of a loaded state's value where the optimiser would have made it.

    torch's own loading gives every tensor the parameter's dtype; NAdam's float32 product of momenta would go
    on with other numbers then.
    """
    if not isinstance(value, Tensor):
        return value
    group = home.optimizer.param_groups[home.group]
    counts_at_home = key == "step" and not group.get("fused") and not group.get("capturable")
    is_like_parameter = value.ndim > 0 and value.shape == home.parameter.shape and value.is_floating_point()
    return value.to(
        value.device if counts_at_home else home.parameter.device,
        home.parameter.dtype if is_like_parameter else value.dtype,
        copy=True,
    )
