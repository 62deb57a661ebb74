"""The lines that a run prints while it trains: one for each line of its log.

They are plain, so that a file takes them. If a live view reads the output of the process, the process prints
events for the view instead.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from bireme.bounds import bytes_text, counted, seconds_text
from bireme.sync.coordinator.recoveries import Recovery

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
