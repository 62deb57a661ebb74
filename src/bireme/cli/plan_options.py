"""Reads the options of `bireme plan`: constraints and output files."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bireme.bounds import bytes_of
from bireme.errors import BiremeError, closest

if TYPE_CHECKING:
    from bireme.plan.tier_limits import TierLimits
    from bireme.schedule.rule import Rule

__all__ = [
    "Exporting",
    "exports_of",
    "penalties_of",
    "tier_limits_of",
]

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Exporting:
    """A requested export and its file; None to print it."""

    name: str
    path: Path | None


def exports_of(texts: Iterable[str], *, has_model: bool) -> list[Exporting]:
    """Reads `torch-csv:schedule.csv`, or `megatron` to print it."""
    from bireme.plan.export.exports import export_named
    from bireme.plan.export.material import NEEDS_MODEL

    found = []
    for text in texts:
        name, colon, file = text.partition(":")
        if export_named(name).needs_graph and not has_model:
            raise BiremeError(NEEDS_MODEL.format(name))
        if colon and not file:
            raise BiremeError(
                f"--export {text} names no file after the colon. Leave out the colon to print it."
            )
        found.append(Exporting(name, Path(file) if file else None))
    return found


def penalties_of(texts: Iterable[str]) -> "dict[Rule, float]":
    """The user's own penalties, each as `RULE=STEPS`."""
    from bireme.schedule.catalogue import SCHEDULES
    from bireme.schedule.rule import Rule

    found: dict[Rule, float] = {}
    late = (Rule.DELAYED, Rule.FRESH)
    rules: dict[str, Rule] = {rule.value: rule for rule in late}
    rules |= {name: known.rule for name, known in SCHEDULES.items() if known.rule in late}
    for text in texts:
        name, _, steps = text.partition("=")
        if name not in rules:
            raise BiremeError(f"--penalty {text} names no update rule. {closest(name, rules)}")
        try:
            found[rules[name]] = float(steps)
        except ValueError:
            raise BiremeError(
                f"--penalty {text} is not RULE=STEPS, such as {name}=1.2: the steps that equal one "
                "synchronous step."
            ) from None
    return found


def tier_limits_of(
    device: str | None, host: str | None, disk: str | None, optimizer: str, updates: str
) -> "TierLimits | None":
    """What each process may use of each tier; None where nothing is to be paged."""
    from bireme.plan.tier_limits import TierLimits

    if device is None:
        only = None if optimizer == AUTO else optimizer
        order = None if updates == "agreed" else updates
        asked = (
            ("host-memory", host),
            ("disk", disk),
            ("memory-optimizer", only),
            ("memory-updates", order),
        )
        given = next((name for name, text in asked if text), None)
        if given is not None:
            raise BiremeError(
                f"--{given} is for what does not fit a device. Say with --device-memory how much of it each "
                "process may use, or auto for all."
            )
        return None

    def amount(text: str, option: str) -> int | None:
        return None if text.strip().lower() == AUTO else bytes_of(text, option)

    return TierLimits(
        amount(device, "--device-memory"),
        None if host is None else amount(host, "--host-memory"),
        0 if disk is None else amount(disk, "--disk"),
        optimizer=optimizer,
        updates_apart=updates == "apart",
    )
