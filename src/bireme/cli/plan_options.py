"""What the options of `bireme plan` say, as wishes and as files to write."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bireme.errors import BiremeError, closest

if TYPE_CHECKING:
    from bireme.schedule.rule import Rule

__all__ = [
    "Exporting",
    "exports_of",
    "penalties_of",
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
