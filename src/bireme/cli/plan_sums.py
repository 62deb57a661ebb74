"""Reads the options of `bireme plan` about gradients: the codec of their sums, and how they are kept."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bireme.cli.measuring import Measuring
from bireme.codec.gradient_words import GradientForm, parse_gradient
from bireme.codec.sum_words import DENSE, DENSE_SUMS, SumCodec, SumCost, SumKind, parse_sum_codec, sum_cost
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.model.graph import Graph
    from bireme.profile.profile import Profile

__all__ = ["AskedSums", "asked_sums"]


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
        from bireme.plan.hashes import check_profile_fits
        from bireme.plan.plan_request import may_delay_updates
        from bireme.profile.kept_gradients import kept_gradients, sum_cost_of

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
            f"Only whole gradients are paged, and --gradient is {form}. Leave out --gradient or "
            "--device-memory."
        )
    return AskedSums(parse_sum_codec(codec), form)
