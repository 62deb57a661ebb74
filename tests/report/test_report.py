"""Reports show what the timeline holds: no rectangle more or less, whole files or none, text that fits."""

import io
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from bireme.errors import BiremeError
from bireme.report.palette import HUES, fill, on
from bireme.report.picture import laid_out, write_picture
from bireme.report.shapes import Anchor, Flag, Rect, Text, fitted, text_width
from bireme.report.terminal import print_program
from bireme.report.timeline_document import write_trace
from bireme.schedule.catalogue import SCHEDULES, generate
from bireme.schedule.grid import ascii_picture
from bireme.schedule.instruction import COMPUTE, Kind
from bireme.schedule.program import Program
from bireme.schedule.weave import UpdateTiming
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network
from bireme.simulate.simulator import pairs_that_talk, simulate
from bireme.timeline.timeline import Timeline

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(program: Program, *, bytes_per_s: float = 1e9, latency_s: float = 0.0) -> Timeline:
    costs = Costs.per_stage(
        program.num_stages,
        forward_s=0.01,
        backward_s=0.02,
        update_s=0.002,
        reduce_s=0.015,
        message_bytes=1e6,
        weight_bytes=3e6,
        stash_bytes=2e6,
    )
    network = Network.dedicated(pairs_that_talk(program), bytes_per_s=bytes_per_s, latency_s=latency_s)
    return simulate(program, costs, network, memory_series=True)


@cache
def timeline_named(name: str, num_batches: int = 3) -> Timeline:
    num_stages = 4 * SCHEDULES[name].stages_per_rank
    return timeline_of(generate(name, num_stages=num_stages, num_microbatches=8, num_batches=num_batches))


def num_computations(program: Program) -> int:
    return sum(step.kind in COMPUTE for track in program.tracks for step in track)


def events_of(timeline: Timeline, path: Path) -> list[dict[str, Any]]:
    write_trace(timeline, path)
    events = json.loads(path.read_bytes())["traceEvents"]
    assert isinstance(events, list)
    return events


def compute_rects(path: Path) -> list[ET.Element]:
    root = ET.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    return [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "compute"]


# The grid in the terminal


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [80, 110])
def test_grid_without_colour_is_the_ascii_picture(name: str, width: int) -> None:
    program = generate(name, num_stages=4, num_microbatches=4, num_batches=2)
    out = io.StringIO()
    print_program(program, Console(file=out, width=width))
    assert out.getvalue() == ascii_picture(program, width) + "\n"


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_colour_switches_the_colours_off_and_nothing_else(name: str) -> None:
    program = generate(name, num_stages=4, num_microbatches=4, num_batches=2)
    out = io.StringIO()
    print_program(program, Console(file=out, width=110, force_terminal=True, no_color=True))
    assert out.getvalue() == ascii_picture(program) + "\n"


def test_colours_tell_batches_and_passes_apart() -> None:
    program = generate("2bw", num_stages=2, num_microbatches=2, num_batches=3)
    out = io.StringIO()
    print_program(
        program, Console(file=out, width=110, force_terminal=True, color_system="truecolor", _environ={})
    )
    for batch in range(3):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            red, green, blue = fill(batch, kind)
            assert f"48;2;{red};{green};{blue}m" in out.getvalue()
    assert "underlined" in out.getvalue()
    assert " batch 2 " in out.getvalue()


def test_a_program_that_is_too_long_is_cut_off_and_says_so() -> None:
    out = io.StringIO()
    program = generate("2bw", num_stages=4, num_microbatches=8, num_batches=1000)
    print_program(program, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert "columns; widen the terminal for more." in lines[-1]
    assert max(map(len, lines)) <= 80
    assert len(lines) < 30
    out = io.StringIO()
    print_program(
        generate("2bw", num_stages=4, num_microbatches=8, num_batches=6), Console(file=out, width=40)
    )
    assert out.getvalue().splitlines()[-1].startswith("Showing the first 32 of 153 columns")


def test_many_ranks_are_one_band() -> None:
    out = io.StringIO()
    print_program(generate("1f1b", num_stages=50, num_microbatches=50), Console(file=out, width=100))
    assert sum(line.startswith("rank") for line in out.getvalue().splitlines()) == 50


# Pictures


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_has_a_rectangle_for_each_computation(name: str, tmp_path: Path) -> None:
    timeline = timeline_named(name)
    write_picture(timeline, tmp_path / "picture.svg")
    assert len(compute_rects(tmp_path / "picture.svg")) == num_computations(timeline.program)


def test_batches_and_passes_have_colours_of_their_own(tmp_path: Path) -> None:
    timeline = timeline_named("2bw")
    write_picture(timeline, tmp_path / "picture.svg")
    fills = defaultdict(set)
    for rect in compute_rects(tmp_path / "picture.svg"):
        title = rect.findtext(f"{SVG}title") or ""
        what, _, batch = title.split(" · ")[:3]
        fills[batch, what.split()[0]].add(rect.get("fill"))
    assert len(fills) == 6
    assert all(len(colours) == 1 for colours in fills.values())
    assert len(set.union(*fills.values())) == 6


def test_rectangles_stand_where_the_timeline_says(tmp_path: Path) -> None:
    timeline = timeline_named("1f1b", 1)
    write_picture(timeline, tmp_path / "picture.svg")
    rects = compute_rects(tmp_path / "picture.svg")
    spans = [i for rank in timeline.ranks for i in rank.intervals() if i.instruction.kind in COMPUTE]
    first, other = rects[0], rects[-1]
    scale = (float(other.get("x", 0)) - float(first.get("x", 0))) / (spans[-1].start_s - spans[0].start_s)
    for rect, span in zip(rects, spans, strict=True):
        assert float(rect.get("x", 0)) == pytest.approx(
            float(first.get("x", 0)) + scale * (span.start_s - spans[0].start_s), abs=0.02
        )
        assert float(rect.get("width", 0)) == pytest.approx(scale * (span.end_s - span.start_s), abs=1.02)


def test_png_has_its_signature_and_a_readable_size(tmp_path: Path) -> None:
    write_picture(timeline_named("zbv"), tmp_path / "picture.PNG")
    data = (tmp_path / "picture.PNG").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    picture = laid_out(timeline_named("zbv"))
    assert (width, height) == (2 * picture.width, 2 * picture.height)
    assert 1200 <= picture.width <= 1600


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_text_leaves_the_page_or_meets_another(name: str) -> None:
    for timeline in (timeline_named(name), timeline_of(timeline_named(name).program, bytes_per_s=1e8)):
        picture = laid_out(timeline)
        boxes = [_box(shape) for shape in picture.shapes if isinstance(shape, Text)]
        for left, top, right, bottom in boxes:
            assert left >= 0
            assert right <= picture.width
            assert top >= 0
            assert bottom <= picture.height
        for a, b in itertools.combinations(boxes, 2):
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def _box(text: Text) -> tuple[float, float, float, float]:
    """Left, top, right and bottom; in rectangles numbers stand close, so a hair is left out."""
    width = text_width(text.text, text.size) - 0.02
    left = text.x - {Anchor.START: 0.0, Anchor.MIDDLE: width / 2, Anchor.END: width}[text.anchor]
    return left, text.y - 0.5 * text.size, left + width, text.y + 0.5 * text.size


def test_text_is_no_wider_than_the_layout_believes() -> None:
    from PIL import ImageFont

    for size in (18, 22, 24, 26, 40):
        font = ImageFont.load_default(size)
        for character in (*map(chr, range(32, 127)), "·"):
            assert font.getlength(character) <= text_width(character, size) + 0.5, character


def test_long_timelines_show_the_first_batches_and_say_so() -> None:
    picture = laid_out(timeline_named("2bw", 100))
    assert any(
        "the first 12 batches of 100" in shape.text for shape in picture.shapes if isinstance(shape, Text)
    )
    rects = [shape for shape in picture.shapes if isinstance(shape, Rect) and shape.role == "compute"]
    assert 12 * 64 <= len(rects) <= 13 * 64
    assert {rect.fill for rect in rects} == {
        fill(b, k) for b in range(6) for k in (Kind.FORWARD, Kind.BACKWARD)
    }


def test_links_are_drawn_only_where_messages_take_time() -> None:
    program = timeline_named("1f1b").program
    roles = {
        speed: {
            s.role for s in laid_out(timeline_of(program, bytes_per_s=speed)).shapes if isinstance(s, Rect)
        }
        for speed in (1e7, float("inf"))
    }
    assert "message" in roles[1e7]
    free = simulate(program, Costs.per_stage(4, forward_s=1, backward_s=2))
    assert not {"message", "link"} & {s.role for s in laid_out(free).shapes if isinstance(s, Rect)}


def test_updates_and_trial_steps_are_marked() -> None:
    flags = [shape for shape in laid_out(timeline_named("2bw-fresh")).shapes if isinstance(shape, Flag)]
    assert len(flags) == 4 * (3 + 2)


def test_an_odd_name_does_not_break_the_picture(tmp_path: Path) -> None:
    timeline = timeline_named("gpipe", 1)
    odd = replace(timeline, program=replace(timeline.program, name="<a & b>\n\x00" + "long" * 100))
    for suffix in ("svg", "png"):
        write_picture(odd, tmp_path / f"picture.{suffix}")
    assert compute_rects(tmp_path / "picture.svg")


def test_a_window_that_takes_no_time_can_be_drawn(tmp_path: Path) -> None:
    program = generate("1f1b", num_stages=2, num_microbatches=2)
    timeline = simulate(program, Costs.per_stage(2, forward_s=0, backward_s=0), memory_series=True)
    for suffix in ("svg", "png"):
        write_picture(timeline, tmp_path / f"picture.{suffix}")
    write_trace(timeline, tmp_path / "trace.json")


@pytest.mark.parametrize("name", ["picture.pdf", "picture", "picture.svg.gz"])
def test_other_formats_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match=r"\.svg or \.png"):
        write_picture(timeline_named("gpipe"), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_png_without_pillow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(BiremeError, match=r"bireme\[viz\]"):
        write_picture(timeline_named("gpipe"), tmp_path / "picture.png")
    assert not list(tmp_path.iterdir())
    write_picture(timeline_named("gpipe"), tmp_path / "picture.svg")


def test_a_folder_that_is_not_there_is_the_users_to_make(tmp_path: Path) -> None:
    for write, name in ((write_picture, "p.svg"), (write_picture, "p.png"), (write_trace, "t.json")):
        with pytest.raises(BiremeError, match="no folder"):
            write(timeline_named("gpipe"), tmp_path / "nowhere" / name)


def test_cut_off_text_fits() -> None:
    assert fitted("short", 12, 100) == "short"
    assert fitted("x" * 100, 12, 100).endswith("...")
    assert text_width(fitted("x" * 100, 12, 100), 12) <= 100


def test_text_on_every_shade_is_legible() -> None:
    """WCAG asks for a contrast of 4.5 for text and 3 for large text; numbers in rectangles are in between."""
    for batch, kind in itertools.product(range(len(HUES)), COMPUTE):
        colour = fill(batch, kind)
        lighter, darker = sorted((_luminance(*colour), _luminance(*on(colour))), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 3.5, (batch, kind)


def _luminance(*colour: int) -> float:
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


# Traces


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("latency_s", [0.0, 0.05])
def test_events_of_one_thread_never_overlap(name: str, latency_s: float, tmp_path: Path) -> None:
    timeline = timeline_of(timeline_named(name).program, bytes_per_s=1e8, latency_s=latency_s)
    threads = defaultdict(list)
    for event in events_of(timeline, tmp_path / "trace.json"):
        if event["ph"] == "X":
            assert event["dur"] >= 0
            start = round(event["ts"] * 1000)
            threads[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1000)))
    for spans in threads.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("name", SCHEDULES)
def test_trace_holds_every_computation_and_message(name: str, tmp_path: Path) -> None:
    timeline = timeline_named(name)
    events = events_of(timeline, tmp_path / "trace.json")
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    computed = [e for e in events if e["ph"] == "X" and "stage" in e["args"] and e["cat"] in _NAMES]
    assert len(computed) == num_computations(timeline.program)
    assert {threads[e["pid"], e["tid"]] for e in computed} == {"compute"}
    num_messages = sum(len(t.start_s) for t in timeline.transfers if not t.is_sync)
    assert sum(e["cat"] == "message" and e["ph"] == "X" for e in _categorised(events)) == 2 * num_messages
    steps = [e for e in _categorised(events) if e["cat"] == "step"]
    kinds = [i.kind for track in timeline.program.tracks for i in track]
    assert len(steps) == kinds.count(Kind.UPDATE) + kinds.count(Kind.TRIAL)


_NAMES = {"forward", "backward", "backward for the inputs", "backward for the weights", "recomputation"}


def _categorised(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (event for event in events if "cat" in event)


def test_memory_counters_peak_where_the_account_does(tmp_path: Path) -> None:
    timeline = timeline_named("2bw")
    peaks: dict[int, float] = defaultdict(float)
    for event in events_of(timeline, tmp_path / "trace.json"):
        if event["ph"] == "C":
            peaks[event["pid"]] = max(peaks[event["pid"]], event["args"]["bytes"])
    assert list(peaks.values()) == [kept.peak_bytes for kept in timeline.memory]


def test_arrows_join_each_send_to_its_receive(tmp_path: Path) -> None:
    events = events_of(timeline_named("2bw"), tmp_path / "trace.json")
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins
    assert begins.keys() == ends.keys()
    for flow, begin in begins.items():
        end = ends[flow]
        joined = [
            next(e for e in slices[arrow["pid"], arrow["tid"]] if e["ts"] <= arrow["ts"] < e["ts"] + e["dur"])
            for arrow in (begin, end)
        ]
        assert joined[0]["args"] == joined[1]["args"]
        assert joined[0]["pid"] != joined[1]["pid"]


def test_a_trace_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    timeline = timeline_named("gpipe")
    broken = replace(
        timeline, transfers=(replace(timeline.transfers[0], sent_by=timeline.transfers[0].sent_by[:1]),)
    )
    (tmp_path / "trace.json").write_text("before")
    with pytest.raises(ValueError, match="shorter"):
        write_trace(broken, tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert (tmp_path / "trace.json").read_text() == "before"


@pytest.mark.parametrize("name", ["1f1b", "2bw-fresh"])
def test_averages_with_replicas_are_flags_a_line_of_their_own_and_a_thread(name: str, tmp_path: Path) -> None:
    program = generate(
        name, num_stages=2, num_microbatches=4, num_batches=3, timing=UpdateTiming(average_lag=0)
    )
    timeline = timeline_of(program)
    shapes = laid_out(timeline).shapes
    texts = {shape.text for shape in shapes if isinstance(shape, Text)}
    assert {"weight average", "average of weights starts, ends", "average of weights with replicas"} <= texts
    assert not {"gradient sync", "gradient sync with replicas"} & texts
    titles = [shape.title or "" for shape in shapes if isinstance(shape, Flag)]
    for what in ("average starts", "average ends"):
        assert sum(title.startswith(what) for title in titles) == 2 * 3
    events = events_of(timeline, tmp_path / "trace.json")
    syncs = [event for event in events if event.get("cat") == "sync" and event["ph"] == "X"]
    assert {event["name"] for event in syncs} == {"weight average"}
    assert len(syncs) == 2 * 3
    plain = generate(name, num_stages=2, num_microbatches=4, num_batches=3)
    others = {s.text for s in laid_out(timeline_of(plain)).shapes if isinstance(s, Text)}
    assert not any("average" in text for text in others)
