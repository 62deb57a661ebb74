"""What the page of a run is made from: its metrics, its timelines, its figures, its curves."""

import json
import math
import random
import shutil
from array import array
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bireme.bounds import against_predicted
from bireme.errors import BiremeError
from bireme.plan.plan import Plan
from bireme.plan.plan_file import write_plan
from bireme.report.page.charts import Points, evened, finite, replicas_figure, smoothed, thinned
from bireme.report.page.figures import flows, headline, runs_document, stage_figures, state
from bireme.report.page.metrics import read_metrics
from bireme.report.page.page import page
from bireme.report.page.run import read_run
from bireme.report.page.tables import comparison_table, facts, memory_figure, tiles
from bireme.report.shapes import Quantity, Scale, clock_text, number_text
from bireme.report.timeline_document import read_recorded, write_recorded
from bireme.runtime.gathering import timeline_of
from bireme.sync.coordinator.recoveries import Recovery
from bireme.train.run_log import MetricsLog
from tests.support.extent import draws
from tests.support.run_folders import (
    DEVICES,
    LEARNS,
    RECOVERY,
    WRITTEN_S,
    lines_of,
    make_run,
    plan_of,
    run_with_replicas,
    timelines_of,
    write_lines,
)


def points_of(values: list[float]) -> Points:
    return finite(array("d", range(len(values))), array("d", values))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "whole")


# Thinning


def test_thinned_curves_keep_their_ends_and_extremes_and_are_points_of_the_whole() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        count, most = draw.randint(1, 5000), draw.randint(4, 600)
        xs = sorted(draw.sample(range(10 * count), count))
        whole = finite(array("d", xs), array("d", (draw.gauss(0, 1) for _ in xs)))
        thin = thinned(whole, most)
        assert len(thin) <= most or len(whole) <= most
        assert list(thin.xs) == sorted(set(thin.xs))
        assert {(x, y) for x, y in zip(thin.xs, thin.ys, strict=True)} <= set(zip(xs, whole.ys, strict=True))
        assert (thin.xs[0], thin.xs[-1]) == (xs[0], xs[-1])
        assert (min(thin.ys), max(thin.ys)) == (min(whole.ys), max(whole.ys))


def test_a_single_spike_among_many_lines_stays_visible() -> None:
    values = [1.0] * 100_000
    values[54_321] = 9.0
    thin = thinned(points_of(values))
    assert max(thin.ys) == 9.0
    assert thin.places[list(thin.ys).index(9.0)] == 54_321


def test_a_short_curve_is_not_touched() -> None:
    points = points_of([3.0, 1.0, 2.0])
    assert thinned(points) is points


def test_values_that_are_no_numbers_are_left_out() -> None:
    points = points_of([1.0, math.nan, 3.0, math.inf])
    assert list(points.places) == [0, 2]


def test_two_batches_that_end_at_one_moment_make_no_rate_that_nobody_reached() -> None:
    """A drained pipeline's last line once said 639,000 tokens a second in a run of 10,000."""
    rates = [100.0] * 99 + [1e6]
    assert max(evened(points_of(rates)).ys) == pytest.approx(125, rel=1e-3)
    assert evened(points_of([100.0] * 9)).ys.tolist() == pytest.approx([100.0] * 9)
    assert list(evened(points_of([50.0, 100.0])).ys) == pytest.approx([200 / 3] * 2)
    assert len(evened(points_of([]))) == 0


def test_evened_rates_take_all_the_time_that_there_was() -> None:
    rates = [100.0] * 40 + [10.0] + [100.0] * 40
    evened_rates = evened(points_of(rates)).ys
    assert evened_rates[40] == pytest.approx(5 / (4 / 100 + 1 / 10))
    assert evened_rates[37] == evened_rates[43] == pytest.approx(100)


def test_a_smoothed_curve_stays_within_its_values_and_does_not_lag() -> None:
    draw = random.Random(1)
    values = [draw.uniform(2, 3) for _ in range(500)]
    smooth = smoothed(points_of(values))
    assert smooth is not None
    assert min(values) <= min(smooth.ys) <= max(smooth.ys) <= max(values)
    line = smoothed(points_of([float(i) for i in range(1000)]))
    assert line is not None
    assert line.ys[500] == pytest.approx(500, abs=1e-6)
    assert smoothed(points_of([1.0, 2.0])) is None


# Axes


def test_marks_are_round_within_the_range_and_rise() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        least = draw.uniform(1e-6, 10) * 10 ** draw.randint(-3, 5)
        most = least * (1 + 10 ** draw.uniform(-2, 5))
        for quantity, is_log in ((Quantity.PLAIN, False), (Quantity.CLOCK, False), (Quantity.PLAIN, True)):
            scale = Scale(least, most, 0, 100, quantity, is_log)
            marks = list(scale.marks(6))
            assert marks == sorted(marks)
            assert 1 <= len(marks) <= 40
            assert all(-1e-6 <= scale.at(mark) <= 100 + 1e-6 for mark in marks)


def test_numbers_are_short() -> None:
    assert [number_text(value) for value in (2.41321, 0.0003, 12_345.6, 4.5e6)] == [
        "2.413",
        "0.0003",
        "12.35 k",
        "4.5 M",
    ]
    assert [clock_text(value) for value in (4.25, 75, 7500, 100_000)] == [
        "4.25 s",
        "1:15 min",
        "2:05 h",
        "1 d 3 h",
    ]


# MetricsLog


def test_half_a_last_line_is_passed_over(tmp_path: Path) -> None:
    write_lines(tmp_path, list(lines_of(20, killed=True)), half_line=True)
    assert read_metrics(tmp_path / "metrics.jsonl").last_step == 20


def test_half_a_line_before_a_resumption_is_passed_over(tmp_path: Path) -> None:
    lines = list(lines_of(20, killed=True))
    path = tmp_path / "metrics.jsonl"
    text = [json.dumps(line) for line in lines]
    path.write_text("\n".join([*text, '{"kind":"tra', json.dumps(lines[0] | {"step": 10, "time_s": 3.0})]))
    metrics = read_metrics(path)
    assert metrics.training.step[-1] == 10
    assert len(metrics.starts) == 2


def test_an_unreadable_line_in_the_middle_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = [json.dumps(line) for line in lines_of(20)]
    for broken in ("{half", "[1, 2]", "7"):
        path.write_text("\n".join([*text[:4], broken, *text[4:]]))
        with pytest.raises(BiremeError, match=r"Line 5 of .*metrics\.jsonl is not a JSON object"):
            read_metrics(path)


WARNED = {"kind": "warning", "step": 20, "text": "One\u2028line\u2029of\x85text, é", "time_s": 9.0}


@pytest.mark.parametrize(
    ("left", "last_s"),
    [
        (b"", 9.0),
        (json.dumps(WARNED, ensure_ascii=False).encode()[:-1], 9.0),
        (b'{"kind":"warning","step":20,"time_s":99.0,"text":"caf\xc3', 9.0),
        (b"\0" * 512, 9.0),
        (b'{"kind":"tra' + b"\0" * 100 + b"\n" + b"\0" * 64, 9.0),
        (None, 0.0),
    ],
)
def test_every_log_that_a_crash_can_leave_is_read_and_gone_on_with(
    left: bytes | None, last_s: float, tmp_path: Path
) -> None:
    """A warning with U+2028, or a character cut in two, once kept a run from being resumed."""
    path = tmp_path / "metrics.jsonl"
    whole = [json.dumps(line, ensure_ascii=False) for line in (*lines_of(20, killed=True), WARNED)]
    path.write_bytes(b"" if left is None else "".join(f"{line}\n" for line in whole).encode() + left)
    log = MetricsLog(path)
    assert last_s <= log.time_s < last_s + 5
    log.note("start", 10)
    log.note("warning", 10, text=WARNED["text"])
    log.close()
    found = read_metrics(path)
    warned = [one.text for one in found.warnings if one.text == WARNED["text"]]
    assert len(warned) == (1 if left is None else 2)
    assert [one.step for one in found.starts] == ([10] if left is None else [0, 10])
    last = path.read_text(encoding="utf-8").splitlines()[-1]  # for readers who split there too
    assert json.loads(last)["text"] == WARNED["text"]


def test_a_log_that_somebody_has_damaged_keeps_no_run_from_going_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = [json.dumps(line) for line in lines_of(20)]
    path.write_text("\n".join([*text[:4], "{half", *text[4:], ""]))
    log = MetricsLog(path)
    log.close()
    assert log.time_s > 0


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ({"kind": "train", "time_s": 1}, "Line 2 .* lacks step"),
        ({"kind": "train", "step": 1, "time_s": 1, "loss": "low"}, 'Line 2 .* loss is "low"'),
        ({"kind": "train", "step": -1, "time_s": 1}, "Line 2 .* step is -1"),
        ({"kind": "stop", "step": 1, "time_s": 1}, "Line 2 .* lacks reason"),
    ],
)
def test_a_line_that_makes_no_sense_is_named(tmp_path: Path, line: dict[str, object], complaint: str) -> None:
    write_lines(tmp_path, [next(lines_of(1)), line])
    with pytest.raises(BiremeError, match=complaint):
        read_metrics(tmp_path / "metrics.jsonl")


def test_kinds_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    write_lines(tmp_path, [*lines_of(5), {"kind": "weather", "step": 5, "time_s": 2}])
    assert read_metrics(tmp_path / "metrics.jsonl").last_step == 5


def test_what_is_trained_again_after_a_resumption_replaces_what_was_known(tmp_path: Path) -> None:
    before = list(lines_of(30, killed=True))
    again = [line | {"loss": 77.0} for line in before if line["kind"] == "train" and line["step"] > 20]
    write_lines(tmp_path, [*before, before[0] | {"step": 20, "time_s": 5.0}, *again])
    training = read_metrics(tmp_path / "metrics.jsonl").training
    assert list(training.step) == list(range(1, 31))
    assert list(training.loss[20:]) == [77.0] * 10
    assert all(loss < 77 for loss in training.loss[:20])


# Timelines


def test_a_recorded_timeline_comes_back_as_it_was(tmp_path: Path) -> None:
    for timeline in timelines_of(3):
        path = tmp_path / f"{timeline.source}.json"
        write_recorded(timeline, path)
        back = read_recorded(path, plan_of().plan)
        assert back.ranks == timeline.ranks
        assert back.transfers == timeline.transfers
        assert back.source == timeline.source
        assert back.steady_batch_s == timeline.steady_batch_s
        assert [kept.at_peak for kept in back.memory] == [kept.at_peak for kept in timeline.memory]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_recorded_timeline_comes_back_with_the_averages_of_its_replicas(lag: int, tmp_path: Path) -> None:
    program = plan_of().plan.averaging(lag).source.program(3, 2)
    times = [array("d", range(len(track))) for track in program.tracks]
    path = tmp_path / "measured.json"
    write_recorded(timeline_of(program, [(one, one) for one in times]), path)
    back = read_recorded(path, plan_of().plan)
    assert back.program == program
    assert [rank.start_s for rank in back.ranks] == times


def test_a_timeline_of_another_plan_is_a_note_and_no_crash(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    path = folder / "timeline-measured.json"
    document = json.loads(path.read_text())
    document["ranks"][1]["start_s"].pop()
    path.write_text(json.dumps(document))
    run = read_run(folder)
    assert run.measured is None
    assert "another plan" in run.notes[0]


def test_messages_that_the_plan_does_not_send_are_a_note(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    path = folder / "timeline-predicted.json"
    document = json.loads(path.read_text())
    document["transfers"][0]["received_by"][0] = 10**6
    path.write_text(json.dumps(document))
    assert "messages" in read_run(folder).notes[0]


def test_a_timeline_without_moments_is_said_to_have_none(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    path = folder / "timeline-predicted.json"
    document = json.loads(path.read_text())
    for rank in document["ranks"]:
        del rank["start_s"], rank["end_s"]
    path.write_text(json.dumps(document))
    assert "started and ended" in read_run(folder).notes[0]


def test_the_ranks_of_other_replicas_are_recorded_too(tmp_path: Path) -> None:
    program = plan_of().plan.source.program(2, 0)
    times = [
        array("d", (rank + place for place in range(len(track)))) for rank, track in enumerate(program.tracks)
    ]
    later = [array("d", (moment + 5 for moment in own)) for own in times]
    timeline = timeline_of(program, [(one, one) for one in (*times, *later)])
    assert [rank.start_s for rank in timeline.ranks] == times
    write_recorded(timeline, tmp_path / "measured.json")
    back = read_recorded(tmp_path / "measured.json", plan_of().plan)
    assert [[rank.start_s for rank in ranks] for ranks in back.others] == [later]


def test_a_plan_of_one_replica_has_no_sync_with_replicas(tmp_path: Path) -> None:
    """The lane of a gradient sync once showed how the ranks of the only pipeline agree."""
    folder = make_run(tmp_path / "run")
    predicted, _ = timelines_of()
    assert any(one.is_sync for one in predicted.transfers)
    found = read_run(folder).predicted
    assert found is not None
    assert found.transfers
    assert not any(one.is_sync for one in found.transfers)


def test_a_plan_of_another_run_is_left_out_with_a_note(tmp_path: Path) -> None:
    """A placement once overwrote plan.json, and the page was an IndexError."""
    folder = make_run(tmp_path / "run")
    other = replace(plan_of().plan, cuts=(4,), devices=(("fast/gpu0",), ("fast/gpu1",)))
    write_plan(folder / "plan.json", replace(plan_of(), plan=other, forecast=None))
    found = read_run(folder)
    assert "plan of another run: it has 2 stages × 1 replica" in found.notes[0]
    assert [stage.devices for stage in stage_figures(found)] == [(name,) for name in DEVICES]
    summary = json.loads((folder / "summary.json").read_text())
    write_plan(folder / "plan.json", plan_of())
    (folder / "summary.json").write_text(json.dumps(summary | {"stages": summary["stages"] * 3}))
    assert len(stage_figures(read_run(folder))) == 4


@pytest.mark.slow
def test_a_page_or_a_sentence_comes_of_every_damaged_folder(tmp_path: Path) -> None:
    """Every file is cut, emptied, changed for another one, or has a value that no run writes."""
    folder = make_run(tmp_path / "run", steps=20)
    files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jsonl", ".toml"))
    refusals = []
    for number in range(draws(800, 40)):
        draw = random.Random(number)
        path = files[number % len(files)]
        whole = path.read_bytes()
        path.write_bytes(damaged(draw, whole, files))
        now_s = WRITTEN_S + 60
        try:
            runs = [read_run(folder)]
            text = page(runs, datetime.fromtimestamp(now_s, tz=UTC), "0.1.0")
            json.dumps(runs_document(runs, now_s), allow_nan=False)
            assert text.startswith("<!DOCTYPE html>")
        except BiremeError as error:
            refusals.append((str(path), str(error)))
        path.write_bytes(whole)
    assert refusals
    assert all(path in sentence for path, sentence in refusals)


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    math.nan,
    math.inf,
    "",
    "x" * 50,
    [],
    {},
    [1],
    {"a": 1},
    [[]],
    ["x"],
)


def damaged(draw: random.Random, whole: bytes, files: list[Path]) -> bytes:
    """What may have come of a file."""
    match draw.randrange(8):
        case 0:
            return whole[: draw.randrange(len(whole))]
        case 1:
            return draw.choice(files).read_bytes()
        case 2:
            return draw.choice((b"", b"\0" * 100, b"\xff\xfe", b"[]", b"null", b'{"format":1}'))
    lines = whole.splitlines()
    place = draw.randrange(len(lines))
    try:
        lines[place] = json.dumps(changed(draw, json.loads(lines[place]))).encode()
    except ValueError:
        lines[place] = draw.choice((b"", b"x", b"[", b"steps = []", lines[0]))
    return b"\n".join(lines)


def changed(draw: random.Random, value: Any) -> Any:
    """A value of JSON of which one part is another one, or is missing."""
    if draw.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return draw.choice(ODD)
    key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
    if draw.random() < 0.2:
        del value[key]
    else:
        value[key] = changed(draw, value[key])
    return value


# Figures


def test_measured_values_are_told_relative_to_predicted_ones_with_one_sign_everywhere(run: Path) -> None:
    """A slower run was -4 % at the top of the page, and more memory +3 % below."""
    assert against_predicted(1.04, 1.0, is_time=True) == "+4.0% slower"
    assert against_predicted(0.5, 1.0, is_time=True) == "−50% faster"
    assert against_predicted(2.0, 1.0, is_time=False) == "+100% more"
    assert against_predicted(9.7, 10.0, is_time=False) == "−3.0% less"
    assert against_predicted(1.0001, 1.0, is_time=True) == "equal"
    assert against_predicted(None, 1.0, is_time=True) == against_predicted(1.0, None, is_time=True) == ""
    found = read_run(run)
    assert "+4.0% slower than predicted (240 ms)" in tiles(found, headline(found))
    assert "6.40 GiB measured: +3.2% more than predicted" in memory_figure(stage_figures(found))
    assert comparison_table([found, found], WRITTEN_S).count("+4.0% slower") == 2


def test_losses_of_different_tokenizers_have_no_best(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other")
    start, *lines = map(json.loads, (other / "metrics.jsonl").read_text().splitlines())
    one = read_run(run)
    for tokenizer, has_best in (("", True), ("bytes", True), ("owner/tokenizer", False)):
        learns = LEARNS | {"tokenizer": tokenizer}
        for line in lines:
            if line["kind"] == "evaluation":
                line["bits_per_byte"] = 2.5 + line["step"] / 1000
        write_lines(other, [start | {"learns": learns}, *lines])
        summary = json.loads((other / "summary.json").read_text()) | {"eval_loss": 1.2, "train_loss": 1.1}
        (other / "summary.json").write_text(json.dumps(summary))
        runs = [replace(one, learns=one.learns.model_copy(update={"tokenizer": "bytes"})), read_run(other)]
        table = comparison_table(runs, WRITTEN_S)
        row = table[table.index("evaluation loss") :].split("</tr>")[0]
        assert ("best" in row) == has_best
        assert ("cannot be compared" in table) != has_best
    assert "2.8" in table[table.index("bits per byte") :].split("</tr>")[0]


def test_replicas_that_were_lost_are_told_with_when_they_came_back(tmp_path: Path) -> None:
    metrics = read_run(run_with_replicas(tmp_path / "run")).metrics
    lost = metrics.absences()
    assert [(one.replicas, one.begin.step, one.end and one.end.step) for one in lost] == [
        ((1,), 100, 160),
        ((0,), 250, None),
    ]
    assert lost[0].name == "host a-server-with-a-long-name (replica 1)"
    assert lost[1].name.startswith("replica 0 (fast/gpu0, ") or lost[1].name.startswith("host ")


def test_a_recovery_stays_known_after_a_resume_and_its_sentence_is_beside_the_replicas(
    tmp_path: Path,
) -> None:
    """That the run was resumed from a step before it does not undo the recovery."""
    folder = run_with_replicas(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_lines(folder, [*lines, lines[0] | {"step": 100, "time_s": 90.0}])
    run = read_run(folder)
    assert run.metrics.recoveries == [Recovery(1, 161, 2.1, 0.8, 1.5)]
    assert run.metrics.recoveries[0].text in replicas_figure(read_run(run_with_replicas(tmp_path / "other")))
    (document,) = runs_document([run], 0.0)["runs"]
    assert document["recoveries"] == [{**RECOVERY, "step": 161}]


def test_the_top_of_a_page_lists_what_a_run_learns_from(run: Path, tmp_path: Path) -> None:
    text = facts(read_run(run_with_replicas(tmp_path / "run")))
    for words in (
        "7 B, of which 20 M learn",
        "12 files",
        "123.5 M tokens",
        "98,765 samples",
        "1.25 in 300 steps",
    ):
        assert words in text
    for words in ("owner/tokenizer", "answers only", "1,234 samples"):
        assert words in text
    assert "Data" not in facts(read_run(run))


def test_a_run_that_ended_has_the_figures_of_its_summary(run: Path) -> None:
    found = read_run(run)
    figures = headline(found)
    assert (figures.steps, figures.train_loss, figures.eval_loss) == (300, 1.713, 1.742)
    assert figures.prediction_error == pytest.approx(1 / 1.04 - 1)
    assert state(found, WRITTEN_S + 1e9).word == "finished"
    stages = stage_figures(found)
    assert [stage.devices for stage in stages] == [(name,) for name in DEVICES]
    assert sum(stages[0].bytes.values()) == pytest.approx(stages[0].predicted_peak_bytes)
    assert stages[2].unit_names == ("blocks.4.a", "blocks.4.b")


def test_a_killed_run_has_figures_all_the_same(tmp_path: Path) -> None:
    found = read_run(make_run(tmp_path / "killed", killed=True))
    figures = headline(found)
    assert figures.steps == 300
    assert figures.measured_batch_s == pytest.approx(0.25, rel=0.1)
    assert figures.predicted_batch_s == 0.24
    assert state(found, WRITTEN_S + 60).word == "running"
    assert state(found, WRITTEN_S + 86_400).word == "ended"
    stages = stage_figures(found)
    assert stages[0].measured_peak_bytes == pytest.approx(5.9 * 2**30, rel=1e-6)
    assert stages[0].bytes.keys() >= {"weights", "activations"}
    assert all(0.5 < (stage.busy_share or 0) <= 1 for stage in stages)


def test_the_summary_of_a_run_that_goes_on_again_does_not_count(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    lines = list(lines_of(300))
    write_lines(folder, [*lines, lines[0] | {"step": 200, "time_s": 50.0}])
    found = read_run(folder)
    assert headline(found).steps == 200
    assert headline(found).train_loss != 1.713
    assert state(found, WRITTEN_S).word == "running"


def test_a_run_that_was_stopped_says_why(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "stopped", killed=True)
    lines = [*lines_of(20, killed=True), {"kind": "stop", "step": 20, "time_s": 6, "reason": "time limit"}]
    write_lines(folder, lines)
    found = state(read_run(folder), WRITTEN_S)
    assert (found.word, found.text) == ("stopped", "stopped at step 20: time limit")


def test_links_carry_the_bytes_of_the_plan(run: Path) -> None:
    found = flows(read_run(run))
    assert [(flow.source.device, flow.destination.device) for flow in found] == list(pairwise(DEVICES))
    for flow in found:
        assert flow.forth_bytes == flow.back_bytes == 4 * 4e6
        assert flow.used_bytes_per_s == pytest.approx(16e6 / (0.24 * 1.04))
    assert found[1].most_bytes_per_s == 1.2e9


def test_links_lead_to_every_rank_of_a_wide_stage(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    shutil.copytree(run, folder)
    log = folder / "metrics.jsonl"
    log.write_text(log.read_text().replace('"num_stages": 4', '"num_stages": 3'))
    one, two, three, four = DEVICES
    wide = Plan((1, 2), 4, "1f1b", devices=((one,), (two, three), (four,)), stage_widths=(1, 2, 1))
    write_plan(folder / "plan.json", replace(plan_of(), plan=wide, forecast=None))
    found = [(flow.source.device, flow.destination.device) for flow in flows(read_run(folder))]
    assert found == [(one, two), (one, three), (two, four), (three, four)]


def test_joules_are_the_watts_of_the_plan_at_the_measured_pace(run: Path) -> None:
    found = read_run(run)
    assert headline(found).joules_per_sample is None
    assert found.plan is not None
    assert found.plan.forecast is not None
    known = replace(found.plan, forecast=replace(found.plan.forecast, watts=1500.0))
    figures = headline(replace(found, plan=known))
    assert figures.samples_per_s is not None
    assert figures.joules_per_sample == pytest.approx(1500 / figures.samples_per_s)
    assert "J</div>" in tiles(found, figures)
