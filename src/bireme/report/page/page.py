"""The page itself: what is where, what is said of a part that is missing, and how it is served live.

It needs nothing from outside: style, script and pictures are in it, and it says so to the browser.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from threading import Lock
from time import monotonic, time

from bireme.errors import BiremeError
from bireme.report.markup import tag, words
from bireme.report.page.charts import (
    MOST_RUNS,
    gradient_figure,
    loss_figure,
    rate_figure,
    replicas_figure,
    throughput_figure,
)
from bireme.report.page.cluster_map import cluster_figure
from bireme.report.page.figures import StageFigures, headline, stage_figures, state
from bireme.report.page.lanes import idle_pattern, timeline_figure
from bireme.report.page.run import Run, read_run
from bireme.report.page.tables import comparison_table, facts, incomparable, memory_figure, stage_table, tiles
from bireme.report.shapes import clock_text
from bireme.wire.text_server import HttpServer

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""What the page may load: nothing."""

_MOST_WARNINGS = 50

_SLOW = 1.5
"""From so many times the usual on it is said that the recorded batches took long."""

_NO_TIMELINE = "No batches of this run were recorded. `bireme train … --set log.trace=true` records a few."
_NO_EVALUATION = (
    "This run has no evaluation. `bireme train … --set training.evaluate_every=100` does so every 100 steps."
)
_NO_CURVES = "No step is logged yet. Make the page again after some steps."
_NO_PLAN = "There is no plan.json with devices in the folder of the run, so the plan is not drawn."
_NO_MEMORY = (
    "Neither plan.json nor summary.json has memory figures. `bireme train` writes both, the second "
    "when a run ends."
)


def page(runs: Sequence[Run], now: datetime, version: str, *, live: str = "") -> str:
    """The page of the first run, with the others' curves and figures next to its own.

    `now` tells whether a run still goes on, `version` is that of the program that makes the page. A page that
    `bireme watch` serves has a word in `live`, which differs from that of any other state of the run.
    """
    assert 1 <= len(runs) <= MOST_RUNS
    names = [run.name for run in runs]
    parts = (part for part in _parts(runs, now, version) if part)
    title = f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}"
    return _document(title, version, live, *parts)


def waiting_page(name: str, sentence: str, version: str, live: str) -> str:
    """The page that `bireme watch` serves while it has no figures of a run; `sentence` says why."""
    return _document(name, version, live, tag("header", tag("h1", words(name))), _missing(sentence))


def _document(title: str, version: str, live: str, *parts: str) -> str:
    policy = f"{_POLICY}; connect-src 'self'" if live else _POLICY
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="generator", content=f"Bireme {version}"),
        tag("title", words(f"{title} · Bireme")),
        tag("style", _resource("style.css")),
    )
    scripts = [tag("script", _resource("script.js"))]
    if live:
        state = tag("p", "live", id="live", role="status", class_="note")
        scripts = [state, *scripts, tag("script", _resource("live.js"))]
    body = tag("body", idle_pattern(), tag("main", *parts), *scripts)
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en', data_version=live or None)}\n"


def _resource(name: str) -> str:
    return files("bireme.report.page").joinpath(name).read_text(encoding="utf-8")


def _parts(runs: Sequence[Run], now: datetime, version: str) -> Iterator[str]:
    run = runs[0]
    stages = stage_figures(run)
    yield _header(runs, now)
    yield tiles(run, headline(run))
    if len(runs) > 1:
        yield _section(
            "Comparison of the runs", "", tag("div", comparison_table(runs, now.timestamp()), class_="wide")
        )
    yield _curves(runs)
    timelines = timeline_figure(run.predicted, run.measured)
    yield _section("Pipeline", _pipeline_lead(run), timelines or _missing(_NO_TIMELINE))
    yield _section(
        "Memory of each stage", _memory_lead(run, stages), memory_figure(stages) or _missing(_NO_MEMORY)
    )
    why = () if run.summary is None else run.summary.why
    yield _section(
        "The plan over the cluster", "", cluster_figure(run, stages) or _missing(_NO_PLAN), _list(why)
    )
    if stages:
        yield _section("Stages, predicted and measured", "", tag("div", stage_table(stages), class_="wide"))
    yield _warnings(run)
    yield _sample(run)
    yield _settings(run)
    yield tag("footer", words(f"Made by Bireme {version} on {_date(now)}."))


def _header(runs: Sequence[Run], now: datetime) -> str:
    run = runs[0]
    found = state(run, now.timestamp())
    written = datetime.fromtimestamp(run.written_s, tz=now.tzinfo)
    others = ", ".join(one.name for one in runs[1:])
    return tag(
        "header",
        tag("h1", words(run.name)),
        tag("p", words(f"compared with {others}"), class_="others") if others else "",
        tag("p", tag("span", words(found.text), class_=f"state {found.word}"), f"last line {_date(written)}"),
        tag("p", words(run.folder), class_="note"),
        facts(run),
    )


def _date(moment: datetime) -> str:
    return f"{moment.day} {moment:%B %Y, %H:%M}"


def _section(title: str, lead: str, *contents: str) -> str:
    return tag(
        "section", tag("h2", words(title)), tag("p", words(lead), class_="lead") if lead else "", *contents
    )


def _missing(sentence: str) -> str:
    """Why a part is missing and how to get it; what is between backquotes is to be typed."""
    parts = sentence.split("`")
    return tag(
        "p",
        *(tag("code", words(part)) if place % 2 else words(part) for place, part in enumerate(parts)),
        class_="missing",
    )


def _curves(runs: Sequence[Run]) -> str:
    run = runs[0]
    loss = loss_figure(runs)
    if not loss:
        return _section("Loss", "", _missing(_NO_CURVES))
    is_evaluated = any(one.metrics.evaluations for one in runs)
    whose = f", {run.name}" if len(runs) > 1 else ""
    small = (
        _captioned(f"Gradient norm{whose}", gradient_figure(run)),
        _captioned(f"Learning rate{whose}", rate_figure(run)),
    )
    return tag(
        "section",
        tag("h2", "Loss"),
        loss,
        tag("p", words(why), class_="note") if (why := incomparable(runs)) else "",
        "" if is_evaluated else _missing(_NO_EVALUATION),
        throughput_figure(runs),
        *map(replicas_figure, runs if len(runs) == 1 else ()),
        tag("div", *small, class_="pair"),
    )


def _captioned(title: str, figure: str) -> str:
    return tag("div", tag("h3", words(title), class_="part-title"), figure) if figure else ""


def _pipeline_lead(run: Run) -> str:
    if run.predicted is None and run.measured is None:
        return ""
    has_both = run.predicted is not None and run.measured is not None
    both = "The prediction above the measurement, on one axis. " if has_both else ""
    width = 1 if run.plan is None else run.plan.plan.width
    is_one = width > 1 and run.measured is not None and not run.measured.others
    which = f" Of {width} replicas one was measured." if is_one else ""
    return f"{both}Drag over a part to look at it closely; striped is idle.{which}{_slowness(run)}"


def _slowness(run: Run) -> str:
    """Said where the recorded batches, of a run that had just begun, do not represent the others."""
    usual_s = headline(run).measured_batch_s
    if run.measured is None or not usual_s or run.measured.steady_batch_s < _SLOW * usual_s:
        return ""
    factor = f"{run.measured.steady_batch_s / usual_s:.2g}"
    return f" The batches recorded are early ones and took {factor} times as long as most of this run."


def _memory_lead(run: Run, stages: Sequence[StageFigures]) -> str:
    if not any(stage.bytes for stage in stages) and any(stage.predicted_peak_bytes for stage in stages):
        return "The parts of the prediction are known once the run has ended or a timeline is recorded."
    return ""


def _list(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    items = (tag("li", words(sentence)) for sentence in sentences)
    return tag("h3", "Why this plan", class_="part-title") + tag("ul", *items, class_="note")


def _warnings(run: Run) -> str:
    """What the run said, and what of its folder could not be read."""
    said = run.metrics.warnings
    items = [
        tag(
            "li",
            tag("span", words(f"step {one.step:,}, {clock_text(one.time_s)}: "), class_="when"),
            words(one.text),
        )
        for one in said[-_MOST_WARNINGS:]
    ]
    items += [tag("li", words(note)) for note in run.notes]
    if not items:
        return ""
    lead = f"The last {_MOST_WARNINGS} of {len(said):,}." if len(said) > _MOST_WARNINGS else ""
    return _section("Warnings", lead, tag("ul", *items))


def _sample(run: Run) -> str:
    text = None if run.summary is None else run.summary.sample
    return _section("What the model writes", "", tag("pre", words(text))) if text else ""


def _settings(run: Run) -> str:
    if not run.settings:
        return ""
    text = tag("pre", words(run.settings.strip()), class_="columns")
    return tag("section", tag("details", tag("summary", "The run file, every key resolved"), text))


# The page of a run, served on this machine alone and made again whenever the run has come further.
#
# Other machines cannot reach it. Pages of other sites in the same browser cannot read it: its address has a
# token, and requests that name another host are refused, as when a site's name is made to lead here.

HOST = "127.0.0.1"
_NAMES = frozenset({HOST, "localhost"})
_PLAIN = "text/plain; charset=utf-8"

_FILES = (
    "metrics.jsonl",
    "run.toml",
    "plan.json",
    "cluster.toml",
    "summary.json",
    "timeline-predicted.json",
    "timeline-measured.json",
)
"""The files that the page is made of."""

_LEAST_S = 1.5
_PACE = 10.0
"""A page that takes a second to make is made every ten seconds at most: the run needs the processor."""

_AGE_S = 60.0
"""So often a page is made again for the clock alone: a run may have ended without notice."""


class LivePage:
    """The newest page of a run. `version` is the program's own."""

    def __init__(self, folder: Path, version: str) -> None:
        self._folder, self._program = folder, version
        self._lock = Lock()
        self._made, self._next_s = "", 0.0
        self._text = ""

    def newest(self) -> tuple[str, str]:
        """A word that differs whenever the page does, and the page."""
        with self._lock:
            found = self._state()
            if found != self._made and monotonic() >= self._next_s:
                begin_s = monotonic()
                self._text, self._made = self._page(found), found
                end_s = monotonic()
                self._next_s = end_s + max(_LEAST_S, _PACE * (end_s - begin_s))
            return self._made, self._text

    def _state(self) -> str:
        words = [str(int(time() // _AGE_S))]
        for name in _FILES:
            with suppress(OSError):
                found = (self._folder / name).stat()
                words.append(f"{name} {found.st_mtime_ns} {found.st_size}")
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]

    def _page(self, state: str) -> str:
        if not (self._folder / _FILES[0]).is_file():
            sentence = f"The run has not begun: there is no {self._folder / _FILES[0]} yet."
            return waiting_page(self._folder.resolve().name, sentence, self._program, state)
        try:
            return page([read_run(self._folder)], datetime.now().astimezone(), self._program, live=state)
        except BiremeError as error:
            return waiting_page(self._folder.resolve().name, str(error), self._program, state)


class PageServer(HttpServer):
    """Serves the newest page at `address`. Port 0 is a free one."""

    def __init__(self, newest: Callable[[], tuple[str, str]], port: int) -> None:
        self._newest = newest
        self._token = secrets.token_urlsafe(16)
        try:
            super().__init__(HOST, port, self._answered)
        except OSError as error:
            why = error.strerror or error
            raise BiremeError(
                f"Port {port} of {HOST} cannot be used: {why}. Leave out --port, which takes a free one."
            ) from None

    @property
    def address(self) -> str:
        """The page's address for a browser."""
        return f"http://{HOST}:{self.port}/{self._token}/"

    def _answered(self, host: str, path: str) -> tuple[int, str, str]:
        token, _, rest = path.removeprefix("/").partition("/")
        if host not in _NAMES:
            return 403, "This address is for a browser on the same machine.\n", _PLAIN
        if not secrets.compare_digest(token.encode(), self._token.encode()):
            return 404, "Open the address that bireme watch has printed.\n", _PLAIN
        if rest not in ("", "version"):
            return 404, "There is only the page.\n", _PLAIN
        version, text = self._newest()
        return (200, version, _PLAIN) if rest else (200, text, "text/html; charset=utf-8")
