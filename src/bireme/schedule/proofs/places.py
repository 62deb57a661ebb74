"""Proof that every instruction is in its place: on the rank of its stage, within the window, and well formed.

The other proofs take this for granted.
"""

from collections.abc import Iterator

from bireme.schedule.instruction import AVERAGES, PAGING, RECEIVES, SENDS, SHARING, Instruction, Item, Kind
from bireme.schedule.program import Program
from bireme.schedule.proofs.messages import channel_of
from bireme.schedule.rule import Rule

__all__ = ["misplaced"]

SLICED = frozenset({Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD})
"""The kinds that may be about half a micro-batch."""


def misplaced(program: Program) -> Iterator[str]:
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
    if program.rank_of_stage[stage] != rank:
        return f"stage {stage} is on rank {program.rank_of_stage[stage]}"
    if instruction.batch not in batches:
        return f"the window's batches are {batches.start} to {batches.stop - 1}"
    if instruction.half is not None and (instruction.half not in (0, 1) or instruction.kind not in SLICED):
        return "only forwards and their messages have halves, which are 0 and 1"
    if instruction.kind in SENDS or instruction.kind in RECEIVES:
        ends = channel_of(program, instruction)
        if ends is None:
            return "there is no stage on the other side"
        if ends[0] == ends[1]:
            return "both stages are on that rank, so nothing goes between ranks"
    if instruction.kind in AVERAGES and program.average_lag is None:
        return "replicas average no weights in this program"
    if instruction.kind in SHARING and program.num_sharers == 1:
        return "replicas share no weights in this program"
    return _microbatch_problem(program, instruction)


def _microbatch_problem(program: Program, instruction: Instruction) -> str | None:
    k = instruction.microbatch
    if instruction.kind in PAGING:
        page = instruction.page
        if page is None or program.tiers_of(program.rank_of_stage[instruction.stage]) is None:
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
    return None
