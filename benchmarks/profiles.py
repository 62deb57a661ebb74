"""Profiles beside what they foretell: stages of several units in seconds and bytes, large models on meta.

    python benchmarks/profiles.py [--quick]

A profile measures units one by one; here stages of several of them run as one function. Units and stages are
measured in turn, A B A B, and each foretold time is divided by the one that was measured right after it. The
model is the built-in GPT; a Llama of 7 and one of 70 billion parameters are captured without weights.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.learned import learned_values
from bireme.model.sources import load_source
from bireme.model.stage import stage_function
from bireme.model.units import units_of
from bireme.profile.profile import Profile
from bireme.profile.profiler import profile
from bireme.profile.saved import Saved
from bireme.profile.stages import StageCost, stage_cost
from bireme.profile.timing import Effort, Seconds, time_benches
from bireme.profile.workbench import Workbench

MODEL = "gpt:layers=8,width=256,heads=8,vocab=256,context=128"
BATCH = 4
STAGES = ((0, 2), (2, 4), (1, 5), (7, 13), (12, 18), (0, 18))
"""Of 2, 4, 6 and all units: with the embedding, with the head, and from between."""

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
"""Large enough that the process itself is small beside it."""

PEAK = """
import sys
import torch
from benchmarks.profiles import bench_of, graph_of, resident_bytes
torch.set_num_threads(1)
text, batch, begin, end = sys.argv[1], *map(int, sys.argv[2:])

def train(bench):
    optimizer = torch.optim.AdamW(bench.trainable, fused=True)
    for _ in range(3):
        bench.backward(bench.differentiable(bench.forward()))
        optimizer.step()

# What a process takes for a first step, whatever is trained, is not the stage's.
small = graph_of("gpt:layers=1,width=64,heads=2,vocab=64,context=64", 2)
train(bench_of(small, (0, 4), 2))
graph = graph_of(text, 1)
before = resident_bytes("VmRSS")
train(bench_of(graph, (begin, end), batch))
print(resident_bytes("VmHWM") - before)
"""

CAPTURE = """
import sys, time
import transformers
from benchmarks.profiles import resident_bytes
from bireme.cluster.device import KNOWN
from bireme.model.capture import capture
from bireme.model.sources import load_source
from bireme.model.units import units_of
from bireme.profile.profiler import profile
begin = time.perf_counter()
source = load_source(f"hf:{sys.argv[1]}", length=512)
graph = capture(source.model, source.example_inputs)
captured = time.perf_counter()
found = profile(graph, KNOWN["a100"], [1])
ended = time.perf_counter()
print(graph.parameter_bytes // 4, len(units_of(graph)), sum(unit.same_as is None for unit in found.units),
      captured - begin, ended - captured, resident_bytes("VmHWM"))
"""


@dataclass(frozen=True, slots=True)
class Ratio:
    """What was foretold over what was measured: the median of several, with the least and the greatest."""

    median: float
    least: float
    greatest: float

    @staticmethod
    def of(figures: list[float]) -> "Ratio":
        return Ratio(statistics.median(figures), min(figures), max(figures))

    def show(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f} to {self.greatest:.3f})"


def resident_bytes(field: str) -> int:
    """Of this process, as Linux tells it: VmRSS now, VmHWM at most so far."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))


def graph_of(text: str, batch: int) -> Graph:
    source = load_source(text, batch=batch)
    return capture(source.model, source.example_inputs, name=text)


def bench_of(graph: Graph, ends: tuple[int, int], batch: int) -> Workbench:
    function = stage_function(graph, units_of(graph)[slice(*ends)])
    device = torch.device("cpu")
    return Workbench(graph, function, learned=learned_values(graph), batch=batch, device=device)


def verdict(is_kept: bool) -> str:
    return "kept" if is_kept else "MISSED"


def ratios(foretold: StageCost, measured: Seconds) -> dict[str, float]:
    return {
        "forward": foretold.forward_s / measured.forward_s,
        "backward": foretold.backward_s / measured.backward_s,
        "recompute and backward": foretold.recompute_backward_s / measured.recompute_backward_s,
    }


def stage_seconds(graph: Graph, num_rounds: int, effort: Effort, console: Console) -> None:
    console.print(f"Seconds foretold / measured: {MODEL}, {BATCH} samples", highlight=False)
    table = Table(box=None)
    for heading in ("threads", "units", "forward", "backward", "recompute and backward"):
        table.add_column(heading, justify="right")
    errors: list[float] = []
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
            medians = [Ratio.of(figures) for figures in columns.values()]
            errors += [abs(ratio.median - 1) for ratio in medians]
            table.add_row(str(num_threads), f"{begin} to {end - 1}", *(ratio.show() for ratio in medians))
    torch.set_num_threads(threads_before)
    console.print(table)
    error = statistics.median(errors)
    console.print(
        f"Median absolute error {error:.1%}, limit {LARGEST_ERROR:.0%}: {verdict(error <= LARGEST_ERROR)}; "
        f"the largest is {max(errors):.1%}.\n"
    )


def stage_bytes(graph: Graph, found: Profile, quick: bool, console: Console) -> None:
    stages = STAGES if quick else tuple(combinations(range(len(found.units) + 1), 2))
    num_equal = 0
    for ends in stages:
        bench = bench_of(graph, ends, BATCH)
        with Saved({**bench.parameters, **bench.buffers}) as saved:
            results = bench.forward()
        num_equal += saved.num_bytes == stage_cost(found, *ends, BATCH).saved_bytes
        del results
    console.print(
        f"Saved bytes foretold are those that saved_tensors_hooks counts in {num_equal} of {len(stages)} "
        f"stages, limit all of them: {verdict(num_equal == len(stages))}.\n"
    )


def process_peaks(quick: bool, console: Console) -> None:
    batch = 4 if quick else 16
    graph = graph_of(HEAVY, 1)
    found = profile(graph, torch.device("cpu"), [batch], effort=Effort(1, 3, 3, 1e-3), use_cache=False)
    console.print(
        f"Peak of training a stage in a process of its own: {HEAVY}, {batch} samples", highlight=False
    )
    table = Table(box=None)
    for heading in ("units", "foretold", "VmHWM grew by", "process / foretold"):
        table.add_column(heading, justify="right")
    for begin, end in ((1, 3), (1, 5)) if quick else ((0, 3), (1, 3), (1, 5), (3, 6), (0, 6)):
        foretold = stage_cost(found, begin, end, batch).peak_bytes()
        grew = int(in_process(PEAK, HEAVY, str(batch), str(begin), str(end)))
        table.add_row(
            f"{begin} to {end - 1}",
            f"{foretold / 2**20:.0f} MiB",
            f"{grew / 2**20:.0f} MiB",
            f"{grew / foretold:.3f}",
        )
    console.print(table)
    console.print()


def large_captures(quick: bool, console: Console) -> None:
    console.print("Llama on the meta device, 512 tokens", highlight=False)
    table = Table(box=None)
    headings = ("model", "parameters", "units", "kinds", "captured in", "profiled in", "peak resident set")
    for heading in (*headings, f"limits {CAPTURE_LIMIT_S:.0f} s, {CAPTURE_LIMIT_GIB:.0f} GiB"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for name in ("7B",) if quick else LLAMAS:
        with tempfile.TemporaryDirectory() as folder:
            config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000}
            config |= dict(zip(SIZES, LLAMAS[name], strict=True))
            Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            figures = [float(word) for word in in_process(CAPTURE, folder).split()]
        parameters, units, kinds, capture_s, profile_s, peak_bytes = figures
        is_kept = capture_s <= CAPTURE_LIMIT_S and peak_bytes <= CAPTURE_LIMIT_GIB * 2**30
        table.add_row(
            name,
            f"{parameters / 1e9:.2f} billion",
            f"{units:.0f}",
            f"{kinds:.0f}",
            f"{capture_s:.1f} s",
            f"{profile_s:.1f} s",
            f"{peak_bytes / 2**30:.2f} GiB",
            verdict(is_kept),
        )
    console.print(table)


def in_process(code: str, *words: str) -> str:
    """What a fresh process prints; it finds this file beside it."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller stages, one Llama")
    quick = parser.parse_args().quick
    console = Console(width=120)
    effort = Effort(num_warmup=1, num_least=5, num_most=10, seconds_per_unit=0.1) if quick else Effort()
    graph = graph_of(MODEL, BATCH)
    found = profile(graph, torch.device("cpu"), [BATCH], effort=effort, use_cache=False)
    stage_bytes(graph, found, quick, console)
    stage_seconds(graph, 2 if quick else 7, effort, console)
    process_peaks(quick, console)
    large_captures(quick, console)


if __name__ == "__main__":
    main()
