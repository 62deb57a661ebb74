"""The checker: what can be proved about a program before anything runs it.

`check` takes any lowered program, a generator's or a file's, and finds what would make it wrong, lose a
gradient, read a weight version that is not there, or wait for ever. It also counts what the program keeps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from bireme.schedule.chunk_account import Holding
from bireme.schedule.instruction import AVERAGES, PAGING, RECEIVES, SENDS, SHARING, Instruction, Item, Kind
from bireme.schedule.program import Program, Rule
from bireme.schedule.proofs.deadlock import run_to_end
from bireme.schedule.proofs.messages import channel_of, exchange_problems, message_problems
from bireme.schedule.proofs.stages import stage_problems
from bireme.schedule.residency import Residency, resident

# Proof that every instruction is in its place: on the rank of its stage, within the window, and well formed.
#
# The other proofs take this for granted.

_SLICED = frozenset({Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD})
"""The kinds that may be about half a micro-batch."""


def _misplaced(program: Program) -> Iterator[str]:
    """Every instruction that is where it cannot be, and why."""
    for rank, track in enumerate(program.tracks):
        for instruction in track:
            problem = _problem(program, rank, instruction)
            if problem is not None:
                yield f"Rank {rank} holds {instruction}, but {problem}."


def _problem(program: Program, rank: int, instruction: Instruction) -> str | None:
    stage, batches = instruction.stage, program.batches
    if not 0 <= stage < program.num_stages:
        return f"the stages are 0 to {program.num_stages - 1}"
    ranks = program.routes.ranks_of(stage)
    if rank not in ranks:
        return f"stage {stage} is on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
    if instruction.batch not in batches:
        return f"the window's batches are {batches.start} to {batches.stop - 1}"
    if instruction.half is not None and (instruction.half not in (0, 1) or instruction.kind not in _SLICED):
        return "only forwards and their messages have halves, which are 0 and 1"
    if instruction.kind in SENDS or instruction.kind in RECEIVES:
        ends = channel_of(program, instruction)
        if ends is None:
            return "there is no stage on the other side"
        if ends[0] == ends[1]:
            return "both stages are on that rank, so nothing goes between ranks"
    if instruction.kind in AVERAGES and program.average_lag is None:
        return "replicas average no weights in this program"
    if (instruction.kind in SHARING or instruction.moves_whole) and program.num_sharers == 1:
        return "replicas share no weights in this program"
    return _microbatch_problem(program, rank, instruction)


def _microbatch_problem(program: Program, rank: int, instruction: Instruction) -> str | None:
    k = instruction.microbatch
    if instruction.kind in PAGING:
        page = instruction.page
        if instruction.moves_whole:
            return None if k is None else "it must name no micro-batch"
        if page is None or program.tiers_of(rank) is None:
            return "it moves nothing" if page is None else "its rank keeps everything on the device"
        if page.item is Item.FROZEN and instruction.kind is Kind.EVICT and page.is_copied:
            return "frozen weights are never written back: their copy below is valid"
        needs_one = page.item is Item.STASH or (page.item is Item.GRADIENT and program.rule is Rule.STASHED)
    elif instruction.kind in (Kind.REDUCE, Kind.UPDATE):
        needs_one = program.rule is Rule.STASHED
    else:
        needs_one = instruction.kind not in {Kind.TRIAL, *AVERAGES, *SHARING}
    if needs_one != (k is not None):
        return "it must name a micro-batch" if needs_one else "it must name no micro-batch"
    if k is not None and not 0 <= k < program.num_microbatches:
        return f"the micro-batches are 0 to {program.num_microbatches - 1}"
    owner = program.routes.rank_of(instruction.stage, k)
    if k is not None and owner != rank:
        return f"rank {owner} takes micro-batch {k} through stage {instruction.stage}"
    return None


# Proofs about chunks: what is used is there, nothing is lost, and no tier holds more than it can.
#
# What is proved: every use finds its chunks on the device, or on their way there; a FETCH finds a copy in the
# tier below and an EVICT one in its own; nothing is evicted while it is being fetched; what nobody else has
# is copied before its slot is given back, if it is read again; at no moment is a tier over capacity. If
# replicas share weights: every pass finds its weights whole, they are used before they are evicted, and they
# are evicted before their bank is written again and before the window ends.


def _paging_problems(program: Program) -> Iterator[str]:
    """What is wrong with the chunks of any rank. Every instruction must be in its place."""
    for rank in range(program.num_ranks):
        if program.tiers_of(rank) is None and program.num_sharers == 1:
            continue
        holding = Holding(program, rank)
        for tier, held in zip(holding.tiers.tiers, holding.held, strict=True):
            if tier.capacity is not None and held > tier.capacity:
                yield (
                    f"Rank {rank} begins with {held} chunks on {tier.name}, which has room for "
                    f"{tier.capacity}."
                )
        for step in program.tracks[rank]:
            yield from holding.start(step)
            holding.end(step)
        yield from holding.finish()


_MOST_PROBLEMS = 20
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
    problems = list(islice(_misplaced(program), _MOST_PROBLEMS))
    if problems:
        # An instruction in a wrong place makes nonsense of every other proof.
        return CheckReport(tuple(problems), deadlock=None, deadlock_if_buffered=False, ranks=())
    proofs = chain(
        stage_problems(program),
        message_problems(program),
        _paging_problems(program),
        exchange_problems(program),
    )
    problems = list(islice(proofs, _MOST_PROBLEMS))
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
