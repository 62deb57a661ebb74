"""The names private to torch that this room uses, in one place, each with why and what would replace it.

They can change with any version of torch. So no other file of this room imports or reaches for one: they
take what is here, under names that say what it is for.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _set_grad_enabled
from torch._export.utils import _compiling_state_context
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx import config as fx_config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import transformer
from torch.optim import Optimizer, optimizer
from torch.utils._python_dispatch import TorchDispatchMode

EXPORT = RLock()
"""For one thread at a time: torch's export changes what holds for the whole process, such as the answer to
whether it exports.
"""


@contextmanager
def in_export() -> Iterator[None]:
    """A context that holds `EXPORT`, for an export without the Python stack of each operator.

    Nothing reads the stacks, and they take 20 % of an export. Torch does not document the switch.
    """
    with EXPORT:
        before = fx_config.do_not_emit_stack_traces
        fx_config.do_not_emit_stack_traces = True
        try:
            yield
        finally:
            fx_config.do_not_emit_stack_traces = before


class DispatchMode(TorchDispatchMode):
    """Sees every operator that runs. Torch documents it, but has no public module for it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch's compiler, which torch would import for it, is to leave the mode out."""
        return False


NUMBERS_NEEDED = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where a tensor without numbers is asked for them. A public exception of fake tensors would do."""

set_grad_enabled = _set_grad_enabled
"""Switches autograd as a plain call, which a graph can hold: `torch.set_grad_enabled` is a class, whose call
leaves an object that switches back."""


_ENGINE = torch.autograd.Variable._execution_engine


def accumulate_gradients(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """What `torch.autograd.backward` does, which compares shapes in Python before the engine compares them:
    that takes as long as the backward of a small layer.
    """
    _ENGINE.run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def fake_tensors() -> FakeTensorMode:
    """A context in which tensors have shapes and devices and no numbers, those from outside included.

    Unlike the meta device it keeps apart what is on which device. Fake tensors have no public module.
    """
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def as_in_capture() -> Iterator[None]:
    """A context in which code that asks is told that it is being exported.

    It may take another way then. `torch.compiler` can be asked, but offers nothing that sets the answer.
    """
    with EXPORT, _compiling_state_context():
        yield


_AUTOCAST, _HISTC = torch.autocast, torch.histc


@contextmanager
def calls_without_numbers() -> Iterator[None]:
    """A context in which models run that would look at numbers, or at the device that they are captured on.

    Torch's transformers compare a mask with a causal one's to choose a faster kernel if no `is_causal` is
    given; without the comparison they apply the mask, with the same result. Experts of transformers count
    whole numbers, which torch does on GPUs only, and their adapters switch autocast off, which the meta
    device does not have. Hold `EXPORT`: this is for all threads.
    """
    with ExitStack() as stack:
        for owner, name, other in (
            (transformer, "_detect_is_causal_mask", lambda _, is_causal=None, _size=None: is_causal is True),
            (torch, "autocast", _autocast),
            (torch, "histc", _histc),
        ):
            if hasattr(owner, name):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, other)
        yield


def _autocast(device_type: str, *given: Any, **more: Any) -> Any:
    return nullcontext() if device_type == "meta" else _AUTOCAST(device_type, *given, **more)


def _histc(values: Tensor, *bounds: Any, **more: Any) -> Tensor:
    counted = values if values.is_floating_point() else values.double()
    return _HISTC(counted, *bounds, **more).to(values.dtype)


def cpp_compiler() -> str | None:
    """The C++ compiler that `torch.compile` uses on the CPU, None where it finds none.

    Torch looks for it while it compiles and would fail in the middle. Imported late: it takes a second.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except InvalidCxxCompiler:
        return None


def compiler_errors() -> tuple[type[Exception], ...]:
    """What `torch.compile` raises where its compiler fails. There is no public name for these."""
    from torch._dynamo.exc import BackendCompilerFailed

    return (BackendCompilerFailed,)


# Torch imports its compiler, which takes a second and 40 MB in each process, when an optimizer is made and
# when it steps: only to have code that is compiled leave both out. What is set here says that nothing is to
# be done for the first.
_ADD_GROUP = inspect.unwrap(Optimizer.add_param_group)
vars(_ADD_GROUP).setdefault("__dynamo_disable", _ADD_GROUP)


def step_optimizer(own: Optimizer) -> None:
    """What `own.step()` does, without importing torch's compiler for one of torch's optimizers."""
    hooks = (
        own._optimizer_step_pre_hooks,
        own._optimizer_step_post_hooks,
        optimizer._global_optimizer_pre_hooks,
        optimizer._global_optimizer_post_hooks,
    )
    step = inspect.unwrap(type(own).step)
    if "torch._dynamo" in sys.modules or any(hooks) or not step.__module__.startswith("torch.optim."):
        own.step()
        return
    with torch.set_grad_enabled(own.defaults.get("differentiable", False)):
        step(own)


def storage_id(tensor: Tensor) -> int:
    """The same number for tensors that share memory, as long as one of them lives.

    `data_ptr()` would do if it was not zero for every tensor without numbers.
    """
    return int(tensor.untyped_storage()._cdata)


def storage_watch(tensor: Tensor) -> object:
    """What keeps the `storage_id` of a tensor from being given to other memory, though not the memory."""
    return StorageWeakRef(tensor.untyped_storage())


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to. Autograd counts it and shows it under this name alone."""
    return int(tensor._version)


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """The parameters that a module itself holds, to be changed in place: `named_parameters` only reads."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """The buffers that a module itself holds, to be changed in place, for the same reason."""
    return module._buffers


class ModuleTensor(NamedTuple):
    """Where a module holds a parameter or buffer: in `table` under `key`. Set it there to change it in place:
    setting an attribute may run code of the module's class.
    """

    name: str
    module: nn.Module
    table: dict[str, Any]
    key: str


def tensor_places(module: nn.Module, prefix: str = "") -> Iterator[ModuleTensor]:
    """The places of all parameters and buffers of a module, of tied ones all."""
    for path, inner in module.named_modules(prefix=prefix, remove_duplicate=False):
        for table in (own_parameters(inner), own_buffers(inner)):
            for key in [key for key, tensor in table.items() if tensor is not None]:
                yield ModuleTensor(f"{path}.{key}" if path else key, inner, table, key)


def written(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments of a call that an operator writes to."""
    schema = schema_of(operator)
    for place, argument in enumerate(schema.arguments if schema else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[place] if place < len(args) else kwargs.get(argument.name)


def schema_of(operator: Any) -> torch.FunctionSchema | None:
    """What an operator takes and which of it it writes to; None for what is no operator of torch.

    `torch.library` offers schemas only to those who define operators.
    """
    return getattr(operator, "_schema", None)
