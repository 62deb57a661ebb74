"""Exchange with torch: the schedule files that torch.distributed.pipelining loads and dumps.

Such a file is a CSV without a header. Row i is rank i, a cell is an action such as `2F0` (stage 2, forward,
micro-batch 0) or empty where the rank idles, and the whole is one batch, which torch runs once per step.
Some files hold the computations only, some the communication too. Torch reads a cell as far as it
understands it; here a cell is an action from its first character to its last, or an error. This module
needs no torch.
"""

import csv
import io
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bireme.errors import BiremeError
from bireme.files import read_text, write_text_atomically
from bireme.schedule.grid import NeverRunsError
from bireme.schedule.instruction import COMPUTE, RECEIVES, SENDS, Instruction, Kind
from bireme.schedule.program import Program, Rule, Track
from bireme.schedule.routes import Routes
from bireme.schedule.source import fold
from bireme.schedule.weave import Orders, every_batch, lower, weave

_COMMUNICATION = SENDS | RECEIVES
_PEER = {Kind.SEND_FORWARD: 1, Kind.RECV_FORWARD: -1, Kind.SEND_BACKWARD: -1, Kind.RECV_BACKWARD: 1}
"""How many stages on the other end of a transfer lies."""
_CLASHES = {
    Kind.BACKWARD: (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT),
    Kind.BACKWARD_INPUT: (Kind.BACKWARD_INPUT, Kind.BACKWARD),
    Kind.BACKWARD_WEIGHT: (Kind.BACKWARD_WEIGHT, Kind.BACKWARD),
}
"""What of the same micro-batch and stage an action cannot be beside; for the others, only itself."""

_ACTION = re.compile(
    "([0-9]{1,9})(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)([0-9]{1,9})?"
)
_HOUSEKEEPING = frozenset({"UNSHARD", "RESHARD", "REDUCE_GRAD"})
"""Work on a stage's parameters or gradients. It is left out: `weave` puts in what Bireme needs of it."""
_COMPOUND = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def load(path: Path, num_batches: int = 1) -> Program:
    """The program in a schedule file, its one batch repeated `num_batches` times."""
    return parse(read_text(path, "schedule file"), source=str(path), num_batches=num_batches)


def parse(text: str, *, source: str, num_batches: int = 1) -> Program:
    """The program that the text of a schedule file says; `source` names the file in errors.

    Communication stays where the file has it, and whether it is right is for the checker to say. A file
    without any is lowered, for which its computations must be complete.
    """
    if num_batches < 1:
        raise BiremeError(f"A program needs at least one batch, not {num_batches}.")
    sheet = _read(text, source)
    rank_of_stage = _placement(sheet)
    num_microbatches = _num_microbatches(sheet)
    _check_repeats(sheet)
    if sheet.has_communication:
        _check_communication(sheet, rank_of_stage)
    else:
        _check_complete(sheet, len(rank_of_stage), num_microbatches)
    one_batch: Orders = [[] for _ in range(sheet.num_ranks)]
    for cell, action in sheet.actions():
        if action.kind is not None:
            one_batch[cell.rank].append(Instruction(action.kind, action.stage, 0, action.microbatch))

    def make(batches: int) -> Program:
        program = weave(
            Path(source).stem,
            Rule.SYNCHRONOUS,
            Routes(rank_of_stage),
            every_batch(one_batch, batches),
            num_microbatches=num_microbatches,
            num_batches=batches,
        )
        return program if sheet.has_communication else lower(program)

    try:
        return fold(make, num_batches)
    except NeverRunsError as error:
        raise NeverRunsError(f"{source}: {error}", error.cycle) from error


def save(program: Program, path: Path, *, comms: bool = False) -> None:
    """Write `to_csv` of the program to a file, whole or not at all."""
    write_text_atomically(path, to_csv(program, comms=comms))


def to_csv(program: Program, *, comms: bool = False) -> str:
    """One batch of a program as a schedule file of torch's format `compute_only`, or `compute_comms`.

    Updates are left out: in torch the optimizer steps outside. With `comms` the communication is that of
    the first batch, and REDUCE_GRAD says where a stage's gradients are complete, for there torch divides
    them by the number of micro-batches. A file with communication gathers no parameters; stages under
    FSDP need the one without, to which torch adds that.
    """
    _check_expressible(program)
    batch = _one_batch(program)
    _check_order_of_losses(batch)
    if comms and not batch.is_lowered:
        batch = lower(batch)
    written = COMPUTE | _COMMUNICATION | {Kind.REDUCE} if comms else COMPUTE
    rows = ([_written(step) for step in track if step.kind in written] for track in batch.tracks)
    return "".join(",".join(row) + "\n" for row in rows)


@dataclass(frozen=True, slots=True)
class _Action:
    """One action of a cell. Housekeeping has no kind, but tells where its stage lives."""

    kind: Kind | None
    stage: int
    microbatch: int | None


@dataclass(frozen=True, slots=True)
class _Cell:
    """A cell, where it is and what it says: nothing, one action, or the parts of a compound."""

    source: str
    rank: int
    column: int
    text: str
    actions: tuple[_Action, ...] = ()

    def error(self, why: str) -> BiremeError:
        where = f"row {self.rank + 1} (rank {self.rank}), column {self.column + 1}"
        return BiremeError(f"{self.source}, {where}, {_quoted(self.text)}: {why}")


@dataclass(frozen=True, slots=True)
class _Sheet:
    """A file's cells, row by row."""

    source: str
    num_ranks: int
    cells: tuple[_Cell, ...]

    def actions(self) -> Iterator[tuple[_Cell, _Action]]:
        return ((cell, action) for cell in self.cells for action in cell.actions)

    @property
    def has_communication(self) -> bool:
        return any(action.kind in _COMMUNICATION for _, action in self.actions())


def _read(text: str, source: str) -> _Sheet:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise BiremeError(f"{source}, line {reader.line_num}, is not CSV: {error}.") from error
    if not rows:
        raise BiremeError(f"{source} is empty. A schedule file has one row of actions for each rank.")
    cells: list[_Cell] = []
    for rank, row in enumerate(rows):
        read = [_read_cell(_Cell(source, rank, column, text)) for column, text in enumerate(row)]
        if not any(action.microbatch is not None for cell in read for action in cell.actions):
            raise BiremeError(
                f"{source}, row {rank + 1} (rank {rank}), does nothing. Every line, even a blank one, is "
                "a rank: delete it, or give the rank a stage."
            )
        cells.extend(read)
    return _Sheet(source, len(rows), tuple(cells))


def _read_cell(cell: _Cell) -> _Cell:
    text = cell.text.strip()
    if not text:
        return cell
    compound = _COMPOUND.fullmatch(text)
    parts = compound[1].split(";") if compound else [text]
    return replace(cell, actions=tuple(_read_action(part.strip(), cell) for part in parts))


def _read_action(text: str, cell: _Cell) -> _Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise cell.error(
            f"{_quoted(text)} is not an action. An action is a stage, what to do and a micro-batch, such as "
            "0F3, 2B0 or 1SEND_F2; or UNSHARD, RESHARD or REDUCE_GRAD after a stage; or several of them as "
            "in (1F0;2B3)OVERLAP_F_B."
        )
    stage, what, microbatch = match.groups()
    if what in _HOUSEKEEPING:
        if microbatch is not None:
            raise cell.error(f"{what} is for a whole stage and takes no micro-batch. Write {stage}{what}.")
        return _Action(None, int(stage), None)
    if microbatch is None:
        raise cell.error(f"{text} does not say of which micro-batch. Write {text}0 for micro-batch 0.")
    return _Action(Kind(what), int(stage), int(microbatch))


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


def _placement(sheet: _Sheet) -> tuple[int, ...]:
    """For each stage the rank whose row has its actions."""
    homes: dict[int, _Cell] = {}
    for cell, action in sheet.actions():
        home = homes.setdefault(action.stage, cell)
        if home.rank != cell.rank:
            raise cell.error(
                f"stage {action.stage} is on rank {cell.rank} here, but on rank {home.rank} in row "
                f"{home.rank + 1}, column {home.column + 1}. A stage must be on one rank."
            )
    _check_gaps(sheet, "stage", "Stages", homes)
    return tuple(homes[stage].rank for stage in range(len(homes)))


def _num_microbatches(sheet: _Sheet) -> int:
    numbers = {action.microbatch for _, action in sheet.actions() if action.microbatch is not None}
    _check_gaps(sheet, "micro-batch", "Micro-batches", numbers)
    return len(numbers)


def _check_gaps(sheet: _Sheet, one: str, all_of_them: str, numbers: Collection[int]) -> None:
    missing = next((number for number in range(len(numbers)) if number not in numbers), None)
    if missing is not None:
        raise BiremeError(
            f"{sheet.source}: {one} {missing} never appears, though {one} {max(numbers)} does. {all_of_them} "
            "are numbered from 0 without gaps."
        )


def _check_repeats(sheet: _Sheet) -> None:
    done: dict[_Action, _Cell] = {}
    for cell, action in sheet.actions():
        if action.kind is None:
            continue
        for kind in _CLASHES.get(action.kind, (action.kind,)):
            before = done.get(replace(action, kind=kind))
            if before is not None:
                raise cell.error(
                    f"{action.stage}{kind.value}{action.microbatch} has been done in column "
                    f"{before.column + 1}. A micro-batch passes a stage once each way."
                )
        done[action] = cell


def _check_communication(sheet: _Sheet, rank_of_stage: tuple[int, ...]) -> None:
    for cell in sheet.cells:
        if not cell.actions:
            raise cell.error(
                "the cell is empty. A rank may idle only in a file without SEND and RECV; with them, the "
                "waiting follows from the messages. Delete the cell."
            )
    for cell, action in sheet.actions():
        if action.kind not in _COMMUNICATION:
            continue
        peer = action.stage + _PEER[action.kind]
        if not 0 <= peer < len(rank_of_stage):
            end = "first" if peer < 0 else "last"
            raise cell.error(f"stage {action.stage} is the {end}, so there is no stage on the other end.")
        if rank_of_stage[peer] == cell.rank:
            raise cell.error(
                f"stages {action.stage} and {peer} are on the same rank, so nothing goes between ranks."
            )


def _check_complete(sheet: _Sheet, num_stages: int, num_microbatches: int) -> None:
    done = {action for _, action in sheet.actions()}
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            has = {kind for kind in COMPUTE if _Action(kind, stage, microbatch) in done}
            split = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
            if Kind.FORWARD not in has:
                lacks = f"no forward of micro-batch {microbatch}, {stage}F{microbatch}"
            elif Kind.BACKWARD not in has and not split <= has:
                lacks = (
                    f"no whole backward of micro-batch {microbatch}, which is {stage}B{microbatch}, or "
                    f"{stage}I{microbatch} and {stage}W{microbatch}"
                )
            else:
                continue
            raise BiremeError(
                f"{sheet.source}: stage {stage} has {lacks}. A file without SEND and RECV must run all "
                f"{num_microbatches} micro-batches forward and backward on all {num_stages} stages, for the "
                "communication is worked out from that."
            )


def _check_expressible(program: Program) -> None:
    cannot = f"Torch's schedule files cannot express {program.name}: "
    if program.rule is not Rule.SYNCHRONOUS:
        raise BiremeError(
            f"{cannot}its update rule is {program.rule}, and torch knows neither weight versions nor updates "
            "inside a schedule. Export a synchronous schedule, such as 1f1b."
        )
    if program.routes.shares:
        raise BiremeError(
            f"{cannot}its stages are on several ranks, and a file has each stage on one. Export a plan of "
            "equal widths, whose replicas run the same file."
        )
    for track in program.tracks:
        for step in track.written():
            if step.half is not None:
                raise BiremeError(
                    f"{cannot}it slices micro-batch {step.microbatch} in halves, and torch has no name for a "
                    "half. Export 1f1b instead, which computes the same."
                )
            if step.kind is Kind.RECOMPUTE:
                raise BiremeError(
                    f"{cannot}it recomputes stage {step.stage}, and torch has no action for that. Export it "
                    "without recomputation and wrap the stage's module in torch.utils.checkpoint."
                )


def _one_batch(program: Program) -> Program:
    """The first batch alone, where all batches are computed in the same order, one after the other."""
    tracks = []
    for rank, track in enumerate(program.tracks):
        batches: dict[int, list[Instruction]] = {}
        newest = program.first_batch
        # Two rounds of a loop show all there is to see.
        for step in track.repeated(min(track.repeats, 2)):
            batches.setdefault(step.batch, []).append(step.shifted(-step.batch, -step.batch))
            if step.kind in COMPUTE:
                if step.batch < newest:
                    raise BiremeError(
                        f"{program.name} cannot be a file for torch, which finishes a batch before it starts "
                        f"the next: rank {rank} starts batch {newest} before {step}."
                    )
                newest = step.batch
        orders = {batch: [step for step in steps if step.kind in COMPUTE] for batch, steps in batches.items()}
        for batch, order in orders.items():
            if order != orders[program.first_batch]:
                raise BiremeError(
                    f"{program.name} cannot be a file for torch, which runs every batch alike: rank {rank} "
                    f"computes batch {batch} in another order than batch {program.first_batch}."
                )
        tracks.append(Track(tuple(batches[program.first_batch])))
    return replace(program, tracks=tuple(tracks), num_batches=1, first_batch=0)


def _check_order_of_losses(batch: Program) -> None:
    last = batch.num_stages - 1
    track = batch.tracks[batch.rank_of_stage[last]]
    order = [step.microbatch or 0 for step in track if step.kind is Kind.FORWARD and step.stage == last]
    if order != sorted(order):
        raise BiremeError(
            f"Torch cannot run {batch.name}: its last stage forwards micro-batches in the order "
            f"{', '.join(map(str, order))}, but torch takes the n-th loss for that of micro-batch n, and so "
            "fails or computes wrong gradients. Let the last stage forward them in order."
        )


def _written(step: Instruction) -> str:
    if step.kind is Kind.REDUCE:
        return f"{step.stage}REDUCE_GRAD"
    return f"{step.stage}{step.kind.value}{step.microbatch}"
