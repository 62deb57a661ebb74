"""Runs of the race: tuning first, with the same budget for all, then a contender in a setting with a seed.

Steps to the loss do not depend on links or on speeds. So each way to learn is tried once, on the loopback
with devices that do not sleep, and counts steps. Each shape is then timed for a few steps in the setting.
Bireme has neither: its planner chooses, once for each setting, and all of its runs there have that plan.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common.command import log
from benchmarks.racing import ours
from benchmarks.racing.contenders import CONTENDERS, Contender
from benchmarks.racing.field import LEARNING, Field, Setting, field, wait_for
from benchmarks.racing.rank import Order, Reached
from benchmarks.racing.results import Results, crossing, curve_document, curve_of

_START_S = 120.0
"""For processes to begin, beside the seconds that they may train."""
_PACE = 12.0
"""Times as long as a step takes that a busy machine may need for it, before it is given up."""
_TUNING_SEED = 100


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a run: the loss to reach, the most steps and seconds, and the steps between two evaluations.

    `timed` are the steps for which a shape is timed. Without `is_tuned` all take the first way and shape.
    """

    target: float
    steps: int
    seconds: float
    every: int
    timed: int
    is_tuned: bool


LIMITS = Limits(2.7, 600, 300.0, 20, 10, True)
QUICK = Limits(3.3, 80, 60.0, 10, 0, False)


class Race:
    """Runs what the results do not have yet. `scratch` has profiles of the model for the runs of Bireme, and
    `python` is an interpreter with the packages of contenders that need more than Bireme's environment has.
    """

    def __init__(self, results: Results, limits: Limits, scratch: Path, python: str | None = None) -> None:
        self._results, self._limits, self._scratch = results, limits, scratch
        self._python = python

    def run(self, setting: Setting, contender: Contender, seed: int) -> None:
        """One run, and the tuning that it needs."""
        keys = {"setting": setting.name, "contender": contender.name}
        if self._results.find("race", **keys, seed=seed):
            return
        if contender.package and self._python is None:
            log(f"{contender.name} is left out: it needs {contender.package}, see --rivals")
            return
        choice = self._way(contender)
        if contender.is_ours:
            self._run_ours(setting, contender, {**choice, **contender.shapes[0]}, seed)
            return
        choice = {**choice, **self._shape(setting, contender, choice)}
        reached, about = self._rival(setting, contender, choice, seed, self._limits.steps)
        self._add(keys, seed, choice, "", reached, about)

    def _add(
        self,
        keys: Mapping[str, str],
        seed: int,
        choice: Mapping[str, Any],
        chosen: str,
        reached: Sequence[Reached],
        about: str,
    ) -> None:
        more = {"choice": choice, "chosen": chosen, "made_of": about, "curve": curve_document(reached)}
        self._results.add("race", **keys, seed=seed, **more)

    def _way(self, contender: Contender) -> dict[str, Any]:
        """The way to learn with the fewest steps to the loss."""
        if not contender.ways:
            return {"learning_rate": self._way(CONTENDERS[contender.like])["learning_rate"]}
        if not self._limits.is_tuned:
            return dict(contender.ways[0])
        tried = list[tuple[float, int, Mapping[str, Any]]]()
        for way in contender.ways:
            found = self._results.find("way", contender=contender.name, choice=way)
            if not found:
                log(f"tuning: {contender.name}, {way}")
                reached, _ = self._rival(LEARNING, contender, dict(way), _TUNING_SEED, self._limits.steps)
                curve = curve_document(reached)
                found = [self._results.add("way", contender=contender.name, choice=way, curve=curve)]
            tried.append((self._effort(curve_of(found[-1])), len(tried), way))
        return dict(min(tried)[2])

    def _effort(self, curve: Sequence[Reached]) -> float:
        """Steps to the loss; if they did not get there, more than all steps, and more for a higher loss."""
        found = crossing(curve, self._limits.target)
        return found[0] if found is not None else self._limits.steps * curve[-1].loss

    def _shape(self, setting: Setting, contender: Contender, way: Mapping[str, Any]) -> dict[str, Any]:
        """The shape with the fastest step in a setting."""
        if len(contender.shapes) == 1 or not self._limits.is_tuned:
            return dict(contender.shapes[0])
        tried = list[tuple[float, int, Mapping[str, Any]]]()
        for shape in contender.shapes:
            keys = {"setting": setting.name, "contender": contender.name, "choice": shape}
            found = self._results.find("shape", **keys)
            if not found:
                log(f"tuning: {contender.name}, {shape}")
                steps = self._limits.timed
                reached, _ = self._rival(
                    setting, contender, {**way, **shape}, _TUNING_SEED, 2 * steps, every=steps
                )
                # The first steps make connections.
                step_s = (reached[1].seconds - reached[0].seconds) / steps
                found = [self._results.add("shape", **keys, step_s=step_s)]
            tried.append((found[-1]["step_s"], len(tried), shape))
        return dict(min(tried)[2])

    def _rival(
        self,
        setting: Setting,
        contender: Contender,
        choice: Mapping[str, Any],
        seed: int,
        steps: int,
        *,
        every: int | None = None,
    ) -> tuple[list[Reached], str]:
        """Run a contender that is not Bireme."""
        limits, module = self._limits, f"{__package__}.{contender.module}"
        with TemporaryDirectory(prefix="race-") as scratch, field(setting, Path(scratch)) as place:
            target = limits.target if every is None else 0.0
            order = Order(
                module, dict(choice), seed, steps, every or limits.every, target, limits.seconds, scratch
            )
            path = Path(scratch) / "order.json"
            path.write_text(json.dumps(asdict(order)))
            python = self._python if contender.package and self._python else sys.executable
            words = ["-m", f"{__package__}.rank", str(path)]
            with place.running(words, {}, python=python) as programs:
                wait_for(programs, lambda: False, _START_S + _PACE * limits.seconds)
            lines = (Path(scratch) / "reached.jsonl").read_text().splitlines()
            return [Reached(**json.loads(line)) for line in lines], place.about

    def _run_ours(self, setting: Setting, contender: Contender, choice: dict[str, Any], seed: int) -> None:
        """Run Bireme, unless another of its contenders had the same plan and keys here: then copy that."""
        keys = {"setting": setting.name, "contender": contender.name}
        with TemporaryDirectory(prefix="race-") as scratch, field(setting, Path(scratch)) as place:
            plan = self._plan(place, contender, choice)
            trained = choice | _settled(choice, plan["plan"])
            order = self._order_of_ours(trained, seed, scratch)
            for other in self._results.find("race", setting=setting.name, seed=seed, choice=trained):
                if other["plan"] == plan["plan"]:
                    self._results.add("race", **{**other, **keys})
                    return
            path = Path(scratch) / "plan.json"
            path.write_text(json.dumps(plan))
            reached = ours.race(place, order, path, self._scratch)
            more = {"choice": trained, "plan": plan["plan"], "chosen": _in_words(plan["plan"])}
            curve = curve_document(reached)
            self._results.add("race", **keys, seed=seed, **more, made_of=place.about, curve=curve)

    def _plan(self, place: Field, contender: Contender, choice: dict[str, Any]) -> Mapping[str, Any]:
        """The plan of a contender in a setting, made once."""
        keys = {"setting": place.setting.name, "contender": contender.name}
        found = self._results.find("plan", **keys)
        if not found:
            log(f"planning: {contender.name}")
            order = self._order_of_ours(choice, _TUNING_SEED, str(place.folder))
            made = ours.plan(place, order, self._scratch)
            found = [self._results.add("plan", **keys, document=made)]
        document: Mapping[str, Any] = found[-1]["document"]
        return document

    def _order_of_ours(self, choice: dict[str, Any], seed: int, folder: str) -> Order:
        limits = self._limits
        return Order("", choice, seed, limits.steps, limits.every, limits.target, limits.seconds, folder)


def _settled(choice: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """The keys whose `auto` a plan has settled: with a plan file a run over several hosts needs them."""
    names = {"sync.mode": "sync_mode", "sync.codec": "sum_codec"}
    return {key: plan[name] for key, name in names.items() if choice[key] == "auto"}


def _in_words(plan: Mapping[str, Any]) -> str:
    """What a plan chose, for a row."""
    codecs = sorted({word for one in plan["codecs"] for word in one.values()}) or ["none"]
    stages = len(plan["cuts"]) + 1
    return (
        f"{plan['schedule']}, {stages} x {plan['width']}, lookahead {plan['lookahead']}, "
        f"boundaries {'+'.join(codecs)}, {plan.get('sync_mode', '')} {plan.get('sum_codec', '')}"
    )
