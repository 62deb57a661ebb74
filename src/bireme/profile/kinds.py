"""Which seconds count on which device of a cluster: those of a profile that was made on such a device, or
those of another device's profile, scaled unit by unit by the rates of both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bireme.cluster.catalogue import catalogue
from bireme.cluster.device import Device
from bireme.errors import BiremeError, closest
from bireme.profile.estimate import rates_of, roofline_s
from bireme.profile.profile import Profile, Rates, UnitCost

_TIMES = ("forward_s", "backward_s", "recompute_backward_s", "backward_input_s", "backward_weight_s")
"""The seconds of a unit that are scaled by the roofline of its forward."""


def _is_called(device: Device, name: str) -> bool:
    """Whether a device has this name, is like the ready device of this name, or is of this kind."""
    known = catalogue().get(name)
    return name in (device.name, device.kind) or (known is not None and known.name == device.name)


def check_kinds(profile: Profile, devices: Sequence[Device]) -> None:
    """Refuse profiles for kinds of devices that are not there."""
    for kind in profile.kinds:
        if not any(_is_called(device, kind.name) for device in devices):
            names = sorted({name for device in devices for name in (device.name, device.kind)})
            raise BiremeError(
                f"There is a profile for {kind.name}, but no device of that name or kind. "
                f"{closest(kind.name, names)}"
            )


@dataclass(frozen=True, slots=True)
class DeviceProfiles:
    """The profiles of a cluster's devices: `of_device` has for each device the index of its profile, and
    `memory_speeds` the speed of its memory relative to where that was made; None if only its `speed` gives
    it.
    """

    profiles: tuple[Profile, ...]
    of_device: tuple[int, ...]
    memory_speeds: tuple[float | None, ...]


def device_profiles(profile: Profile, devices: Sequence[Device]) -> DeviceProfiles:
    """The profiles whose seconds count on these devices, the given one first.

    A device has the profile of its kind. Without one it has the given profile, scaled by the rates of the two
    devices if both are known and no device of the cluster has a speed of its own.
    """
    check_kinds(profile, devices)
    profiles = [profile]
    known: dict[Device, tuple[int, float | None]] = {}
    by_rates: dict[tuple[Rates, str], int] = {}
    base = profile.rates if all(device.speed == 1 for device in devices) else None
    for device in devices:
        if device in known:
            continue
        own = [one for one in profile.kinds if _is_called(device, one.name)]
        kind = min(own, key=lambda one: one.name == device.kind, default=None)  # its name before its kind
        rates = None if base is None else rates_of(device, base.dtype)
        index, memory_speed = 0, None
        if kind is not None:
            index = next((place for place, one in enumerate(profiles) if one is kind.profile), len(profiles))
            profiles += [kind.profile] if index == len(profiles) else []
        elif base is not None and rates is not None and rates != base:
            memory_speed = rates.bytes_per_s / base.bytes_per_s
            index = by_rates.setdefault((rates, device.kind), len(profiles))
            profiles += [_scaled(profile, rates, device)] if index == len(profiles) else []
        if device.members > 1 and kind is None and device.speed == 1:
            raise BiremeError(
                f"{device.name} stands for {device.members} devices that run each operator together, and how "
                "fast they do so is not known. Give it the profile of such a device (--profile NAME=FILE, "
                "plan.profiles), or its speed in the cluster file."
            )
        known[device] = index, memory_speed
    found = [known[device] for device in devices]
    return DeviceProfiles(
        tuple(profiles), tuple(index for index, _ in found), tuple(speed for _, speed in found)
    )


def _scaled(profile: Profile, rates: Rates, device: Device) -> Profile:
    """The profile with the seconds of units on a device of these rates. Seconds of optimizer steps stay."""

    def scaled(cost: UnitCost) -> UnitCost:
        assert profile.rates is not None
        if cost.work is None:
            return cost
        there_s = roofline_s(cost.work, profile.rates, profile.device_kind)
        times = roofline_s(cost.work, rates, device.kind) / there_s if there_s else 1.0
        seconds = {name: getattr(cost, name) for name in _TIMES}
        return replace(cost, **{name: one and one * times for name, one in seconds.items()})

    units = [replace(unit, costs=tuple(map(scaled, unit.costs))) for unit in profile.units]
    return replace(
        profile,
        units=tuple(units),
        device=device.name,
        device_kind=device.kind,
        rates=rates,
        engine=profile.engine if device.kind == profile.device_kind else None,
        kinds=(),
    )
