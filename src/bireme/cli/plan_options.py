"""What the options of `bireme plan` say, as wishes and as files to write."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bireme.errors import BiremeError, closest

if TYPE_CHECKING:
    from bireme.plan.partition.loads import Recompute
    from bireme.plan.wishes import Goal
    from bireme.schedule.rule import Rule

__all__ = [
    "Exporting",
    "check_writable",
    "exports_of",
    "goal_of",
    "penalties_of",
    "recompute_of",
]


@dataclass(frozen=True, slots=True)
class Exporting:
    """An export that was asked for, and the file for it; None where it is to be printed."""

    name: str
    path: Path | None


def exports_of(texts: Iterable[str], *, has_model: bool) -> list[Exporting]:
    """Such as `torch-csv:schedule.csv`, or `megatron` to print it."""
    from bireme.plan.export.exports import NEEDS_MODEL, export_named

    found = []
    for text in texts:
        name, colon, file = text.partition(":")
        if export_named(name).needs_graph and not has_model:
            raise BiremeError(NEEDS_MODEL.format(name))
        if colon and not file:
            raise BiremeError(f"--export {text} names no file. Leave out the colon to have it printed.")
        found.append(Exporting(name, Path(file) if file else None))
    return found


def check_writable(plan: Path | None, exports: Sequence[Exporting]) -> None:
    """Refuse files that could not be written, before a long search."""
    if plan is not None and plan.suffix != ".json":
        raise BiremeError(f"A plan is written to a .json file, and {plan} is none.")
    files = [path for path in (plan, *(export.path for export in exports)) if path is not None]
    for path in files:
        if path.is_dir():
            raise BiremeError(f"{path} cannot be written: it is a folder. Name a file in it.")
        if not path.resolve().parent.is_dir():
            raise BiremeError(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")
    twice = {path.resolve() for path in files}
    if len(twice) < len(files):
        raise BiremeError("Two of the files to write are the same one. Give each a name of its own.")


def penalties_of(texts: Iterable[str]) -> "dict[Rule, float]":
    """Penalties that the user has measured himself, each as `RULE=STEPS`."""
    from bireme.schedule.catalogue import SCHEDULES
    from bireme.schedule.rule import Rule

    found: dict[Rule, float] = {}
    late = (Rule.DELAYED, Rule.FRESH)
    rules: dict[str, Rule] = {rule.value: rule for rule in late}
    rules |= {name: known.rule for name, known in SCHEDULES.items() if known.rule in late}
    for text in texts:
        name, _, steps = text.partition("=")
        if name not in rules:
            raise BiremeError(f"--penalty {text} is for no update rule. {closest(name, rules)}")
        try:
            found[rules[name]] = float(steps)
        except ValueError:
            raise BiremeError(
                f"--penalty {text} is not RULE=STEPS, such as {name}=1.2: steps needed for one of a "
                "synchronous run."
            ) from None
    return found


def goal_of(text: str) -> "Goal":
    """What makes a plan the best."""
    from bireme.plan.wishes import Goal

    known = [goal.value for goal in Goal]
    if text not in known:
        raise BiremeError(f"--objective is {text!r}. {closest(text, known)}")
    return Goal(text)


def recompute_of(text: str) -> "Recompute":
    """Which stages run their forward again."""
    from bireme.plan.partition.loads import Recompute

    words = {choice.value.replace(" ", "-"): choice for choice in Recompute}
    if text not in words:
        raise BiremeError(f"--recompute is {text!r}. {closest(text, words)}")
    return words[text]
