"""What the banks of a stage hold, to be read: by forwards, checkpoints, exports and evaluations."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bireme.runtime.bank_errors import DeadVersion
from bireme.runtime.gathered_weights import GatheredWeights
from bireme.runtime.shared_weights import SharedWeights
from bireme.runtime.stage_memory import StageMemory
from bireme.runtime.stepper import Stepper
from bireme.schedule.instruction import Item

__all__ = ["BankContents"]

Tensors = Mapping[str, Tensor]


class BankContents:
    """The weight versions of one stage, and what the optimiser remembers; whoever steps them sets these."""

    shared: SharedWeights | None
    """What there is of the optimiser here, where replicas share it."""
    _memory: StageMemory
    _is_fresh: bool
    _stage: int
    _dtypes: dict[str, torch.dtype]
    _frozen: Tensors
    _stepper: Stepper
    _banks: list[dict[str, Tensor]]
    _stepped: list[dict[str, Tensor]]
    _leaves: list[dict[str, Tensor]]
    _lives: list[int | None]
    _newest_version: int

    @property
    def gathered(self) -> GatheredWeights | None:
        """What gathers the weights, where each replica keeps a part of them."""
        return self.shared if isinstance(self.shared, GatheredWeights) else None

    @property
    def living(self) -> tuple[int, ...]:
        """The versions that there are to compute with, oldest first."""
        return tuple(sorted(version for version in self._lives if version is not None))

    def leaves(self, version: int) -> Tensors:
        """All parameters as of a version, the trainable ones as leaves that require gradients."""
        return self._leaves[self._bank_of(version)]

    def newest(self, names: Collection[str] | None = None, *, alone: bool = False) -> Tensors:
        """W, or what of it has these names, in the precision in which it is stepped: what a checkpoint holds.
        Not copies. Replicas that share the optimiser must all call it, and get copies of what none has whole;
        with `alone` these are left out.
        """
        bank, shared = self._newest_version % len(self._banks), self.shared
        trained = self._stepped[bank] if shared is None else shared.newest(bank, alone=alone)
        newest = {**trained, **self._frozen}
        wanted = [name for name in self._dtypes if name in newest and (names is None or name in names)]
        return {name: self._read(newest[name]) for name in wanted}

    def next_to_run_on(self, *, alone: bool = False) -> Tensors:
        """What the next batch runs on where that is not W: the version before it, or a trial version; else
        nothing. `alone` and copies are as for `newest`.
        """
        version = self._other_version
        if version is None:
            return {}
        if self.shared is not None:
            return self.shared.run_on(version, alone=alone)
        return {name: self._read(leaf) for name, leaf in self._banks[self._bank_of(version)].items()}

    def own_pieces(self, *, before: bool = False) -> Tensors:
        """This replica's pieces of what nobody has whole of W, or of the version `before` it that the next
        batch runs on. Not copies.
        """
        assert self.shared is not None, "who shares has pieces"
        if not before:
            return self.shared.own_newest(self._newest_version % len(self._banks))
        version = self._other_version
        return {} if version is None else self.shared.own_run_on(version)

    def newest_to_compute_with(self) -> Tensors:
        """W as a stage takes it, for an evaluation; copies only of what is in no bank in that dtype. Replicas
        that share the optimiser must have settled.
        """
        if self.shared is not None:
            self.shared.arrive(self._newest_version)
        if not self._is_fresh or self.shared is not None:
            return {name: self._read(leaf) for name, leaf in self.leaves(self._newest_version).items()}
        return {name: tensor.to(self._dtypes[name]) for name, tensor in self.newest().items()}

    @contextmanager
    def lent(self) -> Iterator[Tensors | None]:
        """W as a stage takes it, to be read within this context, where it lies; None if it is paged and the
        device has no room for it, or if it must be gathered and that of another stage is lent.
        """
        if self.gathered is not None:
            with self.gathered.lent(self._newest_version) as is_whole:
                yield self.leaves(self._newest_version) if is_whole else None
        elif not self._memory.is_paged:
            yield self.newest_to_compute_with()
        elif self._is_fresh:
            yield None  # W lies among what the optimiser remembers
        else:
            bank = self._newest_version % len(self._banks)
            with self._memory.lent([(Item.WEIGHTS, bank), (Item.FROZEN, 0)]) as has_room:
                yield self.leaves(self._newest_version) if has_room else None

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """What the optimiser remembers, by the parameters' names. Not copies."""
        found = self._stepper.state_dict()
        if not self._memory.is_paged:
            return found
        return {
            name: {key: self._read(one) if isinstance(one, Tensor) else one for key, one in state.items()}
            for name, state in found.items()
        }

    @torch.no_grad()
    def state_kinds(self) -> dict[str, dict[str, torch.dtype]]:
        """By parameter, the keys under which the optimiser remembers a number for each element, and its
        dtype; known before the first step.
        """
        return self._stepper.kinds(self.newest())

    @property
    def _other_version(self) -> int | None:
        """The version besides W that the next batch runs on, if there is one."""
        version = self._newest_version if self._is_fresh else self._newest_version - 1
        return version if version >= 0 and version in self._lives else None

    def _read(self, tensor: Tensor) -> Tensor:
        return self._memory.read(tensor.detach())

    def _bank_of(self, version: int) -> int:
        bank = version % len(self._lives)
        if self._lives[bank] != version:
            raise DeadVersion(self._stage, version, self.living)
        return bank
