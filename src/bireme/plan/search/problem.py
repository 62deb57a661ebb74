"""The planning problem: the profile as chains, the usable devices, and where cuts are forbidden.

Units that must stay together are one unit of the merged chain, so that no partitioner has to know of it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise

import numpy as np

from bireme.bounds import widths_text
from bireme.capabilities import exclusion, refuse_excluded
from bireme.cluster.catalogue import namesake
from bireme.cluster.cluster import Cluster, Lane, Link, Overlap
from bireme.cluster.device import NO_ENGINE, Device, Speeds
from bireme.cluster.symmetry import Symmetry
from bireme.codec.description import AS_IT_IS, BoundaryCodecs
from bireme.compiled import COMPILER_BYTES, IS_COMPILED, LEAST_COMPILED
from bireme.errors import BiremeError
from bireme.plan.codec_costs import with_fewer_bytes
from bireme.plan.partition.chain import Chain, Seconds, chain_of
from bireme.plan.plan import check_servers
from bireme.plan.plan_request import AUTO, Goal, PlanRequest
from bireme.profile.estimate import device_profiles
from bireme.profile.profile import Profile
from bireme.schedule.catalogue import SCHEDULES, schedule_named
from bireme.schedule.program import Rule
from bireme.simulate.links import agreement_s, ring_curved, round_trip_s

_UPDATING_EARLY = frozenset({"2bw", "2bw-fresh"})
"""Schedules whose updates can come early."""

_LEAST_BYTES = 1.0
"""What a device has for tensors that a process alone fills."""


class PlanningProblem:
    """A profile, a cluster and a request that have been checked against each other."""

    def __init__(self, profile: Profile, cluster: Cluster, request: PlanRequest) -> None:
        self.profile = profile
        self.cluster = cluster
        placed = cluster.devices()
        self._are_processors = all(device.device.kind == "cpu" for device in placed)
        if profile.optimizer == "muon" and not request.whole_bytes:
            # Without the model, no matrix is known to be smaller than all of its unit.
            request = replace(request, whole_bytes=max(unit.optimizer_bytes for unit in profile.units))
        if profile.master_weights is not None:
            request = replace(request, masters=profile.master_weights)
        self.request = request
        self.names = tuple(device.name for device in placed)
        own = device_profiles(profile, [device.device for device in placed])
        self.profiles, self.kinds = own.profiles, own.of_device
        """The profiles of all kinds of devices, and the kind of each device."""
        self.scaled = frozenset(place for place, speed in enumerate(own.memory_speeds) if speed is not None)
        """The devices whose seconds are scaled from those of another device."""
        self.speeds = tuple(device.device.speed for device in placed)
        """Relative to the profile of a device's own kind."""
        self.resource_speeds = tuple(
            _with_memory_speed(device.device, speed)
            for device, speed in zip(placed, own.memory_speeds, strict=True)
        )
        self.engine = profile.engine or NO_ENGINE
        known = [
            _known_process_bytes(device.device, self.profiles[kind])
            for device, kind in zip(placed, self.kinds, strict=True)
        ]
        self.process_bytes = tuple(num_bytes or 0 for num_bytes in known)
        """What a process holds on each device beside tensors; `limits` are for the tensors."""
        self.unknown_processes = frozenset(place for place, one in enumerate(known) if one is None)
        """The devices of which that is not known."""
        self.room = tuple(
            max(device.device.memory_bytes * request.memory_fraction - process, _LEAST_BYTES)
            for device, process in zip(placed, self.process_bytes, strict=True)
        )
        """What each device has for tensors, and `limits` what a plan may use of that."""
        most = None if request.memory is None else request.memory.device_bytes
        self.limits = self.room if most is None else tuple(min(own, float(most)) for own in self.room)
        self.copied_bytes = request.copied_share * sum(one.gradient_bytes for one in profile.units)
        """Of the second copies of all units, which lie in a process of their own on the host."""
        self.watts = tuple(device.device.watts for device in placed)
        self.threads = tuple(
            max(1, self.profiles[kind].num_threads) if device.device.kind == "cpu" else 0
            for device, kind in zip(placed, self.kinds, strict=True)
        )
        """The cores of its server that each device computes on; none of an accelerator."""
        self.servers = tuple(device.server for device in placed)
        check_servers(request.owners, cluster)
        numbers = {server.name: number for number, server in enumerate(cluster.servers)}
        self.owners = frozenset(numbers[name] for name in request.owners)
        """The servers that have private samples."""
        read = tuple(place for place, unit in enumerate(profile.units) if unit.inputs)
        self.readers = read or (0, len(profile.units) - 1)
        """The units that read inputs of the model; of a profile that does not say it, the ends."""
        self.devices = tuple(dict.fromkeys(map(cluster.number_of, request.devices))) or tuple(
            range(len(placed))
        )
        self.bounds = _bounds(request, len(profile.units))
        self.pins = self._pins()
        self.schedules = _schedules(request)
        word = "none" if request.codec == AUTO else request.codec
        self.codec = BoundaryCodecs(word, word)
        """That of all boundaries between ranks, unless a draft has its own."""
        self.sizes = self._sizes()
        self._check_numbers()
        self._chains: dict[tuple[int, int], Chain] = {}
        self._merged: dict[tuple[int, int, float, int, bool], Chain] = {}
        self.path: Callable[[int, int], tuple[Lane, ...]] = cache(cluster.path)
        """The lanes between two devices."""
        self.latency: Callable[[int, int], float] = cache(cluster.latency)
        self.overlap: Callable[[int, int], Overlap] = cache(cluster.overlap)
        self.round_trip_s: Callable[[frozenset[int]], float] = cache(partial(round_trip_s, cluster))
        """The latency of a message there and back between two of some devices: see `links.round_trip_s`."""
        self.agreement_s = cache(partial(agreement_s, cluster))

    @property
    def sums_in_rounds(self) -> bool:
        """Whether the sums over replicas are rounds, each granted and committed by the coordinator."""
        rounds = self.request.rounds
        return rounds is not None and not rounds.averages and self.request.sites == 1

    def compiler_bytes(self, rule: Rule, width: int, begin: int, end: int) -> int:
        """Memory of numba in a process that tries steps of these units of the profile in a compiled loop."""
        profile = self.profile
        is_plain_adam = profile.optimizer in ("adam", "adamw") and not profile.master_weights
        if not (IS_COMPILED and is_plain_adam and rule is Rule.FRESH and profile.device_kind == "cpu"):
            return 0
        learned = sum(unit.gradient_bytes for unit in profile.units[begin:end]) // 4
        return COMPILER_BYTES if learned >= LEAST_COMPILED * self.request.num_sharers(width) else 0

    @property
    def num_units(self) -> int:
        """How many units the merged chain has."""
        return len(self.bounds) - 1

    @property
    def is_overfull(self) -> bool:
        """Whether one copy of the model's state is more than all devices hold, so that no plan fits."""
        return self.is_too_small(self.devices)

    def is_too_small(self, devices: Iterable[int]) -> bool:
        """Whether one copy of the model's state is more than some devices hold."""
        state_bytes = float(self.whole(self.sizes[0]).bytes.state[0, -1])
        return state_bytes > sum(self.limits[device] for device in devices)

    @property
    def batches(self) -> range:
        """How many samples a step may have."""
        request = self.request
        return range(request.batch_size, (request.largest_batch or request.batch_size) + 1)

    @cached_property
    def symmetry(self) -> Symmetry:
        """Which devices can stand for each other."""
        return Symmetry(self.cluster)

    def updates_early(self, schedule: str, depth: int, sizes: Sequence[int]) -> bool:
        """Whether plans of a schedule and depth update early, with these micro-batches in their replicas.

        That saves memory, and costs no time where ranks agree on a batch within a forward: where they sum no
        gradients over replicas or of parameters that units share.
        """
        if schedule not in _UPDATING_EARLY or len(sizes) > 1 or self._shares_parameters:
            return False
        fastest = max(self.most_speeds[device] for device in self.devices)
        forward_s = float(self.whole(sizes[0]).forward_s.sum()) / depth / fastest
        return depth == 1 or self.round_trip_s(frozenset(self.devices)) <= forward_s

    @cached_property
    def _shares_parameters(self) -> bool:
        return any(held.gradient_bytes for unit in self.profile.units for held in unit.tied)

    @property
    def is_symmetric(self) -> bool:
        """Whether equal devices may change places: not where some are named, or their servers."""
        return not self.request.devices and not self.pins and not self.owners

    def power(self, devices: Iterable[int]) -> float:
        """What a second on these devices counts: what they draw if energy is the goal, else 1."""
        return sum(self.watts[device] for device in devices) if self.request.goal is Goal.ENERGY else 1.0

    def least_power(self, count: int) -> float:
        """The same of those `count` devices that draw least."""
        return self._least_powers[count] if self.request.goal is Goal.ENERGY else 1.0

    @cached_property
    def _least_powers(self) -> tuple[float, ...]:
        return tuple(accumulate(sorted(self.watts[device] for device in self.devices), initial=0.0))

    @cached_property
    def known_sizes(self) -> frozenset[int]:
        """The sizes of micro-batches that all profiles have."""
        return frozenset[int].intersection(*(frozenset(one.micro_batches) for one in self.profiles))

    @cached_property
    def most_speeds(self) -> tuple[float, ...]:
        """The speed of each device for the unit that it is best at, relative to the first kind: no unit is
        faster there.
        """
        return self._relative_speeds(lambda gains, _seconds: float(gains.max(initial=0.0)) or 1.0)

    @cached_property
    def usual_speeds(self) -> tuple[float, ...]:
        """The speed of each device for a whole micro-batch, relative to the first kind."""
        return self._relative_speeds(
            lambda gains, seconds: float(seconds.sum() / (seconds / gains).sum()) if len(gains) else 1.0
        )

    @cached_property
    def usual_resource_speeds(self) -> tuple[Speeds, ...]:
        """The speeds of devices relative to the first profile, for plans that count all work with it."""
        updates_s = [sum(unit.update_s for unit in one.units) for one in self.profiles]
        found = []
        for speeds, usual, kind in zip(self.resource_speeds, self.usual_speeds, self.kinds, strict=True):
            gain = updates_s[0] / updates_s[kind] if updates_s[0] and updates_s[kind] else 1.0
            found.append(replace(speeds, compute=usual, memory=gain * speeds.memory))
        return tuple(found)

    def _relative_speeds(self, of_kind: Callable[[Seconds, Seconds], float]) -> tuple[float, ...]:
        """The speeds of devices, by what `of_kind` makes of the gains over the seconds of all units."""
        if len(self.profiles) == 1:
            return self.speeds
        of_kinds = []
        for kind in range(len(self.profiles)):
            pairs = [(_unit_s(self.whole(size)), _unit_s(self.whole(size, kind))) for size in self.sizes]
            first_s, own_s = (np.concatenate(values) for values in zip(*pairs, strict=True))
            takes = (first_s > 0) & (own_s > 0)
            of_kinds.append(of_kind(first_s[takes] / own_s[takes], first_s[takes]))
        return tuple(speed * of_kinds[kind] for speed, kind in zip(self.speeds, self.kinds, strict=True))

    def whole(self, micro_batch: int, kind: int = 0) -> Chain:
        """The chain of all units, with the seconds on devices of a kind."""
        key = micro_batch, kind
        if key not in self._chains:
            if kind:
                first = self.whole(micro_batch)
                own = chain_of(self.profiles[kind], micro_batch, first.bytes)
                self._chains[key] = first.with_seconds_of([own], [(0, first.num_units)])
            else:
                self._chains[key] = chain_of(self.profile, micro_batch)
        return self._chains[key]

    def gains(self, micro_batch: int, kind: int) -> tuple[float, ...]:
        """How many times as fast each unit of the merged chain is on devices of a kind as on the first."""
        if kind == 0:
            return ()
        first_s, own_s = (_unit_s(self.merged(micro_batch, kind=one)) for one in (0, kind))
        return tuple(np.divide(first_s, own_s, out=np.ones_like(first_s), where=own_s * first_s > 0).tolist())

    def on_kinds(self, micro_batch: int, stages: Sequence[tuple[int, int]], kinds: Sequence[int]) -> Chain:
        """The chain of all units, with the seconds of each stage on the devices of its kind."""
        if len(set(kinds)) == 1:
            return self.whole(micro_batch, kinds[0])
        chains = [self.whole(micro_batch, kind) for kind in kinds]
        return self.whole(micro_batch).with_seconds_of(chains, stages)

    def kept_share(self, width: int) -> float:
        """What sums and averages keep on a device of so many replicas, for each byte of gradients. What they
        keep on the host is on the device only if that is a processor. Second copies are not where so little
        memory is given to each process that there is room for them beside it.
        """
        request = self.request
        on_host = request.kept_host_share(width) if self._are_processors else 0.0
        rest = (room - limit for room, limit in zip(self.room, self.limits, strict=True))
        if on_host and min(rest) >= self.copied_bytes:
            on_host -= request.copied_share
        return request.kept_share(width) + on_host

    def merged(self, micro_batch: int, width: int = 1, rule: Rule = Rule.SYNCHRONOUS, kind: int = 0) -> Chain:
        """The chain of what may be cut apart, with the bytes that are sent over its cuts, what a codec keeps
        of the sums over so many replicas, and the part of the optimizer that each of these has under a rule.
        """
        kept_share = self.kept_share(width)
        sharers = self.request.num_sharers(width)
        shares_newest = self.request.shares_newest(rule, width)
        key = micro_batch, kind, kept_share, sharers, shares_newest
        if key not in self._merged:
            chain = self.whole(micro_batch, kind)
            is_plain = len(self.bounds) == chain.num_units + 1
            merged = chain if is_plain else chain.merged(self.bounds)
            coded = with_fewer_bytes(merged, self.codec, self.request.value_bytes)
            whole = coded.with_newest() if shares_newest else coded
            shared = whole
            if sharers > 1:
                more = self.request.more_of_an_owner(sharers, math.inf, rule)
                shared = whole.with_sharers(sharers, more)
            self._merged[key] = shared.with_residuals(kept_share) if kept_share else shared
        return self._merged[key]

    def codecs(
        self, rank_of_stage: Sequence[int], own: tuple[BoundaryCodecs, ...] = ()
    ) -> tuple[BoundaryCodecs, ...]:
        """The codecs of the boundaries between stages: those asked for of single boundaries, and of the
        others a draft's own, or the one that is wished for.
        """
        asked = own or (self.codec,) * (len(rank_of_stage) - 1)
        if self.request.boundaries:
            single = dict(self.request.boundaries)
            asked = tuple(single.get(boundary, one) for boundary, one in enumerate(asked))
        far = (one != other for one, other in pairwise(rank_of_stage))
        return tuple(one if is_far else AS_IT_IS for one, is_far in zip(asked, far, strict=False))

    def most_overlap(self, schedule: str) -> Overlap:
        """How far messages overlap with work where the plan is run, whatever the links allow."""
        return self.request.overlaps.get(schedule, Overlap.FULL)

    @cached_property
    def _has_curves(self) -> bool:
        return self.cluster.has_curves

    def curved(self, source: int, destination: int) -> tuple[Link, ...]:
        """The links between two devices on which small messages are slower."""
        return self.cluster.curved(source, destination) if self._has_curves else ()

    def ring_curved(self, devices: Sequence[int]) -> tuple[Link, ...]:
        """The same of a ring over these devices."""
        return ring_curved(self.cluster, devices) if self._has_curves else ()

    def _pins(self) -> Mapping[int, int]:
        """The device of each pinned unit of the merged chain."""
        pins: dict[int, int] = {}
        num_units = len(self.profile.units)
        for unit, name in self.request.pinned.items():
            if not 0 <= unit < num_units:
                raise BiremeError(
                    f"Unit {unit} is pinned to {name}, but the model's units are 0 to {num_units - 1}."
                )
            device = self.cluster.number_of(name)
            if device not in self.devices:
                raise BiremeError(f"Unit {unit} is pinned to {name}, which is not among the devices to use.")
            place = next(place for place, end in enumerate(self.bounds[1:]) if unit < end)
            if pins.setdefault(place, device) != device:
                raise BiremeError(
                    f"Unit {unit} is pinned to {name}, but must stay together with a unit that is pinned to "
                    f"{self.names[pins[place]]}. Drop one of the three."
                )
        return pins

    def _sizes(self) -> tuple[int, ...]:
        wish = self.request.micro_batch
        if wish is None:
            if not self.known_sizes:
                names = ", ".join(kind.name for kind in self.profile.kinds)
                raise BiremeError(
                    f"The profiles of {names} and of the other devices have no size of micro-batches in "
                    "common. Profile the same sizes on all kinds of devices."
                )
            return tuple(sorted(self.known_sizes))
        for one in self.profiles:
            one.units[0].at(wish)  # refuses what the profile does not know
        return (wish,)

    def _check_numbers(self) -> None:
        request, num_devices = self.request, len(self.devices)
        if request.largest_batch is not None and request.largest_batch < request.batch_size:
            raise BiremeError(
                f"The largest batch is {request.largest_batch}, but the batch size is {request.batch_size}. "
                "Swap the two."
            )
        asked = request.stage_widths
        if request.least_devices > num_devices:
            words = f"Depth {request.depth or 1} times width {request.width or 1} needs"
            if isinstance(asked, tuple):
                words = f"No plan with stage widths {widths_text(asked)} is possible: its stages need"
            raise BiremeError(
                f"{words} {request.least_devices} devices, but {num_devices} may be used. Make one of them "
                "smaller."
            )
        unknown = next((device for device in self.devices if not self.watts[device]), None)
        if request.goal is Goal.ENERGY and unknown is not None:
            raise BiremeError(
                f"{self.names[unknown]} has no watts in the cluster file, so energy cannot be planned for. "
                "Give all devices their watts, or take another objective."
            )
        depth = len(asked) if isinstance(asked, tuple) else request.depth or 1
        if depth > self.num_units:
            raise BiremeError(
                f"{self.num_units} units that may be separated cannot make {depth} stages: each needs one."
            )


def _unit_s(chain: Chain) -> Seconds:
    return chain.forward_s + chain.backward_s


def _with_memory_speed(device: Device, speed: float | None) -> Speeds:
    """The speeds of a device whose memory has this speed, unless the cluster file gives it."""
    if speed is None or device.update_speed is not None:
        return device.speeds
    return replace(device.speeds, memory=speed)


def _known_process_bytes(device: Device, profile: Profile) -> int | None:
    """What the cluster file gives, else what was measured on such a device, else what the catalogue gives for
    its name. An emulated device stands for the tensors of another alone.
    """
    if device.process_bytes is not None or device.kind == "emulated":
        return device.process_bytes or 0
    if profile.engine is not None and profile.engine.process_bytes and profile.device_kind == device.kind:
        return profile.engine.process_bytes
    known = namesake(device.name)
    return None if known is None else known.process_bytes


def _bounds(request: PlanRequest, num_units: int) -> tuple[int, ...]:
    """Where the chain may be cut, its begin and its end included."""
    inside: set[int] = set()
    for first, last in request.together:
        if not 0 <= first <= last < num_units:
            raise BiremeError(
                f"Units {first} to {last} cannot be kept together: the model's units are 0 to "
                f"{num_units - 1}, and the first comes first."
            )
        inside.update(range(first + 1, last + 1))
    return tuple(place for place in range(num_units + 1) if place not in inside)


def _schedules(request: PlanRequest) -> tuple[str, ...]:
    if request.schedule == "auto":
        found = [name for name, one in SCHEDULES.items() if one.rule is not Rule.STASHED]
        if request.synchronous:
            found = [name for name in found if SCHEDULES[name].rule is Rule.SYNCHRONOUS]
        return tuple(n for n in found if not any(exclusion(used, n) for used in request.used))
    schedule = schedule_named(request.schedule)
    if schedule.rule is Rule.STASHED:
        raise BiremeError(
            f"The engine does not run {schedule.name}, so Bireme cannot plan for it. Use 2bw, its successor."
        )
    refuse_excluded(request.used | {schedule.name: f'the schedule is "{schedule.name}"'})
    if request.synchronous and schedule.rule is not Rule.SYNCHRONOUS:
        raise BiremeError(
            f"{schedule.name} delays updates, but updates must be synchronous. Leave out one of the two, or "
            "use a schedule that drains (1f1b)."
        )
    return (schedule.name,)
