"""Which batches of a run are recorded by instruction: a few early ones of the schedule that stays."""

from bireme.plan.plan_file import SavedPlan
from bireme.schedule.program import Rule
from bireme.train.plan_search import first_delayed_step
from bireme.train.run_file import RunFile

RECORDED = 6
"""Batches whose instructions are recorded, early in a run: the first of them fill the pipeline."""

_SETTLING, _LONG = 10, 40
"""So many batches go before them where so many are to come: the first ones of a process are slow."""


def recorded_first(run: RunFile, rule: Rule, *, step: int, delayed_from: int) -> int:
    """The step after which to record, for a schedule that begins after `step`. If what is learned depends on
    where the pipeline is drained, it must not depend on where a run stopped.
    """
    if rule is Rule.FRESH:
        return delayed_from
    return step + (_SETTLING if run.training.steps - step >= _LONG else 0)


def has_room(run: RunFile, first: int) -> bool:
    """Whether batches follow those that are recorded, or they are recorded however few there are."""
    return first + RECORDED < run.training.steps or run.log.trace


def is_recorded(run: RunFile, saved: SavedPlan) -> bool:
    """Whether a new run comes to record any."""
    rule = saved.plan.source.rule
    begin = 0 if rule is Rule.SYNCHRONOUS else first_delayed_step(run, saved)
    first = recorded_first(run, rule, step=begin, delayed_from=begin)
    return begin < run.training.steps and has_room(run, first)
