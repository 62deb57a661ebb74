"""`bireme plan` as a stranger meets it: a document, tables, files, or one sentence."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bireme.plan.plan_file import load_plan
from bireme.profile import profiler
from bireme.profile.profile import save_profile
from bireme.schedule.torch_csv import load
from tests.support.command import Result, bireme, with_sets
from tests.support.hand_plans import tiny_profile
from tests.support.remembered import forget_plans
from tests.support.tiny_profiles import LITTLE

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("remember_plans", "remember_estimates", "brief_searches")

MODEL = "gpt:layers=4,width=16,heads=2,vocab=32,context=8,tied=false"

CLUSTER = """
format = 1

[[server]]
count = 2

[[server.device]]
kind = "emulated"
memory_bytes = 1e9

[[server.device]]
kind = "emulated"
memory_bytes = 1e9
speed = 0.5

[[server.bridge]]
bytes_per_s = 8e8

[[server.card]]
bytes_per_s = 1e8
"""
"""A fast and a slow device in each of two servers."""

FIELDS = {
    "schedule": str,
    "depth": int,
    "width": int,
    "micro_batch_size": int,
    "num_micro_batches": int,
    "predicted_batch_s": float,
    "samples_per_s": float,
    "planning_s": float,
    "stages": list,
    "bottleneck": str,
    "candidates": list,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the profile of `MODEL`, a cluster, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BIREME_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    save_profile(tiny_profile(), tmp_path / "profile.json")
    (tmp_path / "four.toml").write_text(CLUSTER)
    return iter([tmp_path])


def plan(capsys: Capture, words: str = "") -> Result:
    """`bireme plan` for the profile, on four devices; words such as plan.depth=2 set keys."""
    usual = ["cluster.source=four.toml", "training.batch_size=16", "--profile", "profile.json"]
    given = shlex.split(words)
    own = usual[:2] if "--profile" in given else usual
    return bireme(capsys, "plan", *with_sets([*own, *given]))


# --- the document ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["four.toml", "two-unequal-servers", "laptop"])
def test_the_document_says_the_plan(capsys: Capture, cluster: str) -> None:
    found = plan(capsys, f"cluster.source={cluster} --json").document
    for name, kind in FIELDS.items():
        assert isinstance(found[name], kind), name
    stages = found["stages"]
    assert len(stages) == found["num_stages"]
    used = {name for stage in stages for name in stage["devices"]}
    widths = found["stage_widths"] or [found["width"]] * len(stages)
    assert len(used) == (sum(found["stage_widths"]) or found["depth"] * found["width"])
    assert [unit for stage in stages for unit in stage["units"]] == list(range(10))
    for stage, stage_width in zip(stages, widths, strict=True):
        assert len(stage["devices"]) == stage_width
        assert stage["recompute"] in (False, True)
        assert stage["predicted_busy_s"] > 0
        assert 0 < stage["peak_bytes"] <= stage["limit_bytes"]
        assert stage["headroom_bytes"] == stage["limit_bytes"] - stage["peak_bytes"]
    assert sum(found["micro_batch_sizes"]) * found["num_micro_batches"] == found["batch_size"] == 16
    assert found["samples_per_s"] == pytest.approx(16 / found["predicted_batch_s"])
    costs = [candidate["cost_s_per_sample"] for candidate in found["candidates"]]
    assert costs[0] == min(costs) == found["cost_s_per_sample"]
    assert found["origin"]["graph"] == tiny_profile().graph


def test_the_document_has_the_best_of_every_kind(capsys: Capture) -> None:
    kinds = {one["kind"] for one in plan(capsys, "--json").document["candidates"]}
    assert kinds == {"2bw", "2bw-fresh", "flush", "zero-bubble", "one device", "data parallel"}


@pytest.mark.slow
def test_the_same_words_find_the_same_plan(capsys: Capture) -> None:
    one = plan(capsys, "--json").document
    forget_plans()
    other = plan(capsys, "--json").document
    assert one | {"planning_s": 0} == other | {"planning_s": 0}


@pytest.mark.slow
def test_what_is_asked_of_a_plan_is_kept(capsys: Capture) -> None:
    words = (
        "plan.schedule=1f1b plan.depth=2 plan.width=1 plan.micro_batch=2 plan.together=layers.0..layers.2 "
        "plan.recompute=always plan.pin=9=server1/emulated0 plan.memory_fraction=0.5 --json"
    )
    found = plan(capsys, words).document
    assert (found["schedule"], found["depth"], found["width"]) == ("1f1b", 2, 1)
    assert (found["micro_batch_size"], found["num_micro_batches"]) == (2, 8)
    assert any(set(range(1, 7)) <= set(stage["units"]) for stage in found["stages"])
    assert all(stage["recompute"] for stage in found["stages"])
    assert found["stages"][-1]["devices"] == ["server1/emulated0"]
    assert {stage["limit_bytes"] for stage in found["stages"]} == {5e8}
    devices = 'plan.devices=["server0/emulated1","server1/emulated1"]'
    few = plan(capsys, f"{shlex.quote(devices)} --json").document
    assert {name for stage in few["stages"] for name in stage["devices"]} <= {
        "server0/emulated1",
        "server1/emulated1",
    }


def test_what_is_left_is_that_of_each_device(capsys: Capture) -> None:
    """Two replicas of the whole model, on devices of which one has twice the memory."""
    text = CLUSTER.replace("memory_bytes = 1e9\nspeed", "memory_bytes = 2e9\nspeed")
    Path("unlike.toml").write_text(text)
    devices = shlex.quote('plan.devices=["server0/emulated0","server0/emulated1"]')
    shape = "plan.depth=1 plan.width=2 plan.micro_batch=1"
    words = f"cluster.source=unlike.toml {devices} {shape} --json"
    left = plan(capsys, words).document["headroom_bytes"]
    assert left["server0/emulated1"] - left["server0/emulated0"] == 1e9


@pytest.mark.slow
@pytest.mark.parametrize("device", ["server0/emulated0", "server1/emulated1"])
def test_a_unit_is_where_it_is_pinned_whichever_device_that_is(capsys: Capture, device: str) -> None:
    words = f"plan.schedule=1f1b plan.depth=2 plan.width=2 plan.pin=9={device} --json"
    found = plan(capsys, words).document
    assert device in found["stages"][-1]["devices"]


@pytest.mark.slow
def test_lookahead_can_be_left_to_the_schedule(capsys: Capture) -> None:
    words = "plan.schedule=1f1b plan.depth=4 plan.width=1 plan.whole_layers=true plan.micro_batch=1"
    assert plan(capsys, f"{words} plan.lookahead=false --export megatron").status == 0


@pytest.mark.slow
def test_delayed_updates_can_be_forbidden_or_made_dear(capsys: Capture) -> None:
    free = plan(capsys, "plan.penalties.delayed=1 plan.penalties.fresh=1 plan.depth=2 --json").document
    assert free["kind"] in ("2bw", "2bw-fresh")
    for words in ("plan.synchronous=true", "plan.penalties.delayed=50 plan.penalties.fresh=50"):
        found = plan(capsys, f"{words} --json").document
        assert found["penalty"] == 1
        assert found["kind"] not in ("2bw", "2bw-fresh")


@pytest.mark.slow
def test_whole_layers_stay_whole(capsys: Capture) -> None:
    found = plan(capsys, "plan.whole_layers=true plan.depth=4 plan.width=1 --json").document
    firsts = [stage["units"][0] for stage in found["stages"]]
    assert set(firsts) <= {0, 1, 3, 5, 7, 9}


# --- for people --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_the_tables_fit_the_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = plan(capsys, "--explain").out
    assert max(map(len, out.splitlines())) <= columns
    assert "…" not in re.sub(r"\d…\d", "", "".join(re.findall(r"^.*(?:best of a kind|stage ).*$", out, re.M)))
    for heading in ("stage", "units", "devices", "busy", "memory", "shape", "a batch", "steps", "slower by"):
        assert heading in out
    for kind in ("2bw", "2bw-fresh", "flush (", "zero-bubble (", "one device", "data parallel"):
        assert re.search(rf"^{re.escape(kind)}", out, re.MULTILINE), kind
    assert "has the least free memory" in " ".join(out.split())
    assert "What would help" in out


def test_kinds_that_cannot_be_are_named(capsys: Capture) -> None:
    out = plan(capsys, "plan.synchronous=true plan.depth=1 plan.width=1").out
    assert re.search(r"^one device +1×1", out, re.MULTILINE)
    for kind in ("2bw", "2bw-fresh", "flush", "zero-bubble", "data parallel"):
        assert re.search(rf"^{kind} +none", out, re.MULTILINE), kind


@pytest.mark.slow
def test_it_says_where_the_seconds_are_from(capsys: Capture) -> None:
    assert "are estimated, not measured" in plan(capsys).out
    out = " ".join(plan(capsys, "cluster.source=two-unequal-servers").out.split())
    assert "The times are those of a laptop's CPU of 8 cores (cpu)" in out
    assert "the cluster's devices are cuda. Set their speed" in out
    assert plan(capsys, "cluster.source=laptop --json").document["notes"] != []


@pytest.mark.slow
def test_what_would_help_is_explained(capsys: Capture) -> None:
    found = plan(capsys, "plan.schedule=gpipe plan.depth=2 plan.width=1 --explain --json").document
    gains = {one["with"]: one["gain"] for one in found["helps"]}
    assert gains["any schedule, not gpipe alone"] > 1
    assert gains["another depth than 2"] >= 1
    assert list(gains.values()) == sorted(gains.values(), reverse=True)
    assert len(found["candidates"]) == len(found["candidates_headroom_bytes"])


# --- files -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_plan_is_written_as_it_was_found(capsys: Capture) -> None:
    found = plan(capsys, "--output plan.json --json").document
    saved = load_plan(Path("plan.json"))
    assert saved.plan.num_stages == found["num_stages"]
    assert saved.forecast is not None
    assert saved.forecast.batch_s == found["predicted_batch_s"]
    assert [unit.name for unit in saved.units] == [unit.name for unit in tiny_profile().units]
    assert len(saved.others) == len(found["candidates"]) - 1
    assert saved.origin is not None
    assert saved.origin.profile == found["origin"]["profile"]
    refused = plan(capsys, "--output plan.json")
    assert (refused.status, "plan.json already exists" in refused.err) == (2, True)
    assert "Wrote plan.json." in plan(capsys, "--output plan.json --force").out


def test_stages_of_unequal_width_are_shown_and_written(capsys: Capture) -> None:
    words = "plan.stage_widths=3-1 plan.schedule=1f1b plan.micro_batch=1"
    shown = plan(capsys, f"{words} --output plan.json").out
    assert "1f1b on 4 devices: 2 stages of 3-1 replicas, 16 micro-batches of 1 sample" in shown
    assert "share" in shown
    assert "flush (1f1b)" in shown
    assert "3-1, 16×1" in shown
    found = plan(capsys, f"{words} --json").document
    assert found["stage_widths"] == [3, 1]
    assert [sum(share) for share in found["stage_shares"]] == [16, 16]
    assert len(set(found["stage_shares"][0])) == 2  # a device is half as fast as another
    assert (found["depth"], found["width"], found["num_stages"]) == (2, 1, 2)
    assert [len(stage["devices"]) for stage in found["stages"]] == [3, 1]
    saved = load_plan(Path("plan.json")).plan
    assert saved.stage_widths == (3, 1)
    again = plan(capsys, f"{words.replace('3-1', '[3,1]')} --json").document
    assert again["stages"] == found["stages"]


@pytest.mark.slow
def test_exports_are_written_or_printed(capsys: Capture) -> None:
    words = "plan.schedule=1f1b plan.depth=2 plan.width=2 plan.whole_layers=true"
    exports = "--export torch-csv:plan.csv --export torchtitan:titan.toml --export megatron"
    result = plan(capsys, f"{words} {exports} model.source={MODEL}")
    assert result.status == 0, result.err
    assert load(Path("plan.csv")).num_stages == 2
    tables = tomllib.loads(Path("titan.toml").read_text())
    assert tables["parallelism"]["pipeline_parallel_schedule_csv"] == "plan.csv"
    assert sum(map(len, tables["parallelism"]["module_fqns_per_model_part"])) == 9
    assert "--pipeline-model-parallel-size 2" in result.out
    assert "Wrote titan.toml." in result.out
    found = plan(capsys, f"{words} --export megatron --json").document
    assert "--pipeline-model-parallel-layout" in found["exports"]["megatron"]


@pytest.mark.slow
def test_without_a_profile_the_model_is_measured(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "Effort", lambda: LITTLE)
    shape = "cluster.workers=1 training.batch_size=4 plan.micro_batch=2"
    words = with_sets(f"plan model.source={MODEL} {shape} --json".split())
    found = bireme(capsys, *words).document
    assert found["micro_batch_size"] == 2
    assert found["notes"] == []
    assert "estimated" in " ".join(bireme(capsys, *words, "--like", "a100").document["notes"])


def test_left_out_the_cluster_is_this_machine(capsys: Capture) -> None:
    words = "plan --profile profile.json training.batch_size=4 plan.depth=1 cluster.device=cpu --json"
    found = bireme(capsys, *with_sets(words.split())).document
    here = bireme(capsys, "cluster", "discover", "--json").document
    names = [device["name"] for server in here["servers"] for device in server["devices"]]
    assert set(found["stages"][0]["devices"]) <= set(names)


def test_a_run_file_says_what_is_planned(capsys: Capture) -> None:
    """Keys that are set on the command line come after those of the file."""
    lines = 'training = {batch_size = 8}\nplan = {depth = 2, width = 1}\ncluster = {source = "four.toml"}\n'
    Path("run.toml").write_text(lines)
    words = ["plan", "run.toml", "--profile", "profile.json", "--json"]
    found = bireme(capsys, *words).document
    assert (found["batch_size"], found["depth"], found["width"]) == (8, 2, 1)
    changed = bireme(capsys, *words, "--set", "plan.depth=3", "--set", "training.batch_size=12").document
    assert (changed["batch_size"], changed["depth"], changed["width"]) == (12, 3, 1)


@pytest.mark.parametrize("verb", ["plan", "profile", "memory", "simulate"])
def test_help_names_the_run_file_and_its_keys(capsys: Capture, verb: str) -> None:
    shown = bireme(capsys, verb, "--help").out
    assert "[RUN.toml]" in shown
    assert "TABLE.KEY=VALUE" in shown


# --- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("training.batch_size=0", "training.batch_size is 0"),
        ("training.batch_size=many", 'training.batch_size is "many"'),
        ("plan.dpth=2", "unknown key 'plan.dpth'. Did you mean 'plan.depth'?"),
        ("plan.schedule=2wb", "plan.schedule is"),
        ("plan.schedule=2bw plan.synchronous=true", "plan.synchronous forbids"),
        ("plan.penalties.frsh=2", "Did you mean 'plan.penalties.fresh'?"),
        ("plan.penalties.fresh=0.5", "it must be greater than or equal to 1"),
        ("plan.pin=a", "is not UNIT=DEVICE"),
        ("plan.pin=0=server0/gpu0", "There is no device 'server0/gpu0'"),
        ("plan.pin=10=server0/emulated0", "there is no unit 10; they are 0 to 9"),
        ("plan.pin=layer.0=server0/emulated0", "there is no unit 'layer.0'"),
        ("plan.together=a", "is not FIRST..LAST"),
        ("plan.together=4..3", "before it"),
        ("plan.devices=server0/emulated2", "There is no device 'server0/emulated2'"),
        ("plan.memory_fraction=2", "plan.memory_fraction is 2"),
        ("plan.micro_batch=3", "which plan.micro_batch = 3 does not divide"),
        ("plan.recompute=some", "plan.recompute is"),
        ("plan.depth=9", "the run has 4 devices"),
        ("plan.depth=4 plan.width=2", "plan.depth times plan.width is 8, but the run has 4 devices"),
        ("plan.stage_widths=4-1", "plan.stage_widths is 4-1, added up 5, but the run has 4 devices"),
        ("plan.stage_widths=3-x", "such as 3-1"),
        ("plan.stage_widths=3-1 plan.width=2", "the width of all stages is 2. Leave out the width"),
        ("plan.stage_widths=3-1 plan.schedule=zbv", "zbv runs stages of equal width only"),
        ("cluster.source=emulated-8-equals", "Did you mean 'emulated-8-equal'?"),
        ("plan.file=plan.json", "which is a plan already"),
        ("plan.schedule=pipedream", "plan.schedule is"),
        ("training.batch_size=100000000 plan.micro_batch=1", "100000000 samples"),
        ("training.optimizer=sgd", "training.optimizer is sgd, but the profile profile.json was made with"),
        ("sync.codec=lowrank:2", "a profile does not have them. Name the model too"),
        ("--profile missing.json", "There is no file missing.json"),
        ("--like a100", "--profile already has the costs: leave out --like"),
        ("--fresh", "leave out --fresh"),
        ("--output plan.toml", "must end in .json"),
        ("--output /nowhere/plan.json", "there is no folder /nowhere"),
        ("--export megatrn", "Did you mean 'megatron'?"),
        ("--export megatron:", "names no file"),
        ("--export torchtitan", "Name the model too, in model.source"),
        ("--export megatron:x.json --output x.json", "have the same name"),
        ("--export torch-csv:. plan.schedule=1f1b --output plan.json", "it is a folder"),
        ("--export megatron plan.schedule=2bw plan.depth=2 --output plan.json", "cannot run 2bw"),
        ("plan.memory_fraction=1e-9 --output plan.json", "are missing"),
        (
            """plan.stage_widths=2-1 'plan.devices=["server0/emulated0","server0/emulated1"]'""",
            "its stages need 3 devices, but 2 may be used",
        ),
        ("--no-lookahead", "has no option --no-lookahead. Did you mean 'plan.lookahead'? Set a key by --set"),
        ("--pin=0=server0/gpu0", "Did you mean 'plan.pin'?"),
        ("gpt:layers=2", "Name the model in the key model.source: --set model.source=gpt:layers=2"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    capsys: Capture, folder: Iterator[Path], words: str, said: str
) -> None:
    here = next(folder)
    before = sorted(here.rglob("*"))
    result = plan(capsys, words)
    assert result.status == 2
    assert said in result.err
    assert result.out == ""
    assert len(result.err.splitlines()) == 1
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    "words",
    [
        "training.batch_size=0",
        "plan.memory_fraction=0",
        "plan.devices=a",
        "plan.depth=3 plan.width=2",
        "plan.largest_batch=2",
        "plan.depth=11 cluster.source=two-servers-of-8",
    ],
)
def test_a_mistake_is_found_before_anything_is_measured(
    capsys: Capture, folder: Iterator[Path], words: str
) -> None:
    own = [f"model.source={MODEL}", "cluster.source=four.toml", *words.split()]
    result = bireme(capsys, "plan", *with_sets(own))
    assert result.status == 2
    assert not (next(folder) / "cache").exists()


@pytest.mark.slow
def test_a_model_that_is_not_the_profile_s_is_refused(capsys: Capture) -> None:
    other = MODEL.replace("layers=4", "layers=3")
    result = plan(capsys, f"model.source={other} --export nemo plan.schedule=1f1b plan.depth=2 plan.width=1")
    assert result.status == 2
    assert "was made for another model" in result.err
    assert "Its unit 7 is layers.3.attention, but here it is head." in result.err


@pytest.mark.slow
def test_a_model_given_with_a_profile_must_be_the_one_that_was_profiled(capsys: Capture) -> None:
    assert plan(capsys, f"model.source={MODEL}").status == 0
    result = plan(capsys, f"model.source={MODEL.replace('layers=4', 'layers=3')}")
    assert (result.status, result.out) == (2, "")
    assert "The profile was made for another model" in result.err


def test_a_damaged_profile_is_refused(capsys: Capture) -> None:
    plain = json.loads(Path("profile.json").read_text())
    del plain["units"][0]["costs"]
    Path("profile.json").write_text(json.dumps(plain))
    result = plan(capsys)
    assert (result.status, "lacks units[0].costs" in result.err) == (2, True)


@pytest.mark.slow
def test_the_code_of_the_document_works(capsys: Capture) -> None:
    text = (ROOT / "docs" / "plan-files.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    exec(compile(code, "plan.md", "exec"), {})
    assert "samples/s" in capsys.readouterr().out
