"""The stages of one rank, put together: the function of each, its weights, its part of the evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from bireme.codec.gradient_words import GradientForm
from bireme.errors import BiremeError
from bireme.model.fed_maps import GradientHook, feeding
from bireme.model.graph import Graph, ModelState
from bireme.model.linear_maps import LinearMap, chosen_maps
from bireme.model.segments import SegmentedFunction
from bireme.model.stage import Resolve, stage_function
from bireme.model.units import Unit, units_of
from bireme.plan.program_plan import ProgramPlan
from bireme.runtime.banks import WeightBanks
from bireme.runtime.batch_end import Batches
from bireme.runtime.borders import Borders
from bireme.runtime.evaluation import EvaluationStage
from bireme.runtime.layout import Layout
from bireme.runtime.optimizers import OptimizerFactory
from bireme.runtime.paging.rank_paging import RankPaging
from bireme.runtime.prepared import Weights
from bireme.runtime.sharers import Sharers
from bireme.runtime.stage import LOSS, AnyStageFunction, Stage

__all__ = ["Assembly"]


@dataclass(frozen=True, slots=True)
class Assembly:
    """What stages are made of, and how they run."""

    graph: Graph
    plan: ProgramPlan
    layout: Layout
    borders: Borders
    device: torch.device
    resolve: Resolve
    compiles: bool
    batches: Batches
    form: GradientForm | None = None
    paging: RankPaging | None = None
    sharers: Sharers | None = None

    def stages(
        self, weights: Weights, factory: OptimizerFactory, bank_dtype: torch.dtype | None
    ) -> dict[int, Stage]:
        """The rank's stages, each with its weights."""
        maps = self._maps()
        found = {}
        for stage, own in self.layout.units.items():
            outlet = GradientHook() if maps else None
            function = self._function(own, maps, outlet)
            found[stage] = self._stage(stage, function, weights, factory, bank_dtype, maps, outlet)
        return found

    def _maps(self) -> Mapping[str, LinearMap]:
        """The weights whose gradients are kept as components."""
        if self.form is None:
            return {}
        if self.plan.source.splits_backward:
            raise BiremeError(
                f"{self.plan.source.name} runs backwards in two halves, and principal components need whole "
                'ones. Use a schedule such as 1f1b or 2bw, or training.gradient = "whole".'
            )
        if self.compiles:
            raise BiremeError(
                "A compiled stage cannot give the pairs that principal components are made from. Leave out "
                'model.compile, or use training.gradient = "whole".'
            )
        return chosen_maps(self.graph, self.form)

    def evaluation_stages(self, evaluation: Graph, stages: dict[int, Stage]) -> dict[int, EvaluationStage]:
        """The same in evaluation mode, on the same weights. They must be cut where those in training are."""
        units = units_of(evaluation)
        in_training = units_of(self.graph)
        if [unit.parameters for unit in units] != [unit.parameters for unit in in_training]:
            raise BiremeError(
                f"In evaluation mode {evaluation.name} is cut into other units ({len(units)}) than in "
                "training "
                f"({len(in_training)}), so its stages hold other parameters. Leave evaluation out."
            )
        found = {}
        for stage, training in stages.items():
            own = [units[unit.index] for unit in self.layout.units[stage]]
            function = stage_function(evaluation, own, resolve=self.resolve, outputs=(LOSS,))
            found[stage] = EvaluationStage(function, training.banks, training.buffers, self.device)
        return found

    def _function(
        self, units: tuple[Unit, ...], maps: Mapping[str, LinearMap], outlet: GradientHook | None
    ) -> AnyStageFunction:
        """What runs some units in training."""
        resolve = self.resolve if outlet is None else feeding(self.resolve, maps, outlet)
        again = set(self.plan.recompute_units) & {unit.index for unit in units}
        if not again:
            return stage_function(self.graph, units, resolve=resolve, compile=self.compiles, outputs=(LOSS,))
        if self.plan.source.splits_backward:
            raise BiremeError(
                f"{self.plan.source.name} runs backwards in two halves, and units that recompute would do so "
                "in each. Recompute whole stages, or use a schedule whose backwards are whole."
            )
        return SegmentedFunction(
            self.graph, units, again, resolve=resolve, compile=self.compiles, outputs=(LOSS,)
        )

    def _stage(
        self,
        stage: int,
        function: AnyStageFunction,
        weights: Weights,
        factory: OptimizerFactory,
        bank_dtype: torch.dtype | None,
        maps: Mapping[str, LinearMap],
        outlet: GradientHook | None,
    ) -> Stage:
        states = {state.name: state for state in (*self.graph.parameters, *self.graph.buffers)}
        names = (*function.parameters, *function.buffers)
        given = {name: tensor.to(self.device) for name, tensor in weights(names).items()}
        for name in names:
            found = tuple(given[name].shape) if name in given else None
            if found != states[name].shape:
                what = "are not there" if found is None else f"have the shape {found}"
                raise BiremeError(
                    f"The weights given for {name} {what}, but the model has {states[name].shape}."
                )
        for name in function.parameters:
            _check_dtype(states[name], given[name].dtype, bank_dtype)
        trainable = tuple(name for name in function.parameters if states[name].trainable)
        for name in trainable:
            if given[name].is_complex() and (self.layout.width > 1 or name in self.layout.tied):
                raise BiremeError(
                    f"The gradient of {name} is of {given[name].dtype}. Several ranks can sum gradients "
                    "of real numbers only. Split the parameter into real ones, or train with one replica."
                )
        source = self.plan.source
        memory = None if self.paging is None else self.paging.stage(stage)
        banks = WeightBanks(
            {name: given[name] for name in function.parameters},
            trainable,
            rule=source.rule,
            num_banks=source.banks[stage],
            factory=factory,
            bank_dtype=bank_dtype,
            summed_apart=self.layout.tied.keys() | (self.layout.repeated if self.sharers else ()),
            stage=stage,
            maps={name: one for name, one in maps.items() if name in trainable},
            form=self.form,
            memory=memory,
            sharers=self.sharers,
        )
        return Stage(
            stage,
            function,
            banks,
            {name: given[name].clone() for name in function.buffers},
            self.borders,
            self.batches,
            device=self.device,
            recomputes=stage in source.recomputed,
            outlet=outlet,
            memory=memory,
        )


def _check_dtype(state: ModelState, given: torch.dtype, bank_dtype: torch.dtype | None) -> None:
    """A stage computes with banks of the dtype that it was captured in."""
    computes_with = bank_dtype if bank_dtype is not None and given.is_floating_point else given
    found = str(computes_with).removeprefix("torch.")
    if found == state.dtype:
        return
    if computes_with is given:
        remedy = f"Give them in {state.dtype}, or capture the model in {found}."
    else:
        remedy = f"With bank_dtype = {found}, capture the model in {found}."
    raise BiremeError(
        f"The weights given for {state.name} would be used in {found}, but the model was captured "
        f"with {state.dtype}. {remedy}"
    )
