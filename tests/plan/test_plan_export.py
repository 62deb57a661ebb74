"""Plans in other frameworks' words: read back by what their documents say, or refused with the reason."""

import copy
import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from bireme.errors import BiremeError
from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.sources import load_source
from bireme.model.units import units_of
from bireme.plan.export import EXPORTS, Material, export_named, layout, module_parts
from bireme.plan.plan import Plan
from bireme.schedule.torch_csv import parse
from tests.support.graphs import captured_once
from tests.support.hand_plans import candidate_of
from tests.support.tiny_profiles import gpt

HALVES = ("attention", "feed_forward")
NAMES = ("positions", *(f"layers.{layer}.{half}" for layer in range(4) for half in HALVES), "head")
"""An embedding, four layers in halves, and the head."""

BY_LAYERS = Plan((3, 5, 7), 8, "1f1b")


def material(plan: Plan, *, graph: Graph | None = None, csv: str = "", batch_size: int = 32) -> Material:
    return Material(candidate_of(plan, len(NAMES), batch_size=batch_size), NAMES, graph, csv)


def text(name: str, plan: Plan, **more: object) -> str:
    graph = gpt(4, tied="false")
    return export_named(name).text(replace(material(plan, graph=graph), **more))  # type: ignore[arg-type]  # fields by name


# --- torch's schedule files --------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved", "zbv"])
def test_the_schedule_is_torch_s_file(schedule: str) -> None:
    plan = Plan((3, 5, 7), 8, schedule)
    back = parse(text("torch-csv", plan), source="plan.csv")
    program = plan.program(1)
    assert back.num_stages == 4
    assert back.rank_of_stage == program.rank_of_stage
    assert back.num_microbatches == 8


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan((3,), 4, "2bw"), "update rule is delayed"),
        (Plan((3,), 4, "2bw-fresh"), "update rule is fresh"),
        (Plan((3,), 4, "1f1b-sliced", num_sliced=1), "halves"),
        (Plan((3,), 4, "1f1b", recompute=(1,)), "recomputes stage 1"),
        (Plan((3,), 4, "1f1b", width=2, micro_batch_sizes=(1, 3)), "micro-batches of 1 and 3 samples"),
    ],
)
def test_what_torch_s_file_cannot_say_is_refused(plan: Plan, said: str) -> None:
    with pytest.raises(BiremeError, match=said):
        text("torch-csv", plan)


# --- module names ------------------------------------------------------------------------------------------


def keep_as_documented(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """A copy of a model that keeps these modules: whole children, and of lists the layers that are named."""
    model = copy.deepcopy(model)
    for name, child in list(model.named_children()):
        if isinstance(child, nn.ModuleList):
            kept = {int(other.split(".")[1]) for other in names if other.startswith(f"{name}.")}
            layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(child) if i in kept})
            setattr(model, name, layers)
        elif name not in names:
            setattr(model, name, None)
    return model


@pytest.mark.parametrize("cuts", [(), (3,), (1, 9), (3, 5, 7), (1, 3, 5, 7, 9)])
def test_each_stage_keeps_the_parameters_of_its_units(cuts: tuple[int, ...]) -> None:
    words = "gpt:layers=4,width=16,heads=2,vocab=32,context=8,tied=false"
    model = load_source(words, batch=2).model
    plan = Plan(cuts, 8, "1f1b")
    graph = gpt(4, tied="false")
    units = units_of(graph)
    assert tuple(unit.name for unit in units) == NAMES
    parts = module_parts(plan, graph)
    assert len(parts) == plan.num_stages
    for stage, names in enumerate(parts):
        kept = {name for name, _ in keep_as_documented(model, names).named_parameters()}
        needed = {name for unit in plan.units_of(stage, len(units)) for name in units[unit].parameters}
        assert kept == needed


def test_the_modules_are_those_a_person_would_name() -> None:
    assert module_parts(Plan((3, 9), 4, "1f1b"), gpt(4, tied="false")) == (
        ("tokens", "positions", "dropout", "layers.0"),
        ("layers.1", "layers.2", "layers.3"),
        ("norm", "head"),
    )


class Nested(nn.Module):
    """As transformers nest a model: layers one level down, and a table of positions that all layers use."""

    class Inner(nn.Module):
        class Table(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.arange(x.shape[-1], dtype=torch.float32).cos()

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.table = self.Table()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            table = self.table(x)
            x = self.first(x)
            for layer in self.layers:
                x = x + layer(x * table).relu()
            return x

    def __init__(self) -> None:
        super().__init__()
        self.model = self.Inner()
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.head(self.model(x)).mean()
        return mean


def test_nested_layers_and_what_runs_everywhere_are_named() -> None:
    graph = capture(Nested(), {"x": torch.ones(2, 4)})
    assert [unit.name for unit in units_of(graph)] == [
        "model.first",
        *(f"model.layers.{n}" for n in range(3)),
        "head",
    ]
    assert module_parts(Plan((2, 4), 4, "1f1b"), graph) == (
        ("model.table", "model.first", "model.layers.0"),
        ("model.table", "model.layers.1", "model.layers.2"),
        ("head",),
    )


class Handing(nn.Module):
    """Its first layer makes a table that the second uses too: each stage makes it again for itself."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            table = torch.arange(x.shape[-1], dtype=torch.float32).cos()
            return self.line(x * table).relu(), table

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.First(), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, table = self.layers[0](x)
        mean: torch.Tensor = self.layers[1](x * table).mean()
        return mean


def test_what_a_stage_makes_again_for_itself_does_not_cut_the_layer_that_made_it() -> None:
    graph = capture(Handing(), {"x": torch.ones(2, 4)})
    repeated = next(unit for unit in units_of(graph) if unit.name == "layers.1").operators
    assert any(graph.operators[place].module == "layers.0" for place in repeated)
    assert module_parts(Plan((1,), 4, "1f1b"), graph) == (("layers.0",), ("layers.1",))


@pytest.mark.slow
def test_a_transformers_model_is_cut_as_nemo_s_guide_cuts_it(tmp_path: Path) -> None:
    """Embedding first, norm and head last, and the table of positions in every stage."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    config = {"model_type": "llama", "num_hidden_layers": 4, "tie_word_embeddings": False}
    said = json.dumps(config | sizes | {"architectures": ["LlamaForCausalLM"]})
    (tmp_path / "config.json").write_text(said)
    source = load_source(f"hf:{tmp_path}", batch=2, length=16)
    make = partial(capture, source.model, source.example_inputs)
    graph = captured_once(f"2 of 16 tokens of {said}", make, is_kept=True)
    assert module_parts(Plan((3, 7), 4, "1f1b"), graph) == (
        ("model.embed_tokens", "model.rotary_emb", "model.layers.0"),
        ("model.rotary_emb", "model.layers.1", "model.layers.2"),
        ("model.rotary_emb", "model.layers.3", "model.norm", "lm_head"),
    )


def test_torchtitan_does_not_look_into_a_nested_model() -> None:
    graph = capture(Nested(), {"x": torch.ones(2, 4)})
    nested = Material(candidate_of(Plan((2, 4), 4, "1f1b"), 5), ("",) * 5, graph)
    assert '- ["head"]' in export_named("nemo").text(nested)
    with pytest.raises(BiremeError, match=r"model.table lies deeper, in model"):
        export_named("torchtitan").text(nested)


def test_a_layer_cut_in_two_is_refused_by_name() -> None:
    with pytest.raises(
        BiremeError, match=r"layers.1 is cut in two \(.*attention in stage 0.*plan.whole_layers"
    ):
        module_parts(Plan((4,), 4, "1f1b"), gpt(4, tied="false"))


@pytest.mark.slow
def test_tied_weights_in_two_stages_are_refused_by_name() -> None:
    with pytest.raises(BiremeError, match=r"tokens.weight .* is used in stages 0 and 1: tied weights"):
        module_parts(Plan((3,), 4, "1f1b"), gpt(4, tied="true"))


def test_names_of_modules_need_the_model() -> None:
    with pytest.raises(BiremeError, match=r"Name the model too, in model\.source"):
        export_named("torchtitan").text(material(BY_LAYERS))


# --- torchtitan and NeMo AutoModel -------------------------------------------------------------------------


def test_torchtitan_s_tables_say_the_plan() -> None:
    plan = replace(BY_LAYERS, width=2, recompute=(0, 1, 2, 3))
    tables = tomllib.loads(text("torchtitan", plan))
    assert tables["parallelism"] == {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 1,
        "pipeline_parallel_degree": 4,
        "pipeline_parallel_microbatch_size": 2,
        "pipeline_parallel_schedule": "1F1B",
        "module_fqns_per_model_part": [list(names) for names in module_parts(plan, gpt(4, tied="false"))],
    }
    assert tables["training"] == {"local_batch_size": 16}
    assert tables["activation_checkpoint"] == {"mode": "full"}


@pytest.mark.parametrize(
    ("schedule", "ranks", "name"),
    [
        ("gpipe", 4, "GPipe"),
        ("1f1b", 4, "1F1B"),
        ("interleaved", 2, "Interleaved1F1B"),
        ("zbv", 2, "ZBVZeroBubble"),
    ],
)
def test_torch_finds_the_schedule_by_its_name(schedule: str, ranks: int, name: str) -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    plan = Plan((3, 5, 7), 8, schedule)
    table = tomllib.loads(text("torchtitan", plan))["parallelism"]
    assert table["pipeline_parallel_degree"] == ranks
    assert table["pipeline_parallel_schedule"] == name
    assert get_schedule_class(name).__name__ == f"Schedule{name}"
    with_file = tomllib.loads(text("torchtitan", plan, csv="plan.csv"))["parallelism"]
    assert with_file["pipeline_parallel_schedule_csv"] == "plan.csv"
    assert get_schedule_class(with_file["pipeline_parallel_schedule"])


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan((3, 5, 7), 8, "zb-h1"), "no schedule named zb-h1"),
        (Plan((3, 5, 7), 8, "1f1b", lookahead=1), "1 forwards further ahead"),
        (Plan((3, 5, 7), 3, "1f1b"), "the plan has 3 for 4"),
        (Plan((3, 5, 7), 5, "interleaved"), "5 on 2 ranks"),
    ],
)
def test_what_torch_does_not_make_itself_goes_as_a_file(plan: Plan, said: str) -> None:
    with pytest.raises(BiremeError, match=f"{said}.*--export torch-csv:FILE"):
        text("torchtitan", plan)
    table = tomllib.loads(text("torchtitan", plan, csv='a "b".csv'))["parallelism"]
    assert table["pipeline_parallel_schedule"] == "PipelineScheduleMulti"
    assert table["pipeline_parallel_schedule_csv"] == 'a "b".csv'


def test_nemo_s_section_says_the_plan() -> None:
    section = text("nemo", replace(BY_LAYERS, width=2))
    assert section.splitlines()[:6] == [
        "distributed:",
        "  strategy: fsdp2",
        "  pp_size: 4",
        "  dp_size: 2",
        "  dp_replicate_size: 2",
        "  pipeline:",
    ]
    assert '    pp_schedule: "1F1B"' in section
    assert "    pp_microbatch_size: 2\n    pp_batch_size: 16\n" in section
    assert '      - ["layers.3", "norm", "head"]' in section
    assert "activation_checkpointing: true" in text("nemo", replace(BY_LAYERS, recompute=(0, 1, 2, 3)))


@pytest.mark.parametrize("name", list(EXPORTS))
def test_stages_of_unequal_width_are_refused(name: str) -> None:
    with pytest.raises(BiremeError, match=r"3-1 replicas, but .* Plan with plan\.stage_widths = equal"):
        text(name, Plan((5,), 8, "1f1b", stage_widths=(3, 1)))


@pytest.mark.parametrize("name", ["torchtitan", "nemo", "megatron"])
@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan((3, 5, 7), 8, "2bw"), "cannot run 2bw: .*Plan with plan.synchronous"),
        (Plan((3, 5, 7), 8, "2bw-fresh"), "its update rule is fresh"),
        (Plan((3, 5, 7), 8, "1f1b-sliced", num_sliced=2), "halves"),
        (Plan((), 4, "sequential"), "is one device, without a pipeline"),
        (Plan((), 4, "sequential", width=2), "is data parallelism, without a pipeline"),
        (Plan((3, 5, 7), 8, "1f1b", recompute=(0, 2)), "only on stages 0, 2 of 4"),
        (Plan((3, 5, 7), 8, "1f1b", recompute_units=(2,)), "on stages parts of stages"),
        (Plan((3,), 8, "1f1b", width=2, micro_batch_sizes=(1, 3)), "micro-batches of 1 and 3 samples"),
    ],
)
def test_what_frameworks_cannot_say_is_refused_with_the_reason(name: str, plan: Plan, said: str) -> None:
    with pytest.raises(BiremeError, match=said):
        text(name, plan)


# --- Megatron-LM -------------------------------------------------------------------------------------------


def unfold(words: str) -> list[str]:
    """A layout's stages as letters, by Megatron-LM's document: commas mean nothing, x*n is n x."""
    plain = re.sub(r"\(([^)]+)\)\*(\d+)", lambda m: m[1] * int(m[2]), words.replace(",", ""))
    return re.sub(r"(.)\*(\d+)", lambda m: m[1] * int(m[2]), plain).split("|")


@pytest.mark.parametrize(
    ("cuts", "stages"),
    [
        ((), ["EttttL"]),
        ((3,), ["Et", "tttL"]),
        ((1,), ["E", "ttttL"]),
        ((1, 9), ["E", "tttt", "L"]),
        ((5, 9), ["Ett", "tt", "L"]),
        ((3, 5, 7), ["Et", "t", "t", "tL"]),
    ],
)
def test_the_layout_has_each_stage_s_layers(cuts: tuple[int, ...], stages: list[str]) -> None:
    words = layout(Plan(cuts, 8, "1f1b"), NAMES)
    assert unfold(words) == stages


def test_megatron_s_arguments_say_the_plan() -> None:
    assert text("megatron", replace(BY_LAYERS, width=2, recompute=(0, 1, 2, 3))).splitlines() == [
        "--pipeline-model-parallel-size 4",
        '--pipeline-model-parallel-layout "Et|t|t|tL"',
        "--micro-batch-size 2",
        "--global-batch-size 32",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ]


def test_several_stages_on_a_rank_are_in_the_order_of_the_forward() -> None:
    """Its document: the stages of all ranks' first parts, then those of their second."""
    found = text("megatron", Plan((3, 5, 7), 8, "interleaved"))
    assert "--pipeline-model-parallel-size 2" in found
    assert unfold(re.findall('"(.*)"', found)[0]) == ["Et", "t", "t", "tL"]


@pytest.mark.parametrize(
    ("plan", "names", "said"),
    [
        (Plan((4,), 8, "1f1b"), NAMES, r"a layer in two, before unit 4 \(layers.1.feed_forward\)"),
        (
            Plan((1,), 8, "1f1b"),
            ("tokens", "positions", "h.0", "head"),
            "embedding in two.*together = 0..1",
        ),
        (Plan((3,), 8, "1f1b"), ("tokens", "h.0", "norm", "head"), "head in two.*together = 2..3"),
        (Plan((1,), 8, "1f1b"), ("one", "two"), "no unit of this model has a number"),
        (Plan((2,), 8, "1f1b"), ("a.0", "a.1", "b.0"), "several: a and b"),
        (Plan((2,), 8, "1f1b"), ("a.0", "between", "a.1"), "this model has between"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(plan: Plan, names: tuple[str, ...], said: str) -> None:
    with pytest.raises(BiremeError, match=said):
        layout(plan, names)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan((3, 5, 7), 8, "gpipe"), "no schedule gpipe"),
        (Plan((3, 5, 7), 8, "zb-h1"), "no schedule zb-h1"),
        (Plan((3, 5, 7), 8, "1f1b", lookahead=2), "2 forwards further ahead than Megatron-LM's 1f1b"),
        (Plan((3, 5, 7), 9, "interleaved"), "here 9, are a multiple of the ranks, here 2"),
    ],
)
def test_schedules_that_megatron_does_not_have_are_refused(plan: Plan, said: str) -> None:
    with pytest.raises(BiremeError, match=said):
        text("megatron", plan)


def test_an_unknown_export_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(BiremeError, match="Did you mean 'megatron'"):
        export_named("megatron-lm")
    assert set(EXPORTS) == {"torch-csv", "torchtitan", "nemo", "megatron"}
