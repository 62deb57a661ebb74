"""An accelerator that is not there: tensors that say they are on `far:0`, with numbers all the same.

Operators run on copies of theirs on the CPU, so a run on this device can be held against one on the CPU. What
a real accelerator refuses, it refuses too: operators that are given tensors of both, and the host's look into
its memory. It can be made once in a process, and changes what that process takes for its accelerator: make it
in one of its own.
"""

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["FAR", "make_far_device"]

FAR = "far"

CROSSING = ("copy_", "_to_copy", "_foreach_copy_", "index", "index_put_")
"""Operators that a real accelerator lets read from the host; indices may be there, values may not."""

_kept: list[torch.library.Library] = []


def make_far_device() -> torch.device:
    """Register it; whatever is made with `device="far"` from now on is a `_Far`."""
    _setup_privateuseone_for_python_backend(FAR, _Module())
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    _kept.append(library)
    torch.tensor = _tensor  # type: ignore[assignment]  # of a list, it copies in a way that a device made in Python does not see
    return torch.device(FAR, 0)


class _Module:
    """What torch asks the module of a device for. Draws are the CPU's, whose operators run."""

    default_generators = (torch.default_generator,)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False


class _Far(torch.Tensor):
    """A tensor of that device; `near` has its numbers."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> "_Far":
        made: _Far = torch.Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=torch.device(FAR, 0),
        )
        made.near = near
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "data":  # torch moves the tensor's memory, and knows nothing of what is near
            self.near = value.near

    def tolist(self) -> Any:
        return self.near.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _check(func, args, kwargs)
    found = func(*_near(args), **{name: _near(value) for name, value in kwargs.items()})
    asked = kwargs.get("device")
    if asked is not None and torch.device(asked).type == "cpu":
        return found
    wrapped = _far(found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if _aliases(func) else wrapped


@cache
def _aliases(func: Any) -> bool:
    """Whether an operator writes to what it is given, or gives a view of it."""
    return any(one.alias_info is not None for one in func._schema.arguments)


def _check(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse what an accelerator does."""
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    on_host = [one for one in given if not isinstance(one, _Far)]
    if len(on_host) == len(given) or func.overloadpacket.__name__ in CROSSING:
        return
    if any(one.ndim or torch.Tag.pointwise not in func.tags for one in on_host):
        shapes = ", ".join(str(list(one.shape)) for one in on_host)
        raise RuntimeError(f"{func} is given tensors of far:0 and, of shape {shapes}, of the cpu")


def _near(one: Any) -> Any:
    if isinstance(one, _Far):
        return one.near
    if isinstance(one, list | tuple):
        return type(one)(map(_near, one))
    return torch.device("cpu") if isinstance(one, torch.device) else one


def _tensor(data: Any, *, device: Any = None, make: Any = torch.tensor, **more: Any) -> torch.Tensor:
    made: torch.Tensor = make(data, **more)
    return made if device is None else made.to(device)


def _far(one: Any) -> Any:
    if isinstance(one, list | tuple):
        return type(one)(map(_far, one))
    return _Far(one) if isinstance(one, torch.Tensor) else one
