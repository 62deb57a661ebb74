"""The codecs of a run's borders, batch by batch: from the run file and the plan.

They depend on the number of the batch alone, so a run that is resumed goes on to the last bit.
"""

from collections.abc import Callable
from dataclasses import replace

from bireme.codec.border import AS_IT_IS, BorderCodecs, CodecPhase, LinkCodecs
from bireme.codec.description import NONE
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan, load_plan
from bireme.runtime.coding import checked
from bireme.train.folder import RunFolder
from bireme.train.run_file import RunFile
from bireme.train.run_file.links import AUTO, LinksTable

__all__ = [
    "check_borders",
    "idle_codec",
    "link_codecs",
    "main_codecs",
    "tell_changed_codecs",
    "with_own_codecs",
]


def main_codecs(run: RunFile, plan: Plan) -> tuple[BorderCodecs, ...]:
    """The codecs of each border in the middle of a run."""
    num_borders = plan.num_stages - 1
    asked = run.links
    if asked.codec is None or asked.codec == AUTO:
        found = [*plan.codecs, *[AS_IT_IS] * (num_borders - len(plan.codecs))]
    else:
        found = [BorderCodecs(asked.codec, asked.codec)] * num_borders
    for one in asked.borders or ():
        if one.number < num_borders:
            found[one.number] = one.codecs
    return tuple(found)


def link_codecs(run: RunFile, plan: Plan) -> LinkCodecs:
    """The codecs of all borders over a run."""
    steps, parts = run.training.steps, run.links.schedule
    num_borders = plan.num_stages - 1
    first, last = round(parts.first_fraction * steps), round(parts.last_fraction * steps)
    phases = {0: main_codecs(run, plan)}
    if first:
        phases = {0: _all(parts.first_codec, num_borders), first: phases[0]}
    if last:
        phases = {begin: one for begin, one in phases.items() if begin < steps - last}
        phases[steps - last] = _all(parts.last_codec, num_borders)
    if all(one.is_none for borders in phases.values() for one in borders):
        return LinkCodecs()
    return LinkCodecs(tuple(CodecPhase(begin, phases[begin]) for begin in sorted(phases)))


def with_own_codecs(found: SavedPlan, run: RunFile) -> SavedPlan:
    """A plan from a file, for a run that may send over its borders by other codecs than the file's: what the
    file promises is then not of this run, and left out.
    """
    check_borders(run, found.plan)
    usual = main_codecs(run.model_copy(update={"links": LinksTable()}), found.plan)
    return found if main_codecs(run, found.plan) == usual else replace(found, forecast=None)


def check_borders(run: RunFile, plan: Plan) -> None:
    """Refuse codecs for borders that the plan does not have, and codecs of one's own that are wrong."""
    for one in run.links.borders or ():
        if one.number >= plan.num_stages - 1:
            raise BiremeError(
                f"links.borders names the border {one.border}, but the plan has {plan.num_stages} stages, 0 "
                f"to {plan.num_stages - 1}. Name a border between two of them, or set plan.depth."
            )
    checked(link_codecs(run, plan))


def idle_codec(run: RunFile, plan: Plan) -> tuple[str, ...]:
    """A sentence about a codec that the run asks for, if nothing crosses a border of its plan."""
    word = run.links.codec
    if word in (None, AUTO, str(NONE)) or len(set(plan.source.rank_of_stage)) > 1:
        return ()
    return (
        f"links.codec = {word} has no effect: all stages of the plan are on one device, so nothing is sent "
        "between stages. Set plan.depth to 2 or more, or leave the codec out.",
    )


def tell_changed_codecs(run: RunFile, plan: Plan, folder: RunFolder, tell: Callable[[str], None]) -> None:
    """Say that a run goes on with other codecs than it had, which is allowed."""
    before, now = link_codecs(folder.load_run(), load_plan(folder.plan).plan), link_codecs(run, plan)
    if now != before:
        tell(f"The codecs of the borders change from {_named(before)} to {_named(now)}.")


def _named(codecs: LinkCodecs) -> str:
    """All of them in a sentence: those of a part of the run each once, and where the next part begins."""
    parts = []
    for phase in codecs.phases:
        words = " and ".join(
            dict.fromkeys(
                one.forward
                if one.forward == one.backward
                else f"{one.forward} with gradients in {one.backward}"
                for one in phase.borders
            )
        )
        parts.append(f"from step {phase.first_batch + 1} on {words}" if phase.first_batch else words)
    return ", ".join(parts) or "none"


def _all(word: str, num_borders: int) -> tuple[BorderCodecs, ...]:
    return (BorderCodecs(word, word),) * num_borders
