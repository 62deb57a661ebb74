"""What training keeps for a parameter in addition to it, in bytes, and which parameters muon takes.

Weights of sixteen bits get float32 sums of gradients, float32 state, and a float32 copy that is stepped.
"""

from collections.abc import Iterable

from bireme.errors import BiremeError, closest
from bireme.model.graph import ModelState

__all__ = [
    "OPTIMIZERS",
    "SHORT",
    "check_optimizer",
    "frozen_bytes",
    "gradient_bytes",
    "is_hidden_matrix",
    "moments_share",
    "optimizer_bytes",
    "optimizer_flops",
]

OPTIMIZERS = ("adam", "adamw", "muon", "sgd")
"""The optimisers known by name; sgd is meant with momentum, muon leaves to adamw what is no hidden matrix."""

SHORT = ("bfloat16", "float16")

STEP_BYTES = 4
"""Adam counts its steps for each parameter apart, in a float32."""

MUON_ROUNDS = 5
"""Of Newton and Schulz, by which muon makes a matrix orthogonal."""


def check_optimizer(name: str) -> None:
    """Refuse a name that is none."""
    if name not in OPTIMIZERS:
        raise BiremeError(f"There is no optimiser {name!r}. {closest(name, OPTIMIZERS)}")


def is_hidden_matrix(name: str, num_axes: int) -> bool:
    """Whether a parameter is a matrix inside one of the model's numbered layers, judging by its name.

    `layers.3.attention.query.weight` is; what is looked up and the last matrix lie outside the layers, and so
    does `2.weight`, a module on its own in a sequence.
    """
    return num_axes == 2 and any(part.isdecimal() for part in name.split(".")[:-2])


def frozen_bytes(state: ModelState) -> int:
    """The bytes of a parameter that does not learn; none of what learns, and none of a buffer."""
    return state.num_bytes if state.is_parameter and not state.trainable else 0


def gradient_bytes(state: ModelState) -> int:
    """The bytes of the sum of one parameter's gradients, which has at least 32 bits an element."""
    if not state.trainable:
        return 0
    return 4 * state.num_elements if state.dtype in SHORT else state.num_bytes


def optimizer_bytes(state: ModelState, optimizer: str) -> int:
    """The bytes an optimiser keeps of one parameter; nothing of one that is frozen."""
    if not state.trainable:
        return 0
    is_short = state.dtype in SHORT
    num_moments = _num_moments(state, optimizer)
    return (num_moments + is_short) * gradient_bytes(state) + (0 if num_moments == 1 else STEP_BYTES)


def moments_share(states: Iterable[ModelState], optimizer: str) -> float:
    """The bytes of what an optimiser remembers of each weight, for each byte of all gradients."""
    found = [(gradient_bytes(state), _num_moments(state, optimizer)) for state in states]
    return sum(own * num for own, num in found) / max(sum(own for own, _ in found), 1)


def optimizer_flops(state: ModelState, optimizer: str) -> int:
    """The floating-point operations of the products in a step; other arithmetic counts as none."""
    if not state.trainable or not _is_muons(state, optimizer):
        return 0
    m, n = sorted(state.shape)
    # A round multiplies an m × n matrix by its transpose, the product by itself, and that by the matrix.
    return MUON_ROUNDS * (4 * m * m * n + 2 * m * m * m)


def _num_moments(state: ModelState, optimizer: str) -> int:
    """How many numbers an optimiser remembers of each weight of a parameter."""
    return 1 if optimizer == "sgd" or _is_muons(state, optimizer) else 2


def _is_muons(state: ModelState, optimizer: str) -> bool:
    return optimizer == "muon" and is_hidden_matrix(state.name, len(state.shape))
