"""The page of a run: what is drawn, what the command does, and how a browser shows it."""

import json
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from time import monotonic, sleep

import pytest

from bireme.report import palette
from bireme.report.page.figures import headline
from bireme.report.page.lanes import themed
from bireme.report.page.page import page
from bireme.report.page.run import read_run
from bireme.report.shapes import Rect, Text
from bireme.report.timeline_document import write_recorded
from bireme.schedule.instruction import Kind
from tests.support.chromium import Chromium, chromium, find_chromium
from tests.support.command import bireme
from tests.support.extent import TRY_ALL
from tests.support.patience import patience_s
from tests.support.run_folders import (
    WRITTEN_S,
    lines_of,
    make_run,
    run_with_replicas,
    timelines_of,
    write_lines,
)
from tests.support.served_pages import served

pytestmark = pytest.mark.slow

EMPTY = {"meta", "input", "br", "wbr"}
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
    covers = re.findall(r'<rect x="([\d.]+)%" y="[\d.]+" width="([\d.]+)%" [^>]*class="beyond"', made(run))
    assert len(covers) == 2 * 4
    predicted, measured = (float(covers[place][1]) for place in (0, 4))
    assert predicted > 1 > measured == 0
    assert {round(float(left) + float(width), 6) for left, width in covers[:4]} == {100}


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
    folder = make_run(tmp_path / "long", steps=6_000, recorded=False)
    text = made(folder)
    assert len(text) < 700_000
    assert read_run(folder).metrics.last_step == 6_000


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
    assert (one["absences"], one["learns"]["num_tokens"]) == ([], None)
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


@pytest.mark.parametrize(("width", "name"), [(1, "agreement of stages"), (2, "gradient sync")])
def test_a_trace_names_a_gradient_sync_only_if_there_are_replicas(
    width: int, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, trace = (make_run if width == 1 else run_with_replicas)(tmp_path / "run"), tmp_path / "trace.json"
    measured = timelines_of()[1]
    for rank in measured.ranks:  # each REDUCE takes until the next instruction
        for place, step in enumerate(rank.track[:-1]):
            if step.kind is Kind.REDUCE:
                rank.end_s[place] = rank.start_s[place + 1]
    write_recorded(measured, folder / "timeline-measured.json")
    assert bireme(capsys, "report", str(folder), "--trace", str(trace)).status == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["name"] for event in events if event.get("cat") == "sync"} == {name}


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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all tests, which takes most of their time to start."""
    binary = find_chromium()
    if binary is None:
        pytest.skip("there is no Chromium on this machine: apt-get install chromium")
    with chromium(binary, tmp_path_factory.mktemp("browser")) as found:
        yield found


def test_a_browser_shows_the_page_as_it_should(run: Path, tmp_path: Path, browser: Chromium) -> None:
    path = tmp_path / "report.html"
    path.write_text(made(run), encoding="utf-8")
    browser.open(path, dark=True)
    assert brightness(browser.value("getComputedStyle(document.body).backgroundColor")) < 64
    assert brightness(browser.value("getComputedStyle(document.body).color")) > 192
    browser.open(path)
    assert brightness(browser.value("getComputedStyle(document.body).backgroundColor")) > 192
    assert browser.value("document.title") == "whole · Bireme"
    assert browser.value(f"{SHOWN}.length") == 5
    assert browser.value(f"{SHOWN}.every((one) => one.querySelectorAll('path, rect, line').length > 1)")
    loss = "document.querySelector('.plot.steps').getBoundingClientRect()"
    height = browser.value(f"{loss}.top + 100")
    browser.mouse("mouseMoved", 640, height)
    assert "smoothed" in browser.value("document.querySelector('.tip').textContent")
    browser.value("document.getElementById('scale-1').click()")
    assert browser.value("document.querySelector('.plot.steps.log').clientHeight") > 100
    drag(browser, 300, 700, height)
    moving = "document.querySelector('.plot.log .moving')"
    assert float(browser.value(f"{moving}.getAttribute('width')")[:-1]) > 200
    browser.value("document.querySelector('.whole:not([hidden])').click()")
    assert browser.value(f"{moving}.getAttribute('width')") == "100%"
    assert browser.complaints == []


def test_on_every_width_the_whole_run_is_seen_and_no_text_is_cut_off(
    run: Path, tmp_path: Path, browser: Chromium
) -> None:
    """At 390 pixels two thirds of the curves were out of sight once, at 820 the last 45 of 400 steps."""
    bare = make_run(tmp_path / "bare", killed=True, evaluated=False, recorded=False, with_plan=False)
    wordy = run_with_replicas(
        tmp_path / "a-run-with-a-name-of-many-letters-and-no-space-anywhere-in-it-at-all"
    )
    text = (wordy / "run.toml").read_text()
    (wordy / "run.toml").write_text(text.replace("width=512", "width=512,heads=8,vocab=50257,context=1024"))
    for number, folders in enumerate(((run,), (bare,), (wordy,), (wordy, run, bare, run, wordy, bare))):
        path = tmp_path / f"report-{number}.html"
        path.write_text(made(*folders), encoding="utf-8")
        # In the dark only colors differ.
        for width, dark in ((390, False), (390, True), (820, False), (1440, False)):
            browser.open(path, width=width, height=900, dark=dark)
            where = f"{[folder.name for folder in folders]} at {width}"
            assert browser.value(FLAWS) == [], where
            assert browser.value("innerWidth") == width, where
    assert browser.complaints == []


def test_every_control_is_reached_by_the_keyboard_and_shows_that_it_is(
    run: Path, tmp_path: Path, browser: Chromium
) -> None:
    path = tmp_path / "report.html"
    path.write_text(made(run), encoding="utf-8")
    browser.open(path, width=390)
    reached = []
    for _ in range(20):
        browser.press("Tab")
        found = browser.value(FOCUS)
        if found is None:
            break
        reached.append(found["name"])
        assert found["is_seen"], found
    # Of two radio buttons a browser reaches the chosen one, and the other by arrows.
    assert reached == ["along-0", "scale-0", *["plot"] * 5, "SUMMARY"]
    assert browser.value(f"{SHOWN}.every((one) => one.getAttribute('aria-label').length > 20)")


def test_the_keyboard_reads_values_and_zooms(run: Path, tmp_path: Path, browser: Chromium) -> None:
    path = tmp_path / "report.html"
    path.write_text(made(run), encoding="utf-8")
    browser.open(path)
    browser.value(f"{SHOWN}[0].focus()")
    tip = "document.querySelector('.tip').textContent"
    browser.press("End")
    assert browser.value(tip).startswith("step 300")
    browser.press("ArrowLeft")
    assert browser.value(tip).startswith("step 299")
    browser.press("+")
    assert browser.value(tip).startswith("step 299")
    assert browser.value(f"{SHOWN}[0].classList.contains('near')")
    assert browser.value(FLAWS) == []
    browser.press("Escape")
    assert not browser.value(f"{SHOWN}[0].classList.contains('near')")


SHOWN = "[...document.querySelectorAll('svg.plot')].filter((one) => one.clientHeight > 0)"

FOCUS = """(() => {
  const one = document.activeElement;
  if (!one || one === document.body) return null;
  const shows = one.matches("input") ? one.nextElementSibling : one;
  const name = one.id || (one.classList.contains("plot") ? "plot" : one.tagName);
  const style = getComputedStyle(shows);
  return { name, is_seen: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1 };
})()"""

FLAWS = """(() => {
  const flaws = [];
  const wide = document.documentElement;
  if (wide.scrollWidth > wide.clientWidth) flaws.push(`the page is ${wide.scrollWidth} wide`);
  const isSeen = (one) => one.getClientRects().length && getComputedStyle(one).visibility !== "hidden";
  for (const one of document.querySelectorAll("main *")) {
    if (!isSeen(one) || one instanceof SVGElement || one.matches("input")) continue;
    const isCut = getComputedStyle(one).overflowX !== "visible";
    if (isCut && one.scrollWidth > one.clientWidth + 1) flaws.push(`${one.className} is cut off`);
  }
  // Every piece of text is inside its card, or inside the page if it is in none.
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const own = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || own.closest("title, script, style") || !isSeen(own)) continue;
    const range = document.createRange();
    range.selectNode(texts.currentNode);
    const room = (own.closest("section, .tile") ?? document.body).getBoundingClientRect();
    for (const box of own instanceof SVGElement ? [own.getBoundingClientRect()] : range.getClientRects()) {
      if (own.closest(".near .window")) continue;
      if (box.left < room.left - 1 || box.right > room.right + 1) flaws.push(`${own.textContent} sticks out`);
      if (own instanceof SVGElement && box.height < 9) flaws.push(`${own.textContent} is tiny`);
    }
  }
  for (const svg of document.querySelectorAll("svg.plot, .map svg")) {
    if (!isSeen(svg)) continue;
    const isFree = (one) => isSeen(one) && !one.closest(".near .window");
    const shown = [...svg.querySelectorAll("text")].filter(isFree);
    const boxes = shown.map((one) => [one.textContent, one.getBoundingClientRect()]);
    boxes.forEach(([text, a], place) => {
      for (const [other, b] of boxes.slice(place + 1)) {
        const [x, y] = [["left", "right"], ["top", "bottom"]].map(
          ([low, high]) => Math.min(a[high], b[high]) - Math.max(a[low], b[low]));
        if (x > 1 && y > 4) flaws.push(`${text} is over ${other}`);
      }
    });
  }
  // The curves go from one end of their chart to the other, and so to the last step.
  for (const svg of document.querySelectorAll("svg.plot:not(.near)")) {
    const curves = [...svg.querySelectorAll(".curve.line")].filter(isSeen);
    if (!curves.length) continue;
    const room = svg.getBoundingClientRect();
    const ends = curves.map((one) => one.getBoundingClientRect().right);
    const last = Math.max(...ends);
    if (Math.abs(last - room.right) > 2 || last > innerWidth) flaws.push(`a curve ends at ${last}`);
    const marks = [...svg.querySelectorAll(".x-axis text")].filter(isSeen);
    if (marks.length < 2) flaws.push(`${marks.length} marks`);
  }
  return flaws;
})()"""


def drag(browser: Chromium, start: float, end: float, y: float) -> None:
    browser.mouse("mouseMoved", start, y)
    browser.mouse("mousePressed", start, y, pressed=True)
    browser.mouse("mouseMoved", end, y, pressed=True)
    browser.mouse("mouseReleased", end, y, pressed=True)


def brightness(colour: str) -> float:
    """The mean of red, green and blue of a colour as browsers say it."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


@pytest.mark.skipif(not TRY_ALL, reason="waits for a browser: BIREME_TESTS=all")
def test_a_browser_shows_new_figures_of_a_run_and_keeps_what_the_reader_chose(
    tmp_path: Path, browser: Chromium
) -> None:
    folder = tmp_path / "growing"
    with served(folder) as server:
        browser.open(server.address)
        assert "has not begun" in browser.value("document.body.textContent")
        make_run(folder)
        until(browser, "document.querySelector('.plot.steps') !== null")
        browser.value("document.getElementById('scale-1').click()")
        browser.value("document.querySelector('details').open = true")
        write_lines(folder, [*lines_of(300), {"kind": "warning", "step": 900, "time_s": 9e3, "text": "NEW"}])
        until(browser, "document.body.textContent.includes('NEW')")
        assert browser.value("document.getElementById('scale-1').checked")
        assert browser.value("document.querySelector('details').open")
        height = browser.value("document.querySelector('.plot.steps.log').getBoundingClientRect().top + 100")
        browser.mouse("mouseMoved", 640, height)
        assert "smoothed" in browser.value("document.querySelector('.tip').textContent")
        drag(browser, 300, 700, height)
        write_lines(folder, list(lines_of(300)))
        until(browser, "document.getElementById('live').textContent.includes('zoom out')")
        assert "NEW" in browser.value("document.body.textContent")
        browser.value("document.querySelector('.whole:not([hidden])').click()")
        until(browser, "!document.body.textContent.includes('NEW')")
    until(browser, "document.getElementById('live').textContent.includes('has ended')")
    assert [one for one in browser.complaints if server.address not in one] == []
    browser.complaints.clear()


def until(browser: Chromium, condition: str) -> None:
    end_s = monotonic() + patience_s()
    while not browser.value(condition):
        assert monotonic() < end_s, condition
        sleep(0.1)
