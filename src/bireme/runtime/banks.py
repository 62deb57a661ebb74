"""The weight versions of one stage: as many banks of leaf tensors, and the newest weights in full precision.

Version v lives in bank v mod `num_banks`, where it takes the place of version v − `num_banks`. A micro-batch
holds the version that it runs on from its forward to its backward; a bank that is held cannot be written.

Bytes for each trainable parameter, with Adam and without gradients (2 more in bfloat16, 4 more in float32):

                float32 banks           bfloat16 banks
    rule        banks  W  Adam  sum     banks  W  Adam  sum
    synchronous   4    -   8    12        2    4   8    14
    delayed       8    -   8    16        4    4   8    16
    fresh         8    4   8    20        4    4   8    16

W is the newest weights where they are kept apart from the banks: as float32 master weights of bfloat16 banks,
and under the FRESH rule, whose banks hold trial versions.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from bireme.runtime.optimizers import OptimizerFactory
from bireme.runtime.stepper import Stepper
from bireme.schedule.rule import Rule

__all__ = ["BankInUse", "BankMemory", "DeadVersion", "WeightBanks"]

Tensors = Mapping[str, Tensor]
Gradients = Mapping[str, Tensor | None]


class BankInUse(RuntimeError):  # noqa: N818 (named for what happened)
    """A bank was to be written while a micro-batch still needs the version in it. The program is wrong."""

    def __init__(self, stage: int, version: int | None, made: int, num_held: int) -> None:
        super().__init__(
            f"Stage {stage} cannot make version {made} in the place of version {version}, which "
            f"{num_held} micro-batches under way still need."
        )


class DeadVersion(RuntimeError):  # noqa: N818 (named for what happened)
    """A version was asked for that is not made yet, or overwritten. The program is wrong."""

    def __init__(self, stage: int, version: int, living: Collection[int]) -> None:
        has = ", ".join(map(str, living))
        super().__init__(f"Stage {stage} is to run on version {version}, but has version {has}.")


@dataclass(frozen=True, slots=True)
class BankMemory:
    """What the weights of a stage take: `apart` is W where it is kept apart from the banks."""

    banks_bytes: int
    frozen_bytes: int
    apart_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.banks_bytes + self.frozen_bytes + self.apart_bytes + self.optimizer_bytes


class WeightBanks:
    """Starts with `parameters` as version 0; those in `trainable` get versions, the others are there once.

    The tensors given are taken over, where their dtype allows it, and written: do not use them any more.
    Banks are of `bank_dtype`, or of each parameter's own dtype. Where that has fewer than 32 bits, float32
    master weights are stepped in its place.
    """

    def __init__(
        self,
        parameters: Tensors,
        trainable: Collection[str],
        *,
        rule: Rule,
        num_banks: int,
        factory: OptimizerFactory,
        bank_dtype: torch.dtype | None = None,
        stage: int = 0,
    ) -> None:
        self._is_fresh = rule is Rule.FRESH
        self._stage = stage
        self._dtypes = {name: _bank_dtype(tensor, bank_dtype) for name, tensor in parameters.items()}
        self._frozen: dict[str, Tensor] = {}
        self._apart: dict[str, Tensor] = {}
        newest: dict[str, Tensor] = {}
        for name, tensor in parameters.items():
            dtype = self._dtypes[name]
            if name not in trainable:
                self._frozen[name] = tensor.detach().to(dtype)
                continue
            newest[name] = tensor.detach().to(torch.float32 if dtype.itemsize < 4 else dtype)
            if self._is_fresh or newest[name].dtype != dtype:
                self._apart[name] = newest[name]
        self._banks = [self._new_bank(newest, is_first=bank == 0) for bank in range(num_banks)]
        self._leaves = [
            {name: bank[name] if name in bank else self._frozen[name] for name in parameters}
            for bank in self._banks
        ]
        self._lives: list[int | None] = [0, *[None] * (num_banks - 1)]
        self._held = [0] * num_banks
        self._newest_version = 0
        self._stepper = Stepper(newest, factory)

    @property
    def trainable(self) -> tuple[str, ...]:
        """The parameters that there are versions of."""
        return tuple(self._banks[0])

    @property
    def is_fresh(self) -> bool:
        """Whether banks hold trial versions."""
        return self._is_fresh

    @property
    def newest_version(self) -> int:
        """How many updates have been made."""
        return self._newest_version

    @property
    def living(self) -> tuple[int, ...]:
        """The versions that there are to compute with, oldest first."""
        return tuple(sorted(version for version in self._lives if version is not None))

    def leaves(self, version: int) -> Tensors:
        """All parameters as of a version, the trainable ones as leaves that require gradients."""
        return self._leaves[self._bank_of(version)]

    def hold(self, version: int) -> None:
        """Keep a version from being overwritten: a micro-batch begins its forward on it."""
        self._held[self._bank_of(version)] += 1

    def release(self, version: int) -> None:
        """A micro-batch has ended its backward on a version."""
        bank = self._bank_of(version)
        if not self._held[bank]:
            raise RuntimeError(f"Stage {self._stage} releases version {version}, which nothing holds.")
        self._held[bank] -= 1

    @torch.no_grad()
    def update(
        self,
        version: int,
        gradients: Gradients,
        *,
        lr_factor: float = 1.0,
        scale: float = 1.0,
        skip: bool = False,
    ) -> None:
        """Make W(version) from the newest weights: a step, or with `skip` the same weights once more.

        Under the FRESH rule that touches no bank, in the others it is written over the oldest version.
        """
        self._expect_next(version)
        if self._is_fresh:
            if not skip:
                self._stepper.step(self._apart, gradients, lr_factor=lr_factor, scale=scale)
        else:
            newest = self._banks[self._bank_of(self._newest_version)]
            target = self._open(version)
            if target is not newest:
                _copy({name: newest[name] for name in newest if skip or name not in self._apart}, target)
            if not skip:
                weights = {**target, **self._apart}
                self._stepper.step(weights, gradients, lr_factor=lr_factor, scale=scale)
                _copy(self._apart, target)
            self._close(version)
        self._newest_version = version

    @torch.no_grad()
    def trial(
        self,
        version: int,
        gradients: Gradients | None,
        *,
        gradient_scale: float = 1.0,
        lr_factor: float = 1.0,
        scale: float = 1.0,
    ) -> None:
        """Make trial version `version` from W(version − 1), which stays, and what there is of its gradient.

        Without gradients, or where one is not finite, the trial version is W(version − 1) itself: a batch on
        weights that are no numbers would be lost too, and every one behind it.
        """
        self._expect_next(version)
        target = self._open(version)
        if gradients is None or not _all_finite(gradients):
            _copy(self._apart, target)
        else:
            self._stepper.trial(
                self._apart,
                target,
                gradients,
                lr_factor=lr_factor,
                scale=scale,
                gradient_scale=gradient_scale,
            )
        self._close(version)

    @torch.no_grad()
    def settle(self) -> None:
        """Make the newest weights the version that the next batch runs on, once a window has drained.

        Under the FRESH rule a window begins on W itself, for no gradient is under way. Under the others there
        is nothing to do.
        """
        if self._is_fresh and self._newest_version not in self._lives:
            _copy(self._apart, self._open(self._newest_version))
            self._close(self._newest_version)

    def newest(self) -> Tensors:
        """W, in the precision in which it is stepped: what a checkpoint holds. Not copies."""
        newest = {**self._banks[self._newest_version % len(self._banks)], **self._apart, **self._frozen}
        return {name: newest[name].detach() for name in self._dtypes}

    def next_to_run_on(self) -> Tensors:
        """What the next batch runs on where that is not W: the version before it, or a trial version; else
        nothing. Not copies.
        """
        version = self._newest_version if self._is_fresh else self._newest_version - 1
        if version < 0 or version not in self._lives:
            return {}
        return {name: leaf.detach() for name, leaf in self._banks[self._bank_of(version)].items()}

    def newest_to_compute_with(self) -> Tensors:
        """W as a stage takes it, for an evaluation; copies only of what is in no bank in that dtype."""
        if not self._is_fresh:
            return {name: leaf.detach() for name, leaf in self.leaves(self._newest_version).items()}
        return {name: tensor.to(self._dtypes[name]) for name, tensor in self.newest().items()}

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """What the optimiser remembers, by the parameters' names. Not copies."""
        return self._stepper.state_dict()

    @torch.no_grad()
    def load(
        self,
        parameters: Tensors,
        optimizer_state: Mapping[str, Mapping[str, Any]],
        *,
        version: int,
        older: Mapping[int, Tensors] | None = None,
    ) -> None:
        """Take over copies of W(version) and of the optimiser's state; of both what has names from here.

        `older` are the living versions before it, and under the FRESH rule the trial version of that number.
        What it lacks becomes equal to W(version).
        """
        versions = [version] if self._is_fresh else range(version, version - len(self._banks), -1)
        for living in [one for one in versions if one >= 0]:
            is_newest = living == version and not self._is_fresh
            given = parameters if is_newest or older is None else older.get(living, parameters)
            _copy({name: given[name] for name in self.trainable}, self._open(living))
            self._close(living)
        _copy({name: parameters[name] for name in self._apart}, self._apart)
        _copy({name: parameters[name] for name in self._frozen}, self._frozen)
        self._lives = [one if one in versions else None for one in self._lives]
        self._newest_version = version
        self._stepper.load_state_dict(optimizer_state)

    def memory(self) -> BankMemory:
        """What all this takes now; an optimiser takes its share at its first step."""
        return BankMemory(
            banks_bytes=sum(leaf.nbytes for bank in self._banks for leaf in bank.values()),
            frozen_bytes=sum(tensor.nbytes for tensor in self._frozen.values()),
            apart_bytes=sum(tensor.nbytes for tensor in self._apart.values()),
            optimizer_bytes=self._stepper.state_bytes(),
        )

    def _new_bank(self, newest: Tensors, *, is_first: bool) -> dict[str, Tensor]:
        """The leaves of one bank; those of the first one hold version 0."""
        bank = {}
        for name, tensor in newest.items():
            if not is_first:
                leaf = torch.empty_like(tensor, dtype=self._dtypes[name])
            elif name in self._apart:
                leaf = tensor.to(self._dtypes[name], copy=True)
            else:
                leaf = tensor
            bank[name] = leaf.requires_grad_()
        return bank

    def _bank_of(self, version: int) -> int:
        bank = version % len(self._lives)
        if self._lives[bank] != version:
            raise DeadVersion(self._stage, version, self.living)
        return bank

    def _expect_next(self, version: int) -> None:
        if version != self._newest_version + 1:
            raise RuntimeError(
                f"Stage {self._stage} is to make version {version}, but its newest weights are version "
                f"{self._newest_version}."
            )

    def _open(self, version: int) -> dict[str, Tensor]:
        """The bank that a version belongs in, to be written; what was in it is gone."""
        bank = version % len(self._lives)
        if self._held[bank]:
            raise BankInUse(self._stage, self._lives[bank], version, self._held[bank])
        self._lives[bank] = None
        return self._banks[bank]

    def _close(self, version: int) -> None:
        """The version has been written. A graph that still needs what was there before fails from now on."""
        bank = version % len(self._lives)
        self._lives[bank] = version
        increment_version(list(self._banks[bank].values()))


def _bank_dtype(tensor: Tensor, asked: torch.dtype | None) -> torch.dtype:
    return asked if asked is not None and tensor.is_floating_point() else tensor.dtype


def _copy(source: Tensors, target: Tensors) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)


def _all_finite(gradients: Gradients) -> bool:
    """Whether no gradient has an infinity or a NaN in it; one look at the device, no copy."""
    norms = [
        torch.linalg.vector_norm(gradient, ord=torch.inf).double()
        for gradient in gradients.values()
        if gradient is not None and gradient.numel()
    ]
    return not norms or bool(torch.stack(norms).isfinite().all())
