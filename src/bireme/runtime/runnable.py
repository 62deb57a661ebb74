"""What a pipeline is asked to run, by name or as a program, in the one form that the engine knows."""

from dataclasses import replace

import torch

from bireme.errors import BiremeError
from bireme.memory.chunk_memory import page_bytes
from bireme.model.graph import Graph
from bireme.model.units import Unit
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.plan.program_plan import ProgramPlan
from bireme.schedule.instruction import Kind
from bireme.schedule.program import Program
from bireme.schedule.rule import Rule
from bireme.schedule.source import ProgramSource, source_of

__all__ = ["AnyPlan", "for_sharers", "on_pages", "runnable", "unhurried", "work_of"]

AnyPlan = Plan | SavedPlan | ProgramPlan | Program


def on_pages(plan: AnyPlan, device: torch.device) -> AnyPlan:
    """The plan with chunks that can be mapped on the device that it runs on."""
    named = plan.plan if isinstance(plan, SavedPlan) else plan
    if not isinstance(named, Plan) or named.paging is None:
        return plan
    fitting = named.on_pages(page_bytes(device))
    return replace(plan, plan=fitting) if isinstance(plan, SavedPlan) else fitting


def runnable(plan: AnyPlan) -> ProgramPlan:
    """What a plan asks for. Refuses a program that is wrong, or right and yet nothing for the engine."""
    match plan:
        case SavedPlan():
            asked = plan.plan.by_program
        case Plan():
            asked = plan.by_program
        case Program():
            asked = ProgramPlan(source_of(plan))
        case ProgramPlan():
            asked = plan
    if asked.source.rule is Rule.STASHED:
        raise BiremeError(
            f"The engine does not run {asked.source.name}, whose stages step after every micro-batch and so "
            "never agree on a batch. 2bw also trains without a bubble, on two weight versions. `bireme "
            "simulate` shows both."
        )
    _check_updates(asked.source)
    return asked


def _check_updates(source: ProgramSource) -> None:
    """A batch ends on a rank for all its stages at once: its norm and its verdict are of all of them."""
    program = source.settled()
    for rank, track in enumerate(program.tracks):
        newest = dict.fromkeys(source.stages_of(rank), program.first_batch - 1)
        for step in track:
            if step.kind is not Kind.UPDATE:
                continue
            newest[step.stage] = step.batch
            last = min(newest, key=newest.__getitem__)
            if step.batch > newest[last] + 1:
                raise BiremeError(
                    f"{source.name} updates stage {step.stage} from batch {step.batch} before stage {last}, "
                    f"which is on the same rank, is updated from batch {newest[last] + 1}. The engine ends a "
                    "batch on all stages of a rank before it ends the next one on any. Change the order of "
                    "these updates."
                )


def unhurried(plan: AnyPlan, by_program: ProgramPlan) -> ProgramPlan:
    """The plan where ranks share parameters: their sums take long, so nobody waits for them unless asked."""
    named = plan.plan if isinstance(plan, SavedPlan) else plan
    if isinstance(named, Plan) and named.updates_early is None:
        return replace(named, updates_early=False).by_program
    return by_program


def _halfway(plan: AnyPlan, by_program: ProgramPlan) -> ProgramPlan:
    """The plan where replicas share an optimiser: updates leave time for the weights to travel."""
    named = plan.plan if isinstance(plan, SavedPlan) else plan
    if isinstance(named, Plan) and not named.updates_halfway:
        return replace(named, updates_halfway=True).by_program
    return by_program


WHOLE_WEIGHTS = 2
"""Of a plan that does not say it: those of the pass that runs, and those of the next on their way."""


def for_sharers(plan: AnyPlan, by_program: ProgramPlan, shard: str) -> ProgramPlan:
    """The plan for replicas that share this: with time for weights to travel, or gathers of them. Refuses a
    plan whose replicas are to share weights where they do not.
    """
    named = plan.plan if isinstance(plan, SavedPlan) else plan
    if isinstance(named, Plan) and named.whole_weights and shard != "weights":
        raise BiremeError(
            f"In the plan replicas share weights (whole_weights = {named.whole_weights}), but shard is "
            f'"{shard}". Set shard = "weights", or make a new plan.'
        )
    if shard == "none" or by_program.width == 1:
        return by_program
    return _halfway(plan, by_program) if shard == "optimizer" else _gathering(plan, by_program)


def _gathering(plan: AnyPlan, by_program: ProgramPlan) -> ProgramPlan:
    """The plan where replicas share weights: they are gathered where they are used."""
    named = plan.plan if isinstance(plan, SavedPlan) else plan
    if not isinstance(named, Plan):
        raise BiremeError(
            "Replicas share the weights, which are gathered where a schedule uses them, but "
            f"{by_program.source.name} "
            'is a program and not a plan with a schedule. Name a schedule, or use shard = "optimizer".'
        )
    if not named.whole_weights:
        by_program = replace(named, whole_weights=WHOLE_WEIGHTS).by_program
    by_program.source.settled()  # refuses schedules that need gradients whole
    return by_program


def work_of(graph: Graph, unit: Unit) -> float:
    """The multiplications of a unit, and a little for each operator, so that none counts for nothing."""
    return sum(1.0 + graph.operators[place].flops for place in unit.operators)
