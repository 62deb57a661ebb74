"""Profiles as files and in the cache: what is read is what was written, and what is damaged is not read."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.cluster.device import KINDS, Device, EngineCost
from bireme.errors import BiremeError
from bireme.profile import measuring, profiler
from bireme.profile.control import cache_folder
from bireme.profile.profile import (
    KeptMemory,
    Profile,
    SharedState,
    UnitCost,
    UnitProfile,
    load_profile,
    save_profile,
)
from bireme.profile.profiler import profile
from tests.support.extent import examples
from tests.support.tiny_profiles import CPU, LAPTOP, LITTLE, Bench, gpt, line


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> Bench:
    """Made-up times, and nothing measured before."""
    found = Bench()
    monkeypatch.setattr(measuring, "time_benches", found)
    monkeypatch.setattr(measuring, "time_update", lambda *_: 0.5)
    return found


names = st.text(max_size=8)
counts = st.integers(0, 2**60)
seconds = st.floats(0, 1e9, allow_nan=False)
kept = st.builds(KeptMemory, st.lists(names, min_size=1, max_size=3).map(tuple), counts, st.booleans())


engines = st.builds(
    EngineCost,
    **{
        one.name: counts if one.name in ("process_bytes", "num_processes") else seconds
        for one in fields(EngineCost)
    },
)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    sizes = draw(st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True))
    half = st.none() | seconds
    words = st.lists(names, max_size=2).map(tuple)
    units: list[UnitProfile] = []
    for index in range(draw(st.integers(1, 4))):
        firsts = [place for place, unit in enumerate(units) if unit.same_as is None]
        costs = st.tuples(
            *(
                st.builds(
                    UnitCost,
                    micro_batch=st.just(size),
                    forward_s=seconds,
                    backward_s=seconds,
                    recompute_backward_s=seconds,
                    backward_input_s=half,
                    backward_weight_s=half,
                    spread=seconds,
                    saved_bytes=counts,
                    boundary_bytes=counts,
                    workspace_bytes=counts,
                    shared=st.lists(kept, max_size=2).map(tuple),
                    returned_bytes=st.none() | counts,
                )
                for size in sizes
            )
        )
        same_as = st.none() | st.sampled_from(firsts) if index else st.none()
        held = st.lists(st.builds(SharedState, names, counts, counts, counts, counts), max_size=2).map(tuple)
        unit = st.builds(
            UnitProfile,
            same_as=same_as,
            receives=words,
            sends=words,
            inputs=words,
            parameter_bytes=counts,
            gradient_bytes=counts,
            optimizer_bytes=counts,
            buffer_bytes=counts,
            update_s=seconds,
            trial_s=seconds,
            reduce_s=seconds,
            tied=held,
            costs=costs,
        )
        units.append(draw(unit))
    whole = st.builds(
        Profile,
        device_kind=st.sampled_from(KINDS),
        num_threads=counts,
        num_operators=counts,
        parameter_bytes=counts,
        units=st.just(tuple(units)),
        engine=st.none() | engines,
    )
    return draw(whole)


@examples(50)
@given(profiles())
def test_what_is_read_from_a_file_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, found: Profile
) -> None:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    save_profile(found, path)
    assert load_profile(path) == found


Damage = Callable[[dict[str, Any]], Any]


@cache
def estimated() -> Profile:
    return profile(gpt(3), LAPTOP, [1, 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda plain: plain.pop("units"), "lacks units"),
        (lambda plain: plain.update(untis=[]), "unknown key 'untis'. Did you mean 'units'"),
        (lambda plain: plain.update(format=2), "format is 2"),
        (lambda plain: plain.update(units=[]), "at least 1 item"),
        (lambda plain: plain["units"][0].update(saved=1), r"units\[0\].saved"),
        (lambda plain: plain["units"][0]["costs"][0].update(forward_s=-1.0), "forward_s is -1.0"),
        (lambda plain: plain["units"][0]["costs"][0].update(forward_s=1e308), r"forward_s is 1e\+308"),
        (lambda plain: plain["units"][0].update(gradient_bytes=2**70), "gradient_bytes is 11805"),
        (lambda plain: plain.update(device_kind="tpu"), "device_kind is 'tpu'; it must be cpu or cuda"),
        (lambda plain: plain["units"][0]["costs"][0].update(saved_bytes="many"), 'saved_bytes is "many"'),
        (lambda plain: plain["units"][1]["costs"].pop(), "unit 1 has costs for micro-batches of .1. samples"),
        (lambda plain: plain["units"][0]["costs"][1].update(micro_batch=1), "unit 0 has costs for .*1, 1"),
        (lambda plain: plain["units"][0].update(same_as=0), "unit 0 cannot be the same as unit 0"),
        (lambda plain: plain["units"][5].update(same_as=3), "unit 5 cannot be the same as unit 3"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path: Path, damage: Damage, sentence: str) -> None:
    path = tmp_path / "profile.json"
    save_profile(estimated(), path)
    plain = json.loads(path.read_text())
    damage(plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(BiremeError, match=sentence) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_profile_is_measured_once_under_the_same_circumstances(bench: Bench) -> None:
    first = profile(line(), CPU, [2])
    assert profile(line(), CPU, [2]) == first
    assert bench.num_calls == 1
    profile(line(), CPU, [2], use_cache=False)
    assert bench.num_calls == 2


@pytest.mark.slow
def test_under_other_circumstances_it_is_measured_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile(line(), CPU, [2])
    again: list[Callable[[], Profile]] = [
        lambda: profile(line(), CPU, [3]),
        lambda: profile(line(), CPU, [2, 3]),
        lambda: profile(line(), CPU, [2], optimizer="sgd"),
        lambda: profile(line(), CPU, [2], halves=True),
        lambda: profile(line(), CPU, [2], effort=LITTLE),
        lambda: profile(line("float64"), CPU, [2]),
        lambda: profile(replace(line(), name="another"), CPU, [2]),
    ]
    for run in again:
        before = bench.num_calls
        run()
        assert bench.num_calls > before
        after = bench.num_calls
        run()
        assert bench.num_calls == after
    for name in ("versions_here", "device_here"):
        found = {"versions_here": "newer", "device_here": Device("another", "cpu", 2**40)}[name]
        monkeypatch.setattr(profiler, name, lambda *_, found=found: found)
        before = bench.num_calls
        profile(line(), CPU, [2])
        assert bench.num_calls > before


def test_the_cache_is_where_the_environment_says(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BIREME_CACHE", str(tmp_path / "mine"))
    profile(line(), CPU, [2])
    (file,) = (tmp_path / "mine").rglob("*.json")
    assert load_profile(file).model == line().name
    monkeypatch.delenv("BIREME_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "bireme"


def test_a_cache_that_cannot_be_used_is_as_good_as_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = profile(line(), CPU, [2])
    (file,) = cache_folder().rglob("*.json")
    file.write_text(file.read_text()[:-40])
    assert profile(line(), CPU, [2]) == first
    assert bench.num_calls == 2
    assert load_profile(file) == first
    (tmp_path / "file").touch()
    monkeypatch.setenv("BIREME_CACHE", str(tmp_path / "file"))
    assert profile(line(), CPU, [2]) == first
    assert bench.num_calls == 3


def test_estimates_are_not_cached(own_cache: Path) -> None:
    profile(line(), LAPTOP, [2])
    assert not own_cache.exists()
