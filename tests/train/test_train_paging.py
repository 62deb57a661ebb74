"""`bireme train` with state on a disk: the losses of a resident run, and the bytes of its tiers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bireme.errors import BiremeError
from bireme.plan.plan import Paging, Plan
from bireme.plan.plan_file import write_plan
from bireme.schedule.accesses import Sizes
from bireme.schedule.budgets import Budgets
from bireme.train.prepare import check_plan
from bireme.train.run_file import load_run_file
from tests.plan.conftest import few_chunks  # noqa: F401 (a fixture)
from tests.support.alone import alone
from tests.support.command import bireme
from tests.support.extent import TRY_ALL
from tests.support.small_models import gpt
from tests.support.training import CUTS, losses, settings, write_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_chunks")]

DEVICE, DISK = 400_000, 1 << 30
NOTHING, EACH, TWICE = (0.0,) * 4, (40_000.0,) * 4, (80_000.0,) * 4
"""Bytes of no stage, and bytes that no stage's weights have more of."""


OF_TWO = {
    "plan__file": "",
    "model__source": "gpt:layers=4,width=64,heads=2,vocab=257,context=32",
    "training__batch_size": 4,
    "plan__schedule": "1f1b",
    "plan__width": 2,
    "plan__micro_batch": 2,
    "cluster__workers": 2,
    "cluster__timeout_s": 600,
    "export__at_end": "false",
}
"""Two replicas of one rank, which plan for themselves."""


def test_a_run_with_its_state_on_a_disk_is_the_resident_one_and_says_what_it_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, "1f1b", 4)
    plan = Plan(CUTS[4], 2, "1f1b", stages_per_rank=4)
    sizes = Sizes(EACH, EACH, TWICE, NOTHING, NOTHING, NOTHING, NOTHING)
    paging = Paging((Budgets(DEVICE, 0, DISK),), sizes, chunk_bytes=(4096,), is_summed=True, stashes=False)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    found: dict[str, dict[int, float]] = {}
    tiers: dict[str, list[dict[str, Any]]] = {}
    for name, one in (("resident", plan), ("paged", replace(plan, paging=paging))):
        write_plan(tmp_path / f"{name}.json", one)
        more = settings(
            plan__file=tmp_path / f"{name}.json",
            cluster__workers=1,
            log__name=name,
            training__steps=8,
            training__evaluate_every=4,
            **({"memory__disk": scratch} if one.paging else {}),
        )
        with alone():
            result = bireme(capsys, "train", str(run), *more, "--json")
        assert result.status == 0, result.err
        tiers[name] = result.document.get("tiers", [])
        found[name] = losses(tmp_path / "runs" / name) | {-1: result.document["eval_loss"]}
    assert found["paged"] == found["resident"]
    assert not list(scratch.iterdir())
    assert not tiers["resident"]
    device, disk = tiers["paged"]
    assert (device["rank"], device["tier"], device["budget_bytes"]) == (0, "device", DEVICE)
    assert (disk["rank"], disk["tier"], disk["budget_bytes"]) == (0, "disk", DISK)
    for tier in (device, disk):
        assert 0 < tier["peak_bytes"] <= tier["budget_bytes"]
        assert 0 < tier["bytes_moved"] == tier["predicted_bytes_moved"]


@pytest.mark.skipif(not TRY_ALL, reason="threads do the same in tests/runtime/test_shared_optimizer.py")
@pytest.mark.parametrize(("shard", "other"), [("optimizer", "weights"), ("weights", "none")])
def test_what_replicas_share_is_offloaded_as_planned_and_another_plan_goes_on(
    shard: str, other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two replicas with one micro-batch each, in which sums are the same in any order."""
    path = write_run(tmp_path, "1f1b", 1)
    write_plan(tmp_path / "of-two.json", Plan((), 1, "1f1b", width=2))
    common = {**OF_TWO, "training__clip_norm": 0}
    own = {"plan__file": tmp_path / "of-two.json", "plan__width": "", "plan__micro_batch": ""}
    own |= {"plan__schedule": "auto"}
    plain = settings(**common | own, training__steps=4, log__name="plain")
    result = bireme(capsys, "train", str(path), *plain, "--json")
    assert result.status == 0, result.err
    budgets = {"memory__device": "2MB", "memory__disk": tmp_path, "memory__disk_bytes": "1GB"}
    more = {"memory__shard": shard, "memory__host": "2MB", **budgets}
    shared = settings(**common, **more, training__steps=2, log__name="shared")
    first = bireme(capsys, "train", str(path), *shared, "--json")
    assert first.status == 0, first.err
    tiers = first.document["tiers"]
    assert {(one["rank"], one["tier"]) for one in tiers} >= {(rank, "device") for rank in range(2)}
    for tier in tiers:
        assert tier["bytes_moved"] == tier["predicted_bytes_moved"]
        assert tier["peak_bytes"] <= tier["budget_bytes"]
    assert all(tier["bytes_moved"] for tier in tiers if tier["tier"] == "device")
    sent = first.document["sync"]["shared"]
    assert 0 < sent["gathered_bytes"] == sent["predicted_gathered_bytes"]
    rest = settings(training__steps=4, training__schedule_steps=2, memory__shard=other, memory__device="auto")
    then = bireme(capsys, "resume", str(tmp_path / "runs" / "shared"), *rest, "--json")
    assert then.status == 0, then.err
    assert losses(tmp_path / "runs" / "shared") == losses(tmp_path / "runs" / "plain")


@pytest.mark.few(1)
@pytest.mark.parametrize(("mode", "device"), [("quorum", "5MB"), ("diloco", "6.6MB")])
def test_replicas_that_may_die_offload(
    mode: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, "1f1b", 1)
    more = settings(
        **OF_TWO,
        **({"sync__diloco_every": 2} if mode == "diloco" else {}),
        sync__mode=mode,
        memory__device=device,
        memory__host="20MB",
        training__steps=4,
    )
    result = bireme(capsys, "train", str(path), *more, "--json")
    assert result.status == 0, result.err
    assert result.document["steps"] == 4
    tiers = result.document["tiers"]
    assert all(tier["bytes_moved"] == tier["predicted_bytes_moved"] for tier in tiers)
    assert all(tier["bytes_moved"] for tier in tiers if tier["tier"] == "device")


def test_what_excludes_the_schedule_of_a_plan_from_a_file_is_refused_before_a_process_starts() -> None:
    sizes = Sizes(EACH, EACH, TWICE, NOTHING, NOTHING, NOTHING, NOTHING)
    plan = Plan(CUTS[4], 2, "1f1b", stages_per_rank=4)
    run = load_run_file(
        None, ["model.source=gpt:layers=1", "plan.file=plan.json", "training.gradient=principal:2"]
    )
    graph = gpt("layers=3,tied=false").graph
    check_plan(run, plan, graph)
    check_plan(run, replace(plan, paging=Paging((Budgets(DEVICE),), sizes)), graph)
    with pytest.raises(BiremeError, match=r'training\.gradient is "principal:2", and .*"?zb-h1'):
        check_plan(run, replace(plan, schedule="zb-h1"), graph)
