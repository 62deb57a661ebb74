"""The weight versions of one stage: as many banks of leaf tensors, and the newest weights in full precision.

Version v lives in bank v mod `num_banks`, where it takes the place of version v − `num_banks`. A micro-batch
holds the version that it runs on from its forward to its backward; a bank that is held cannot be written.

Everything lies in flat arenas, one for each kind and parameter group, with the parameters at the same places
in all; `BankMemory` counts their bytes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from bireme.codec.lowrank import Product
from bireme.memory.arena import Slots
from bireme.runtime.gradients import GradientPool, PrincipalGradients, most_piece_elements, step_all
from bireme.runtime.paging.stage_memory import StageMemory
from bireme.runtime.parameter_groups import (
    BankMemory,
    ParameterGroupWeights,
    Tensors,
    bank_dtype_of,
    part_of,
    step_dtype_of,
)
from bireme.runtime.shared_weights import GatheredWeights, SharedWeights, Sharers, frozen_parts
from bireme.runtime.stepper import OptimizerFactory, Stepper
from bireme.runtime.trial import Trials
from bireme.schedule.instruction import Item
from bireme.schedule.program import Rule
from bireme.sync.exchange import are_finite, norm_workspace_bytes
from bireme.sync.reducer import NUMBERS_BYTES

# What a program does wrong with weight versions. No program that the checker proves right comes to that.


class BankInUse(RuntimeError):  # noqa: N818 (named for what happened)
    """A bank was to be written while a micro-batch still needs the version in it. The program is wrong."""

    def __init__(self, stage: int, version: int | None, made: int, num_held: int) -> None:
        super().__init__(
            f"Stage {stage} cannot replace version {version} by version {made}, because "
            f"{num_held} micro-batches in flight still need it."
        )


class DeadVersion(RuntimeError):  # noqa: N818 (named for what happened)
    """A version was asked for that is not made yet, or overwritten. The program is wrong."""

    def __init__(self, stage: int, version: int, living: Collection[int]) -> None:
        has = ", ".join(map(str, living))
        super().__init__(f"Stage {stage} must run on version {version}, but has version {has}.")


Gradients = Mapping[str, Tensor | Product | None]


@dataclass(frozen=True, slots=True)
class HeldWeights:
    """Weights of a version on one rank, by name: `whole` ones, and this replica's `pieces` of those that no
    replica has whole.
    """

    whole: Tensors
    pieces: Tensors


class WeightBanks:
    """Starts with copies of `parameters` as version 0; those in `trainable` get versions, the others do not.

    Banks are of `bank_dtype`, or of each parameter's own dtype. Where that has fewer than 32 bits, float32
    master weights are stepped in its place. The parameters in `summed_apart` lie on parameter groups of their
    own, because their gradients are summed with other ranks than those of the rest. The gradients of the
    weights in `principal` are kept as components. Where replicas are `sharers` of the optimizer, this
    one steps and remembers its parts of the weights, and gets the others' as they are made, or when they are
    gathered. The replicas in `averagers` have whole optimizers, but average a part of the weights each.
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
        summed_apart: Collection[str] = (),
        stage: int = 0,
        principal: PrincipalGradients | None = None,
        memory: StageMemory | None = None,
        sharers: Sharers | None = None,
        averagers: Sharers | None = None,
    ) -> None:
        self._averagers = averagers
        self._memory = memory = memory or StageMemory()
        self.is_fresh = rule is Rule.FRESH
        """Whether banks hold trial versions."""
        self._stage = stage
        self._dtypes = {name: bank_dtype_of(tensor, bank_dtype) for name, tensor in parameters.items()}
        given = {
            name: tensor.detach().to(step_dtype_of(self._dtypes[name]))
            for name, tensor in parameters.items()
            if name in trainable
        }
        frozen = {
            name: tensor.detach().to(self._dtypes[name])
            for name, tensor in parameters.items()
            if name not in given
        }
        gathers = sharers is not None and sharers.gathers
        self._stepper = Stepper(
            given,
            factory,
            {name: (self._dtypes[name], name in summed_apart) for name in given},
            memory.allocator(Item.OPTIMIZER),
            sharers,
        )
        self._trials = Trials(self._stepper)
        parts = self._stepper.parts or (None,) * len(self._stepper.parameter_groups)
        self._stores = [
            ParameterGroupWeights(
                parameter_group,
                given,
                self._dtypes,
                num_banks,
                memory,
                is_apart=self.is_fresh,
                part=part,
                keeps_part=gathers,
                averaged=None
                if averagers is None
                else part_of(parameter_group, averagers.member, averagers.num_members),
            )
            for parameter_group, part in zip(self._stepper.parameter_groups, parts, strict=True)
        ]
        store_of = {name: store for store in self._stores for name in store.leaves[0]}
        self.trainable = tuple(given)
        """The parameters that there are versions of."""
        self._banks = [
            {name: store_of[name].leaves[bank][name] for name in given} for bank in range(num_banks)
        ]
        views = [dict(chain(*(s.stepped(bank).items() for s in self._stores))) for bank in range(num_banks)]
        self._stepped = [{name: own[name] for name in given if name in own} for own in views]
        self._apart = {
            name: view for one in self._stores if one.apart for name, view in one.apart.views.items()
        }
        self.shared: SharedWeights | None = None
        """This replica's side of what replicas share."""
        self._frozen_stores: list[ParameterGroupWeights] = []
        """This replica's parts of the frozen weights, if replicas share them."""
        if sharers is not None and gathers:
            self._frozen_stores = frozen_parts(sharers, frozen, memory)
            self._frozen: Tensors = {
                name: view for one in self._frozen_stores for name, view in one.leaves[0].items()
            }
        else:
            self._frozen = memory.frozen(frozen)
        if sharers is not None:
            kind = GatheredWeights if gathers else SharedWeights
            self.shared = kind(
                sharers, self._stepper, self._trials, self._stores, num_banks, self._frozen_stores
            )
        self._leaves = [
            {name: bank[name] if name in bank else self._frozen[name] for name in parameters}
            for bank in self._banks
        ]
        self._lives: list[int | None] = [0, *[None] * (num_banks - 1)]
        self._held = [0] * num_banks
        self.newest_version = 0
        """How many updates have been made."""
        device = next(iter(parameters.values())).device if parameters else torch.device("cpu")
        source = memory.gradients if memory.is_paged else None
        self.gradients = GradientPool(
            self._stepper.parameter_groups,
            self.trainable,
            device,
            principal,
            source,
            self._stepper.parts,
            summed_apart=summed_apart,
            sharers=sharers if gathers else None,
        )
        """Where the sums of the gradients lie."""
        memory.before_gradients(self.gradients.reserve)

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters, whether they learn or not."""
        return tuple(self._dtypes)

    @property
    def gathered(self) -> GatheredWeights | None:
        """What gathers the weights, where each replica keeps a part of them."""
        return self.shared if isinstance(self.shared, GatheredWeights) else None

    def arrive(self, version: int) -> None:
        """Wait until a version is whole here, if other replicas make or keep a part of it."""
        if self.shared is not None:
            self.shared.arrive(version)

    @property
    def living(self) -> tuple[int, ...]:
        """The versions that there are to compute with, oldest first."""
        return tuple(sorted(version for version in self._lives if version is not None))

    def leaves(self, version: int) -> Tensors:
        """All parameters as of a version, the trainable ones as leaves that require gradients."""
        return self._leaves[self._bank_of(version)]

    def held(self, *, before: bool = False) -> HeldWeights:
        """What this rank has of W, in the precision in which it is stepped: what a checkpoint holds. With
        `before`, what it has of the version that the next batch runs on where that is not W: the one before
        it, or a trial version. Not copies: `read` gives their contents.
        """
        version = self._other_version if before else self.newest_version
        whole: dict[str, Tensor] = {}
        pieces: dict[str, Tensor] = {}
        if version is None:
            return HeldWeights(whole, pieces)
        if self.gathered is None:  # else there is this replica's part in any case
            self.arrive(version)
        bank = self.bank_of(version)
        frozen = () if before else self._frozen_stores
        for store, number in (*((store, bank) for store in self._stores), *((store, 0) for store in frozen)):
            views, is_whole = store.held(number, is_newest=not before)
            (whole if is_whole else pieces).update(views)
        if not before and self.gathered is None:
            whole |= self._frozen
        return HeldWeights(whole, pieces)

    def read(self, tensor: Tensor) -> Tensor:
        """A tensor that lies here with its content, whichever tier has it; a copy if it is paged."""
        return self._memory.read(tensor.detach())

    def newest(self) -> Tensors:
        """W, in the precision in which it is stepped. Not copies, but of what is paged. Replicas that share
        the optimizer must all call it, and get copies of what none has whole.
        """
        newest = self.held().whole
        if self.shared is not None:
            newest = {**newest, **self.shared.copies(self.bank_of(self.newest_version))}
        return {name: self.read(newest[name]) for name in self._dtypes if name in newest}

    def newest_to_compute_with(self) -> Tensors:
        """W as a stage takes it, for an evaluation; copies only of what is in no bank in that dtype. Replicas
        that share the optimizer must have settled.
        """
        self.arrive(self.newest_version)
        if not self.is_fresh or self.shared is not None:
            return {name: self.read(leaf) for name, leaf in self.leaves(self.newest_version).items()}
        return {name: tensor.to(self._dtypes[name]) for name, tensor in self.newest().items()}

    @contextmanager
    def lent(self) -> Iterator[Tensors | None]:
        """W as a stage takes it, to be read within this context, where it lies; None if it is paged and the
        device has no room for it, or if it must be gathered and that of another stage is lent.
        """
        if self.gathered is not None:
            with self.gathered.lent(self.newest_version) as is_whole:
                yield self.leaves(self.newest_version) if is_whole else None
        elif not self._memory.is_paged:
            yield self.newest_to_compute_with()
        elif self.is_fresh:
            yield None  # W lies among what the optimizer remembers
        else:
            bank = self.newest_version % len(self._banks)
            with self._memory.lent([(Item.WEIGHTS, bank), (Item.FROZEN, 0)]) as has_room:
                yield self.leaves(self.newest_version) if has_room else None

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """What the optimizer remembers, by the parameters' names. Not copies."""
        found = self._stepper.state_dict()
        if not self._memory.is_paged:
            return found
        return {
            name: {key: self.read(one) if isinstance(one, Tensor) else one for key, one in state.items()}
            for name, state in found.items()
        }

    @torch.no_grad()
    def put_back_state(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        """Have the optimizer remember what was changed in what `optimizer_state` gave."""
        for name, state in self._stepper.state_dict().items():
            for key, one in state.items():
                if isinstance(one, Tensor):
                    self._memory.put_back(one, changed[name][key])

    @torch.no_grad()
    def state_kinds(self) -> dict[str, dict[str, torch.dtype]]:
        """By parameter, the keys under which the optimizer remembers a number for each element, and its
        dtype; known before the first step.
        """
        return self._stepper.kinds(self.newest())

    @property
    def _other_version(self) -> int | None:
        """The version besides W that the next batch runs on, if there is one."""
        version = self.newest_version if self.is_fresh else self.newest_version - 1
        return version if version >= 0 and version in self._lives else None

    def _bank_of(self, version: int) -> int:
        bank = version % len(self._lives)
        if self._lives[bank] != version:
            raise DeadVersion(self._stage, version, self.living)
        return bank

    def bank_of(self, version: int) -> int:
        """The number of the bank that a version lies in, or is to be made in."""
        return version % len(self._banks)

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

        The step is made with the gradients times `scale`, which is done in place. Under the FRESH rule it
        touches no bank, under the others it is written over the oldest version.
        """
        self._expect_next(version)
        if self.is_fresh:
            if not skip:
                self._step(self._apart, gradients, lr_factor, scale)
        else:
            newest = self.newest_version % len(self._banks)
            bank = self._open(version)
            for store in self._stores:
                store.begin(bank, newest, skips=skip)
            if not skip:
                self._step(self._stepped[bank], gradients, lr_factor, scale)
                self._copy_apart_into(bank)
            self._close(version)
            if self.shared is not None:
                self.shared.made(bank)
        self.newest_version = version

    def _step(self, weights: Tensors, gradients: Gradients, lr_factor: float, scale: float) -> None:
        cut = None if self.shared is None else self.shared.own
        step_all(self._stepper, weights, gradients, lr_factor=lr_factor, scale=scale, cut=cut)

    @torch.no_grad()
    def trial(
        self,
        version: int,
        gradients: Gradients | None,
        *,
        gradient_scale: float = 1.0,
        lr_factor: float = 1.0,
        scale: float = 1.0,
        flats: Sequence[Tensor] = (),
    ) -> None:
        """Make trial version `version` from W(version − 1), which stays, and what there is of its gradient.

        Without gradients, or where one is not finite, the trial version is W(version − 1) itself: a batch on
        weights that are no numbers would be lost too, and every one after it. `flats` is the memory that the
        gradients lie in. Replicas that share the optimizer must all call it.
        """
        self._expect_next(version)
        bank = self._open(version)
        given = {name: one for name, one in (gradients or {}).items() if one is not None}
        factors = (one.factors if isinstance(one, Product) else (one,) for one in given.values())
        counts = bool(given) and are_finite([*chain.from_iterable(factors)])
        if self.shared is not None:
            held = given.keys() if counts else ()
            factor = gradient_scale * scale
            self.shared.try_step(bank, flats, held, lr_factor=lr_factor, factor=factor)
        elif not counts:
            self._copy_apart_into(bank)
        else:
            self._trials.make(
                self._apart, self._banks[bank], given, lr_factor=lr_factor, factor=gradient_scale * scale
            )
        self._close(version)

    @property
    def averaged(self) -> list[tuple[Slots, Tensor]]:
        """What is averaged of W from here, in the precision in which it is stepped, with its layout: all of
        it, or this replica's part. Copies if it is paged.
        """
        bank = self.newest_version % len(self._banks)
        both = (store.to_average(bank) for store in self._stores)
        return [(slots, self._memory.read(flat)) for slots, flat in both]

    @torch.no_grad()
    def average(
        self, version: int, write: Callable[[Sequence[Tensor]], None], *, is_drained: bool = False
    ) -> None:
        """Have W(version), the newest, changed in place: `write` is given the flats that are `averaged` here.
        Replicas that average a part each must all call it.

        No micro-batch may run on it yet. Under the FRESH rule it touches no bank, unless the window
        `is_drained`: then the next batch runs on W.
        """
        if version != self.newest_version:
            raise RuntimeError(
                f"Stage {self._stage} is to average version {version}, but its newest is "
                f"{self.newest_version}."
            )
        if self.is_fresh and not (is_drained and version in self._lives):
            self._write_averaged(write)
            return
        bank = self._open(version)
        self._write_averaged(write)
        for store in self._stores:
            store.round_anywhere(bank)
        self._close(version)
        if self.shared is not None and self._memory.is_paged:
            self.shared.make_whole(bank)
        elif self.shared is not None:
            self.shared.made(bank)

    def _write_averaged(self, write: Callable[[Sequence[Tensor]], None]) -> None:
        """Have what is averaged from here changed, and get what the other replicas have averaged, if each
        averages a part.
        """
        bank = self.newest_version % len(self._banks)
        flats = [flat for _, flat in self.averaged]
        write(flats)
        for store, flat in zip(self._stores, flats, strict=True):
            self._memory.put_back(store.to_average(bank)[1], flat)
        for store in self._stores:
            if self._averagers is not None and store.averaged is not None:
                whole = self._memory.read(store.newest_part(bank))
                for pending in self._averagers.gather([(whole, store.averaged.parts)]):
                    pending.wait()
                self._memory.put_back(store.newest_part(bank), whole)

    def averaged_piece(self, name: str) -> tuple[slice, tuple[int, ...]] | None:
        """The elements of a parameter that are averaged from here, and its shape; None if all of it is."""
        for store in self._stores:
            part = store.part or store.averaged
            if part is not None and name in part.pieces:
                return part.pieces[name], store.banks[0].slots[name].shape
        return None

    def complete(self) -> None:
        """Get the parts of all versions of the other replicas that share the optimizer, if only this one's
        were loaded; all of them must call it. Trial versions are each replica's own.
        """
        if self.shared is not None and not self.is_fresh:
            for version in self.living:
                self.shared.make_whole(self.bank_of(version))

    @torch.no_grad()
    def settle(self) -> None:
        """Make the newest weights the version that the next batch runs on, once a window has drained.

        Under the FRESH rule a window begins on W itself, for no gradient is under way. Under the others there
        is nothing to do.
        """
        if self.is_fresh and self.newest_version not in self._lives:
            bank = self._open(self.newest_version)
            with self._memory.opened(Item.OPTIMIZER), self._memory.opened(Item.WEIGHTS, bank):
                self._copy_apart_into(bank)
                if self.shared is not None:
                    self.shared.made(bank)
                    self.shared.arrive(bank)
            self._close(self.newest_version)

    @torch.no_grad()
    def load(
        self,
        parameters: Tensors,
        optimizer_state: Mapping[str, Mapping[str, Any]],
        *,
        version: int,
        older: Mapping[int, Tensors] | None = None,
    ) -> None:
        """Take over copies of W(version) and of the optimizer's state; of both what has names from here.

        Of weights that replicas share, this replica's pieces do; `complete` then gets the others.
        `older` are the living versions before it, and under the FRESH rule the trial version of that number.
        What it lacks becomes equal to W(version); a trial version of replicas that share the optimizer does
        when the window begins. Frozen weights that are not given stay.
        """
        versions: Sequence[int] = range(version, version - len(self._banks), -1)
        if self.is_fresh:
            versions = [version] if older and version in older else []
        for living in [one for one in versions if one >= 0]:
            is_newest = living == version and not self.is_fresh
            given = parameters if is_newest or older is None else older.get(living, parameters)
            bank = self._open(living)
            with self._memory.opened(Item.WEIGHTS, bank):
                for store in self._stores:
                    store.put(bank, given)
            self._close(living)
        if frozen := {name: parameters[name] for name in self._frozen if name in parameters}:
            with self._memory.opened(Item.FROZEN):
                for store in self._frozen_stores:
                    store.put(0, frozen)
                for name, tensor in frozen.items() if self.gathered is None else ():
                    self._frozen[name].copy_(tensor)
        self._lives = [one if one in versions else None for one in self._lives]
        self.newest_version = version
        with self._memory.opened(Item.OPTIMIZER):
            for store in self._stores:
                store.put_apart(parameters)
            bank = version % len(self._banks)
            whole = (self._stepped if self.shared is None else self._banks)[bank]
            self._stepper.load_state_dict(optimizer_state, whole, self._stepped[bank])
        if self.shared is None:  # else all replicas must take part
            self.settle()

    def memory(self) -> BankMemory:
        """What all this takes now; an optimizer takes its share at its first step."""
        slots = [
            slot
            for parameter_group in self._stepper.own_parameter_groups
            for _, slot in parameter_group.slots.items()
        ]
        norm_bytes = norm_workspace_bytes(slot.end - slot.begin for slot in slots)
        # A trial step looks whether its gradients are finite while the batch before is summed up.
        waiting_bytes = NUMBERS_BYTES if self.is_fresh else 0
        frozen_bytes = sum(store.num_bank_bytes for store in self._frozen_stores)
        if self.gathered is None:
            frozen_bytes = sum(tensor.nbytes for tensor in self._frozen.values())
        principal = self.gradients.principal
        settled_bytes = piece_bytes = 0
        if principal is not None:
            settled_bytes = principal.num_bytes
            piece_bytes = most_piece_elements(self._stepper, principal.shapes) * principal.most_itemsize
        return BankMemory(
            banks_bytes=sum(store.num_bank_bytes for store in self._stores),
            frozen_bytes=frozen_bytes,
            apart_bytes=sum(store.apart.num_bytes for store in self._stores if store.apart is not None),
            optimizer_bytes=self._stepper.state_bytes() + settled_bytes,
            gradient_bytes=self.gradients.num_bytes,
            workspace_bytes=self._trials.num_bytes + norm_bytes + waiting_bytes + piece_bytes,
        )

    def _copy_apart_into(self, bank: int) -> None:
        for store in self._stores:
            store.round_into(bank)

    def _expect_next(self, version: int) -> None:
        if version != self.newest_version + 1:
            raise RuntimeError(
                f"Stage {self._stage} is to make version {version}, but its newest weights are version "
                f"{self.newest_version}."
            )

    def _open(self, version: int) -> int:
        """The bank that a version belongs in, to be written; what was in it is gone."""
        bank = version % len(self._lives)
        if self._held[bank]:
            raise BankInUse(self._stage, self._lives[bank], version, self._held[bank])
        self.arrive(bank)
        self._lives[bank] = None
        return bank

    def _close(self, version: int) -> None:
        """The version has been written. A graph that still needs what was there before fails from now on."""
        bank = version % len(self._lives)
        self._lives[bank] = version
        increment_version(list(self._banks[bank].values()))
