"""The checker: what can be proved about a program before anything runs it.

`check` takes any lowered program, a generator's or a file's, and finds what would make it wrong, lose a
gradient, read a weight version that is not there, or wait for ever. It also counts what the program keeps.
"""

from dataclasses import dataclass
from itertools import chain, islice

from bireme.schedule.program import Program
from bireme.schedule.proofs.deadlock import run_to_end
from bireme.schedule.proofs.gathering import gathering_problems
from bireme.schedule.proofs.messages import message_problems
from bireme.schedule.proofs.paging import paging_problems
from bireme.schedule.proofs.places import misplaced
from bireme.schedule.proofs.stages import stage_problems
from bireme.schedule.residency import Residency, resident

__all__ = ["CheckReport", "check"]

MOST_PROBLEMS = 20
"""One mistake can have many consequences; the first ones tell enough."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What the checker found.

    `deadlock` is the circle of waiting instructions where sends are synchronous, or None;
    `deadlock_if_buffered` says whether it remains where sends complete at once. `ranks` is empty where
    instructions are out of place.
    """

    problems: tuple[str, ...]
    deadlock: tuple[str, ...] | None
    deadlock_if_buffered: bool
    ranks: tuple[Residency, ...]

    @property
    def ok(self) -> bool:
        """Whether the program is proved right."""
        return not self.problems and self.deadlock is None

    def verdict(self, name: str) -> str:
        """In one sentence, what is wrong with the program of that name."""
        if self.problems:
            more = len(self.problems) - 1
            others = " `bireme schedule --check` shows more." if more else ""
            return f"{name} is not a correct program. {self.problems[0]}{others}"
        return f"{name} deadlocks: {'; '.join(self.deadlock or ())}."


def check(program: Program) -> CheckReport:
    """Everything that is wrong with a program, and what each rank keeps."""
    problems = list(islice(misplaced(program), MOST_PROBLEMS))
    if problems:
        # An instruction in a wrong place makes nonsense of every other proof.
        return CheckReport(tuple(problems), deadlock=None, deadlock_if_buffered=False, ranks=())
    proofs = chain(
        stage_problems(program),
        message_problems(program),
        paging_problems(program),
        gathering_problems(program),
    )
    problems = list(islice(proofs, MOST_PROBLEMS))
    stuck = run_to_end(program, synchronous_sends=True)
    buffered = None if stuck is None else run_to_end(program, synchronous_sends=False)
    deadlock = None
    if stuck is not None and stuck.cycle:
        deadlock = tuple(stuck.waits[rank] for rank in stuck.cycle)
    elif stuck is not None and not problems:
        problems.extend(f"{wait[0].upper()}{wait[1:]}, for ever." for wait in stuck.waits.values())
    return CheckReport(
        problems=tuple(problems),
        deadlock=deadlock,
        deadlock_if_buffered=buffered is not None and bool(buffered.cycle),
        ranks=tuple(resident(program, rank) for rank in range(program.num_ranks)),
    )
