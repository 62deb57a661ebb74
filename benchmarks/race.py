"""The race: real training over emulated links, against what people would use instead, to the same loss.

    python benchmarks/race.py [--setting NAME …] [--contender NAME …] [--seed N …] [--resume FILE] [--quick]

Four emulated hosts train the same GPT on the same batches, with real processes and sockets. The clock stops
when the loss on held-out text is reached, and stands still during evaluations. docs/race.md says how it is
made and what it found. Everything that has run is a line of the file that `--resume` names; what it has is
not run again. `--only-report` runs nothing and reports the file. `--picture FILE.svg` draws the curves.

Settings: unshaped, 1gbit, 100mbit-20ms, 100mbit-slow-host.
"""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import Verdict, at_least, at_most
from benchmarks.racing.contenders import CHOSEN, CONTENDERS, HAND, RIVALS
from benchmarks.racing.field import SETTINGS
from benchmarks.racing.results import Results, crossing, curve_of, drawn, loss_at
from benchmarks.racing.runs import LIMITS, QUICK, Limits, Race
from bireme.files import write_text_atomically
from bireme.report.markup import svg

SEEDS = (0, 1, 2)
QUICK_CONTENDERS = ("ddp-bf16", "diloco")
FAR, SLOW_HOST = "100mbit-20ms", "100mbit-slow-host"
PIPELINES = ("torch-1f1b", "torch-interleaved-zb")
MOST_SLOWER, MOST_FROM_HAND = 1.03, 1.05
LEAST_OF_PIPELINES, LEAST_OF_ALL, LEAST_SLOW_HOST = 5.0, 1.5, 2.0


def rows_of(results: Results, setting: str, target: float) -> list[dict[str, Any]]:
    """A row for each contender that has run in a setting, the fastest first."""
    rows = []
    runs = results.find("race", setting=setting)
    for name in dict.fromkeys(one["contender"] for one in runs):
        own = [one for one in runs if one["contender"] == name]
        curves = [curve_of(one) for one in own]
        found = [crossing(curve, target) or (inf, inf) for curve in curves]
        reached = {one["seed"]: at_s for one, (_, at_s) in zip(own, found, strict=True) if at_s < inf}
        steps, seconds = (median(values) for values in zip(*found, strict=True))
        ends = [curve[-1] for curve in curves]
        sent = [end.card_bytes / end.step for end in ends if end.card_bytes is not None]
        rows.append(
            {
                "contender": name,
                "seeds": len(own),
                "reached": len(reached),
                "seconds": seconds if seconds < inf else None,
                "seconds_by_seed": {seed: round(at_s, 2) for seed, at_s in reached.items()},
                "steps": steps if steps < inf else None,
                "step_s": median(end.seconds / end.step for end in ends),
                "kB_a_step": median(sent) / 1e3 if sent else None,
                "loss_when_the_first_arrives": None,
                "made_of": own[-1]["made_of"],
                "commit": own[-1]["commit"],
                "chosen": own[-1]["chosen"],
            }
        )
    arrivals = [row["seconds"] for row in rows if row["seconds"] is not None]
    for row in rows if arrivals else ():
        of_row = [curve_of(one) for one in runs if one["contender"] == row["contender"]]
        losses = [loss for curve in of_row if (loss := loss_at(curve, min(arrivals))) is not None]
        row["loss_when_the_first_arrives"] = median(losses) if losses else None
    return sorted(rows, key=lambda row: (row["seconds"] is None, row["seconds"] or 0.0))


def tuning_rows(results: Results, budget: Limits) -> Iterator[dict[str, Any]]:
    """What was tried to tune each contender."""
    for one in results.find("way"):
        found = crossing(curve_of(one), budget.target)
        about = f"{found[0]:.0f} steps to the loss" if found else f"not within {budget.steps} steps"
        yield {"contender": one["contender"], "in": "loopback", "tried": str(one["choice"]), "found": about}
    for one in results.find("shape"):
        about = f"{one['step_s']:.3f} s a step"
        yield {
            "contender": one["contender"],
            "in": one["setting"],
            "tried": str(one["choice"]),
            "found": about,
        }


def verdicts(setting: str, rows: Sequence[dict[str, Any]]) -> Iterator[Verdict]:
    """The goals, as far as contenders have reached the loss."""
    reached = {row["contender"]: row["seconds_by_seed"] for row in rows if row["seconds"] is not None}
    if CHOSEN not in reached:
        return
    rivals = _times([one.name for one in RIVALS], reached)
    if rivals is not None:
        yield at_most(f"{setting}: seconds of Bireme, of the best rival's", 1 / rivals, MOST_SLOWER)
        what = f"{setting}: the best rival's seconds, of Bireme's"
        if setting == FAR:
            yield at_least(what, rivals, LEAST_OF_ALL)
        if setting == SLOW_HOST:
            yield at_least(what, rivals, LEAST_SLOW_HOST)
    pipelines = _times(PIPELINES, reached)
    if setting == FAR and pipelines is not None:
        yield at_least(f"{setting}: the best pipeline's seconds, of Bireme's", pipelines, LEAST_OF_PIPELINES)
    hand = _times([one.name for one in HAND], reached)
    if hand is not None:
        what = f"{setting}: seconds as chosen, of the best Bireme by hand"
        yield at_most(what, max(1.0, 1 / hand), MOST_FROM_HAND)


def _times(names: Sequence[str], reached: Mapping[str, Mapping[int, float]]) -> float | None:
    """How many times as long as Bireme the best of these contenders takes, by the medians of the seeds with
    which both have reached the loss; None if there is no such seed.
    """
    found = []
    for name in names:
        own = reached[CHOSEN]
        if seeds := own.keys() & reached.get(name, {}).keys():
            found.append(median(reached[name][seed] for seed in seeds) / median(own[seed] for seed in seeds))
    return min(found, default=None)


def options(parser: ArgumentParser) -> None:
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, help="networks; all without it")
    parser.add_argument("--contender", nargs="+", choices=CONTENDERS, help="who takes part; all without it")
    parser.add_argument("--seed", nargs="+", type=int, default=SEEDS, help="seeds, one run for each")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="results to go on with and to add to")
    parser.add_argument(
        "--rivals", metavar="PYTHON", help="an interpreter that has torchft and Bireme's own packages"
    )
    parser.add_argument("--only-report", action="store_true", help="run nothing, report the file of --resume")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw the curves of the settings")


def measure(asked: Namespace) -> Findings:
    limits = QUICK if asked.quick else LIMITS
    settings = asked.setting or ([FAR] if asked.quick else list(SETTINGS))
    names = asked.contender or (QUICK_CONTENDERS if asked.quick else list(CONTENDERS))
    seeds = asked.seed[:1] if asked.quick else asked.seed
    with TemporaryDirectory(prefix="race-") as scratch:
        path = asked.resume or Path(scratch) / "race.jsonl"
        results = Results(path)
        if not asked.only_report:
            race = Race(results, limits, Path(scratch), asked.rivals)
            for seed in seeds:  # whoever stops it has whole rounds
                for setting in settings:
                    for name in names:
                        log(f"{setting}: {name}, seed {seed}")
                        race.run(SETTINGS[setting], CONTENDERS[name], seed)
        by_setting = {setting: rows_of(results, setting, limits.target) for setting in settings}
        sections = [
            Section(f"{setting}: to a loss of {limits.target:g}", rows)
            for setting, rows in by_setting.items()
            if rows
        ]
        sections.append(Section("Tuning", list(tuning_rows(results, limits))))
        if asked.picture is not None:
            write_text_atomically(asked.picture, svg(drawn(results, settings, limits.target)))
        found = [one for setting, rows in by_setting.items() for one in verdicts(setting, rows)]
    return Findings(sections, found)


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        quick="one setting, two rivals that are not tuned, one seed, a loss that is soon reached",
        options=options,
    )
