"""`[plan]` of a run file: what is asked of the plan, in the words of `bireme plan`."""

from typing import Annotated, Literal

from pydantic import Field

from bireme.plan.penalties import START
from bireme.train.run_file.table import Devices, Samples, Share, StepsOrNever, Table, Text, Texts

__all__ = ["Penalties", "Planning"]

Penalty = Annotated[float, Field(ge=1, lt=1e6, allow_inf_nan=False)]


class Penalties(Table):
    """`[plan.penalties]`."""

    delayed: Penalty | None = Field(
        default=None, description="Steps of 2bw; if not set what was measured", examples=[1.5]
    )
    fresh: Penalty | None = Field(
        default=None, description="Steps of 2bw-fresh; if not set what was measured", examples=[1.05]
    )


class Planning(Table):
    """`[plan]`."""

    schedule: Literal[
        "auto",
        "sequential",
        "gpipe",
        "1f1b",
        "1f1b-sliced",
        "2bw",
        "2bw-fresh",
        "interleaved",
        "zb-h1",
        "zbv",
    ] = Field(default="auto", description="Schedule of the pipeline; auto is the best of all")
    objective: Literal["time-to-loss", "throughput"] = Field(
        default="time-to-loss",
        description="What makes a plan best; throughput leaves penalties out of account",
    )
    depth: Devices | None = Field(default=None, description="Devices of a replica", examples=[2])
    width: Devices | None = Field(default=None, description="Replicas of the pipeline", examples=[1])
    microbatches: Samples | None = Field(
        default=None, description="Micro-batches that a replica cuts its part of a batch into", examples=[4]
    )
    micro_batch: Samples | None = Field(
        default=None, description="Samples of a micro-batch, in the place of microbatches", examples=[4]
    )
    largest_batch: Samples | None = Field(
        default=None,
        description="Samples that a step may have at most, where the planner may choose more than "
        "training.batch_size",
        examples=[64],
    )
    devices: Texts | None = Field(
        default=None,
        description="Names of the devices to use; all if not set. `bireme cluster show` lists them",
        examples=[("host/gpu0", "host/gpu1")],
    )
    memory_fraction: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        default=1.0, description="Share of each device's memory that the plan may fill"
    )
    pin: Texts | None = Field(
        default=None,
        description="Units that must be on a device, each as UNIT=DEVICE, by number or name",
        examples=[("0=host/gpu0", "head=host/gpu1")],
    )
    together: Texts | None = Field(
        default=None,
        description="Units that must not be cut apart, each range as FIRST..LAST, by number or name",
        examples=[("0..3",)],
    )
    whole_layers: bool = Field(default=False, description="Cut between layers only")
    recompute: Literal["never", "where-needed", "always"] = Field(
        default="where-needed", description="Which stages run their forward again to save memory"
    )
    lookahead: bool = Field(
        default=True, description="Let stages run further ahead than their schedule, to hide slow links"
    )
    file: Text | None = Field(
        default=None,
        description="A plan made before by bireme plan. Of this table only the delay_warmup keys go with it",
        examples=["plan.json"],
    )
    synchronous: bool = Field(default=False, description="Have no delayed updates")
    delay_warmup_fraction: Share | None = Field(
        default=None,
        description="Part of all steps that goes under 1f1b at the beginning, before a schedule that delays "
        f"updates. If not set {START:g}, in long runs less, and 0 where you name the schedule yourself; of a "
        "plan from a file what it was made for",
        examples=[START],
    )
    delay_warmup_steps: StepsOrNever | None = Field(
        default=None,
        description="Steps that go so, in the place of delay_warmup_fraction",
        examples=[200],
    )
    penalties: Penalties = Field(
        default_factory=Penalties,
        description="Steps that a rule of delayed updates takes for one of a synchronous run.",
    )

    def num_delay_warmup_steps(self, steps: int) -> int | None:
        """How many of so many steps go without delayed updates at first; None leaves it to the plan."""
        if self.delay_warmup_steps is not None or self.delay_warmup_fraction is None:
            return self.delay_warmup_steps
        return round(self.delay_warmup_fraction * steps)
