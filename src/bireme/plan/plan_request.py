"""What a user asks of a plan: batch size, goal and constraints."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise

from bireme.bounds import ANY, EQUAL, parse_stage_widths, widths_text
from bireme.capabilities import refuse_excluded
from bireme.cluster.cluster import Overlap
from bireme.codec.description import BoundaryCodecs, parse_codec
from bireme.codec.sum_description import DENSE, DENSE_SUMS, SiteRounds, SumCost
from bireme.errors import BiremeError, closest
from bireme.plan.partition.chain import layer_bounds
from bireme.plan.partition.loads import Recompute
from bireme.plan.penalties import (
    BOTH_CODED,
    DEFAULT_DELAY_WARMUP,
    WORDS_TO_TRY,
    agreement_steps,
    codec_steps,
    steps_for_one,
    sum_steps,
    unseen_share,
)
from bireme.schedule.catalogue import SCHEDULES
from bireme.schedule.program import Rule

# Units of a model as people name them: by number, by name, or by the beginning of several names.


def pins_of(texts: Iterable[str], names: Sequence[str], what: str) -> dict[int, str]:
    """Units by number, and the device that each must be on, from texts as UNIT=DEVICE.

    `names` are those of all units; `what` is the option or key that the texts are of.
    """
    found: dict[int, str] = {}
    for text in texts:
        unit, equals, device = text.partition("=")
        if not equals or not device:
            raise BiremeError(f"{what} {text} is not UNIT=DEVICE, such as 0=server0/gpu1.")
        for number in _units(unit, names, f"{what} {text}"):
            if found.setdefault(number, device) != device:
                raise BiremeError(
                    f"Unit {number} ({names[number]}) is pinned to {found[number]} and to {device}. Leave "
                    "out one of the two."
                )
    return found


def ranges_of(
    texts: Iterable[str], names: Sequence[str], what: str, *, whole_layers: bool
) -> tuple[tuple[int, int], ...]:
    """First and last units of what must not be cut, from texts as FIRST..LAST; with `whole_layers` those of
    all layers as well.
    """
    found = []
    for text in texts:
        first, dots, last = text.partition("..")
        place = f"{what} {text}"
        if not dots:
            raise BiremeError(f"{place} is not FIRST..LAST, such as 0..3 or layers.0..layers.1.")
        begin, end = _units(first, names, place)[0], _units(last, names, place)[-1]
        if begin > end:
            raise BiremeError(f"{place} ends before it begins: at unit {end}, and begins at {begin}.")
        found.append((begin, end))
    if whole_layers:
        found += [(begin, end - 1) for begin, end in pairwise(layer_bounds(names)) if end > begin + 1]
    return tuple(found)


def _units(text: str, names: Sequence[str], where: str) -> list[int]:
    """The units that a number, a name or the beginning of names means."""
    if text.isdecimal():
        if int(text) >= len(names):
            raise BiremeError(f"{where}: there is no unit {text}; they are 0 to {len(names) - 1}.")
        return [int(text)]
    found = [place for place, name in enumerate(names) if name == text or name.startswith(f"{text}.")]
    if not text or not found:
        raise BiremeError(f"{where}: there is no unit {text!r}. {closest(text, set(names))}")
    return found


# What a user allows a process to use of each tier of memory.

_PLACES = ("auto", "device", "host")
"""Where the optimizer may step."""


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Bytes of one process; None leaves them to the machine, and 0 is none of that tier.

    Without `stashes` activations stay on the device. `optimizer` says where updates are made of what is
    paged: on the device, on the host, or wherever a batch is predicted to take less time (auto). With
    `updates_apart` stages may be updated before all have their gradients. `within_s` asks for an estimate:
    the best plan that is found in these seconds, or the first that fits, timed over two batches.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = 0
    stashes: bool = True
    optimizer: str = "auto"
    updates_apart: bool = False
    within_s: float | None = None

    def __post_init__(self) -> None:
        if self.device_bytes is not None and self.device_bytes < 1:
            raise BiremeError(f"The device memory is {self.device_bytes} bytes; it must be 1 or more.")
        if self.host_bytes == 0 and self.disk_bytes == 0:
            raise BiremeError("There is neither host memory nor a disk to offload to. Give one of them.")
        if self.optimizer not in _PLACES:
            raise BiremeError(
                f"The optimizer cannot step on {self.optimizer!r}. {closest(self.optimizer, _PLACES)}"
            )
        if self.optimizer == "host" and self.host_bytes == 0:
            raise BiremeError(
                "The optimizer is to step on the host, which has no memory to offload to. Give it some, or "
                "let the optimizer step on the device."
            )


AUTO = "auto"
"""The codec, or what replicas share, that the planner chooses."""

SHARDS = ("none", "optimizer", "weights")
"""What the replicas of a stage may share."""

_SHORT_BYTES = 2
"""Weights whose values have so many bytes are made from a float32 master copy."""


UNEQUAL_WIDTHS = tuple(name for name, schedule in SCHEDULES.items() if schedule.widens)
"""The schedules that run stages of unequal width."""


def may_delay_updates(schedule: str, *, synchronous: bool) -> bool:
    """Whether a plan with this schedule, or with any if it is auto, may delay updates."""
    return not synchronous and (schedule == AUTO or SCHEDULES[schedule].rule is not Rule.SYNCHRONOUS)


class Goal(StrEnum):
    """The goal with this name."""

    TIME_TO_LOSS = "time-to-loss"
    """Seconds per sample, times the steps that its update rule takes for one of a synchronous run."""
    THROUGHPUT = "throughput"
    """Seconds per sample."""
    ENERGY = "energy"
    """Joules per sample, times those steps."""


@dataclass(frozen=True, slots=True)
class SyncChoice:
    """A way for replicas to come to equal weights: what a codec makes of their sums, and the rounds that they
    have. `unstudied` says why the study has no figure of it, as far as the run file alone tells.
    """

    sums: SumCost = DENSE_SUMS
    rounds: SiteRounds | None = None
    unstudied: str = ""

    @property
    def mode(self) -> str:
        """The mode in the words of a run file."""
        return "allreduce" if self.rounds is None else self.rounds.agreement[0]

    @property
    def averages(self) -> bool:
        """Whether replicas average weights."""
        return self.rounds is not None and self.rounds.averages


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """`batch_size` is the number of samples per step; `largest_batch` allows up to that many.

    `schedule` is a name, or auto for all that the engine runs. `synchronous` forbids delayed updates.
    `penalties` replace the measured ones. `delay_warmup` is the share of the run under 1f1b before updates
    are delayed; by default `DEFAULT_DELAY_WARMUP` if the planner chooses the schedule, else 0. The plan may
    use `memory_fraction` of each device. With `in_parts` a device that has the whole model may run it in
    parts that each run their forward again. `depth`, `width` and `micro_batch` fix the value. `pinned` maps
    units to devices, `together` names first and last units of ranges that must not be cut, `devices` lists
    the usable devices, all if empty. `recompute` says which stages may recompute. Each of the servers
    `owners` has private samples: it must be the home of a replica (see `plan.homes`). Without `lookahead` no
    stage runs further ahead than its schedule, as in other frameworks. `codec` is that of the boundaries, in
    both directions; auto leaves it to the planner. `boundaries` are those that have codecs of their own
    whatever it is, by the stage before them. `has_ending` says that the last fifth of the run has int8
    instead. Values that cross boundaries have `value_bytes`. `sums` is what a codec makes of sums of
    gradients over replicas. With `memory` what does not fit a device may be paged to its host and to a disk,
    within these limits. `whole_backwards` forbids schedules that run backwards in two halves. `shard` says
    what the replicas of a stage share: none, optimizer, or weights, which are the optimizer, the weights and
    the gradients; auto leaves it to the planner. Of what an optimizer keeps of one parameter that it steps
    whole, `whole_bytes` are the most; 0 if it steps each element apart. Replicas are assigned to `sites`,
    equally many to each: within a site they sum gradients in every batch and may share. Between sites, or
    between replicas that average weights, there are `rounds`. Second copies keep `copied_share` bytes on
    hosts for each byte of a stage's gradients. `masters` says whether the optimizer has a float32 copy of the
    weights that it steps; left out, it has one of values of 2 bytes. `overlaps` says of schedules how far
    messages overlap with work in the framework that will run the plan; fully where it says nothing.
    `stage_widths` are the replicas of each stage, "equal" for the same number for all stages, or "any". If
    the planner chooses how replicas agree, `sync_choices` are the ways, the usual one first.
    """

    batch_size: int
    largest_batch: int | None = None
    schedule: str = "auto"
    synchronous: bool = False
    goal: Goal = Goal.TIME_TO_LOSS
    penalties: Mapping[Rule, float] = field(default_factory=dict)
    delay_warmup: float | None = None
    memory_fraction: float = 1.0
    depth: int | None = None
    width: int | None = None
    micro_batch: int | None = None
    pinned: Mapping[int, str] = field(default_factory=dict)
    together: tuple[tuple[int, int], ...] = ()
    devices: tuple[str, ...] = ()
    recompute: Recompute = Recompute.WHERE_NEEDED
    in_parts: bool = False
    lookahead: bool = True
    owners: tuple[str, ...] = ()
    sums: SumCost = DENSE_SUMS
    codec: str = "none"
    boundaries: tuple[tuple[int, BoundaryCodecs], ...] = ()
    has_ending: bool = False
    value_bytes: int = 4
    memory: TierLimits | None = None
    whole_backwards: bool = False
    shard: str = "none"
    whole_bytes: int = 0
    sites: int = 1
    rounds: SiteRounds | None = None
    copied_share: float = 0.0
    masters: bool | None = None
    overlaps: Mapping[str, Overlap] = field(default_factory=dict)
    stage_widths: str | tuple[int, ...] = ANY
    sync_choices: tuple[SyncChoice, ...] = ()

    def __post_init__(self) -> None:
        self._check_widths()
        for name in ("batch_size", "largest_batch", "depth", "width", "micro_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BiremeError(f"{name} is {value}; it must be 1 or more.")
        if not 0 < self.memory_fraction <= 1:
            raise BiremeError(
                f"The memory fraction is {self.memory_fraction}; it must be more than 0 and at most 1."
            )
        if self.delay_warmup is not None and not 0 <= self.delay_warmup <= 1:
            raise BiremeError(f"The delay warm-up is {self.delay_warmup:g} of the run; it must be 0 to 1.")
        if self.codec != AUTO:
            parse_codec(self.codec)
        if self.shard not in (*SHARDS, AUTO):
            raise BiremeError(f"There is no shard {self.shard!r}. {closest(self.shard, (*SHARDS, AUTO))}")
        refuse_excluded(self.used)
        for rule, steps in self.penalties.items():
            if not 1 <= steps < 1e6:
                raise BiremeError(f"The penalty of {rule} is {steps}; it must be 1 or more.")

    def _check_widths(self) -> None:
        """Refuse widths of stages that are none, and those that another part of the request forbids."""
        asked = self.stage_widths
        if isinstance(asked, str):
            parse_stage_widths(asked)
            return
        named = widths_text(asked)
        if min(asked, default=0) < 1:
            raise BiremeError(f"The stage widths are {named}; each stage has one replica or more.")
        if len(set(asked)) == 1:
            raise BiremeError(
                f"The stage widths {named} are equal. Set depth = {len(asked)} and width = {asked[0]} "
                "instead."
            )
        if self.depth not in (None, len(asked)):
            raise BiremeError(
                f"The stage widths {named} are of {len(asked)} stages, but the depth is {self.depth}. "
                "Leave out one of the two."
            )
        if reason := self.equal_widths_because:
            raise BiremeError(f"The stage widths are {named}, but {reason}")

    @property
    def equal_widths_because(self) -> str:
        """Why all stages of a plan must have the same width, with a remedy; nothing if they need not."""
        if self.stage_widths == EQUAL:
            return "all stages are to have the same width. Set the stage widths to any."
        if self.width is not None:
            return f"the width of all stages is {self.width}. Leave out the width."
        if self.schedule not in (AUTO, *UNEQUAL_WIDTHS):
            able = ", ".join(UNEQUAL_WIDTHS)
            return f"the schedule {self.schedule} runs stages of equal width only. These run others: {able}."
        if self.owners:
            return "private samples need whole replicas on their servers. Leave out one of the two."
        if self.rounds is not None or self.sites > 1:
            return (
                "replicas that may die, average weights or are in sites are whole pipelines. Use allreduce."
            )
        if self.shard != "none" or self.memory is not None:
            what = "share" if self.shard != "none" else "offload"
            return f"only stages of equal width {what} memory. Leave out one of the two."
        if self.whole_backwards or self.sums.codec != DENSE:
            return "only the gradients of equal replicas go through codecs. Leave out one of the two."
        return ""

    @property
    def least_devices(self) -> int:
        """The fewest devices of a plan with the depth and width, or the stage widths, that are asked for."""
        if isinstance(self.stage_widths, tuple):
            return sum(self.stage_widths)
        return (self.depth or 1) * (self.width or 1)

    @property
    def shape_words(self) -> str:
        """The shape and the schedule that are asked for, in words that follow on "No plan"."""
        fixed = [f"{name} {value}" for name in ("depth", "width") if (value := getattr(self, name))]
        if isinstance(self.stage_widths, tuple):
            fixed.append(f"stage widths {widths_text(self.stage_widths)}")
        shape = f" with {' and '.join(fixed)}" if fixed else ""
        return f"{shape} for {'any schedule' if self.schedule == AUTO else self.schedule}"

    @property
    def used(self) -> dict[str, str]:
        """The capabilities that it asks for beside the schedule, each with words that name it."""
        found = {}
        if self.shard not in ("none", AUTO):
            found[f"shard-{self.shard}"] = f"replicas share the {self.shard}"
        if self.memory is not None:
            found["offloading"] = "memory may be offloaded"
        if self.sums.codec != DENSE:
            found["sum-codec"] = f'sums go through "{self.sums.codec}"'
        if self.whole_backwards:
            found["principal"] = "gradients are principal components"
        return found

    @property
    def shards(self) -> tuple[str, ...]:
        """What replicas may share, if the planner chooses. Replicas that may die share within sites; sites
        that sum gradients must share.
        """
        if self.width == 1 or (self.rounds is not None and self.sites == 1):
            return ("none",)
        must_share = self.rounds is not None and not self.rounds.averages
        return SHARDS[1:] if must_share else SHARDS

    def sharing(self, shard: str) -> "PlanRequest":
        """The same with this shared. An owner of a part sends that part alone to other sites."""
        rounds = self.rounds
        if rounds is not None and shard != "none":
            rounds = replace(rounds, in_parts=True)
        return replace(self, shard=shard, rounds=rounds)

    def agreeing(self, choice: SyncChoice) -> "PlanRequest":
        """The same with replicas that agree in this way."""
        return replace(self, sums=choice.sums, rounds=choice.rounds, sync_choices=())

    def chosen(self, mode: str, sum_codec: str) -> "PlanRequest":
        """The same with that choice, if it is one of those that the planner has."""
        known = {(one.mode, str(one.sums.codec)): one for one in self.sync_choices}
        choice = known.get((mode, sum_codec))
        return self if choice is None else self.agreeing(choice)

    def num_sites(self, width: int) -> int:
        """How many sites so many replicas are in: each replica is one, where these average weights and no
        sites are asked for.
        """
        averages = self.rounds is not None and self.rounds.averages
        return width if averages and self.sites == 1 else self.sites

    def site_width(self, width: int) -> int:
        """How many of so many replicas sum gradients with each other in every batch."""
        return width // self.num_sites(width)

    def num_sharers(self, width: int) -> int:
        """How many of so many replicas share an optimizer; 1 if each has its own."""
        return self.site_width(width) if self.shard != "none" else 1

    @property
    def sums_within(self) -> SumCost:
        """The cost of the sums within a site, which send gradients as they are where the sums between sites
        go through the codec.
        """
        if self.sites > 1 and self.rounds is not None and not self.rounds.averages:
            return DENSE_SUMS
        return self.sums

    def _parts(self, width: int) -> int:
        """Into how many parts the replicas of a site divide what they send to other sites."""
        return self.site_width(width) if self.rounds is not None and self.rounds.in_parts else 1

    def round_share(self, width: int) -> float:
        """What each of so many replicas sends to other sites until all fragments have had a round, for each
        byte of its gradients.
        """
        num_sites = self.num_sites(width)
        if self.rounds is None or num_sites == 1:
            return 0.0
        state = self.rounds.state_share * DENSE_SUMS.hop_share(num_sites)
        return (self.sums.hop_share(num_sites) + state) / self._parts(width)

    def coded_share(self, width: int) -> float:
        """Of each byte of its gradients, what one of so many replicas encodes for a round, and decodes of
        each member.
        """
        if self.rounds is None or self.num_sites(width) == 1:
            return 0.0
        return 1 / self.rounds.fragments / self._parts(width)

    def kept_share(self, width: int) -> float:
        """What codecs of sums within a site keep on the device, for each byte of gradients."""
        is_on_host = self.rounds is not None and not self.rounds.averages
        return 0.0 if is_on_host or self.site_width(width) == 1 else self.sums.kept_share

    def kept_host_share(self, width: int) -> float:
        """What a rank keeps on its host for rounds and their codecs, and for second copies, for each byte of
        gradients.
        """
        if self.rounds is None or width == 1:
            return self.copied_share
        return self.copied_share + (self.sums.kept_share + self.rounds.kept_share) / self._parts(width)

    def more_of_an_owner(self, sharers: int, num_bytes: float, rule: Rule) -> float:
        """What one of so many replicas has at most beyond an equal part of a stage's optimizer, which is so
        many bytes, because each parameter that is stepped whole has one owner.
        """
        # The largest are given out first, each to the replica with the least so far.
        whole_bytes = self.whole_bytes * (2 if self.shares_newest(rule, sharers) else 1)
        return (1 - 1 / sharers) * min(whole_bytes, num_bytes)

    @property
    def shares_weights(self) -> bool:
        """Whether replicas share weights and gradients too."""
        return self.shard == "weights"

    @property
    def has_masters(self) -> bool:
        """Whether weights are too short to be stepped, so that the optimizer has master copies of them."""
        return self.value_bytes == _SHORT_BYTES if self.masters is None else self.masters

    def shares_newest(self, rule: Rule, width: int) -> bool:
        """Whether the newest weights, which trial versions are made from, are part of a shared optimizer.

        Master copies are in any case.
        """
        return rule is Rule.FRESH and self.num_sharers(width) > 1 and not self.has_masters

    @property
    def delay_warmup_share(self) -> float:
        """The delay warm-up, as a share of the run."""
        if self.delay_warmup is not None:
            return self.delay_warmup
        return DEFAULT_DELAY_WARMUP if self.schedule == "auto" else 0.0

    @property
    def codec_words(self) -> tuple[str, ...]:
        """The codecs that boundaries may have, each once; those of the planner's choice where it chooses."""
        named = [*(WORDS_TO_TRY if self.codec == AUTO else (self.codec,))]
        named += [word for _, one in self.boundaries for word in (one.forward, one.backward)]
        return tuple(dict.fromkeys(str(parse_codec(word)) for word in named if word != "none"))

    def codec_penalty(self, codecs: Iterable[BoundaryCodecs], optimizer: str, width: int = 1) -> float:
        """Batches with these codecs on boundaries that equal one without; 1 if the goal is throughput.
        With several replicas, a codec of sums makes it larger.
        """
        if self.goal is Goal.THROUGHPUT:
            return 1.0
        steps = codec_steps(codecs, optimizer, has_ending=self.has_ending)
        return steps * (BOTH_CODED if steps > 1 < width and not self.sums.is_dense else 1.0)

    def sum_penalty(self, width: int, optimizer: str) -> float:
        """Batches of so many replicas with this codec of sums that equal one without; 1 if the goal is
        throughput.
        """
        if width == 1 or self.goal is Goal.THROUGHPUT:
            return 1.0
        return sum_steps(self.sums.codec, optimizer).steps

    def agreement_penalty(self, width: int, optimizer: str, rule: Rule) -> float:
        """Batches of so many replicas that equal one whose gradients all sum; 1 if the goal is throughput."""
        num_sites = self.num_sites(width)
        if self.rounds is None or not self.rounds.averages or num_sites == 1 or self.goal is Goal.THROUGHPUT:
            return 1.0
        has_warmup = self.delay_warmup_share > 0
        return agreement_steps(
            *self.rounds.agreement, optimizer, num_sites, rule, has_warmup=has_warmup
        ).steps

    def penalty(
        self,
        rule: Rule,
        optimizer: str,
        num_stages: int,
        num_microbatches: int,
        *,
        lookahead: int = 0,
        width: int = 1,
    ) -> float:
        """Batches with this plan that equal one synchronous batch; 1 if the goal is throughput.

        Batches of the delay warm-up take longer, by the bubble of equal stages, and count that much more. A
        trial step of replicas of a single stage knows the gradients of its own replica alone.
        """
        if rule is Rule.SYNCHRONOUS or self.goal is Goal.THROUGHPUT:
            return 1.0
        steps = self.penalties.get(rule)
        if steps is None:
            unseen = (
                unseen_share(num_stages, num_microbatches, lookahead) if num_stages > 1 else 1 - 1 / width
            )
            steps = steps_for_one(rule, optimizer, delay_warmup=self.delay_warmup_share, unseen=unseen)
        return steps * (1 + self.delay_warmup_share * (num_stages - 1) / num_microbatches)
