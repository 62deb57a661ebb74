"""Plans for a part of a model: what does not learn is there once, and has no gradients and no optimizer."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bireme.cluster.catalogue import device_named
from bireme.cluster.cluster import Card, Cluster, Link, Server
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.part import LoraPart, TrainedPart
from bireme.model.sources import load_source
from bireme.model.units import units_of
from bireme.plan.forecast import Answer, NothingFits
from bireme.plan.partition.autopipe import costs_between
from bireme.plan.partition.chain import chain_of
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.search import find_plan
from bireme.profile.profile import Profile
from bireme.runtime.message_format import Boundaries
from bireme.schedule.catalogue import generate
from bireme.simulate.simulator import simulate
from tests.support.command import bireme, with_sets
from tests.support.estimates import estimated_once
from tests.support.extent import draws
from tests.support.graphs import captured_once
from tests.support.tiny_llama import save_config

GPU = device_named("rtx4090")
LENGTH = 128


def profile_of(graph: Graph) -> Profile:
    return estimated_once(graph, GPU, [1])


def found(measured: Profile, schedule: str, *, memory_share: float) -> Answer | NothingFits:
    """On two machines of one card each, with so much of its memory, a gigabit between them."""
    card = replace(GPU, memory_bytes=round(memory_share * GPU.memory_bytes))
    servers = (Server(name, (card,), cards=(Card("net", (0,), Link(1.25e8, 1e-4)),)) for name in "ab")
    return find_plan(measured, Cluster(tuple(servers)), PlanRequest(batch_size=8, depth=2, schedule=schedule))


@pytest.mark.slow
def test_a_llama_of_7b_that_does_not_fit_two_cards_is_planned_there_as_an_adapter(tmp_path: Path) -> None:
    """By default with fewer layers, on cards with as much less memory."""
    pytest.importorskip("peft")
    num_layers = draws(32, 4)
    folder = save_config(
        tmp_path / "llama-7b",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=2048,
    )
    lora = LoraPart(8, targets=("q_proj", "v_proj"))
    source = load_source(f"hf:{folder}", length=LENGTH, dtype="bfloat16", part=TrainedPart(lora=lora))
    make = partial(capture, source.model, source.example_inputs)
    graph = captured_once(f"{num_layers} layers of Llama 7B, {LENGTH} tokens, {lora}", make, is_kept=True)
    learning = sum(state.num_elements for state in graph.parameters if state.trainable)
    assert learning == num_layers * 2 * 8 * (4096 + 4096)
    share = (num_layers * 202e6 + 262e6) / 6.74e9  # of the parameters of 32 layers

    measured = profile_of(graph)
    assert measured.parameter_bytes > 13e9 * share
    assert sum(unit.parameter_bytes for unit in measured.units) == 2 * learning
    assert sum(unit.gradient_bytes for unit in measured.units) == 4 * learning
    assert sum(unit.buffer_bytes for unit in measured.units) > 13e9 * share
    peaks = {}
    for schedule in ("1f1b", "2bw"):
        answer = found(measured, schedule, memory_share=share)
        assert isinstance(answer, Answer), answer
        stages = answer.best.forecast.stages
        peaks[schedule] = sum(stage.peak_bytes - stage.process_bytes for stage in stages)
    assert 13e9 * share < peaks["1f1b"] < 20e9 * share
    assert peaks["2bw"] - peaks["1f1b"] < 2e9 * share  # a second version of the whole would be 13 GB

    whole = replace(graph, parameters=tuple(replace(state, trainable=True) for state in graph.parameters))
    assert isinstance(found(profile_of(whole), "1f1b", memory_share=share), NothingFits)


@pytest.mark.slow
def test_messages_have_the_bytes_that_the_engine_sends() -> None:
    """Before the second layer nothing learns, so only an empty message comes back there."""
    part = TrainedPart(freeze=("tokens.*", "positions.*", "layers.0.*"))
    text = "gpt:layers=2,width=8,heads=1,vocab=32,context=8,tied=false"
    source = load_source(text, part=part)
    make = partial(capture, source.model, source.example_inputs)
    graph = captured_once(f"the last layer of {text}", make, is_kept=True)
    units, cuts, size = units_of(graph), (2, 4), 3
    costs = costs_between(chain_of(estimated_once(graph, GPU, [size]), size), cuts)
    boundaries = Boundaries(graph, ((), *(units[cut].receives for cut in cuts)))
    for stage in range(len(cuts)):
        for there, found in (
            (boundaries.forward(stage + 1, size), costs.message_bytes),
            (boundaries.backward(stage, size), costs.gradient_message_bytes),
        ):
            sent = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in there.specs)
            assert found[stage] == sent
    hidden = 3 * 8 * 8 * 4.0
    assert costs.message_bytes == (hidden, hidden, 0.0)
    assert costs.gradient_message_bytes == (0.0, hidden, 0.0)

    timeline = simulate(generate("1f1b", num_stages=3, num_microbatches=6, num_batches=1), costs)
    found_bytes = {
        (one.source, one.destination): sum(one.num_bytes) for one in timeline.transfers if not one.is_sync
    }
    assert found_bytes == {(0, 1): 6 * hidden, (1, 0): 0.0, (1, 2): 6 * hidden, (2, 1): 6 * hidden}


@pytest.mark.slow
@pytest.mark.usefixtures("remember_estimates")
def test_the_command_line_freezes_by_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    model = "model.source=gpt:layers=2,width=8,heads=1,vocab=32,context=8,tied=false"
    words = with_sets(["profile", model, "--like", "laptop", "--batch", "1", "--json"])
    whole = bireme(capsys, *words).document["units"]
    patterns = 'model.freeze=["tokens.*", "positions.*", "layers.0.*"]'
    part = bireme(capsys, *words, "--set", patterns).document["units"]
    assert [unit["name"].split(".")[0] for unit in part] == ["positions", *["layers"] * 4, "head"]
    for before, now in zip(whole[:3], part[:3], strict=True):
        assert now["gradient_bytes"] == now["optimizer_bytes"] == now["parameter_bytes"] == 0
        assert now["buffer_bytes"] == before["parameter_bytes"] + before["buffer_bytes"]
        assert now["frozen_bytes"] == before["parameter_bytes"]
        assert now["costs"][0]["backward_s"] == now["costs"][0]["saved_bytes"] == 0
    for before, now in zip(whole[3:], part[3:], strict=True):
        assert not {"frozen_bytes"} & (before.keys() | now.keys())
        for key in ("gradient_bytes", "optimizer_bytes", "parameter_bytes", "buffer_bytes"):
            assert now[key] == before[key]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["model.freeze=x", "model.lora.rank=2"], "only the adapter learns"),
        (["model.lora.targets=q_proj"], "Set model.lora.rank"),
        (["model.train=layer.0.*"], "Did you mean 'layers.0.*'?"),
    ],
)
def test_keys_of_no_use_are_refused(keys: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = "model.source=gpt:layers=1,width=8,heads=1,vocab=32,context=8"
    result = bireme(capsys, *with_sets(["profile", model, "--like", "laptop", *keys]))
    assert result.status == 2
    assert said in result.err
