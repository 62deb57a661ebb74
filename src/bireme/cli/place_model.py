"""`bireme place --model`: make a workload from a model, and a plan from its placement."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bireme.cli.measuring import Measuring, captures_of, measure

if TYPE_CHECKING:
    from bireme.placement.of_model.from_model import ModelWorkload
    from bireme.placement.workload import Granularity, Placement
    from bireme.profile.profile import Profile


@dataclass(frozen=True, slots=True)
class ModelPlacing:
    """A model to place: its workload and its profile."""

    made: "ModelWorkload"
    profile: "Profile"

    @classmethod
    def of(
        cls,
        asked: Measuring,
        cluster: str | None,
        *,
        training: bool,
        granularity: "Granularity",
        devices: Sequence[str] = (),
        copies_tied: bool,
    ) -> "ModelPlacing":
        """Capture and measure the model, and find the devices."""
        from bireme.cli.plan_run import cluster_of
        from bireme.placement.of_model.from_model import workload_of
        from bireme.report.progress import progress_bar

        found = cluster_of(cluster)
        with progress_bar("capturing the model") as progress:
            profile = measure(asked, progress)
        micro_batch = asked.batches[0]
        made = workload_of(
            captures_of(asked).graph(micro_batch),
            profile,
            found,
            micro_batch=micro_batch,
            training=training,
            granularity=granularity,
            devices=devices,
            copy_tied=copies_tied,
        )
        return cls(made, profile)


@dataclass(frozen=True, slots=True)
class OfModel:
    """What a model's placement yields besides its document: a plan file, on request."""

    placing: ModelPlacing
    plan: Path | None
    schedule: str
    num_microbatches: int | None

    def write(self, placement: "Placement") -> str:
        """Write the plan; return a sentence on what moving its cuts to unit borders changed."""
        if self.plan is None:
            return ""
        from bireme.placement.of_model.to_plan import plan_of
        from bireme.plan.plan_file import planned_units, write_plan

        placed = plan_of(
            self.placing.made,
            placement,
            num_microbatches=self.num_microbatches or 2 * len(set(placement.devices)),
            schedule=self.schedule,
            snapped=True,
        )
        write_plan(self.plan, placed.plan, planned_units(self.placing.profile))
        return placed.note

    def documented(self, document: dict[str, Any]) -> dict[str, Any]:
        """The placement's document, with the cluster's names of its devices and the unit of each node."""
        made = self.placing.made
        names = dict(zip(document["loads"], made.device_names, strict=True))
        units = dict(zip(document["assignment"], (made.unit_names[unit] for unit in made.units), strict=True))
        return document | {"devices": names, "units": units, "micro_batch": made.micro_batch}
