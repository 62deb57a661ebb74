"""Whether a model fits machines, how fast it trains there, and what would help: the answers of `bireme fit`.

The model is a shape and the machines are words of the catalogue, so nothing is measured. Each answer is a
plan of the usual search, for a profile from arithmetic. A rate is a range: the same plan, forecast once for
the least share of their rates that devices and links were reported to attain, and once for the most.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from bireme.bounds import bytes_text
from bireme.cluster.cluster import Cluster
from bireme.cluster.named_machines import NamedMachine, NamedMachines
from bireme.errors import BiremeError
from bireme.model.shapes import TransformerShape
from bireme.plan.explain import changes
from bireme.plan.forecast import Answer, Candidate, NothingFits, tightest_device
from bireme.plan.penalties import DEFAULT_DELAY_WARMUP
from bireme.plan.plan_request import PlanRequest, TierLimits
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.search import find_plan, forecast_of, least_cost
from bireme.profile.profile import Profile
from bireme.profile.shape_profile import TrainedShare, profile_of_shape

SCHEDULES_TRIED = ("1f1b", "2bw-fresh")
"""For several devices: one that drains and one that does not, so that an answer takes seconds."""

LINK_SHARES = (0.70, 0.94)
"""The shares of a link's rate that messages attain: at least an estimate, at most TCP's payload on Ethernet
(1,448 of 1,538 bytes of a frame).
"""

SHARED_LINK_SHARES = (0.46, 0.70)
"""The same if several GPUs of a machine share its link. All-reduces over TCP attained 14.8 and 22.4 of
32 Gbit/s with eight GPUs in each of two and of four machines, but 30.8 with one (NVIDIA/nccl on GitHub,
issue 209), and 1.7 of 3.1 GB/s with four GPUs in each of two (NVIDIA/nccl-tests, issue 83).
"""

_LARGEST_MICRO_BATCH = 8


def likely_share(least_and_most: tuple[float, float]) -> float:
    """The geometric mean of a range of shares."""
    return math.sqrt(math.prod(least_and_most))


@dataclass(frozen=True, slots=True)
class Range:
    """Tokens a second, from the least to the most, and the value that plans are made for."""

    low: float
    likely: float
    high: float


@dataclass(frozen=True, slots=True)
class FitQuestion:
    """A model, machines, what learns, the tokens of a sequence and the sequences of a batch."""

    shape: TransformerShape
    machines: NamedMachines
    trained: TrainedShare
    length: int
    batch_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.length <= self.shape.context:
            raise BiremeError(
                f"The length is {self.length:,} tokens; {self.shape.name} has 1 to {self.shape.context:,}."
            )
        if not 1 <= self.batch_size <= 65_536:
            raise BiremeError(f"The batch is {self.batch_size:,} sequences; it must be 1 to 65,536.")


@dataclass(frozen=True, slots=True)
class MachinesFit:
    """The answer for some machines: whether they can do without offloading, and the fastest plan that is
    known, which may offload. `left_bytes` are free on the tightest `device` at its worst moment under that
    plan; if it offloads or there is none, they are negative: the bytes that the nearest plan lacks there
    without. `host_bytes` are the most that it keeps on one host, 0 if it does not offload. `is_stopped` if
    its search was over before all was tried.
    """

    words: str
    num_devices: int
    candidate: Candidate | None
    device: str
    left_bytes: float
    limit_bytes: float
    tokens_per_s: Range | None
    fits: bool
    host_bytes: float = 0.0
    is_stopped: bool = False

    @property
    def offloads(self) -> bool:
        """Whether the fastest plan does."""
        return self.host_bytes > 0


@dataclass(frozen=True, slots=True)
class FitHelp:
    """The best plan with one thing changed. `gain` is the work done in the same time, relative to the
    best plan; None if nothing fits without the change.
    """

    words: str
    tokens_per_s: float
    gain: float | None
    host_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """All answers: for each machine by itself, then for all together. `untried` are changes for which no time
    was left, `no_help` those that bring nothing.
    """

    question: FitQuestion
    rows: tuple[MachinesFit, ...]
    helps: tuple[FitHelp, ...]
    no_help: tuple[str, ...]
    untried: tuple[str, ...]
    notes: tuple[str, ...]
    took_s: float


def fit(question: FitQuestion, *, within_s: float) -> Fit:
    """Plan for each machine and for all, with offloading if nothing else fits, and then for one change at a
    time as long as no more than `within_s` have passed.
    """
    begin_s = perf_counter()

    def left_s() -> float:
        return begin_s + within_s - perf_counter()

    machines = question.machines.machines
    alone = {one.words: replace(question.machines, machines=(one,)) for one in machines}
    asked = list(alone.values())
    if len(machines) > 1:
        asked.append(question.machines)
    planners = [_Planner(replace(question, machines=one)) for one in asked]
    rows = [planner.row() for planner in planners]
    helps, no_help, untried = [], [], []
    known = list(rows)
    for place in range(len(rows))[::-1]:
        least = min(map(_cost, known))
        planner = planners[place]
        if rows[place].candidate is not None or not planner.can_offload or planner.least_cost() >= least:
            continue
        if least == math.inf or left_s() > within_s / 2:
            known[place] = planner.offloaded(rows[place], max(_SEARCHED * left_s(), 0.0))
        else:
            known[place] = replace(rows[place], is_stopped=True)
    row = rows[-1] = _with_devices_left_out(known)
    no_help += [_OFFLOADING] if row.candidate is None else []
    planner = planners[-1]
    for words, plan in planner.changed(row):
        if left_s() < 0:
            untried.append(words)
            continue
        help_ = plan()
        if help_ is None or (help_.gain is not None and help_.gain < _HELPS):
            no_help.append(words)
        else:
            helps.append(help_)
    helps.sort(key=lambda one: -(one.gain or one.tokens_per_s))
    took_s = perf_counter() - begin_s
    notes = tuple(_notes(question, row))
    return Fit(question, tuple(rows), tuple(helps), tuple(no_help), tuple(untried), notes, took_s)


def _with_devices_left_out(rows: list[MachinesFit]) -> MachinesFit:
    """The answer for all machines: that of one of them, if it is faster alone."""
    best = min(reversed(rows), key=_cost)
    fits = any(row.fits for row in rows)
    is_stopped = any(row.is_stopped for row in rows)
    words, num_devices = rows[-1].words, rows[-1].num_devices
    return replace(best, words=words, num_devices=num_devices, fits=fits, is_stopped=is_stopped)


def _cost(row: MachinesFit) -> float:
    return math.inf if row.candidate is None else row.candidate.forecast.cost_s_per_sample


_HELPS = 1.02
"""Gains below this are within the uncertainty of forecasts."""

HOST_BYTES = 128 * 2**30
"""The memory of a host for each of its devices, if none is given."""

_NO_HOST = 1
"""Bytes of a host with nothing to offload to: 0 would mean that they are not known."""

_SEARCHED = 0.6
"""The share of the time in which plans that offload are searched if nothing else fits."""

_OFFLOADING = "offloading to the hosts (memory.device)"

_FIRST = ("bandwidth", "codecs", "memory")
"""Words of the changes that are tried before others."""

_NO_CHANGES = ("delayed updates", "any schedule")
"""The beginnings of changes that take nothing but another schedule, which was tried already."""


def _order(words: str) -> int:
    return next((place for place, word in enumerate(_FIRST) if word in words), len(_FIRST))


class _Planner:
    """The search for one set of machines, with profiles for the devices' least, likely and most shares."""

    def __init__(self, question: FitQuestion) -> None:
        self.question = question
        self._fits = False
        self.can_offload = any(_host_bytes(one) > _NO_HOST for one in question.machines.machines)
        self.devices = {one.device.word: one.device for one in question.machines.machines}
        likely = {word: one.likely_attained for word, one in self.devices.items()}
        self.profile, self.cluster = self._costs(
            likely, likely_share(LINK_SHARES), likely_share(SHARED_LINK_SHARES)
        )
        self.request = PlanRequest(
            question.batch_size,
            value_bytes=2,
            delay_warmup=DEFAULT_DELAY_WARMUP if self.cluster.num_devices > 1 else None,
            in_parts=self.cluster.num_devices == 1,
        )

    def row(self) -> MachinesFit:
        """The answer for these machines."""
        words = ", ".join(one.words for one in self.question.machines.machines)
        num_devices = self.cluster.num_devices
        found = self._best(self.cluster, self.request)
        if isinstance(found, NothingFits):
            limit_bytes = found.stages[found.stage].limit_bytes
            missing = -found.missing_bytes
            return MachinesFit(words, num_devices, None, found.device, missing, limit_bytes, None, fits=False)
        best, tightest = found.best, tightest_device(found.best)
        self._fits = True
        left, limit = tightest.left_bytes, tightest.limit_bytes
        return MachinesFit(words, num_devices, best, tightest.name, left, limit, self._range(best), fits=True)

    def offloaded(self, row: MachinesFit, within_s: float) -> MachinesFit:
        """The answer if some of what nothing else fits is offloaded; the same if that fits nowhere either."""
        request = self._offloading(within_s)
        begin_s = perf_counter()
        try:
            found = self._best(self.cluster, request, request.schedule)
        except BiremeError:
            return row
        if isinstance(found, NothingFits):
            return row
        best, is_stopped = found.best, perf_counter() - begin_s > within_s
        rate, host_bytes = self._range(best), self._host_bytes(best)
        return replace(row, candidate=best, tokens_per_s=rate, host_bytes=host_bytes, is_stopped=is_stopped)

    def least_cost(self) -> float:
        """A bound on the cost of all plans: the work, divided as if there were no units."""
        problem = PlanningProblem(self.profile, self.cluster, self.request)
        return least_cost(problem, problem.devices)

    def _offloading(self, within_s: float) -> PlanRequest:
        """The request for an estimate of plans that offload."""
        schedule = SCHEDULES_TRIED[0] if self.cluster.num_devices > 1 else "sequential"
        return replace(self.request, memory=TierLimits(within_s=within_s), schedule=schedule)

    def _host_bytes(self, best: Candidate) -> float:
        """The most that a plan keeps in the memory of one machine."""
        servers = {placed.name: placed.server for placed in self.cluster.devices()}
        of_server: Counter[int] = Counter()
        for tier in best.forecast.tiers:
            for device in best.plan.devices[tier.rank] if tier.tier == "host" else ():
                of_server[servers[device]] += round(tier.peak_bytes)
        return float(max(of_server.values(), default=0))

    def changed(self, row: MachinesFit) -> Iterator[tuple[str, Callable[[], FitHelp | None]]]:
        """The changes to try, in words that follow on "with", and a function that plans each."""
        best = row.candidate
        # If one device is the fastest alone, a change may let others help it, under any schedule.
        schedule = None if best is None or best.plan.num_ranks == 1 else best.plan.schedule
        is_plain, without = best is not None and not row.offloads, " without offloading" * row.offloads
        asked = self._offloading(0.0) if row.offloads else self.request
        for change in sorted(changes(self.cluster, asked), key=lambda one: _order(one.words)):
            words, cluster = change.words, change.cluster
            if best is not None and row.offloads and "bandwidth" in words:
                yield words, partial(self._help_same, words, cluster, asked, best)
            elif is_plain and not words.startswith(_NO_CHANGES):
                yield words, partial(self._help, words, cluster, change.request, best, schedule)
            elif "memory" in words:
                words += without
                yield words, partial(self._help, words, cluster, self.request, best, None)
        if self.question.trained is TrainedShare.FULL:
            lora = replace(self.question, trained=TrainedShare.LORA)
            words = f"adapters instead of all weights (--train lora){without}"
            yield words, partial(self._help_of, words, lora, best)
        if not is_plain:
            half = replace(self.question, length=max(1, self.question.length // 2))
            words = f"sequences of half the length (--length){without}"
            yield words, partial(self._help_of, words, half, best)
        elif best is not None and best.plan.recompute:
            yield (
                _OFFLOADING,
                partial(self._help, _OFFLOADING, self.cluster, self._offloading(0.0), best, schedule),
            )

    def _help_same(
        self, words: str, cluster: Cluster, request: PlanRequest, best: Candidate
    ) -> FitHelp | None:
        """The gain of the same plan that offloads on a cluster that is otherwise, or of one that does not."""
        then = forecast_of(best.plan, self.profile, cluster, request)
        gain = best.forecast.cost_s_per_sample / then.cost_s_per_sample
        same = FitHelp(words, then.samples_per_s * self.question.length, gain)
        other = self._help(words, cluster, self.request, best, None) if self._fits else None
        return max(filter(None, (same, other)), key=lambda one: one.gain or 0.0)

    def _help_of(self, words: str, question: FitQuestion, best: Candidate | None) -> FitHelp | None:
        """The answer to another question on the same machines; its gain is in tokens."""
        other = _Planner(question)
        found = other._help(words, other.cluster, other.request, best, None)
        if found is None or found.gain is None:
            return found
        return replace(found, gain=found.gain * question.length / self.question.length)

    def _help(
        self, words: str, cluster: Cluster, request: PlanRequest, best: Candidate | None, schedule: str | None
    ) -> FitHelp | None:
        try:
            found = self._best(cluster, request, schedule)
        except BiremeError:  # nothing fits with the tiers of memory either
            return None
        if isinstance(found, NothingFits):
            return None
        then = found.best.forecast
        gain = None if best is None else best.forecast.cost_s_per_sample / then.cost_s_per_sample
        return FitHelp(words, then.samples_per_s * self.question.length, gain, self._host_bytes(found.best))

    def _best(
        self, cluster: Cluster, request: PlanRequest, schedule: str | None = None
    ) -> Answer | NothingFits:
        """The best plan under a schedule, or under any of those that are tried."""
        tried = SCHEDULES_TRIED if cluster.num_devices > 1 else ("sequential",)
        found: list[Answer] = []
        for name in tried if schedule is None else (schedule,):
            asked = replace(request, schedule=name)
            one = find_plan(self.profile, cluster, asked, is_brief=True, advises=False, compares=False)
            if isinstance(one, Answer):
                found.append(one)
            elif not found:
                return one  # the next one keeps two versions of the weights, so it takes no less memory
        return min(found, key=lambda one: one.best.forecast.cost_s_per_sample)

    def _range(self, best: Candidate) -> Range:
        request = self._offloading(0.0) if best.plan.paging else self.request
        low, high = (
            forecast_of(best.plan, *self._costs(attained, *link_shares), request).samples_per_s
            for end, link_shares in enumerate(zip(LINK_SHARES, SHARED_LINK_SHARES, strict=True))
            for attained in [{word: one.attained[end] for word, one in self.devices.items()}]
        )
        length = self.question.length
        return Range(low * length, best.forecast.samples_per_s * length, high * length)

    def _costs(
        self, attained: Mapping[str, float], link_share: float, shared_share: float
    ) -> tuple[Profile, Cluster]:
        """The profile for the first device, and the cluster with the speeds of all relative to it."""
        sizes = [1 << power for power in range(_LARGEST_MICRO_BATCH.bit_length())]
        sizes = [size for size in sizes if self.question.batch_size % size == 0]
        asked = self.question
        profiles = {
            word: profile_of_shape(asked.shape, device, attained[word], asked.length, sizes, asked.trained)
            for word, device in self.devices.items()
        }
        first = asked.machines.machines[0].device
        own = profiles[first.word]
        speeds = {
            word: (
                _seconds(own) / _seconds(profiles[word]),
                device.memory_bytes_per_s / first.memory_bytes_per_s,
            )
            for word, device in self.devices.items()
        }
        cluster = asked.machines.cluster(speeds, link_share, shared_share)
        servers = zip(cluster.servers, asked.machines.machines, strict=True)
        return own, replace(
            cluster,
            servers=tuple(replace(one, host_memory_bytes=_host_bytes(machine)) for one, machine in servers),
        )


def _host_bytes(machine: NamedMachine) -> int:
    """The memory of a machine to offload to: as good as none if its devices have all there is."""
    if machine.device.shares_host:
        return machine.host_bytes or _NO_HOST
    return machine.host_bytes or machine.count * HOST_BYTES


def _seconds(profile: Profile) -> float:
    """Of a forward and a backward of all units with one sequence."""
    return sum(unit.costs[0].forward_s + unit.costs[0].backward_s for unit in profile.units)


def _notes(question: FitQuestion, row: MachinesFit) -> Iterator[str]:
    """The sources of the answers, and what Bireme cannot do."""
    if question.shape.is_mixture and question.trained is not TrainedShare.FULL:
        yield "Adapters are beside the maps of attention: experts are no linear maps of their own."
    devices = {one.device.word: one.device for one in question.machines.machines}
    for device in devices.values():
        low, high = device.attained
        yield f"{device.word} attains {low:.0%} to {high:.0%} of its matrix rate: {device.attained_source}."
        if "bfloat16" not in device.flops_per_s:
            yield f"{device.word} has no hardware for bfloat16, so it counts with its rate in float32."
        if device.kind in ("mps", "xpu"):
            yield f"Bireme has not been tested on {device.word} ({device.kind})."
    for one in {one.words: one for one in question.machines.machines}.values():
        usual = one.device.memory_bytes
        if 0 < usual < one.memory_bytes:
            size = one.words.partition(":")[2].partition("+")[0]
            yield (
                f"{one.words} counts with {size} on the device, which is sold with {bytes_text(usual)}. The "
                f"memory of its host follows a plus sign: {one.device.word}+{size}."
            )
    if row.host_bytes:
        yield "Plans that offload are timed over two batches."
        if any(not one.host_bytes and not one.device.shares_host for one in question.machines.machines):
            yield (
                f"Hosts whose memory is not given count with {bytes_text(HOST_BYTES)} for each device. It "
                f"follows a plus sign: {question.machines.machines[0].device.word}+64GB."
            )
    if len(question.machines.machines) > 1:
        low, high = LINK_SHARES
        yield f"Links attain {low:.0%} to {high:.0%} of their rate: an estimate, and TCP's payload."
        if any(one.count > 1 for one in question.machines.machines):
            low, high = SHARED_LINK_SHARES
            yield f"Links that several GPUs share attain {low:.0%} to {high:.0%} (NVIDIA/nccl, issue 209)."
        if question.machines.link is None:
            yield "No link is given, so machines are joined by 1 Gbit/s with 0.5 ms between two of them."
    if row.candidate is not None and row.candidate.plan.stages_per_rank not in (None, 1):
        yield "A run plans the model in parts if plan.recompute is layers."
    if row.candidate is not None:
        yield from row.candidate.forecast.assumptions
