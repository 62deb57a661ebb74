"""Models that a function of the user makes: called on the meta device for shapes, on the CPU for numbers.

The function returns a module, or (module, example inputs). It is called with random numbers that begin from a
seed, and the caller's random state is restored. Nothing here guesses a weight: the CPU call gives them all.
"""

import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bireme.errors import BiremeError
from bireme.model.capture import resized
from bireme.model.convert import named_tensors
from bireme.model.examples import example_inputs
from bireme.model.graph import ModelState
from bireme.model.torch_private import tensor_places
from bireme.user_code import reason_of, user_function

_RETURNS = "a torch.nn.Module, or (module, example inputs)"


def own_model(
    text: str, batch: int, length: int | None, device: torch.device, seed: int
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model that the function returns, on a device, and example inputs of `batch` samples.

    A function that cannot run on the meta device, because it reads numbers or loads a whole model, runs on
    the CPU instead, and its model is moved.
    """
    function = user_function(text, _RETURNS)
    if device.type != "meta":
        with device:
            model, inputs = _called(text, function, seed)
        model = model.to(device)
    else:
        try:
            with warnings.catch_warnings(), device:
                warnings.simplefilter("ignore")  # load_state_dict warns of every tensor that it cannot copy
                model, inputs = _called(text, function, seed)
        except BiremeError:
            model, inputs = _called(text, function, seed)
        _move_to_meta(text, model)
    if inputs is not None:
        return model, _own_inputs(text, model, inputs, batch, device)
    if getattr(model, "config", None) is None:
        raise BiremeError(
            f"{text} returns a {type(model).__name__} without inputs, and without a config to make them "
            "from. Return (module, example inputs)."
        )
    return model, example_inputs(model, model.config, batch, length)


def made_states(text: str, states: Sequence[ModelState], seed: int) -> dict[str, Tensor]:
    """The numbers of these parameters and buffers, as the function makes them on the CPU.

    Parameters of real numbers come in float32, all else in the type of the state. A parameter with a NaN is
    refused.
    """
    try:
        model, _ = _called(text, user_function(text, _RETURNS), seed)
    except BiremeError as error:
        raise BiremeError(
            f"{error} It is called on the CPU once, for the initial weights. If it cannot run there, save "
            "the weights as safetensors in a folder and name it in model.weights."
        ) from error
    own = dict(named_tensors(model))
    found = {}
    for state in states:
        tensor = own.get(state.name)
        shape = None if tensor is None else tuple(tensor.shape)
        if tensor is None or shape != state.shape:
            has = "no such tensor" if tensor is None else f"the shape {shape}"
            raise BiremeError(
                f"{text} makes another model on the CPU than on the meta device: {state.name} has the shape "
                f"{state.shape} there, and {has} on the CPU. Let the function make the same model each time."
            )
        if tensor.is_meta:
            raise BiremeError(
                f"{text} leaves {state.name} on the meta device, where it has no numbers. Make it on the "
                "CPU, or name a folder with the model's weights in model.weights."
            )
        _check_no_nan(text, state, tensor)
        in_float32 = state.is_parameter and tensor.is_floating_point()
        dtype = torch.float32 if in_float32 else getattr(torch, state.dtype)
        found[state.name] = tensor.detach().to("cpu", dtype)
    return found


def _check_no_nan(text: str, state: ModelState, tensor: Tensor) -> None:
    # The sum is quick and takes no memory. Infinities can make it NaN too, so the elements decide.
    is_real = state.is_parameter and tensor.is_floating_point()
    if is_real and bool(tensor.detach().sum().isnan()) and bool(tensor.isnan().any()):
        count = int(tensor.isnan().sum())
        raise BiremeError(
            f"{text} makes a model whose parameter {state.name} holds NaN ({count} of {tensor.numel()} "
            "elements), so its loss would be NaN from the first step. Check how the parameter is "
            "initialized or loaded."
        )


def _called(text: str, function: Callable[[], Any], seed: int) -> tuple[nn.Module, Any]:
    """The module and the example inputs that the function returns; None if it returns no inputs."""
    try:
        with generators_restored():
            seed_generators(seed)
            made = function()
    except BiremeError:
        raise
    except (Exception, SystemExit) as error:  # a script's main() may leave Python
        raise BiremeError(f"{text} fails: {reason_of(error)}.") from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        kind = "nothing" if made is None else f"a {type(made).__name__}"
        raise BiremeError(f"{text} returns {kind}. It must return {_RETURNS}.")
    return model, inputs


def seed_generators(seed: int) -> None:
    """Let torch, numpy and Python draw from this seed on."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


@contextmanager
def generators_restored() -> Iterator[None]:
    """Leave the generators of torch, numpy and Python as they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _move_to_meta(text: str, model: nn.Module) -> None:
    """Take the numbers out of a model in place. Tied tensors stay tied, which `Module.to` does not do."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for _, module, table, key in tensor_places(model):
        tensor = table[key]
        if nn.parameter.is_lazy(tensor):
            raise BiremeError(
                f"The {type(module).__name__} in the model of {text} has no shape before its first call. "
                "Call the model once in the function, or give the sizes to its constructor."
            )
        if not tensor.is_meta:
            table[key] = moved.setdefault(id(tensor), (tensor, _without_numbers(tensor)))[1]


def _without_numbers(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _own_inputs(
    text: str, model: nn.Module, given: Any, batch: int, device: torch.device
) -> dict[str, Tensor]:
    """The function's inputs by name, their samples repeated or left out to make the batch."""
    if isinstance(given, Tensor):
        given = (given,)
    names = list(inspect.signature(model.forward).parameters)
    if isinstance(given, tuple | list) and len(given) <= len(names):
        given = dict(zip(names, given, strict=False))
    if not isinstance(given, Mapping) or not given or not all(_is_sample_tensor(v) for v in given.values()):
        raise BiremeError(
            f"The example inputs of {text} do not fit. They must be tensors whose first axis is the batch: "
            "in a dict by the names of the model's forward, or in its order in a tuple."
        )
    own = resized(given, batch)
    return own if device.type == "meta" else {name: value.to(device) for name, value in own.items()}


def _is_sample_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) > 0
