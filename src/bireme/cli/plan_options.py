"""Reads the options of `bireme plan`: constraints and output files."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bireme.bounds import bytes_of
from bireme.cli.measuring import Measuring
from bireme.codec.sum_description import (
    DENSE,
    DENSE_SUMS,
    GradientForm,
    SumCodec,
    SumCost,
    SumKind,
    parse_gradient,
    parse_sum_codec,
    sum_cost,
)
from bireme.errors import BiremeError, closest

if TYPE_CHECKING:
    from bireme.model.graph import Graph
    from bireme.plan.plan_request import TierLimits
    from bireme.profile.profile import Profile
    from bireme.schedule.program import Rule


# Reads the options of `bireme plan` about gradients: the codec of their sums, and how they are kept.


@dataclass(frozen=True, slots=True)
class AskedSums:
    """A codec of sums over replicas, and how gradients are kept; None if they are whole."""

    codec: SumCodec
    form: GradientForm | None

    def counted(
        self, profile: "Profile", asked: Measuring | None, schedule: str, *, synchronous: bool
    ) -> "tuple[Profile, SumCost]":
        """The profile with gradients as they are kept, and what sums cost.

        Without the model, gradients are taken as one vector a unit.
        """
        if asked is None:
            return profile, self._by_profile(profile)
        if self.codec == DENSE and self.form is None:
            return profile, DENSE_SUMS
        graph = self.graph(profile, asked)
        if self.form is None:
            return profile, sum_cost(self.codec, graph.gradient_shapes)
        from bireme.plan.plan_file import check_profile_fits
        from bireme.plan.plan_request import may_delay_updates
        from bireme.profile.optimizers import kept_gradients, sum_cost_of

        check_profile_fits(profile, graph)
        may_delay = may_delay_updates(schedule, synchronous=synchronous)
        counted = kept_gradients(graph, self.form).counted_in(profile, may_delay=may_delay)
        return counted, sum_cost_of(graph, self.codec, self.form)

    def graph(self, profile: "Profile", asked: Measuring) -> "Graph":
        """The model."""
        from bireme.cli.measuring import captures_of

        return captures_of(asked).graph(profile.micro_batches[0])

    def _by_profile(self, profile: "Profile") -> SumCost:
        if self.form is not None:
            raise BiremeError(
                f"--gradient {self.form} depends on the model's linear maps, which a profile does not have. "
                "Give the model with --model too."
            )
        if self.codec.kind is SumKind.LOWRANK:
            raise BiremeError(
                f"--sync-codec {self.codec} depends on the shapes of the model's matrices, which a profile "
                "does not have. Give the model with --model too."
            )
        return sum_cost(self.codec, [(unit.gradient_bytes // 4,) for unit in profile.units])


def asked_sums(
    codec: str,
    gradient: str,
    gradient_of: list[str] | None,
    schedule: str,
    *,
    pages: bool,
    shares: bool,
) -> AskedSums:
    """What the options say; refuses what does not go together."""
    form = parse_gradient(gradient, tuple(gradient_of) if gradient_of else None)
    if shares and (form is not None or parse_sum_codec(codec) != DENSE):
        given = f"--sync-codec {codec}" if form is None else f"--gradient {form}"
        raise BiremeError(
            "With --shard each replica gets the plain sum of its part of whole gradients, but there is "
            f"{given}. Leave out one of the two."
        )
    if form is None:
        if gradient_of:
            raise BiremeError("--gradient-of names weights for --gradient, such as principal:8. Give both.")
        return AskedSums(parse_sum_codec(codec), None)
    from bireme.schedule.catalogue import SCHEDULES

    if schedule in SCHEDULES and SCHEDULES[schedule].splits_backward:
        raise BiremeError(
            f"--gradient {form} needs whole backwards, but --schedule {schedule} splits them. Use a schedule "
            "such as 1f1b or 2bw."
        )
    if pages:
        raise BiremeError(
            f"Only whole gradients are offloaded, and --gradient is {form}. Leave out --gradient or "
            "--device-memory."
        )
    return AskedSums(parse_sum_codec(codec), form)


AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Exporting:
    """A requested export and its file; None to print it."""

    name: str
    path: Path | None


def exports_of(texts: Iterable[str], *, has_model: bool) -> list[Exporting]:
    """Reads `torch-csv:schedule.csv`, or `megatron` to print it."""
    from bireme.plan.export import NEEDS_MODEL, export_named

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
    from bireme.schedule.program import Rule

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
    from bireme.plan.plan_request import TierLimits

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
