"""Capture: from an unmodified module to a `Graph`, through torch.export.

The module runs once on tensors that hold no numbers, so its weights may lie on the meta device and never
exist. Training and evaluation are captured apart, because they are different programs. Parameters stay
arguments, under the module's own names.
"""

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from typing import Any, NamedTuple

import torch
from torch.export import Dim, ExportedProgram

from bireme.errors import BiremeError
from bireme.model.convert import converted
from bireme.model.graph import Graph
from bireme.model.torch_private import EXPORT, masks_as_given

__all__ = ["Inputs", "Loss", "Whole", "batch_size", "capture", "on_device_of", "resized"]

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
    inputs = on_device_of(model, example_inputs)
    with EXPORT:
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


DEPENDS_ON_NUMBERS = ("data-dependent", "DataDependent", "guard on", "_local_scalar_dense", "control flow")
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
        extra = _switched_off(self.model)
        with masks_as_given():
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


def _switched_off(model: torch.nn.Module) -> dict[str, bool]:
    """Keep a generation cache out of the graph: it is made in every forward and used by none of training."""
    parameters = inspect.signature(model.forward).parameters
    return {"use_cache": False} if "use_cache" in parameters else {}


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


def on_device_of(model: torch.nn.Module, inputs: Inputs) -> Any:
    """The inputs on the model's device, no two of them the same tensor: export would take them for one."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    def moved(value: Any) -> Any:
        return value.detach().to(device).clone() if isinstance(value, torch.Tensor) else value

    if isinstance(inputs, Mapping):
        return {key: moved(value) for key, value in inputs.items()}
    return tuple(moved(value) for value in inputs)


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

    if isinstance(inputs, Mapping):
        return {key: fitted(value) for key, value in inputs.items()}
    return tuple(fitted(value) for value in inputs)


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

    if isinstance(inputs, dict):
        shapes: Any = {key: batch_axis(value) for key, value in inputs.items()}
    else:
        shapes = tuple(batch_axis(value) for value in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exported = torch.export.export(whole, (several,), dynamic_shapes=(shapes,), strict=False)
        except Exception:  # torch raises dozens of kinds here; what matters is whether a fixed shape works
            return _Exported(_exported_for_one_shape(whole, inputs), batch_size(inputs), any_batch=False)
    if not any(_is_symbolic(node) for node in exported.graph.nodes):
        return _Exported(_exported_for_one_shape(whole, inputs), batch_size(inputs), any_batch=False)
    return _Exported(exported, batch_size(several), any_batch=True)


def _is_symbolic(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "placeholder"
        and isinstance(value, torch.Tensor)
        and any(not isinstance(n, int) for n in value.shape)
    )


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
    text = str(error).strip()
    reason = text.splitlines()[0].rstrip(".") if text else type(error).__name__
    if any(sign in f"{type(error).__name__} {text}" for sign in DEPENDS_ON_NUMBERS):
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
    own = {inspect.getsourcefile(type(module)) for module in model.modules() if _has_source(module)}
    found = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename in own:
            found = f" because of {code.co_filename}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _has_source(module: torch.nn.Module) -> bool:
    if type(module).__module__.startswith("torch."):
        return False
    try:
        return inspect.getsourcefile(type(module)) is not None
    except TypeError:
        return False
