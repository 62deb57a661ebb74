"""`[plan]` of a run file: what is asked of the plan, in the words of `bireme plan`."""

from typing import Annotated, Literal

from pydantic import Field

from bireme.plan.penalties import DEFAULT_DELAY_WARMUP
from bireme.train.run_file.table import Devices, Samples, Share, StepsOrNever, Table, Text, Texts

__all__ = ["Penalties", "Planning"]

Penalty = Annotated[float, Field(ge=1, lt=1e6, allow_inf_nan=False)]


class Penalties(Table):
    """`[plan.penalties]`."""

    delayed: Penalty | None = Field(
        default=None,
        description="Steps of 2bw that equal one synchronous step; by default as measured",
        examples=[1.5],
    )
    fresh: Penalty | None = Field(
        default=None,
        description="Steps of 2bw-fresh that equal one synchronous step; by default as measured",
        examples=[1.05],
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
    ] = Field(default="auto", description="Pipeline schedule; auto searches for the best")
    objective: Literal["time-to-loss", "throughput", "energy"] = Field(
        default="time-to-loss",
        description="What to optimise; throughput ignores penalties, energy is joules per sample times "
        "penalties and needs the watts of all devices",
    )
    depth: Devices | None = Field(default=None, description="Number of devices per replica", examples=[2])
    width: Devices | None = Field(
        default=None, description="Number of replicas of the pipeline", examples=[1]
    )
    microbatches: Samples | None = Field(
        default=None, description="Number of micro-batches per batch and replica", examples=[4]
    )
    micro_batch: Samples | None = Field(
        default=None, description="Samples per micro-batch, instead of microbatches", examples=[4]
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
        default="where-needed", description="Which stages recompute activations to save memory"
    )
    lookahead: bool = Field(
        default=True, description="Allow stages to run further ahead than their schedule, to hide slow links"
    )
    file: Text | None = Field(
        default=None,
        description="A plan file of bireme plan. Only the delay_warmup keys may be set with it",
        examples=["plan.json"],
    )
    synchronous: bool = Field(default=False, description="Forbid delayed updates")
    delay_warmup_fraction: Share | None = Field(
        default=None,
        description="Fraction of steps run under 1f1b before updates are delayed. By default "
        f"{DEFAULT_DELAY_WARMUP:g}, less in long runs, and 0 if you name the schedule; "
        "for a plan file, the value that it was made with",
        examples=[DEFAULT_DELAY_WARMUP],
    )
    delay_warmup_steps: StepsOrNever | None = Field(
        default=None,
        description="Number of these steps, instead of delay_warmup_fraction",
        examples=[200],
    )
    penalties: Penalties = Field(
        default_factory=Penalties,
        description="Steps with delayed updates that equal one synchronous step.",
    )

    def num_delay_warmup_steps(self, steps: int) -> int | None:
        """How many of so many steps go without delayed updates at first; None leaves it to the plan."""
        if self.delay_warmup_steps is not None or self.delay_warmup_fraction is None:
            return self.delay_warmup_steps
        return round(self.delay_warmup_fraction * steps)
