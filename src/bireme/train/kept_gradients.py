"""What gradients take that are kept as principal components: in a profile, for the planner, and in words."""

from dataclasses import replace
from typing import Any

from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.linear_maps import chosen_maps
from bireme.model.units import units_of
from bireme.plan.plan import Plan
from bireme.profile.optimizers import gradient_bytes
from bireme.profile.profile import Profile
from bireme.schedule.catalogue import SCHEDULES
from bireme.schedule.rule import Rule
from bireme.train.run_file import RunFile

__all__ = ["check_gradient", "check_schedule", "gradient_document", "with_kept_gradients"]


def check_gradient(run: RunFile, graph: Graph) -> None:
    """Refuse a form of gradients that the model, or how it runs, does not go with."""
    form = run.training.gradient_form
    if form is None:
        return
    if run.model.compile:
        raise BiremeError(
            f"training.gradient is {form}, but model.compile is set: a compiled stage cannot give the pairs "
            "that components are made from. Leave out one of the two."
        )
    asked = run.plan.schedule
    if asked != "auto" and SCHEDULES[asked].splits_backward:
        raise BiremeError(
            f"training.gradient is {form}, which needs whole backwards, but plan.schedule is {asked}, which "
            "splits them. Use a schedule such as 1f1b or 2bw."
        )
    chosen_maps(graph, form)


def check_schedule(run: RunFile, plan: Plan) -> None:
    """Refuse a plan whose backwards are not whole where components are made from them."""
    form = run.training.gradient_form
    if form is not None and plan.source.splits_backward:
        raise BiremeError(
            f"training.gradient is {form}, which needs whole backwards, but {plan.schedule} splits them. "
            "Use a schedule such as 1f1b or 2bw."
        )


def with_kept_gradients(run: RunFile, graph: Graph, profile: Profile) -> Profile:
    """The profile of the run: gradients take what is kept of them, and what the next batch goes on from is
    with the optimiser's state.
    """
    form = run.training.gradient_form
    if form is None:
        return profile
    states = {state.name: state for state in graph.parameters}
    asked = run.plan.schedule
    may_delay = asked == "auto" or SCHEDULES[asked].rule is not Rule.SYNCHRONOUS
    num_settled = 2 if may_delay and not run.plan.synchronous else 1
    maps = chosen_maps(graph, form)
    units = []
    for unit, cost in zip(units_of(graph), profile.units, strict=True):
        own = [maps[name] for name in unit.parameters if name in maps]
        whole = sum(gradient_bytes(states[one.name]) for one in own)
        kept = sum(
            _kept_bytes(gradient_bytes(states[one.name]), form.rank, one.rows, one.columns) for one in own
        )
        units.append(
            replace(
                cost,
                gradient_bytes=cost.gradient_bytes - whole + kept,
                optimizer_bytes=cost.optimizer_bytes + num_settled * kept,
            )
        )
    return replace(profile, units=tuple(units))


def gradient_document(run: RunFile, graph: Graph) -> dict[str, Any]:
    """For a document: what the gradients of one batch take, over all stages, and would if they were whole."""
    form = run.training.gradient_form
    if form is None:
        return {}
    maps = chosen_maps(graph, form)
    whole = kept = 0
    for state in graph.parameters:
        num_bytes = gradient_bytes(state)
        one = maps.get(state.name)
        whole += num_bytes
        kept += num_bytes if one is None else _kept_bytes(num_bytes, form.rank, one.rows, one.columns)
    return {
        "gradient": {
            "form": str(form),
            "num_weights": len(maps),
            "whole_bytes": whole,
            "kept_bytes": kept,
        }
    }


def _kept_bytes(whole_bytes: int, rank: int, rows: int, columns: int) -> int:
    return whole_bytes // (rows * columns) * rank * (rows + columns + 1)
