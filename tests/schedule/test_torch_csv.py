"""Programs to torch's schedule files and back."""

import csv
import io
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.instruction import Kind
from bireme.schedule.program import Program, Rule, Track
from bireme.schedule.torch_csv import load, parse, save, to_csv
from tests.support.extent import examples

EXPORTABLE = [
    schedule.name
    for schedule in SCHEDULES.values()
    if schedule.rule is Rule.SYNCHRONOUS and not schedule.slices
]
TWO_STAGES = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
WITH_COMMS = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"


@st.composite
def programs(draw: st.DrawFn) -> Program:
    name = draw(st.sampled_from(EXPORTABLE))
    per_rank = draw(st.integers(1, 3)) if name == "interleaved" else SCHEDULES[name].stages_per_rank
    return generate(
        name,
        num_stages=per_rank * draw(st.integers(1, 5)),
        num_microbatches=draw(st.integers(1, 9)),
        num_batches=draw(st.sampled_from((1, 2, 3, 40))),
        stages_per_rank=per_rank,
    )


@examples(60)
@given(programs())
def test_a_program_comes_back_from_its_file(program: Program) -> None:
    text = to_csv(program)
    assert parse(text, source=f"{program.name}.csv", num_batches=program.num_batches) == program


@examples(60)
@given(programs())
def test_communication_comes_back_where_it_stood(program: Program) -> None:
    text = to_csv(program, comms=True)
    again = parse(text, source=f"{program.name}.csv", num_batches=program.num_batches)
    assert to_csv(again, comms=True) == text
    assert to_csv(again) == to_csv(program)
    if program.num_batches == 1:
        assert again == program


@pytest.mark.parametrize("comms", [False, True])
@pytest.mark.parametrize("name", EXPORTABLE)
def test_torch_reads_every_cell_as_it_is_written(name: str, comms: bool) -> None:
    from torch.distributed.pipelining.schedules import _Action

    program = generate(name, num_stages=4, num_microbatches=5)
    cells = to_csv(program, comms=comms).replace("\n", ",").rstrip(",").split(",")
    assert [str(_Action.from_str(cell)) for cell in cells] == cells


@pytest.mark.parametrize("comms", [False, True])
@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_torchs_own_schedules_are_read(name: str, comms: bool) -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    file = io.StringIO(newline="")
    csv.writer(file).writerows(get_schedule_ops(name, 2, 8, 2, with_comms=comms))
    program = parse(file.getvalue(), source=f"{name}.csv")
    assert program.rank_of_stage == ((0, 1, 1, 0) if "V" in name else (0, 1, 0, 1))
    assert program.num_microbatches == 8
    assert program.is_lowered
    assert sum(step.kind is Kind.UPDATE for track in program.tracks for step in track) == 4


def test_a_file_is_read_as_a_synchronous_program_named_after_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(TWO_STAGES)
    program = load(path, num_batches=3)
    assert (program.name, program.rule, program.num_batches) == ("mine", Rule.SYNCHRONOUS, 3)
    assert to_csv(program) == TWO_STAGES


def test_idle_cells_housekeeping_and_compounds_leave_only_their_computations() -> None:
    text = "0UNSHARD,0F0,,0RESHARD,(0F1;0B0)OVERLAP_F_B,,0B1,0REDUCE_GRAD\r\n1F0,1B0,1F1, 1B1\r\n"
    assert to_csv(parse(text, source="x.csv")) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_a_stage_lives_where_its_actions_stand() -> None:
    program = parse("2F0,2B0\n0F0,1F0,1B0,0B0\n", source="x.csv")
    assert program.rank_of_stage == (1, 1, 0)


def test_a_long_run_of_a_file_is_a_loop() -> None:
    program = parse(TWO_STAGES, source="x.csv", num_batches=100_000)
    assert sum(len(list(track.written())) for track in program.tracks) < 200
    assert to_csv(program) == TWO_STAGES


def test_a_file_with_communication_may_lack_computations() -> None:
    assert parse("0F0,0SEND_F0\n1RECV_F0,1F0,1B0\n", source="x.csv").num_stages == 2


@pytest.mark.parametrize(
    "cell",
    [
        "0F0garbage",
        "0FX",
        "F0",
        "0",
        "-1F0",
        "٣F0",
        "0f0",
        "0F0 0F1",
        "\ufeff0F0",
        "0UPDATE",
        "0RECOMPUTE0",
        "0OVERLAP_F_B",
        "()OVERLAP_F_B",
        "(0F0;0B0)",
        "(0F0;;0B0)OVERLAP_F_B",
        "(0F0;0B0)OVERLAP_F_B0",
        "((0F0)OVERLAP_F_B)OVERLAP_F_B",
        pytest.param("9" * 5000 + "F0", id="5000 digits"),
    ],
)
def test_a_cell_that_is_not_wholly_an_action_is_refused(cell: str) -> None:
    _refused(f"0F0,0B0\n1F0,{cell}\n", r"x\.csv, row 2 \(rank 1\), column 2, .* is not an action")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is empty"),
        ("0F0,0B0\n\n", r"row 2 \(rank 1\), does nothing"),
        ("0F0,0B0\n1UNSHARD,,\n", r"row 2 \(rank 1\), does nothing"),
        ('0F0,"0B0\n', "is not CSV"),
        ("0F,0B0\n", r"row 1 \(rank 0\), column 1, '0F': 0F does not say of which micro-batch"),
        ("0F0,0B0,0SEND_F\n", "0SEND_F does not say"),
        ("0UNSHARD3,0F0,0B0\n", "UNSHARD is for a whole stage"),
        ("0F0,0B0\n0F1,0B1\n", r"row 2 \(rank 1\), column 1, '0F1': stage 0 .* on rank 0 in row 1, column 1"),
        ("0F0,0B0\n1F0,1B0\n3F0,3B0\n", "stage 2 never appears, though stage 3"),
        ("1F0,1B0\n", "stage 0 never appears"),
        ("0F0,0F2,0B0,0B2\n", "micro-batch 1 never appears, though micro-batch 2"),
        ("0F0,0F0,0B0\n", "0F0 has been done in column 1"),
        ("0F0,(0B0;0B0)OVERLAP_F_B\n", "0B0 has been done in column 2"),
        ("0F0,0I0,0W0,0B0\n", "0I0 has been done in column 2"),
        ("0F0,0B0,0W0\n", "0B0 has been done in column 2"),
        ("0F0,0B0\n1B0\n", "stage 1 has no forward of micro-batch 0, 1F0"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n", "stage 1 has no whole backward of micro-batch 1"),
        ("0F0,0I0\n", "stage 0 has no whole backward of micro-batch 0"),
        ("0F0,1F0,1F1,0F1,1B0,0B0,1B1,0B1\n", "x.csv: This order deadlocks"),
    ],
)
def test_a_file_that_makes_no_program_is_refused(text: str, why: str) -> None:
    _refused(text, why)


@pytest.mark.parametrize(
    ("row", "cell", "why"),
    [
        (0, "", "the cell is empty"),
        (0, "0SEND_B0", "stage 0 is the first"),
        (0, "0RECV_F0", "stage 0 is the first"),
        (1, "1SEND_F0", "stage 1 is the last"),
        (1, "1RECV_B0", "stage 1 is the last"),
        (0, "0SEND_F0", "0SEND_F0 has been done in column 2"),
    ],
)
def test_communication_with_nobody_is_refused(row: int, cell: str, why: str) -> None:
    rows = WITH_COMMS.splitlines()
    rows[row] += f",{cell}"
    _refused("\n".join(rows), rf"row {row + 1} \(rank {row}\), column 5, '{cell}': {why}")


def test_communication_within_a_rank_is_refused() -> None:
    _refused("0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0\n", "stages 0 and 1 are on the same rank")


def test_a_program_needs_a_batch() -> None:
    with pytest.raises(BiremeError, match="at least one batch, not 0"):
        parse(TWO_STAGES, source="x.csv", num_batches=0)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"0F0,\xff\xfe")
    for path, why in (
        (tmp_path / "none.csv", "There is no schedule file .*none.csv"),
        (tmp_path, "cannot be read"),
        (binary, "not a text in UTF-8: byte 5 is 0xff"),
    ):
        with pytest.raises(BiremeError, match=why):
            load(path)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if SCHEDULES[name].rule is not Rule.SYNCHRONOUS])
def test_weight_versions_cannot_be_written(name: str) -> None:
    _not_written(
        generate(name, num_stages=3, num_microbatches=4, num_batches=2), "knows neither weight versions"
    )


def test_halves_cannot_be_written() -> None:
    _not_written(generate("1f1b-sliced", num_stages=4, num_microbatches=4), "slices micro-batch 0 in halves")


def test_recomputation_cannot_be_written() -> None:
    program = generate("1f1b", num_stages=3, num_microbatches=4, recompute=[1])
    _not_written(program, "it recomputes stage 1")


def test_a_loss_out_of_order_cannot_be_written() -> None:
    program = parse("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n", source="x.csv")
    _not_written(program, "in the order 1, 0")


def test_batches_of_different_orders_cannot_be_written() -> None:
    program = generate("gpipe", num_stages=1, num_microbatches=2, num_batches=2)
    first, second = (
        list(generate(name, num_stages=1, num_microbatches=2).tracks[0]) for name in ("gpipe", "1f1b")
    )
    later = [step.shifted(1, 1) for step in second]
    _not_written(
        replace(program, tracks=(Track((*first, *later)),)), "computes batch 1 in another order than batch 0"
    )
    overlapping = [first[0], later[0], *first[1:], *later[1:]]
    _not_written(
        replace(program, tracks=(Track(tuple(overlapping)),)), "starts batch 1 before 0F1 of batch 0"
    )


def test_a_saved_file_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("old")
    path.chmod(0o600)
    save(parse(WITH_COMMS, source="x.csv"), path, comms=True)
    assert (
        path.read_text() == "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n"
    )
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BiremeError, match="No space left on device"):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_written_only_into_a_folder_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match="there is no folder"):
        write_text_atomically(tmp_path / "none" / "schedule.csv", "new")
    with pytest.raises(BiremeError, match="it is a folder"):
        write_text_atomically(tmp_path, "new")


def _refused(text: str, why: str) -> None:
    with pytest.raises(BiremeError, match=why):
        parse(text, source="x.csv")


def _not_written(program: Program, why: str) -> None:
    for comms in (False, True):
        with pytest.raises(BiremeError, match=why):
            to_csv(program, comms=comms)
