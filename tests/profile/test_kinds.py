"""Profiles by kind of device: which one counts on which device, and how seconds are scaled by rates."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.made_up.models import profile_of
from bireme.cluster.catalogue import device_named
from bireme.cluster.device import Device
from bireme.errors import BiremeError
from bireme.profile.estimate import ATTAINED_BYTES, ATTAINED_FLOPS, device_profiles, roofline_s
from bireme.profile.profile import KindProfile, Profile, Rates, UnitWork, load_profile, save_profile

BASE = Rates("float32", 1e12, 1e11)
COMPUTE = UnitWork(flops=10**12, product_bytes=10**6, other_bytes=0, num_calls=1)
MEMORY = UnitWork(flops=0, product_bytes=0, other_bytes=10**11, num_calls=3)


def profile(*works: UnitWork | None) -> Profile:
    """Units of a second forward and two backward, with this work."""
    found = profile_of([1.0] * len(works), [2.0] * len(works), update_s=[0.5] * len(works))
    units = tuple(
        replace(unit, costs=tuple(replace(cost, work=work) for cost in unit.costs))
        for unit, work in zip(found.units, works, strict=True)
    )
    return replace(found, units=units, device_kind="cuda", rates=BASE)


def device(name: str = "gpu", flops: float = 1e12, num_bytes: float = 1e11, speed: float = 1.0) -> Device:
    """A GPU of these rates."""
    return Device(name, "cuda", 2**34, num_bytes, flops, 2 * flops, speed=speed)


def test_a_unit_is_scaled_by_the_rate_that_limits_it() -> None:
    found = device_profiles(profile(COMPUTE, MEMORY), [device(), device("other", 4e12, 3e11)])
    assert found.of_device == (0, 1)
    first, scaled = found.profiles
    by_arithmetic, by_memory = (unit.costs[0] for unit in scaled.units)
    assert (by_arithmetic.forward_s, by_arithmetic.backward_s) == pytest.approx((1 / 4, 2 / 4))
    assert (by_memory.forward_s, by_memory.backward_s) == pytest.approx((1 / 3, 2 / 3))
    assert found.memory_speeds[0] is None
    assert found.memory_speeds[1] == pytest.approx(3)
    assert [unit.update_s for unit in scaled.units] == [unit.update_s for unit in first.units]


def test_speeds_of_the_cluster_file_come_before_rates() -> None:
    fast = device("other", 4e12, 3e11)
    assert device_profiles(profile(COMPUTE), [fast, device("slow", speed=0.5)]).of_device == (0, 0)


@pytest.mark.parametrize(
    ("known", "there"),
    [
        (replace(profile(COMPUTE), rates=None), device("other", 4e12)),
        (profile(COMPUTE), device("other", 0.0)),
        (profile(COMPUTE), device("other", 4e12, 0.0)),
    ],
)
def test_without_the_rates_of_both_a_device_is_as_fast_as_profiled(known: Profile, there: Device) -> None:
    assert device_profiles(known, [device(), there]).of_device == (0, 0)


def test_a_unit_without_work_is_not_scaled() -> None:
    scaled = device_profiles(profile(None), [device("other", 4e12)]).profiles[1]
    assert scaled.units[0].costs[0].forward_s == 1.0


def test_the_ready_device_of_the_same_name_gives_the_rates() -> None:
    named = Device(device_named("rtx3090").name, "cuda", 2**34)
    (bare, full) = (device_profiles(profile(COMPUTE), [one]) for one in (named, device_named("rtx3090")))
    assert bare.profiles[1].units == full.profiles[1].units


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 3090", "rtx3090", "cuda"])
def test_a_profile_is_for_devices_by_name_or_kind(name: str) -> None:
    own = profile(MEMORY)
    found = device_profiles(
        replace(profile(COMPUTE), kinds=(KindProfile(name, own),)),
        [device_named("laptop"), device_named("rtx3090"), device_named("rtx3090")],
    )
    assert found.of_device[1:] == (found.of_device[1],) * 2
    assert found.profiles[found.of_device[1]] is own
    assert found.profiles[found.of_device[0]] is not own


def test_the_profile_of_a_name_comes_before_that_of_a_kind() -> None:
    kinds = (KindProfile("cuda", profile(MEMORY)), KindProfile("rtx3090", profile(None)))
    found = device_profiles(
        replace(profile(COMPUTE), kinds=kinds), [device_named("rtx3090"), device_named("t4")]
    )
    assert found.profiles[found.of_device[0]] is kinds[1].profile
    assert found.profiles[found.of_device[1]] is kinds[0].profile


def test_a_profile_for_a_device_that_is_not_there_is_refused() -> None:
    kinds = (KindProfile("rtx3080", profile(COMPUTE)),)
    with pytest.raises(BiremeError, match=r"a profile for rtx3080, but no device of that name or kind"):
        device_profiles(replace(profile(COMPUTE), kinds=kinds), [device()])


def test_a_device_that_stands_for_several_needs_a_profile_or_a_speed() -> None:
    node = replace(device_named("a100").together(8), name="node")
    with pytest.raises(BiremeError, match=r"node stands for 8 devices .* how fast they do so is not known"):
        device_profiles(profile(COMPUTE), [node, device()])
    assert device_profiles(profile(COMPUTE), [replace(node, speed=5.0)]).of_device == (0,)
    own = replace(profile(COMPUTE), kinds=(KindProfile("node", profile(MEMORY)),))
    assert device_profiles(own, [node, device()]).of_device == (1, 0)


def test_work_rates_and_kinds_come_back_from_a_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    whole = replace(profile(COMPUTE, None), kinds=(KindProfile("a", profile(MEMORY)),))
    save_profile(whole, path)
    assert load_profile(path) == whole


RATES = st.builds(Rates, st.just("float32"), st.floats(1e9, 1e16), st.floats(1e8, 1e14))
WORKS = st.builds(
    UnitWork, st.integers(0, 10**15), st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 99)
)


@given(WORKS, RATES, RATES)
def test_no_unit_gains_more_than_the_rate_that_gains_most(work: UnitWork, one: Rates, other: Rates) -> None:
    here_s, there_s = roofline_s(work, one, "cuda"), roofline_s(work, other, "cuda")
    gains = (other.flops_per_s / one.flops_per_s, other.bytes_per_s / one.bytes_per_s, 1.0)
    assert here_s <= there_s * max(gains) * (1 + 1e-9)
    assert here_s >= there_s * min(gains) * (1 - 1e-9)
    least_s = max(
        work.flops / (one.flops_per_s * ATTAINED_FLOPS),
        (work.product_bytes + work.other_bytes) / (one.bytes_per_s * ATTAINED_BYTES),
    )
    assert here_s >= least_s * (1 - 1e-9)
