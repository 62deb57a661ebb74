"""`[plan]` of a run file: what is asked of the plan, and the tables beside it."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from bireme.balance import Policy
from bireme.bounds import ANY, bytes_of, bytes_per_s_of, parse_stage_widths, widths_text
from bireme.codec.description import BoundaryCodecs, parse_codec
from bireme.errors import BiremeError
from bireme.plan.penalties import DEFAULT_DELAY_WARMUP
from bireme.train.run_file.table import (
    Devices,
    Samples,
    Share,
    Steps,
    StepsOrNever,
    Table,
    Text,
    Texts,
    listed,
    parsed,
)

# `[balance]` of a run file: how much of each batch every replica trains.


class Balancing(Table):
    """`[balance]`."""

    mode: Literal["off", "start", "measured"] | None = Field(default=None, examples=["measured"])
    """off keeps the plan's shares; start measures every replica before the first step; measured lets shares
    follow the speed of the replicas while they train; by default measured if devices of the plan's
    replicas differ in speed, or if machines of bireme coordinate have one replica, else off. With groups and
    diloco, off gives all replicas the same number of batches, and shares follow speeds otherwise.
    """
    batch: Literal["keep", "grow"] = "keep"
    """grow measures before the first step and sets training.batch_size to the samples that all replicas train
    while the slowest one runs at its best rate; training.learning_rate grows in proportion, with a warm-up.
    """
    margin: Annotated[float, Field(ge=0, lt=1)] = Policy().margin
    """Least part of a step's time that a change of shares must save."""
    every_steps: Steps = Policy().every
    """Fewest steps between two changes of shares, unless the speed of a device jumps."""
    replan: bool = False
    """Make a new plan at the next checkpoint if one stage, not a whole replica, has become slow; under
    `bireme coordinate`, if that has lasted for `elastic.patience_s` and pays.
    """


# `[memory]` of a run file: what of a stage may lie on the host or on a disk, and what replicas share.

AUTO = "auto"
"""As much as there is."""


def _as_text(value: Any) -> Any:
    """A plain number of bytes is an amount too."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(int(value)) if is_number and float(value).is_integer() else value


def _amount(value: str) -> str:
    if value.strip().lower() == AUTO:
        return AUTO
    try:
        bytes_of(value, "it")
    except BiremeError:
        raise ValueError('auto, or bytes such as "6GB", "24GiB" or "5e9"') from None
    return value.strip()


Amount = Annotated[str, BeforeValidator(_as_text), AfterValidator(_amount)]


def _rate(value: str) -> str:
    try:
        bytes_per_s_of(value, "it")
    except BiremeError:
        raise ValueError('a rate above 0, such as "50Mbit/s" or "6MB/s"') from None
    return value.strip()


class Memory(Table):
    """`[memory]`."""

    device: Amount | None = Field(default=None, examples=["6GB"])
    """Memory that each process may use of its device, such as 6GB; auto is all of it. What does not fit is
    offloaded to the host. If not set, nothing is offloaded.
    """
    host: Amount = AUTO
    """Host memory that each process may offload to, 0 for none; auto is its share of the host's."""
    disk: Text | None = Field(default=None, examples=["/scratch"])
    """Folder on a disk of each machine that may be offloaded to; the file in it is removed when the run ends.
    """
    disk_bytes: Amount = AUTO
    """Bytes of the disk that each process may use, such as 200GB; auto is its share of what is free in the
    folder.
    """
    stashes: bool = True
    """Offload the activations of micro-batches too, not only weights and optimizer."""
    optimizer: Literal["auto", "device", "host"] = Field(default="auto", examples=["host"])
    """Where the optimizer steps what is offloaded: on the device, after what it remembers was fetched; on the
    host, where that stays, and only gradients come down and weights go up; or wherever a batch is predicted
    to take less time (auto). On GPUs it steps on the device.
    """
    updates: Literal["agreed", "apart"] = Field(default="agreed", examples=["apart"])
    """When stages that are offloaded step: after all have agreed on the gradient's norm and on whether the
    batch counts (agreed), or each as soon as it has its own gradients, if a batch is predicted to take less
    time that way (apart). The latter needs one replica and a schedule that drains between batches. It clips
    by another rule: each stage by the norm of its own gradient, to its share of training.clip_norm, and not
    all stages by the norm of the whole gradient.
    """
    shard: Literal["none", "auto", "optimizer", "weights"] = Field(default="none", examples=["optimizer"])
    """What the replicas of a stage share: nothing (none); the optimizer, of which each replica then keeps and
    steps a part, and sends the others the new weights of it; weights and gradients too (weights), which are
    then gathered where they are used; or whatever of these is predicted to take the least time and fits
    (auto).
    """
    copies: Annotated[int, Field(ge=0, le=1)] | None = Field(default=None, examples=[1])
    """Second copies of each stage's weights and optimizer state, in the memory of another process, which is
    on another machine if the run has several. After a loss the run goes on from them instead of the last
    checkpoint. By default 1 with quorum and one replica, whose state no other replica has; else 0.
    """
    copy_rate: Annotated[str, AfterValidator(_rate)] | None = Field(default=None, examples=["50Mbit/s"])
    """Most that each machine sends for second copies, such as 50Mbit/s; by default a quarter of the time of a
    link.
    """

    @property
    def copy_bytes_per_s(self) -> float | None:
        """The most bytes a second for second copies; None bounds their share of a link's time instead."""
        return None if self.copy_rate is None else bytes_per_s_of(self.copy_rate, "memory.copy_rate")

    @property
    def is_on(self) -> bool:
        """Whether anything may be paged."""
        return self.device is not None

    @property
    def device_bytes(self) -> int | None:
        """What a process may use of its device; None where it is all of it."""
        return None if self.device is None else _bytes(self.device, "memory.device")

    @property
    def host_bytes(self) -> int | None:
        """What a process may use of the host; None leaves it to the machine."""
        return _bytes(self.host, "memory.host")

    @property
    def most_disk_bytes(self) -> int | None:
        """What a process may use of the disk, 0 where there is no folder; None leaves it to the machine."""
        return 0 if self.disk is None else _bytes(self.disk_bytes, "memory.disk_bytes")


def _bytes(amount: str, key: str) -> int | None:
    return None if amount == AUTO else bytes_of(amount, key)


# `[links]` of a run file: how what crosses the boundaries between stages becomes fewer bytes.


def auto_or(parse: Callable[[str], object], value: str) -> str:
    """A word as `parse` reads it, or `AUTO`."""
    return AUTO if value.strip().lower() == AUTO else str(parsed(value, parse))


def _boundary(value: str) -> str:
    first, dash, second = value.strip().partition("-")
    if not dash or not first.isdecimal() or not second.isdecimal() or int(second) != int(first) + 1:
        raise ValueError('two neighboring stages, such as "0-1"')
    return f"{int(first)}-{int(second)}"


Codec = Annotated[str, AfterValidator(lambda value: str(parsed(value, parse_codec)))]
CodecOrAuto = Annotated[str, AfterValidator(partial(auto_or, parse_codec))]


class BoundaryLinks(Table):
    """One entry of `links.boundaries`."""

    boundary: Annotated[str, AfterValidator(_boundary)]
    forward: Codec
    backward: Codec | None = None

    @property
    def number(self) -> int:
        """The stage before the boundary."""
        return int(self.boundary.partition("-")[0])

    @property
    def codecs(self) -> BoundaryCodecs:
        """Both directions; the gradient goes as the activation does unless it is said."""
        return BoundaryCodecs(self.forward, self.backward or self.forward)


class LinkSchedule(Table):
    """`[links.schedule]`."""

    first_fraction: Share = 0.0
    """Share of the steps, at the beginning of the run, with first_codec."""
    first_codec: Codec = "int8"
    """Codec of all boundaries in the first part of the run, in the notation of links.codec."""
    last_fraction: Share = 0.0
    """Share of the steps, at the end of the run, with last_codec: a model that was trained with topk has
    adapted to missing entries, and needs some steps without it.
    """
    last_codec: Codec = "int8"
    """Codec of all boundaries in the last part of the run, in the notation of links.codec."""


class LinksTable(Table):
    """`[links]`."""

    codec: CodecOrAuto | None = Field(default=None, examples=["int8"])
    """How activations and their gradients are sent between stages: none sends them as they are, bfloat16,
    int8, int7 to int1 (bits a value), topk:SHARE:BITS (the largest entries of each token),
    topk:SHARE:BITS:BATCHES (those of the whole tensor, by a threshold that holds for so many batches),
    MODULE:ATTRIBUTE (a codec of your own), or auto, which lets the planner choose by the speed of the links.
    By default the plan decides: none, unless the plan comes from a file.
    """
    boundaries: (
        Annotated[
            tuple[BoundaryLinks, ...],
            Field(max_length=4096),
            listed('one table or more, such as [{boundary = "0-1", forward = "int8"}]'),
        ]
        | None
    ) = Field(default=None, examples=[({"boundary": "0-1", "forward": "int8", "backward": "int4"},)])
    """Codecs of single boundaries, each named by the stages on both sides; the gradient has the codec of the
    activation unless backward names another.
    """
    schedule: LinkSchedule = Field(default_factory=LinkSchedule)
    """Other codecs at the beginning and at the end of a run."""
    encrypt: bool = True
    """Encrypt what goes from one host to another, which needs the extra encryption; lines of NCCL cannot be
    encrypted.
    """


Penalty = Annotated[float, Field(ge=1, lt=1e6)]


class Penalties(Table):
    """`[plan.penalties]`."""

    delayed: Penalty | None = Field(default=None, examples=[1.5])
    """Steps of 2bw that equal one synchronous step; by default as measured."""
    fresh: Penalty | None = Field(default=None, examples=[1.05])
    """Steps of 2bw-fresh that equal one synchronous step; by default as measured."""


def _widths(value: Any) -> Any:
    """A list of numbers is the replicas of each stage too."""
    if isinstance(value, list | tuple) and value and all(type(one) is int for one in value):
        return widths_text(value)
    return value


def _stage_widths(value: str) -> str:
    found = parsed(value, parse_stage_widths)
    return found if isinstance(found, str) else widths_text(found)


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
    ] = "auto"
    """Pipeline schedule; auto searches for the best."""
    objective: Literal["time-to-loss", "throughput", "energy"] = "time-to-loss"
    """What to optimize; throughput ignores penalties, energy is joules per sample times penalties and needs
    the watts of all devices.
    """
    depth: Devices | None = Field(default=None, examples=[2])
    """Number of devices per replica."""
    width: Devices | None = Field(default=None, examples=[1])
    """Number of replicas of the pipeline."""
    stage_widths: Annotated[str, BeforeValidator(_widths), AfterValidator(_stage_widths)] = Field(
        default=ANY, examples=["3-1"]
    )
    """Replicas of each stage, such as 3-1: three of the first stage, one of the second; equal gives all
    stages the same number, any leaves it to the planner.
    """
    microbatches: Samples | None = Field(default=None, examples=[4])
    """Number of micro-batches per batch and replica."""
    micro_batch: Samples | None = Field(default=None, examples=[4])
    """Samples per micro-batch, instead of microbatches."""
    largest_batch: Samples | None = Field(default=None, examples=[64])
    """Samples that a step may have at most, where the planner may choose more than training.batch_size."""
    devices: Texts | None = Field(default=None, examples=[("host/gpu0", "host/gpu1")])
    """Names of the devices to use; all if not set. `bireme cluster show` lists them."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each device's memory that the plan may fill."""
    profiles: Texts | None = Field(default=None, examples=[("rtx3090=rtx3090.json",)])
    """Profiles of the model on other devices, each as NAME=FILE: the name, the kind or the ready description
    of these devices, and a file of bireme profile.
    """
    pin: Texts | None = Field(default=None, examples=[("0=host/gpu0", "head=host/gpu1")])
    """Units that must be on a device, each as UNIT=DEVICE, by number or name."""
    together: Texts | None = Field(default=None, examples=[("0..3",)])
    """Units that must not be cut apart, each range as FIRST..LAST, by number or name."""
    whole_layers: bool = False
    """Cut between layers only."""
    recompute: Literal["never", "where-needed", "always", "layers"] = "where-needed"
    """Which stages recompute activations to save memory; with layers, a device that has the whole model may
    also run it in parts that each recompute.
    """
    lookahead: bool = True
    """Allow stages to run further ahead than their schedule, to hide slow links."""
    file: Text | None = Field(default=None, examples=["plan.json"])
    """A plan file of bireme plan. Only the delay_warmup keys may be set with it."""
    synchronous: bool = False
    """Forbid delayed updates."""
    delay_warmup_fraction: Share | None = Field(
        default=None,
        description="Fraction of steps run under 1f1b before updates are delayed. By default "
        f"{DEFAULT_DELAY_WARMUP:g}, less in long runs, and 0 if you name the schedule; "
        "for a plan file, the value that it was made with",
        examples=[DEFAULT_DELAY_WARMUP],
    )
    delay_warmup_steps: StepsOrNever | None = Field(default=None, examples=[200])
    """Number of these steps, instead of delay_warmup_fraction."""
    penalties: Penalties = Field(default_factory=Penalties)
    """Steps with delayed updates that equal one synchronous step."""

    def refuse_more_devices(self, most: int, than: str, remedy: str) -> None:
        """Refuse a plan that needs more devices than there are; `{needed}` in the remedy is that number."""
        widths = parse_stage_widths(self.stage_widths)
        what, needed = "plan.depth times plan.width is", (self.depth or 1) * (self.width or 1)
        if isinstance(widths, tuple):
            what, needed = f"plan.stage_widths is {self.stage_widths}, added up", sum(widths)
        if needed > most:
            raise BiremeError(f"{what} {needed}, but {than} {remedy.format(needed=needed)}")

    def num_delay_warmup_steps(self, steps: int) -> int | None:
        """How many of so many steps go without delayed updates at first; None leaves it to the plan."""
        if self.delay_warmup_steps is not None or self.delay_warmup_fraction is None:
            return self.delay_warmup_steps
        return round(self.delay_warmup_fraction * steps)
