"""A run that trains now: its newest figures as lines of text, at the bottom of a terminal of any width."""

import json
import math
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from bireme.bounds import bytes_text, counted, rate_text, seconds_text
from bireme.sync.coordinator.recoveries import Recovery

# The lines that a run prints while it trains: one for each line of its log.
#
# They are plain, so that a file takes them. If a live view reads the output of the process, the process
# prints events for the view instead.

EVENTS = "BIREME_EVENTS"
"""Variable of the environment that a live view sets for the processes whose output it reads."""

MARK = "\x1e"
"""Begins the line of an event. Text for people does not have it."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """A line of a run's log, and the steps that the run is to train."""

    kind: str
    step: int
    num_steps: int
    values: Mapping[str, Any]


def event_in(line: str) -> RunEvent | None:
    """The event that a line of output holds; None if it is text."""
    if not line.startswith(MARK):
        return None
    try:
        return RunEvent(**json.loads(line[1:]))
    except (ValueError, TypeError):  # two processes wrote at once
        return None


class RunLines:
    """Prints the events of a run to standard error, where progress belongs."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._begin_s = monotonic()
        self._begin_step = 0
        self._as_events = EVENTS in os.environ

    def show(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Print an event of the run."""
        if self._as_events:
            event = {"kind": kind, "step": step, "num_steps": self._num_steps, "values": values}
            line: str | None = MARK + json.dumps(event)
        elif kind == "train":
            line = self._training(step, values)
        else:
            line = event_text(RunEvent(kind, step, self._num_steps, values))
        if kind == "start":
            self._begin_s, self._begin_step = monotonic(), step
        if line is not None:
            print(line, file=sys.stderr, flush=True)  # noqa: T201 (this is what the file is for)

    def _training(self, step: int, values: Mapping[str, Any]) -> str:
        parts = [step_text(step, self._num_steps), f"loss {values['loss']:.4f}"]
        parts.append(f"norm {values['grad_norm']:.3f}")
        parts += [] if (speed := speed_text(values)) is None else [speed]
        known = [bytes_text(one) for one in values["memory_bytes"] if one]
        if known:
            parts.append(f"memory {' + '.join(known)}")
        if "copy_age" in values:
            age = values["copy_age"]
            parts.append("no second copy yet" if age is None else f"copy {counted(age, 'batch')} old")
        done = step - self._begin_step
        if done and step < self._num_steps:
            left_s = (monotonic() - self._begin_s) / done * (self._num_steps - step)
            parts.append(f"{clock_text(left_s)} left")
        return "  ".join(parts)


def step_text(step: int, num_steps: int) -> str:
    """Such as `step  40/1000`."""
    return f"step {step:>{len(str(num_steps))}}/{num_steps}"


def speed_text(values: Mapping[str, Any]) -> str | None:
    """Such as `4,100 tokens/s`; in samples if they are no text."""
    if values["tokens_per_s"]:
        return f"{values['tokens_per_s']:,.0f} tokens/s"
    return f"{values['samples_per_s']:,.1f} samples/s" if values["samples_per_s"] else None


def event_text(event: RunEvent) -> str | None:
    """The line for any event but that of training; None if it has none."""
    values = event.values
    at = step_text(event.step, event.num_steps)
    match event.kind:
        case "start":
            return f"{at}  the pipeline is ready"
        case "evaluation":
            return f"{at}  evaluation loss {values['loss']:.4f}{_more(values)}"
        case "checkpoint":
            return (
                f"{at}  checkpoint, {bytes_text(values['num_bytes'])}, pause "
                f"{seconds_text(values['stall_s'])}, written in {seconds_text(values['write_s'])}"
            )
        case "schedule":
            return f"{at}  switches to {values['schedule']}; updates are delayed from here"
        case "shares" if event.step:
            return f"{at}  shares {' + '.join(map(str, values['shares']))}"
        case "recovery":
            return f"{at}  {Recovery(step=event.step, **values).text}"
        case "warning" | "private":
            return f"{at}  {values['text']}"
    return None


def _more(values: Mapping[str, Any]) -> str:
    """The other figures of an evaluation."""
    perplexity, bits = values["perplexity"], values["bits_per_byte"]
    parts = [] if perplexity is None else [f"perplexity {perplexity:,.4g}"]
    parts += [] if bits is None else [f"{bits:.4f} bits per byte"]
    return "".join(f"  {part}" for part in parts)


def clock_text(seconds: float) -> str:
    """Such as 1:05 or 2:03:10."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


_MOST_LOSSES = 2000
_MOST_RANKS = 12
_LEAST_BAR, _MOST_BAR = 10, 60
_SPARKS = 48
_FULL = 0.95
"""From this share of its memory on a device is nearly full."""
_WIDE = 76
"""In narrower terminals the link of a rank has a line of its own."""

_SCROLLED = ("evaluation", "schedule", "shares", "recovery", "warning", "private")
"""Events that get a line above the view."""


@dataclass(frozen=True, slots=True)
class _Signs:
    """Signs of bars and sparklines."""

    full: str
    empty: str
    sparks: str
    arrow: str


_UNICODE = _Signs("━", "─", "▁▂▃▄▅▆▇█", "→")
_ASCII = _Signs("#", "-", "_.-~=+*#", "->")


@dataclass(slots=True)
class LiveRun:
    """The newest figures of a run. `is_ascii` if the terminal shows no other signs."""

    is_ascii: bool = False
    has_begun: bool = False
    _num_steps: int = 1
    _begin: tuple[int, float] = (0, 0.0)
    """The step of the start, and the time then."""
    _last: tuple[int, float] = (0, 0.0)
    """The newest step, and the time of its first event."""
    _start: Mapping[str, Any] = field(default_factory=dict)
    _train: Mapping[str, Any] = field(default_factory=dict)
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_LOSSES))
    _evaluated: tuple[int, float] | None = None
    _saved: int | None = None
    _sent: dict[int, tuple[float, int]] = field(default_factory=dict)
    """The bytes that ranks have sent, by their indices in the lists of the log, and when each number came."""
    _rates: dict[int, float] = field(default_factory=dict)
    _shares: Sequence[int] = ()
    """Samples of a batch that each replica trains."""
    _away: set[int] = field(default_factory=set)
    """Replicas that are lost."""

    def take(self, event: RunEvent, now_s: float) -> str | None:
        """Take in an event. Returns the line that it gets above the view."""
        values = event.values
        self._num_steps = max(event.num_steps, 1)
        if event.step > self._last[0]:
            self._last = event.step, now_s
        match event.kind:
            case "start":
                self.has_begun, self._start = True, values
                self._begin = self._last = event.step, now_s
                self._sent, self._rates = {}, {}
            case "train":
                if values.get("replica") != self._train.get("replica"):  # the lists are of other ranks now
                    self._sent, self._rates = {}, {}
                self._train = values
                self._losses.append(values["loss"])
                self._note_sent(values["sent_bytes"], now_s)
            case "evaluation":
                self._evaluated = event.step, values["loss"]
            case "checkpoint":
                self._saved = event.step
            case "shares":
                self._shares = values["shares"]
            case "membership":
                (self._away.discard if values["event"] == "back" else self._away.add)(values["replica"])
        return event_text(event) if event.kind in _SCROLLED else None

    def lines(self, width: int, now_s: float) -> list[Text]:
        """The view, at most `width` letters wide."""
        if not self.has_begun:
            return []
        found = [*self._progress(width, now_s), *self._figures(width), *self._ranks(width)]
        for line in found:
            line.truncate(width)
        return found

    def _note_sent(self, sent: Sequence[int | None], now_s: float) -> None:
        """Numbers of other ranks come late to the log, so some lines have those of the line before."""
        for index, new in enumerate(sent):
            if new is None:
                continue
            before_s, before = self._sent.setdefault(index, (now_s, new))
            if new != before and now_s > before_s:
                self._rates[index] = (new - before) / (now_s - before_s)
                self._sent[index] = now_s, new

    @property
    def _signs(self) -> _Signs:
        return _ASCII if self.is_ascii else _UNICODE

    def _bar(self, share: float, width: int, style: str) -> Text:
        full = round(min(max(share, 0.0), 1.0) * width)
        signs = self._signs
        return Text.assemble((signs.full * full, style), (signs.empty * (width - full), "dim"))

    def _progress(self, width: int, now_s: float) -> Iterator[Text]:
        (begin, begin_s), (step, last_s), num_steps = self._begin, self._last, self._num_steps
        label, share = f"step {step:,}/{num_steps:,}", step / num_steps
        right = f"{math.floor(100 * share)}%"
        if begin < step < num_steps:
            left_s = (last_s - begin_s) / (step - begin) * (num_steps - step) - (now_s - last_s)
            right += f"  {clock_text(max(left_s, 0.0))} left"
        room = width - len(label) - len(right) - 4
        if room >= _LEAST_BAR:
            bar = self._bar(share, min(room, _MOST_BAR), "green")
            yield Text.assemble((label, "bold"), "  ", bar, "  ", right)
        else:
            yield Text.assemble((label, "bold"), "  ", right)
            yield self._bar(share, width, "green")

    def _figures(self, width: int) -> Iterator[Text]:
        if not self._train:
            yield Text("waiting for the first steps", "dim")
            return
        label = f"loss {self._train['loss']:.4f}"
        room = min(width - len(label) - 2, _SPARKS)
        yield Text.assemble((label, "bold"), "  ", (self._sparkline(room), "cyan"))
        parts = [] if (speed := speed_text(self._train)) is None else [speed]
        parts.append(f"norm {self._train['grad_norm']:.3g}")
        parts.append(f"learning rate {self._train['learning_rate']:.3g}")
        if self._evaluated is not None:
            step, value = self._evaluated
            parts.append(f"evaluation {value:.4f} at {step:,}")
        parts += [] if self._saved is None else [f"checkpoint of {self._saved:,}"]
        if "copy_age" in self._train and self._train["copy_age"] is not None:
            parts.append(f"copy {self._train['copy_age']} batches old")
        yield from map(Text, _flowing(parts, width))

    def _sparkline(self, width: int) -> str:
        """The losses so far, each letter the mean of as many as the others."""
        losses = [one for one in self._losses if math.isfinite(one)]
        count = min(max(width, 0), len(losses))
        ends = [len(losses) * place // count for place in range(count + 1)] if count else []
        means = [math.fsum(losses[first:end]) / (end - first) for first, end in pairwise(ends)]
        low, high = min(means, default=0.0), max(means, default=0.0)
        sparks = self._signs.sparks
        top = len(sparks) - 1
        return "".join(sparks[round((one - low) / (high - low) * top) if high > low else 0] for one in means)

    def _ranks(self, width: int) -> Iterator[Text]:
        devices = list(self._start.get("devices") or ())
        memory: Sequence[int | None] = self._train.get("memory_bytes") or ()
        count = len(devices) or len(memory)
        if not count:
            return
        # Replicas that may die report their own ranks alone.
        first = 0 if len(memory) == count else self._train.get("replica", 0) * len(memory)
        shown = range(min(count, _MOST_RANKS))
        rows = [self._rank(rank, rank - first, memory, is_wide=width >= _WIDE) for rank in shown]
        widest = [max(len(row.label) for row in rows), max(len(row.memory) for row in rows)]
        widest[0] = min(widest[0], max(width // 3, 12))
        links = max(len(row.link) for row in rows) if width >= _WIDE else 0
        room = min(width - sum(widest) - links - 6, _MOST_BAR // 3)
        for row in rows:
            label = row.label[: widest[0]].ljust(widest[0])
            parts: list[str | Text | tuple[str, str]] = [label, "  "]
            if room >= _LEAST_BAR // 2 and any(row.share is not None for row in rows) and not row.is_away:
                style = "red" if (row.share or 0.0) > _FULL else "blue"
                parts += [self._bar(row.share or 0.0, room, style), "  "]
            parts.append((row.memory, "red") if row.is_away else row.memory.ljust(widest[1]))
            if links:
                parts += ["  ", (row.link, "dim")]
            yield Text.assemble(*parts)
            if row.link and not links:
                yield Text(f"{self._signs.arrow:>4} {row.link}", "dim")
        if count > _MOST_RANKS:
            yield Text(f"and {count - _MOST_RANKS} more ranks", "dim")

    def _rank(self, rank: int, place: int, memory: Sequence[int | None], *, is_wide: bool) -> "_RankRow":
        """The row of a rank, which is the `place`-th in the lists of the log."""
        start = self._start
        devices = start.get("devices") or ()
        label = f"{rank} {_at(devices, rank) or ''}".rstrip()
        replica = rank * start.get("width", 1) // max(len(devices), 1)
        if replica in self._away:
            return _RankRow(label, "away", "", None, is_away=True)
        limit, num_bytes = _at(start.get("device_bytes") or (), rank), _at(memory, place)
        text = bytes_text(num_bytes) if num_bytes else ""
        if num_bytes and limit and is_wide:
            text += f" of {bytes_text(limit)}"
        elif not num_bytes and (samples := _at(self._shares, replica)) is not None:
            text = f"{counted(samples, 'sample')} a batch"
        sent, link = self._rates.get(place), _at(start.get("link_bytes_per_s") or (), rank)
        sends = "" if sent is None else f"sends {_rate(sent)}"
        sends += f" of {_rate(link)}" if sends and link else ""
        return _RankRow(label, text, sends, num_bytes / limit if num_bytes and limit else None)


@dataclass(frozen=True, slots=True)
class _RankRow:
    """What a line shows about a rank. `share` is the part of its device's memory that it has used."""

    label: str
    memory: str
    link: str
    share: float | None
    is_away: bool = False


def _rate(bytes_per_s: float) -> str:
    """With three digits at most."""
    return rate_text(float(f"{bytes_per_s:.3g}"))


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if 0 <= place < len(values) else None


def _flowing(parts: Sequence[str], width: int) -> Iterator[str]:
    """The parts on lines, none of which is broken."""
    line = ""
    for part in parts:
        if line and len(line) + 2 + len(part) > width:
            yield line
            line = ""
        line += f"  {part}" if line else part
    yield line


# The live view of a run in a terminal: the newest figures at the bottom, all other output above them.
#
# While the view is open, standard output and standard error of this process, and of all processes that it
# starts, are a pipe. One thread reads the pipe: events of the run change the view, and text is printed above
# it. So no process needs to know where the view is on the screen.

_END = MARK.encode()
"""The last line of the pipe. Processes that outlive the view may still have it open."""

_BETWEEN_S = 0.25
"""Least time between two pictures: drawing takes time from the ranks."""

_CLOCK_S = 1.0
"""Draw this often if nothing happens, for the clock."""

_MOST_BYTES = 1 << 16


@contextmanager
def live_view() -> Iterator[None]:
    """Show the run that trains in the block; plain lines if standard error is not a terminal."""
    errors, out = sys.__stderr__, sys.__stdout__
    if errors is None or errors is not sys.stderr or not errors.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    files = [2, 1] if out is not None and out is sys.stdout and out.isatty() else [2]
    _flush()
    kept = [os.dup(file) for file in files]
    reader, writer = os.pipe()
    screen = _Screen(reader, kept[0], errors.encoding)
    try:
        for file in files:
            os.dup2(writer, file)
        os.environ[EVENTS] = "1"
        yield
    finally:
        os.environ.pop(EVENTS, None)
        _flush()
        for file, before in zip(files, kept, strict=True):
            os.dup2(before, file)
        os.write(writer, _END + b"\n")
        os.close(writer)
        screen.close()
        for before in kept:
            os.close(before)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


class _Screen:
    """Reads the pipe to its end, and draws on the terminal."""

    def __init__(self, reader: int, terminal: int, encoding: str) -> None:
        self._reader, self._terminal = reader, terminal
        file = os.fdopen(os.dup(terminal), "w", encoding=encoding, errors="replace")
        self._console = Console(file=file, force_terminal=True, highlight=False)
        self._run = LiveRun(is_ascii="utf" not in encoding.lower())
        self._live = Live(
            console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._drawn_s, self._rest, self._is_open = 0.0, b"", True
        self._lines: list[str] = []
        """Those that were read and are not shown yet."""
        self._thread = threading.Thread(target=self._work, name="bireme view", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Draw the last picture, and leave the cursor below it."""
        self._thread.join()
        os.close(self._reader)
        with suppress(OSError):
            self._console.file.close()

    def _work(self) -> None:
        try:
            with suppress(OSError):  # the terminal is gone
                self._show()
        finally:  # after an error too, which is printed at the end: the writers of the pipe must not wait
            with suppress(OSError):
                self._live.stop()
            while self._lines or self._is_open:
                texts = (line.partition(MARK)[0] for line in self._lines if not line.startswith(MARK))
                with suppress(OSError):
                    os.write(self._terminal, "".join(f"{text}\n" for text in texts).encode())
                self._lines = self._read() if self._is_open else []

    def _show(self) -> None:
        is_new = False
        while self._is_open:
            wait_s = max(self._drawn_s + _BETWEEN_S - monotonic(), 0.0) if is_new else _CLOCK_S
            if select.select([self._reader], [], [], wait_s)[0]:
                self._lines = self._read()
                if texts := list(self._texts(self._lines)):
                    self._console.print(Text.from_ansi("\n".join(texts)), soft_wrap=True)
                self._lines, is_new = [], True
            if not is_new or monotonic() - self._drawn_s >= _BETWEEN_S:
                self._draw()
                is_new = False
        self._draw()

    def _read(self) -> list[str]:
        """The next lines of the pipe, which is open until its last line."""
        found = os.read(self._reader, _MOST_BYTES)
        *lines, self._rest = (self._rest + found).split(b"\n")
        self._is_open = bool(found) and not any(line.endswith(_END) for line in lines)
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def _texts(self, lines: Iterable[str]) -> Iterator[str]:
        """The text of some lines of output. Events change the view, and few of them have a text."""
        for line in lines:
            text, *marked = line.split(MARK)  # a process may have left a line without an end
            if text or not marked:
                yield text
            for one in filter(None, marked):
                event = event_in(MARK + one)
                own = one if event is None else self._run.take(event, monotonic())
                if own is not None:
                    yield own

    def _draw(self) -> None:
        """Draw the newest figures, if the run has begun."""
        self._drawn_s = monotonic()
        if not self._run.has_begun:
            return
        size = os.get_terminal_size(self._terminal)
        if size.columns and size.lines:
            self._console.size = size
        if not self._live.is_started:
            self._live.start()
        lines = self._run.lines(self._console.width - 1, monotonic())
        self._live.update(Group(*lines), refresh=True)
