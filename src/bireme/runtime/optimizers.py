"""Optimizers by name: from a word and a few numbers to ordinary torch optimizers.

A factory is called once per stage, with the parameters of that stage and their own names. It may assume
nothing about other stages, so what it decides, it decides by a parameter's name and shape alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from bireme.devices import KINDS
from bireme.errors import BiremeError
from bireme.memory.arena import PLAIN, ArenaAllocator
from bireme.profile.optimizers import check_optimizer, is_hidden_matrix
from bireme.schedule.instruction import Item

# Where the memory of a stage lies that training changes: with torch, or in ranges that chunks come to.
#
# This is the interface by which weight banks and stages know of paging, and what it is without: nothing is
# asked twice, nothing is copied.


class Stash:
    """Room for what one micro-batch keeps."""

    def keep(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy in the room."""
        return tensor

    def saving(self, _others: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Within this context, what autograd saves goes into the room, but for the memory of the others."""
        return nullcontext()


UNPAGED = Stash()
"""Micro-batches keep what they keep with torch."""


class StageMemory:
    """Memory that is always there."""

    is_paged = False
    """Whether reading what there is makes copies of it."""
    has_master = False
    """Whether weights must be made from a master copy, because the version before may be elsewhere."""

    def allocator(self, _item: Item, _number: int = 0) -> ArenaAllocator:
        """For an item that is there for good: a bank of weights, an optimizer's state, or frozen weights."""
        return PLAIN

    def gradients(self) -> ArenaAllocator:
        """For the sums of one batch more."""
        return PLAIN

    def frozen(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights that do not learn, where they stay; maybe copies."""
        return weights

    def before_gradients(self, reserve: Callable[[int], ArenaAllocator]) -> None:
        """`reserve` is to be asked for the memory of a batch's `gradients` when the first is about to come
        there.
        """

    def stash(self, _batch: int, _microbatch: int) -> Stash:
        """For what a micro-batch keeps between its passes."""
        return UNPAGED

    def lasting(self, tensor: Tensor) -> Tensor:
        """A result of a pass that can be read when what the pass used has left; a copy if it lies there."""
        return tensor

    def opened(self, _item: Item, _number: int = 0) -> AbstractContextManager[None]:
        """Within this context an item may be read and written between instructions."""
        return nullcontext()

    def lent(self, _items: Sequence[tuple[Item, int]]) -> AbstractContextManager[bool]:
        """Within this context items, each with its number, can be read where they lie, between instructions;
        False if the device has no room for them.
        """
        return nullcontext(True)

    def read(self, tensor: Tensor) -> Tensor:
        """A tensor with its content, whichever tier has it; a copy if it is paged."""
        return tensor

    def put_back(self, _tensor: Tensor, _changed: Tensor) -> None:
        """Have a tensor be what `read` gave of it, which has been changed since."""

    def end(self, _item: Item, _number: int) -> None:
        """Nobody needs an item any more that was opened."""


NamedTensors = list[tuple[str, Tensor]]

OptimizerFactory = Callable[[NamedTensors], Optimizer | Sequence[Optimizer]]
"""Makes what steps the given parameters. Each of them must be in just one group of one optimizer."""

_WEIGHT_DECAY = {"adam": 0.0, "adamw": 0.01, "muon": 0.1, "sgd": 0.0}
"""What torch takes where nothing is said."""


def _is_hidden(name: str, parameter: Tensor) -> bool:
    return is_hidden_matrix(name, parameter.ndim)


def named_optimizer(
    name: str,
    *,
    lr: float,
    weight_decay: float | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    momentum: float | None = None,
    no_decay_1d: bool = True,
    rest_lr: float | None = None,
    muon_takes: Callable[[str, Tensor], bool] = _is_hidden,
) -> OptimizerFactory:
    """The factory of `adam`, `adamw`, `muon` or `sgd`; what is not said is as in torch.

    With `no_decay_1d` only parameters of two and more axes decay. `momentum` is for sgd (0.9) and muon
    (0.95). Muon steps the matrices that `muon_takes` says, as far as AdamW would, so that one learning rate
    does for both, and leaves the rest to AdamW at `rest_lr`, or at `lr` where that is not given.
    """
    check_optimizer(name)
    decay = _WEIGHT_DECAY[name] if weight_decay is None else weight_decay
    rate_of_rest = lr if rest_lr is None else rest_lr
    _refuse_outside("learning rate", lr)
    _refuse_outside("learning rate of the rest", rate_of_rest)
    _refuse_outside("weight decay", decay)
    for share in betas if momentum is None else (*betas, momentum):
        _refuse_outside("momentum", share, below=1.0)

    def groups(named: NamedTensors) -> list[dict[str, object]]:
        decays = [pair for pair in named if pair[1].ndim >= 2 or not no_decay_1d]
        others = [pair for pair in named if pair[1].ndim < 2 and no_decay_1d]
        both = ({"params": decays, "weight_decay": decay}, {"params": others, "weight_decay": 0.0})
        return [group for group in both if group["params"]]

    def make(named: NamedTensors) -> list[Optimizer]:
        # One kernel is several times as fast as several, and takes no temporary copies.
        fused = True if all(tensor.device.type in KINDS for _, tensor in named) else None
        if name == "muon":
            taken = [pair for pair in named if muon_takes(*pair)]
            matrices = {pair[0] for pair in taken}
            left = [pair for pair in named if pair[0] not in matrices]
            made: list[Optimizer] = []
            if taken:
                inertia = 0.95 if momentum is None else momentum
                adjust = "match_rms_adamw"
                made.append(Muon(taken, lr=lr, weight_decay=decay, momentum=inertia, adjust_lr_fn=adjust))
            if left:
                made.append(AdamW(groups(left), lr=rate_of_rest, betas=betas, fused=fused))
            return made
        if not named:
            return []
        if name == "sgd":
            return [SGD(groups(named), lr=lr, momentum=0.9 if momentum is None else momentum, fused=fused)]
        kind = Adam if name == "adam" else AdamW
        return [kind(groups(named), lr=lr, betas=betas, fused=fused)]

    return make


def _refuse_outside(what: str, value: float, below: float = math.inf) -> None:
    if not 0.0 <= value < below:
        limit = "" if below == math.inf else f" and less than {below:g}"
        raise BiremeError(f"An optimizer cannot have a {what} of {value}: it must be 0 or more{limit}.")
