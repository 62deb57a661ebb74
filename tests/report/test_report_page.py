"""The page of a run: what is drawn, what the command does, and how a browser shows it."""

import json
import math
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bireme.report import palette
from bireme.report.page.figures import headline
from bireme.report.page.page import page
from bireme.report.page.run import read_run
from bireme.report.page.themed import themed
from bireme.report.shapes import Rect, Text
from bireme.schedule.instruction import Kind
from tests.support.chromium import Chromium, chromium, find_chromium
from tests.support.command import bireme
from tests.support.run_folders import WRITTEN_S, lines_of, make_run, timelines_of, write_lines

pytestmark = pytest.mark.slow

EMPTY = {"meta", "input", "br"}
NOW = datetime.fromtimestamp(WRITTEN_S + 60, tz=UTC)


class Reader(HTMLParser):
    """Goes through a page and sees whether every tag is closed in order, and what the tags are."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.classes: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append(tag)
        self.classes += (values.get("class") or "").split()
        self.addresses += [value for name in ("src", "href") if (value := values.get(name))]
        if values.get("id"):
            self.ids.append(values["id"] or "")
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def made(*folders: Path) -> str:
    return page([read_run(folder) for folder in folders], NOW, "0.1.0")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "whole")


# The page


def test_the_page_is_well_formed_and_asks_for_nothing(run: Path) -> None:
    text = made(run)
    reader = Reader(text)
    assert reader.open == []
    assert reader.addresses == []
    assert len(reader.ids) == len(set(reader.ids))
    assert not re.search(r"https?://|@import|url\((?!#)", text)


def test_every_chart_has_marks_without_a_script(run: Path) -> None:
    reader = Reader(made(run))
    for role in ("curve", "dots", "checkpoint", "skipped", "compute", "flag", "part", "measured", "flow"):
        assert reader.classes.count(role) > 0, role
    timelines = [one for one in reader.classes if one == "compute"]
    assert len(timelines) == 2 * 4 * 4 * 4 * 2  # twice: 4 ranks, 4 batches, 4 micro-batches, both passes


def test_time_after_the_end_of_a_timeline_is_not_shown_as_idle(run: Path) -> None:
    """The predicted lanes of a run that took longer once ended in stripes, as if the devices had waited."""
    covers = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)" [^>]*class="beyond"', made(run))
    assert len(covers) == 2 * 4
    predicted, measured = (float(covers[place][1]) for place in (0, 4))
    assert predicted > 10 > measured == 0
    assert {float(left) + float(width) for left, width in covers[:4]} == {1106.0}


def test_the_page_has_colours_for_the_dark_and_for_paper(run: Path) -> None:
    text = made(run)
    assert "@media screen and (prefers-color-scheme: dark)" in text
    assert "@media print" in text


def test_text_on_a_colour_that_is_the_same_in_the_dark_keeps_its_own() -> None:
    fill = palette.fill(0, Kind.FORWARD)
    text = themed([Text(1, 2, "3", 11, palette.on(fill)), Text(1, 2, "rank", 11, palette.INK)])
    assert re.findall(r'fill="([^"]+)"', text) == ["#141820", "var(--ink)"]
    assert 'fill="var(--ink)"' in themed([Rect(0, 0, 1, 1, palette.UPDATE)])


def test_words_from_files_are_escaped(run: Path) -> None:
    text = made(run)
    assert "&lt;again&gt;" in text
    assert "&lt;end&gt;" in text
    assert "<again>" not in text


def test_odd_names_of_folders_do_no_harm(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, steps=30) for name in ("<b>&'", 'a"<script>')]
    reader = Reader(made(*folders))
    assert reader.open == []
    assert "b" not in reader.tags
    assert reader.tags.count("script") == made(folders[0]).count("</script>")


def test_recorded_batches_that_took_long_are_told(run: Path, tmp_path: Path) -> None:
    assert "The batches recorded are early ones" not in made(run)
    folder = make_run(tmp_path / "quick")
    summary = json.loads((folder / "summary.json").read_text())
    quick_s = summary["measured_batch_s"] / 4
    (folder / "summary.json").write_text(json.dumps(summary | {"measured_batch_s": quick_s}))
    assert re.search(r"early ones and took (3\.[89]|4)\d? times as long as most", made(folder))


def test_the_same_run_makes_the_same_page(run: Path) -> None:
    assert made(run) == made(run)


def test_missing_parts_say_how_to_get_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "bare", killed=True, evaluated=False, recorded=False, with_plan=False)
    text = made(folder)
    assert Reader(text).open == []
    for words in ("log.trace=true", "training.evaluate_every=100", "no plan.json", "has memory figures"):
        assert words in text


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    write_lines(tmp_path, [next(lines_of(1))])
    assert "No step is logged yet" in made(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    assert Reader(made(tmp_path)).open == []


def test_a_run_of_one_line_has_a_dot(tmp_path: Path) -> None:
    write_lines(tmp_path, list(lines_of(1, evaluated=False)))
    assert Reader(made(tmp_path)).classes.count("dots") > 0


def test_losses_that_are_not_finite_leave_a_gap(tmp_path: Path) -> None:
    lines = [line | {"loss": math.nan} if line["step"] == 7 else line for line in lines_of(30)]
    write_lines(tmp_path, lines)
    text = made(tmp_path)
    (tmp_path / "summary.json").write_text('{"train_loss": NaN, "eval_loss": null, "later": [1]}')
    assert read_run(tmp_path).notes == ()
    assert headline(read_run(tmp_path)).train_loss is not None
    assert "nan" not in re.sub(r"<style>.*?</style>|<script.*?</script>", "", text, flags=re.S).lower()


def test_broken_documents_are_told_and_the_curves_are_drawn(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for name in ("plan.json", "summary.json", "cluster.toml"):
        (folder / name).write_text("{")
    text = made(folder)
    assert all(str(folder / name) in text for name in ("plan.json", "summary.json", "cluster.toml"))
    assert Reader(text).classes.count("curve") > 0


def test_a_timeline_that_cannot_be_drawn_is_told_under_warnings(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "timeline-measured.json").write_text('{"num_batches": 4, "ranks": []}')
    text = made(folder)
    assert "another plan" in text
    assert "predicted" in text


def test_a_long_run_comes_out_as_a_small_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "long", steps=20_000, recorded=False)
    text = made(folder)
    assert len(text) < 700_000
    assert read_run(folder).metrics.last_step == 20_000


def test_several_runs_are_drawn_over_each_other(run: Path, tmp_path: Path) -> None:
    others = [make_run(tmp_path / f"other-{seed}", seed=seed, recorded=False) for seed in (1, 2)]
    text = made(run, *others)
    reader = Reader(text)
    assert reader.open == []
    assert "Comparison of the runs" in text
    assert text.count("other-2") > 3
    assert "best" in reader.classes
    assert "pale-line" not in reader.classes


# The command


def test_the_command_writes_the_page_into_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bireme(capsys, "report", str(run))
    assert (result.status, result.out) == (0, f"Wrote {run / 'report.html'}.\n")
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_the_document_has_the_numbers_of_every_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_run(tmp_path / "other", killed=True, evaluated=False, recorded=False)
    document = bireme(capsys, "report", str(run), str(other), "--json").document
    one, two = document["runs"]
    assert (one["state"], one["steps"], one["schedule"]) == ("finished", 300, "2bw")
    assert one["prediction_error"] == pytest.approx(1 / 1.04 - 1)
    assert one["num_skipped"] == 2
    assert len(one["stages"]) == 4
    assert two["eval_loss"] is None
    assert two["measured_timeline"] is None
    assert document["page"] is None
    assert not (other / "report.html").exists()


def test_the_trace_is_that_of_the_measured_timeline(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, html = tmp_path / "trace.json", tmp_path / "page.html"
    result = bireme(capsys, "report", str(run), "-o", str(html), "--trace", str(trace))
    assert result.out == f"Wrote {html}.\nWrote {trace}.\n"
    events = json.loads(trace.read_text())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(timelines_of()[1].makespan_s * 1e6, rel=1e-3)


def test_a_trace_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", recorded=False)
    result = bireme(capsys, "report", str(folder), "--trace", str(tmp_path / "trace.json"))
    assert result.status == 2
    assert "no timeline" in result.err


def test_a_wrong_folder_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bireme(capsys, "report", str(tmp_path / "nothing"))
    assert result.status == 2
    assert "is not a folder" in result.err
    make_run(tmp_path / "one", steps=5, recorded=False)
    result = bireme(capsys, "report", str(tmp_path))
    assert result.status == 2
    assert f"such as {tmp_path / 'one'}" in result.err


def test_seven_runs_are_too_many(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bireme(capsys, "report", *[str(run)] * 7)
    assert result.status == 2
    assert "give at most 6" in result.err


# In a browser


@pytest.mark.slow
def test_a_browser_shows_the_page_as_it_should(run: Path, tmp_path: Path) -> None:
    binary = find_chromium()
    if binary is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    path = tmp_path / "report.html"
    path.write_text(made(run), encoding="utf-8")
    with chromium(binary, tmp_path) as browser:
        browser.open(path, dark=True)
        assert brightness(browser.value("getComputedStyle(document.body).backgroundColor")) < 64
        assert brightness(browser.value("getComputedStyle(document.body).color")) > 192
        browser.open(path)
        assert brightness(browser.value("getComputedStyle(document.body).backgroundColor")) > 192
        assert browser.value("document.documentElement.scrollWidth") <= 1280
        shown = "[...document.querySelectorAll('svg.plot')].filter((one) => one.clientHeight > 0)"
        assert browser.value(f"{shown}.length") == 7
        assert browser.value(f"{shown}.every((one) => one.querySelectorAll('path, rect').length > 1)")
        browser.mouse("mouseMoved", 640, 500)
        assert "smoothed" in browser.value("document.querySelector('.tip').textContent")
        browser.value("document.getElementById('scale-1').click()")
        assert browser.value("document.querySelector('.plot.steps.log').clientHeight") > 100
        drag(browser, 300, 700, 500)
        assert "scale(" in browser.value("document.querySelector('.log .zoomed').getAttribute('transform')")
        browser.value("document.querySelector('.whole:not([hidden])').click()")
        assert browser.value("document.querySelector('.log .zoomed').getAttribute('transform')") == ""
        assert browser.complaints == []


@pytest.mark.slow
def test_nothing_is_cut_off_in_a_browser(run: Path, tmp_path: Path) -> None:
    binary = find_chromium()
    if binary is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    bare = make_run(tmp_path / "bare", killed=True, evaluated=False, recorded=False, with_plan=False)
    wordy = make_run(tmp_path / "wordy")
    text = (wordy / "run.toml").read_text()
    (wordy / "run.toml").write_text(text.replace("width=512", "width=512,heads=8,vocab=50257,context=1024"))
    path = tmp_path / "report.html"
    with chromium(binary, tmp_path) as browser:
        path.write_text(made(wordy, run, bare, run, wordy), encoding="utf-8")
        browser.open(path, width=1366, height=768)
        assert browser.value(f"{WIDEST}('.scrolls')") == 0
        for folders in ((wordy, run), (bare,)):
            path.write_text(made(*folders), encoding="utf-8")
            browser.open(path, width=400, height=800)
            assert browser.value("document.documentElement.scrollWidth") == 400
            # Charts keep a size that can be read, and scroll.
            assert browser.value("document.querySelector('svg.plot.steps').clientWidth") > 800
            browser.value("document.querySelector('.plots').scrollLeft = 300")
            assert browser.value("document.querySelector('.plots').scrollLeft") == 300
        assert browser.complaints == []


WIDEST = """(name => Math.max(...[...document.querySelectorAll(name)].map(
    one => one.scrollWidth - one.clientWidth)))"""


def drag(browser: Chromium, start: float, end: float, y: float) -> None:
    browser.mouse("mouseMoved", start, y)
    browser.mouse("mousePressed", start, y, pressed=True)
    browser.mouse("mouseMoved", end, y, pressed=True)
    browser.mouse("mouseReleased", end, y, pressed=True)


def brightness(colour: str) -> float:
    """The mean of red, green and blue of a colour as browsers say it."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3
