"""Capture: from an unmodified module to a `Graph`, through torch.export.

The module runs once on tensors that hold no numbers, so its weights may lie on the meta device and never
exist. Training and evaluation are captured apart, because they are different programs. Parameters stay
arguments, under the module's own names.
"""

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bireme.errors import BiremeError, first_line
from bireme.model.convert import converted, tensors_within
from bireme.model.graph import Graph
from bireme.model.torch_private import as_in_capture, calls_without_numbers, in_export

Inputs = Mapping[str, Any] | Sequence[Any]
"""What the module is called with: by name, or by position."""

Loss = Callable[[Any, Inputs], torch.Tensor]
"""The loss from what the module returns and what it was called with."""


def capture(
    model: torch.nn.Module,
    example_inputs: Inputs,
    *,
    loss: Loss | None = None,
    training: bool = True,
    name: str | None = None,
) -> Graph:
    """The graph of a module, for any batch size if the module allows it.

    `example_inputs` are tensors whose first axis is the batch. Without `loss` the module must return one:
    a scalar, or something with a scalar `loss` in it. The module is left as it was.
    """
    names: list[str] = []
    whole = Whole(model, loss, names)
    inputs = _on_device_of(model, example_inputs)
    with in_export():
        was_training = model.training
        model.train(training)
        try:
            with _quietly():
                exported, batch, any_batch = _exported(whole, inputs)
        finally:
            model.train(was_training)
    return converted(
        exported,
        model,
        name=name or type(model).__name__,
        training=training,
        batch=batch,
        any_batch=any_batch,
        outputs=tuple(names),
    )


_DEPENDS_ON_NUMBERS = ("data-dependent", "DataDependent", "guard on", "_local_scalar_dense", "control flow")
"""Words in torch's errors that tell of Python which looks at the numbers in a tensor."""


class Whole(torch.nn.Module):
    """The module with its loss: tensors in, tensors out, and the names of those."""

    def __init__(self, model: torch.nn.Module, loss: Loss | None, names: list[str]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

        def note(found: Mapping[str, torch.Tensor]) -> None:
            names[:] = found

        # A function, because export puts back whatever else a forward changes in its module.
        self.note = note

    def forward(self, inputs: Any) -> tuple[torch.Tensor, ...]:
        """Run the module, and then the loss."""
        # A generation cache is made in every forward, and used by none of training.
        accepted = inspect.signature(self.model.forward).parameters
        extra = {"use_cache": False} if "use_cache" in accepted else {}
        with calls_without_numbers(), _ListsAsNumbers():
            if isinstance(inputs, dict):
                taken = inputs if self.loss is None else _taken(self.model, inputs)
                returned = self.model(**taken, **extra)
            else:
                returned = self.model(*inputs, **extra)
        named = _tensors(returned)
        if self.loss is not None:
            named = {"loss": self.loss(returned, inputs)} | {k: v for k, v in named.items() if k != "loss"}
        self.note(named)
        return tuple(named.values())


class _ListsAsNumbers(TorchFunctionMode):
    """Makes a CPU tensor of a list of numbers that is an index, as in Falcon. On the meta device torch would
    make one without the numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(_are_numbers, index)):
                given = (torch.tensor(one, device="cpu") if _are_numbers(one) else one for one in index)
                args = args[0], tuple(given)
        return func(*args, **(kwargs or {}))


def _are_numbers(index: Any) -> bool:
    """Whether an index is a list of numbers, and not of tensors or slices."""
    is_list = isinstance(index, list) and bool(index)
    return is_list and all(isinstance(one, int) or _are_numbers(one) for one in index)


def _taken(model: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs that the forward of a model accepts. The others, such as labels, are for the loss alone."""
    parameters = inspect.signature(model.forward).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return dict(inputs)
    return {name: value for name, value in inputs.items() if name in parameters}


def _tensors(returned: Any) -> dict[str, torch.Tensor]:
    """The tensors in what a module returns, by name: of a mapping, a dataclass, a sequence or alone."""
    if isinstance(returned, torch.Tensor):
        return {"loss" if returned.ndim == 0 else "output": returned}
    if isinstance(returned, Mapping):
        items = {str(key): value for key, value in returned.items()}
    elif hasattr(returned, "__dataclass_fields__"):
        items = {key: getattr(returned, key) for key in returned.__dataclass_fields__}
    elif isinstance(returned, tuple | list):
        items = {str(index): value for index, value in enumerate(returned)}
    else:
        items = {}
    tensors = {key: value for key, value in items.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise BiremeError(
            f"The model returns a {type(returned).__name__} without a tensor in it. It must return tensors: "
            "one, or several in a tuple, a dict or a dataclass."
        )
    return tensors


def _on_device_of(model: torch.nn.Module, inputs: Inputs) -> Any:
    """The inputs on the model's device, no two of them the same tensor: export would take them for one."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def moved(value: Any) -> Any:
        return value.detach().to(device).clone() if isinstance(value, torch.Tensor) else value

    return _each(inputs, moved)


def _each(inputs: Inputs, made: Callable[[Any], Any]) -> Any:
    """What is `made` of each input, by its name or its position."""
    if isinstance(inputs, Mapping):
        return {key: made(value) for key, value in inputs.items()}
    return tuple(map(made, inputs))


def batch_size(inputs: Any) -> int:
    """How many samples the inputs have: the length that the first axis of each has."""
    values = inputs.values() if isinstance(inputs, dict) else inputs
    sizes = {value.shape[0] for value in values if isinstance(value, torch.Tensor) and value.ndim > 0}
    if len(sizes) != 1:
        raise BiremeError(
            f"The example inputs have first axes of lengths {sorted(sizes)}. The first axis of each must be "
            "the batch, with the same length."
        )
    return int(sizes.pop())


def resized(inputs: Inputs, batch: int) -> Any:
    """The inputs with their samples repeated or left out, from the first on, until there are `batch`."""

    def fitted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            return value
        return value[torch.arange(batch, device=value.device) % len(value)]

    return _each(inputs, fitted)


class _Exported(NamedTuple):
    """The exported program, the batch size of its shapes, and whether it holds for any other."""

    program: ExportedProgram
    batch: int
    any_batch: bool


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep torch from writing half a graph to standard error where it fails: our error is one sentence."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(before)


def _exported(whole: Whole, inputs: Any) -> _Exported:
    # One sample would be taken for an axis of length one for ever; two tell it from other axes. They are
    # copies, because export leaves marks on its tensors by which the next one would fail.
    several = resized(inputs, max(batch_size(inputs), 2))

    def batch_axis(value: Any) -> Any:
        return {0: Dim.DYNAMIC} if isinstance(value, torch.Tensor) and value.ndim > 0 else None

    shapes = _each(inputs, batch_axis)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(whole, (several,), dynamic_shapes=(shapes,), strict=False)
        except Exception:  # torch raises dozens of kinds here; what matters is whether a fixed shape works
            return _Exported(_exported_for_one_shape(whole, inputs), batch_size(inputs), any_batch=False)
    given = (node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder")
    if all(isinstance(n, int) for one in given if isinstance(one, Tensor) for n in one.shape):
        return _Exported(_exported_for_one_shape(whole, inputs), batch_size(inputs), any_batch=False)
    return _Exported(exported, batch_size(several), any_batch=True)


def _exported_for_one_shape(whole: Whole, inputs: Any) -> ExportedProgram:
    try:
        return torch.export.export(whole, (inputs,), strict=False)
    except BiremeError:
        raise
    except Exception as error:
        raise BiremeError(_why_not(error, whole.model)) from error


def _why_not(error: Exception, model: torch.nn.Module) -> str:
    """In one sentence, which line of the model is in the way, and what to do."""
    line = _line_of_model(error, model)
    reason = first_line(error).rstrip(".")
    if any(sign in f"{type(error).__name__} {error}" for sign in _DEPENDS_ON_NUMBERS):
        what = "Python there depends on the numbers in a tensor, and capture runs without any"
        remedy = "Write that line without it" if line else f"Torch says: {reason}. Write it without"
    else:
        what, remedy = reason, "Check that the model runs with these inputs outside Bireme"
    return (
        f"{type(model).__name__} cannot be captured{line}: {what}. {remedy}, or give the model as a chain: "
        "an nn.Sequential or a list of modules to run one by one."
    )


def _line_of_model(error: Exception, model: torch.nn.Module) -> str:
    """The innermost line of the traceback that belongs to one of the model's own modules."""
    modules = {type(module).__module__ for module in model.modules()}
    own = {
        getattr(sys.modules.get(name), "__file__", "") for name in modules if not name.startswith("torch.")
    }
    found = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename in own:
            found = f" because of {code.co_filename}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


# Captures of one model at several batch sizes: one graph where it holds for any, else one for each size.
#
# A model specializes where its code makes a number of the batch size, as by reshaping with a literal one.
# Then every size of a micro-batch is a program of its own, captured when it is first asked for.


class Captures:
    """The graphs of a model by batch size, each captured once.

    The samples of the example inputs are repeated or left out to make a size. `front_end` is `capture` for a
    module, or `chain` where `model` is the modules of a chain. `finish` changes a graph that was captured.
    """

    def __init__(
        self,
        model: Any,
        example_inputs: Inputs,
        *,
        loss: Loss | None = None,
        training: bool = True,
        name: str | None = None,
        front_end: Callable[..., Graph] = capture,
        finish: Callable[[Graph], Graph] = lambda graph: graph,
    ) -> None:
        self._model = model
        self._inputs = example_inputs
        self._settings: dict[str, Any] = {"loss": loss, "training": training, "name": name}
        self._front_end = front_end
        self._finish = finish
        self._for_any: Graph | None = None
        self._for_one: dict[int, Graph] = {}

    def graph(self, batch: int | None = None) -> Graph:
        """The graph that holds for a batch size; without one, for that of the example inputs."""
        if self._for_any is not None:
            return self._for_any
        size = batch_size(self._inputs) if batch is None else batch
        if size not in self._for_one:
            inputs = resized(self._inputs, size)
            self.know(self._finish(self._front_end(self._model, inputs, **self._settings)))
        return self._for_any or self._for_one[size]

    def know(self, graph: Graph) -> None:
        """Give this graph, which was captured before, and capture none for its size."""
        if graph.any_batch:
            self._for_any = graph
        else:
            self._for_one[graph.batch] = graph

    def knows(self, size: int) -> bool:
        """Whether the graph for this size is known."""
        return self._for_any is not None or size in self._for_one


# One capture for both modes of a model, where it is the same program in training and in evaluation.
#
# A model may ask in any line of its code whether it is in training. So it runs once in each mode, on the meta
# device, and what it calls of torch is compared: each function and its arguments, with a tensor known by the
# call that made it. Equal calls are the same program. Only dropout may be told of the mode, by an
# argument that its operator in the graph has too.

_DROPOUT, _TRAIN = "aten.dropout.default", 2
"""The operator of dropout, and the place among its arguments that says whether anything is dropped."""


def dropouts_of(model: torch.nn.Module, example_inputs: Inputs, loss: Loss | None = None) -> int | None:
    """How many dropouts of a model on the meta device drop something in training, if in evaluation none of
    them does and all else is the same; None if the modes are two programs, or if that cannot be told. The
    model is left as it was.
    """
    if any(not tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return None
    try:
        inputs = _on_device_of(model, example_inputs)
        in_training, in_evaluation = (_run(model, inputs, loss, training=mode) for mode in (True, False))
    except Exception:  # whatever it is, a capture tells of it better
        return None
    is_same = in_training.told == in_evaluation.told and not in_evaluation.num_dropouts
    return in_training.num_dropouts if is_same else None


def in_evaluation(graph: Graph, num_dropouts: int) -> Graph | None:
    """The graph in evaluation mode of a model with so many such dropouts, from the one in training mode.

    None where dropouts have come to be other operators.
    """
    dropping = [
        place
        for place, one in enumerate(graph.operators)
        if one.target == _DROPOUT and one.arguments[_TRAIN] is True
    ]
    if len(dropping) != num_dropouts:
        return None
    operators = list(graph.operators)
    for place in dropping:
        given = operators[place].arguments
        operators[place] = replace(operators[place], arguments=(*given[:_TRAIN], False, *given[_TRAIN + 1 :]))
    return replace(graph, training=False, operators=tuple(operators))


def _run(model: torch.nn.Module, inputs: Any, loss: Loss | None, *, training: bool) -> "_Calls":
    """What a copy of the model calls in a mode: running may change what a model keeps."""
    copy = deepcopy(model).train(training)
    names: list[str] = []
    calls = _Calls()
    for name, tensor in (*copy.named_parameters(), *copy.named_buffers()):
        calls.made[id(tensor)] = _Made(tensor, name)
        calls.told.append((name, tensor.requires_grad))
    given = inputs.values() if isinstance(inputs, dict) else inputs
    for place, one in enumerate(tensors_within(list(given))):
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
        for place, one in enumerate(tensors_within(result)):
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
