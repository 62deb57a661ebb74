"""The pictures in the generators are those of the programs they make, and the grid shows the clock."""

import re
from pathlib import Path
from textwrap import indent

import pytest

import bireme.schedule.generators
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.grid import WIDTH, Grid, ascii_picture, drawn, duration, grid, label, opening
from bireme.schedule.instruction import COMPUTE, Kind
from bireme.schedule.program import Program

PICTURED = {
    "sequential": generate("sequential", num_stages=4, num_microbatches=4),
    "gpipe": generate("gpipe", num_stages=4, num_microbatches=4),
    "1f1b": generate("1f1b", num_stages=4, num_microbatches=4),
    "1f1b-sliced": generate("1f1b-sliced", num_stages=4, num_microbatches=4, num_sliced=2),
    "2bw": generate("2bw", num_stages=4, num_microbatches=4, num_batches=3),
    "2bw-fresh": generate("2bw-fresh", num_stages=4, num_microbatches=4, num_batches=3),
    "pipedream": generate("pipedream", num_stages=4, num_microbatches=4, num_batches=2),
    "interleaved": generate("interleaved", num_stages=8, num_microbatches=4, stages_per_rank=2),
    "zb-h1": generate("zb-h1", num_stages=4, num_microbatches=4),
    "zbv": generate("zbv", num_stages=8, num_microbatches=4),
}
"""What the picture in each generator's file is a picture of."""

GENERATORS = [
    re.sub(r"^#$", "# ", path.read_text(), flags=re.MULTILINE)
    for path in Path(bireme.schedule.generators.__file__).parent.glob("*.py")
]


def test_every_schedule_has_a_picture() -> None:
    assert set(PICTURED) == set(SCHEDULES)


@pytest.mark.parametrize("name", PICTURED)
def test_the_picture_in_a_generator_is_the_program_it_makes(name: str) -> None:
    picture = ascii_picture(PICTURED[name], WIDTH - len("# "))
    assert any(indent(picture, "# ", lambda _: True) in source for source in GENERATORS)


@pytest.mark.parametrize("name", PICTURED)
def test_cells_cover_every_column_once_and_hold_every_instruction(name: str) -> None:
    program = PICTURED[name]
    cells = grid(program)
    for rank, row in enumerate(cells.rows):
        column = 0
        for cell in row:
            assert cell.start == column
            column += cell.width
            if cell.instruction is not None:
                assert cell.width * cells.ticks_per_column == duration(cell.instruction)
        assert column == cells.num_columns
        track = program.tracks[rank]
        assert [cell.instruction for cell in row if cell.instruction] == [
            i for i in track if i.kind in COMPUTE
        ]
        marks = [mark for cell in row for mark in cell.marks]
        assert marks == [i for i in track if i.kind in (Kind.UPDATE, Kind.TRIAL)]


def test_a_column_is_a_forward_or_half_of_one() -> None:
    assert grid(PICTURED["1f1b"]).ticks_per_column == 2
    assert grid(PICTURED["1f1b-sliced"]).ticks_per_column == 1


@pytest.mark.parametrize("name", PICTURED)
@pytest.mark.parametrize("width", [1, 20, 60, 80, 200])
def test_any_width_shows_every_label_and_mark_once(name: str, width: int) -> None:
    cells = grid(PICTURED[name])
    wide, narrow = drawn(cells, 10_000), drawn(cells, width)
    assert narrow.num_columns == wide.num_columns == cells.num_columns
    for rank in range(len(cells.rows)):
        assert _signs(narrow.bands, rank) == _signs(wide.bands, rank)
    if width >= 60:
        lines = [line for band in narrow.bands for line in band]
        assert max(len("".join(piece.text for piece in line)) for line in lines) <= width + 1


def _signs(bands: tuple[tuple[tuple[object, ...], ...], ...], rank: int) -> str:
    """A rank's characters over all bands, without spaces and the length of cells."""
    pieces = [piece for band in bands for piece in band[rank][1:]]
    return "".join(str(getattr(piece, "text", "")) for piece in pieces).replace(" ", "").replace("=", "")


def test_stages_of_one_rank_have_different_labels() -> None:
    two, three = PICTURED["zbv"], generate("interleaved", num_stages=6, num_microbatches=2, stages_per_rank=3)
    assert _labels(two, rank=0) >= {"F0", "f0", "W3", "w3"}
    assert _labels(three, rank=1) == {
        f"{stage}{kind}{k}" for stage in (1, 3, 5) for kind in "FB" for k in (0, 1)
    }


def _labels(program: Program, rank: int) -> set[str]:
    return {label(program, step) for step in program.tracks[rank] if step.kind in COMPUTE}


def test_recomputation_and_a_later_window_are_shown() -> None:
    program = generate(
        "2bw-fresh", num_stages=2, num_microbatches=2, num_batches=2, recompute=[0], first_batch=5
    )
    assert ascii_picture(program).splitlines() == [
        "rank 0: F10 F11 R10 .   B10===='F12 R11 B11==== F13 R12 B12==== R13 B13====|",
        "rank 1: .   F10 B10==== F11 B11===='F12 B12==== .   F13 B13====|.   .   .",
        "F forward   B backward   R recomputation   . idle   | update   ' trial step",
    ]


def test_the_opening_of_a_long_program_is_the_short_one() -> None:
    long = generate("1f1b", num_stages=3, num_microbatches=4, num_batches=1000)
    short = generate("1f1b", num_stages=3, num_microbatches=4, num_batches=10)
    assert [list(track) for track in opening(long, 10).tracks] == [list(track) for track in short.tracks]


def test_an_empty_rank_and_a_program_without_instructions_can_be_drawn() -> None:
    program = opening(generate("1f1b", num_stages=2, num_microbatches=1, num_batches=2), 0)
    cells = grid(program)
    assert cells == Grid(program, 2, 0, ((), ()))
    assert ascii_picture(program).splitlines()[:2] == ["rank 0:", "rank 1:"]
