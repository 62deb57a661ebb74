"""Plans with gradients that are kept as principal components: their sums as they are sent, and the option."""

from pathlib import Path

import pytest
import torch

from bireme.cluster.catalogue import device_named
from bireme.cluster.cluster_file import save_cluster
from bireme.codec.lowrank import PrincipalStream, first_components
from bireme.codec.sum_description import DENSE, DENSE_SUMS, GradientForm
from bireme.model.units import chosen_maps
from bireme.plan.plan_request import PlanRequest, TierLimits
from bireme.plan.search.draft import Draft
from bireme.plan.search.evaluator import PlanEvaluator
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outline
from bireme.profile.optimizers import kept_gradients, sum_cost_of
from bireme.profile.profile import save_profile
from bireme.sync.components import merge_components
from bireme.sync.exchange import BatchGradients, SentBytes
from tests.plan.test_plan_sums import cluster
from tests.support.command import bireme, with_sets
from tests.support.estimates import estimated_once
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_profiles import gpt
from tests.support.together import run_threads

FORM = GradientForm(2)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_sums_of_components_are_predicted_to_the_byte(width: int) -> None:
    graph = gpt(tied="false")
    maps = chosen_maps(graph, FORM)
    fabric = ThreadFabric(width)

    def sent(rank: int) -> int:
        group = fabric.of(rank).group(range(width))
        assert group is not None
        streams = {
            name: PrincipalStream(first_components(one.rows, one.columns, 2, seed=1, dtype=torch.float32))
            for name, one in maps.items()
        }
        for name, one in maps.items():
            streams[name].feed(torch.ones(1, one.rows), torch.ones(1, one.columns))
        gradients = BatchGradients({}, set(), streams=streams)
        counted = SentBytes()
        merge_components(group, gradients, counted)
        return counted.sent

    cost = sum_cost_of(graph, DENSE, FORM)
    assert cost.hop_bytes(0.0, slice(None), 1) == 0
    found = sum(one.found_bytes for one in cost.gathered)
    predicted = width * cost.hop_bytes(float(found), slice(None), width)
    assert sum(run_threads(width, sent)) == round(predicted)
    # With more than two replicas that is more than a ring of the same bytes would send.
    assert predicted > width * DENSE_SUMS.hop_share(width) * found


@pytest.mark.slow
def test_a_plan_counts_the_gradients_that_are_kept_as_components(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_cluster(cluster(), tmp_path / "cluster.toml")
    save_profile(estimated_once(gpt(tied="false"), device_named("laptop"), [1, 2]), tmp_path / "profile.json")
    files = ("--profile", f"{tmp_path}/profile.json", f"cluster.source={tmp_path}/cluster.toml")
    model = "model.source=gpt:layers=2,width=16,heads=2,vocab=32,context=8,tied=false"
    shape = ("training.batch_size=4", "plan.schedule=1f1b", "plan.width=2")
    words = with_sets(["plan", *files, model, *shape, "--json"])
    whole, kept = (bireme(capsys, *words, *more) for more in ((), ("--set", "training.gradient=principal:2")))
    assert (whole.status, kept.status) == (0, 0), kept.err
    assert "gradient" not in whole.document
    told = kept.document["gradient"]
    assert (told["form"], told["kept_bytes"] < told["whole_bytes"]) == ("principal:2", True)
    one, other = ([stage["peak_bytes"] for stage in found.document["stages"]] for found in (whole, kept))
    assert one != other


def test_components_are_counted_on_the_device_of_a_plan_that_offloads() -> None:
    graph = gpt(tied="false")
    kept, sums = kept_gradients(graph, FORM), sum_cost_of(graph, DENSE, FORM)
    profile = kept.counted_in(estimated_once(graph, device_named("laptop"), [1, 2]), may_delay=False)
    limits = TierLimits(50_000)
    request = PlanRequest(4, schedule="1f1b", sums=sums, whole_backwards=True, memory=limits)
    draft = Draft(Outline("1f1b", 1, 1, (1,), 4), ((0,),), ())
    evaluator = PlanEvaluator(PlanningProblem(profile, cluster(), request))
    paging = evaluator.paging(draft, host_updates=False)
    assert paging is not None
    found = sum(one.found_bytes for one in sums.gathered)
    assert found > 0
    for item in ("gradient", "optimizer"):
        counted = sum(getattr(unit, f"{item}_bytes") for unit in profile.units)
        assert sum(getattr(paging.sizes, item)) == counted - found
    # What a batch goes on from, and what two batches at most have found.
    assert sum(paging.sizes.buffers) == sum(unit.buffer_bytes for unit in profile.units) + 3 * found


def test_what_gradients_cannot_be_is_refused_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    profiled = ("plan", "--profile", f"{tmp_path}/none.json")
    principal = "training.gradient=principal:2"
    apart = ("memory.device=1GB", "memory.updates=apart", "training.clip_norm=0")
    for words, sentence in (
        (("training.gradient=svd:3",), "principal:RANK"),
        (("training.gradient_of=*.weight",), 'training.gradient is "whole"'),
        ((principal, *apart), "whose components are found when all stages"),
        ((principal, "memory.shard=optimizer"), "Gradients that replicas sum in parts are whole"),
    ):
        result = bireme(capsys, *with_sets([*profiled, *words]))
        assert (result.status, sentence in result.err) == (2, True), result.err
