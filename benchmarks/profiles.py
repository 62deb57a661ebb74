"""What profiles predict, compared with measurements: stages of several units, and large models on meta.

    python benchmarks/profiles.py [--quick] [--json]

A profile measures units one by one; here stages of several of them run as one function. Units and stages are
measured in turn, A B A B, and each predicted time is divided by the one that was measured right after it. The
model is the built-in GPT; a Llama of 7 and one of 70 billion parameters are captured without weights.
"""

import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, in_process
from benchmarks.common.verdicts import Spread, Verdict, at_most, exactly, resident_bytes
from bireme.cluster.catalogue import device_named
from bireme.model.capture import capture
from bireme.model.graph import Graph, learned_values
from bireme.model.sources import load_source
from bireme.model.stage import StageFunction
from bireme.model.units import units_of
from bireme.profile.estimate import Seconds
from bireme.profile.profile import Profile
from bireme.profile.profiler import Saved, profile
from bireme.profile.stages import StageCost, stage_cost
from bireme.profile.timing import Effort, Workbench, time_benches

MODEL = "gpt:layers=8,width=256,heads=8,vocab=256,context=128"
BATCH = 4
STAGES = ((0, 2), (2, 4), (1, 5), (7, 13), (12, 18), (0, 18))
"""Of 2, 4, 6 and all units: with the embedding, with the head, and from between."""

PASSES = ("forward", "backward", "recompute_and_backward")
MIB, GIB = 2**20, 2**30

LARGEST_ERROR = 0.10
"""Of the median over stages, passes and numbers of threads."""

CAPTURE_LIMIT_S = 60.0
CAPTURE_LIMIT_GIB = 2.0

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
LLAMAS = {"7B": (4096, 11008, 32, 32, 32), "70B": (8192, 28672, 80, 64, 8)}
"""Their sizes, in this order."""

HEAVY = "gpt:layers=2,width=1024,heads=16,vocab=4096,context=256"
"""Large enough that the process itself is small compared with it."""


def graph_of(text: str, batch: int) -> Graph:
    source = load_source(text, batch=batch)
    return capture(source.model, source.example_inputs, name=text)


def bench_of(graph: Graph, ends: tuple[int, int], batch: int) -> Workbench:
    function = StageFunction(graph, units_of(graph)[slice(*ends)])
    device = torch.device("cpu")
    return Workbench(graph, function, learned=learned_values(graph), batch=batch, device=device)


def ratios(predicted: StageCost, measured: Seconds) -> dict[str, float]:
    return {
        "forward": predicted.forward_s / measured.forward_s,
        "backward": predicted.backward_s / measured.backward_s,
        "recompute_and_backward": predicted.recompute_backward_s / measured.recompute_backward_s,
    }


def stage_seconds(graph: Graph, num_rounds: int, effort: Effort) -> Section:
    rows = []
    threads_before = torch.get_num_threads()
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        found: dict[tuple[int, int], dict[str, list[float]]] = {ends: {} for ends in STAGES}
        for _ in range(num_rounds):
            units = profile(graph, torch.device("cpu"), [BATCH], effort=effort, use_cache=False)
            for ends in STAGES:
                (measured,) = time_benches([bench_of(graph, ends, BATCH)], effort, halves=False)
                for what, ratio in ratios(stage_cost(units, *ends, BATCH), measured).items():
                    found[ends].setdefault(what, []).append(ratio)
        for (begin, end), columns in found.items():
            shown = {what: Spread.of(figures) for what, figures in columns.items()}
            rows.append({"threads": num_threads, "units": f"{begin} to {end - 1}", **shown})
    torch.set_num_threads(threads_before)
    return Section(f"Seconds predicted / measured: {MODEL}, {BATCH} samples", rows)


def stage_bytes(graph: Graph, found: Profile, quick: bool) -> Section:
    """Saved bytes as predicted, and those that saved_tensors_hooks counts."""
    rows = []
    for begin, end in STAGES if quick else combinations(range(len(found.units) + 1), 2):
        bench = bench_of(graph, (begin, end), BATCH)
        with Saved({**bench.parameters, **bench.buffers}) as saved:
            results = bench.forward()
        predicted = stage_cost(found, begin, end, BATCH).saved_bytes
        rows.append(
            {"units": f"{begin} to {end - 1}", "foretold_bytes": predicted, "saved_bytes": saved.num_bytes}
        )
        del results
    return Section("Saved bytes of stages", rows)


def process_peaks(quick: bool) -> Section:
    batch = 4 if quick else 16
    graph = graph_of(HEAVY, 1)
    found = profile(graph, torch.device("cpu"), [batch], effort=Effort(1, 3, 3, 1e-3), use_cache=False)
    rows = []
    for begin, end in ((1, 3), (1, 5)) if quick else ((0, 3), (1, 3), (1, 5), (3, 6), (0, 6)):
        predicted = stage_cost(found, begin, end, batch).peak_bytes()
        grew = in_process(peak_of_training, batch, begin, end)
        rows.append(
            {
                "units": f"{begin} to {end - 1}",
                "foretold_mib": predicted / MIB,
                "process_grew_by_mib": grew / MIB,
                "process_over_foretold": grew / predicted,
            }
        )
    return Section(f"Peak of training a stage in a process of its own: {HEAVY}, {batch} samples", rows)


def peak_of_training(batch: int, begin: int, end: int) -> int:
    """By how much this process grows."""
    torch.set_num_threads(1)
    # What a process takes for a first step, whatever is trained, is not the stage's.
    small = graph_of("gpt:layers=1,width=64,heads=2,vocab=64,context=64", 2)
    train(bench_of(small, (0, 4), 2))
    graph = graph_of(HEAVY, 1)
    before = resident_bytes("VmRSS")
    train(bench_of(graph, (begin, end), batch))
    return resident_bytes("VmHWM") - before


def train(bench: Workbench) -> None:
    optimizer = torch.optim.AdamW(bench.trainable, fused=True)
    for _ in range(3):
        bench.backward(bench.differentiable(bench.forward()))
        optimizer.step()


def large_captures(quick: bool) -> Section:
    rows = [in_process(captured, name) for name in (("7B",) if quick else LLAMAS)]
    return Section("Llama on the meta device, 512 tokens", rows)


def captured(name: str) -> dict[str, Any]:
    """One of the Llamas; its peak is the process's."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000}
    config |= dict(zip(SIZES, LLAMAS[name], strict=True))
    import_module("transformers")  # takes long, and is not what is timed
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        begin = time.perf_counter()
        source = load_source(f"hf:{folder}", length=512)
        graph = capture(source.model, source.example_inputs)
        capture_s = time.perf_counter() - begin
        begin = time.perf_counter()
        found = profile(graph, device_named("a100"), [1])
        profile_s = time.perf_counter() - begin
    return {
        "model": name,
        "billion_parameters": graph.parameter_bytes / 4e9,
        "units": len(units_of(graph)),
        "kinds": sum(unit.same_as is None for unit in found.units),
        "capture_s": capture_s,
        "profile_s": profile_s,
        "peak_resident_gib": resident_bytes("VmHWM") / GIB,
    }


def verdicts(stages: Section, saved: Section, llamas: Section) -> Iterator[Verdict]:
    errors = [abs(row[what].median - 1) for row in stages.rows for what in PASSES]
    yield at_most("median absolute error of a pass", statistics.median(errors), LARGEST_ERROR)
    wrong = sum(row["foretold_bytes"] != row["saved_bytes"] for row in saved.rows)
    yield exactly("stages whose saved bytes are not those predicted", wrong, 0)
    for row in llamas.rows:
        yield at_most(f"Llama of {row['model']}: seconds to capture", row["capture_s"], CAPTURE_LIMIT_S)
        yield at_most(f"Llama of {row['model']}: peak GiB", row["peak_resident_gib"], CAPTURE_LIMIT_GIB)


def measure(asked: Namespace) -> Findings:
    quick = asked.quick
    effort = Effort(num_warmup=1, num_least=5, num_most=10, seconds_per_unit=0.1) if quick else Effort()
    graph = graph_of(MODEL, BATCH)
    found = profile(graph, torch.device("cpu"), [BATCH], effort=effort, use_cache=False)
    saved = stage_bytes(graph, found, quick)
    stages = stage_seconds(graph, 2 if quick else 7, effort)
    llamas = large_captures(quick)
    sections = [saved, stages, process_peaks(quick), llamas]
    return Findings(sections, list(verdicts(stages, saved, llamas)))


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="fewer rounds, smaller stages, one Llama")
