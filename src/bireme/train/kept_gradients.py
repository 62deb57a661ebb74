"""Gradients that a run keeps as principal components: what they take, and what they do not go with."""

from typing import Any

from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.linear_maps import chosen_maps
from bireme.plan.plan import Plan
from bireme.plan.plan_request import may_delay_updates
from bireme.profile.kept_gradients import kept_gradients
from bireme.profile.profile import Profile
from bireme.schedule.catalogue import SCHEDULES
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
    """The profile of the run: gradients take what is kept of them."""
    form = run.training.gradient_form
    if form is None:
        return profile
    may_delay = may_delay_updates(run.plan.schedule, synchronous=run.plan.synchronous)
    return kept_gradients(graph, form).counted_in(profile, may_delay=may_delay)


def gradient_document(run: RunFile, graph: Graph) -> dict[str, Any]:
    """For a document: what the gradients of one batch take, and would if they were whole."""
    form = run.training.gradient_form
    return {} if form is None else {"gradient": kept_gradients(graph, form).document(graph)}
