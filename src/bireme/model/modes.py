"""One capture for both modes of a model, where it is the same program in training and in evaluation.

A model may ask in any line of its code whether it is in training. So it runs once in each mode, on the meta
device, and what it calls of torch is compared: each function and its arguments, with a tensor known by the
call that made it. Equal calls are the same program. Only dropout may be told of the mode, by an
argument that its operator in the graph has too.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bireme.model.capture import Inputs, Loss, Whole, on_device_of
from bireme.model.graph import Graph, Operator
from bireme.model.torch_private import as_in_capture

__all__ = ["Modes", "in_evaluation", "modes_of"]

DROPOUT, TRAIN = "aten.dropout.default", 2
"""The operator of dropout, and the place among its arguments that says whether anything is dropped."""


@dataclass(frozen=True, slots=True)
class Modes:
    """How many dropouts of a model drop something in training; none of them does in evaluation, and all else
    is the same.
    """

    num_dropouts: int


def modes_of(model: torch.nn.Module, example_inputs: Inputs, loss: Loss | None = None) -> Modes | None:
    """What the modes of a model on the meta device have in common; None where they are two programs, or that
    cannot be told. The model is left as it was.
    """
    if any(not tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return None
    try:
        inputs = on_device_of(model, example_inputs)
        in_training, in_evaluation = (_run(model, inputs, loss, training=mode) for mode in (True, False))
    except Exception:  # whatever it is, a capture tells of it better
        return None
    is_same = in_training.told == in_evaluation.told and not in_evaluation.num_dropouts
    return Modes(in_training.num_dropouts) if is_same else None


def in_evaluation(graph: Graph, modes: Modes) -> Graph | None:
    """The graph in evaluation mode of such a model, made from the one in training mode.

    None where dropouts have come to be other operators.
    """
    dropping = [place for place, one in enumerate(graph.operators) if _drops(one)]
    if len(dropping) != modes.num_dropouts:
        return None
    operators = list(graph.operators)
    for place in dropping:
        given = operators[place].arguments
        operators[place] = replace(operators[place], arguments=(*given[:TRAIN], False, *given[TRAIN + 1 :]))
    return replace(graph, training=False, operators=tuple(operators))


def _drops(operator: Operator) -> bool:
    return operator.target == DROPOUT and operator.arguments[TRAIN] is True


def _run(model: torch.nn.Module, inputs: Any, loss: Loss | None, *, training: bool) -> "_Calls":
    """What a copy of the model calls in a mode: running may change what a model keeps."""
    copy = deepcopy(model).train(training)
    names: list[str] = []
    calls = _Calls()
    for name, tensor in (*copy.named_parameters(), *copy.named_buffers()):
        calls.made[id(tensor)] = _Made(tensor, name)
        calls.told.append((name, tensor.requires_grad))
    given = inputs.values() if isinstance(inputs, dict) else inputs
    for place, one in enumerate(_tensors_within(list(given))):
        calls.made[id(one)] = _Made(one, f"input {place}")
    with as_in_capture(), calls:
        returned = Whole(copy, loss, names)(inputs)
    calls.told += [names, calls.known(returned)]
    return calls


@dataclass(slots=True)
class _Made:
    """A tensor by its name, or by the number of the call that made it and its place in the result."""

    tensor: Tensor
    name: str | tuple[int, int]


@dataclass
class _Calls(TorchFunctionMode):
    """Notes what is called of torch, in `told`, and how many dropouts there were that drop."""

    told: list[object] = field(default_factory=list)
    num_dropouts: int = 0
    made: dict[int, _Made] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note the call, and make it."""
        named = dict(kwargs or {})
        drops = func is functional.dropout
        if drops:
            bound = inspect.signature(func).bind(*args, **named)
            bound.apply_defaults()
            given = dict(bound.arguments)
            self.num_dropouts += bool(given.pop("training"))
            self.told.append((func, self.known(given)))
        else:
            self.told.append((func, self.known(args), self.known(named)))
        result = func(*args, **named)
        number = len(self.told)
        for place, one in enumerate(_tensors_within(result)):
            # What writes to a tensor returns it, and so does a dropout that drops nothing.
            if drops or id(one) not in self.made:
                self.made[id(one)] = _Made(one, (number, place))
        return result

    def known(self, given: Any) -> object:
        """The same with names in the place of tensors; one that nobody knows is like no other."""
        if isinstance(given, Tensor):
            made = self.made.get(id(given))
            return object() if made is None else made.name
        if isinstance(given, Mapping):
            return [(name, self.known(one)) for name, one in given.items()]
        if isinstance(given, tuple | list):
            return [self.known(one) for one in given]
        # 1, 1.0 and True are equal, and not the same.
        return type(given), given


def _tensors_within(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for one in result:
            yield from _tensors_within(one)
