"""What has run so far, in a file with one JSON object to a line, which `--resume` goes on with.

Kinds of lines: `way` (steps to the loss of one way to learn), `shape` (seconds of a step of one shape in a
setting), `plan` (what Bireme's planner chose in a setting), `race` (a run).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common.curves import Curve, CurvePanel, curve_picture
from benchmarks.common.made import commit
from benchmarks.racing.contenders import CHOSEN, DENSE_BEST, RIVALS
from benchmarks.racing.rank import Reached
from bireme.documents import read_json_lines
from bireme.report.shapes import Picture


class Results:
    """The lines of a file, and those that are added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = read_json_lines(path, start="way").records if path.exists() else {}
        self._lines: list[Mapping[str, Any]] = list(found.values())

    def find(self, kind: str, **keys: Any) -> list[Mapping[str, Any]]:
        """The lines of a kind that have these keys and values."""
        return [
            one
            for one in self._lines
            if one["kind"] == kind and all(one.get(key) == value for key, value in keys.items())
        ]

    def add(self, kind: str, **values: Any) -> Mapping[str, Any]:
        """Write a line, with the commit and the date."""
        line = {
            "kind": kind,
            **values,
            "commit": commit(),
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._lines.append(line)
        return line


def curve_document(reached: Sequence[Reached]) -> list[dict[str, Any]]:
    """A curve as plain data."""
    return [asdict(one) for one in reached]


def curve_of(line: Mapping[str, Any]) -> list[Reached]:
    """The curve of a line."""
    return [Reached(**one) for one in line["curve"]]


def crossing(curve: Sequence[Reached], target: float) -> tuple[float, float] | None:
    """Steps and seconds at which a curve reaches a loss, between the two evaluations around it; None if it
    does not. The loss is taken to fall in a straight line between them.
    """
    if curve and curve[0].loss <= target:
        return float(curve[0].step), curve[0].seconds
    for before, after in pairwise(curve):
        if after.loss <= target:
            share = (before.loss - target) / (before.loss - after.loss)
            steps = before.step + share * (after.step - before.step)
            return steps, before.seconds + share * (after.seconds - before.seconds)
    return None


def loss_at(curve: Sequence[Reached], seconds: float) -> float | None:
    """The loss after these seconds, between two evaluations; None before the first and after the last."""
    for before, after in pairwise(curve):
        if before.seconds <= seconds <= after.seconds:
            share = (seconds - before.seconds) / (after.seconds - before.seconds)
            return before.loss + share * (after.loss - before.loss)
    return None


ABOVE = 0.5
"""Of the loss above the target, so much is in a picture."""


def drawn(results: Results, settings: Sequence[str], target: float) -> Picture:
    """The loss over seconds, a panel for each setting: of the rivals, and of Bireme as it chooses and without
    delay, codecs and averages, the first seed.
    """
    panels = []
    names = {CHOSEN, DENSE_BEST, *(one.name for one in RIVALS)}
    for setting in settings:
        firsts = {
            one["contender"]: curve_of(one)
            for one in reversed(results.find("race", setting=setting))
            if one["curve"] and one["contender"] in names
        }
        if firsts:
            curves = [
                Curve(name, [(one.seconds, one.loss) for one in curve], name == CHOSEN)
                for name, curve in sorted(firsts.items())
            ]
            least = min(target, *(one.loss for curve in firsts.values() for one in curve)) - 0.02
            words = f"{setting}: loss over seconds"
            panels.append(CurvePanel(words, "s", curves, least, target + ABOVE, target))
    return curve_picture("loss over seconds of training", panels)
