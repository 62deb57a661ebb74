"""Forecasts against measurements that are printed in papers and reports.

    python benchmarks/published.py [--quick] [--json]

Each row gives the source of the measured figure. Nothing is fitted to a row: GPTs of PipeDream-2BW have the
profile of `made_up/published_2bw.py` (a V100 attains at most 60 TFLOP/s, less in small micro-batches), all
other models the profile of `bireme fit` on devices of the catalogue, which attain the geometric mean of the
catalogue's range. Links attain the geometric mean of the range of `bireme fit`. Figures marked "read off"
were read off a plot and are good to about 2 units.

The authors of PipeDream-2BW measured with Megatron-LM: `scripts/driver_sweep.py` in msr-fiddle/pipedream on
GitHub, commit 9fa62318. It gives each stage the same number of layers, recomputes layer by layer, and keeps
Megatron-LM's order of ranks: the replicas of a stage are neighbors, on one server if there is room, and the
messages of a pipeline cross servers. The source does not give the bandwidth that messages between servers
attained, nor the memory of a process beside tensors, for which the catalogue's figure counts. Sums of
gradients run beside work here if the schedule allows it. Megatron-LM's own data parallelism makes them after
the last backward, so forecasts for 64 V100 are high.
"""

import math
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import at_most, exactly
from benchmarks.made_up.published_2bw import (
    GPT_1_3B,
    GPT_2_2B,
    SIZES,
    Model,
    p3_16xlarge,
    profile_of_model,
)
from bireme.cluster.catalogue import catalogue
from bireme.cluster.cluster import Cluster, Overlap
from bireme.cluster.named_machines import machines_of
from bireme.errors import BiremeError
from bireme.model.shapes import TransformerShape, shape_of
from bireme.plan.fit import LINK_SHARES
from bireme.plan.forecast import Answer, Candidate
from bireme.plan.partition.loads import Recompute
from bireme.plan.plan import Plan
from bireme.plan.plan_request import Goal, PlanRequest
from bireme.plan.search.search import find_plan, forecast_of
from bireme.profile.profile import Profile
from bireme.profile.shape_profile import profile_of_shape

LINK_SHARE = math.sqrt(math.prod(LINK_SHARES))
"""What links attain of their rate, as in `bireme fit`."""

GPT_3_8B = Model("GPT 3.8B", 32, 3072, 32)

BW = "Narayanan et al. 2021 (PipeDream-2BW)"
MEGATRON = "as its scripts/driver_sweep.py has Megatron-LM do it"
LLAMA_1 = "Touvron et al. 2023 (LLaMA), table of the carbon footprint"
LLAMA_2 = "Touvron et al. 2023 (Llama 2), table of the carbon footprint"
LLM_C = "karpathy/llm.c on GitHub, discussions"
PATRICKSTAR = "hpcaitech/ColossalAI on GitHub, issue 124 (PatrickStar's author)"


@dataclass(frozen=True, slots=True)
class Published:
    """A measured figure, its source, and the forecast of it; what is assumed beyond the source."""

    name: str
    unit: str
    measured: float
    source: str
    assumed: str
    forecast: Callable[[], float]

    def row(self) -> dict[str, Any]:
        log(f"{self.name}, {self.unit}")
        found = self.forecast()
        return {
            "what": self.name,
            "unit": self.unit,
            "measured": self.measured,
            "forecast": found,
            "error": found / self.measured - 1,
            "source": self.source,
            "assumed": self.assumed,
        }


# PipeDream-2BW: GPTs of 512 tokens on servers of eight V100, as the authors' Megatron-LM runs them.


def megatron_forecast(
    model: Model,
    schedule: str,
    depth: int,
    width: int,
    num_microbatches: int,
    size: int,
    *,
    checkpointed: bool,
    process_bytes: int = 0,
) -> Candidate:
    """Equally many layers are on each stage, the embedding on the first and the head on the last. Ranks are
    numbered through the replicas of a stage first, so that replicas are on one server and stages on several.
    Both ends of a message wait for it.
    """
    layers = model.layers // depth
    names = [f"server{rank // 8}/gpu{rank % 8}" for rank in range(depth * width)]
    plan = Plan(
        cuts=tuple(1 + layers * stage for stage in range(1, depth)),
        num_microbatches=num_microbatches,
        schedule=schedule,
        width=width,
        micro_batch_sizes=(size,) * width,
        devices=tuple(tuple(names[stage * width : (stage + 1) * width]) for stage in range(depth)),
    )
    servers = (
        replace(one, devices=tuple(replace(own, process_bytes=process_bytes) for own in one.devices))
        for one in p3_16xlarge(-(-len(names) // 8)).servers
    )
    cluster = Cluster(tuple(servers)).with_links(
        lambda _, group: replace(group.link, bytes_per_s=group.link.bytes_per_s * LINK_SHARE)
    )
    request = PlanRequest(
        width * num_microbatches * size,
        goal=Goal.THROUGHPUT,
        recompute=Recompute.NEVER,
        overlaps={schedule: Overlap.NONE},
    )
    profile = profile_of_model(model, checkpointed=checkpointed)
    return Candidate(plan, forecast_of(plan, profile, cluster, request))


def fastest_rate(model: Model, schedule: str, depth: int, width: int, batch: int) -> float:
    """Samples a second with the fastest micro-batch that fits."""
    rates = []
    for size in SIZES:
        count = batch // width // size
        if count >= (depth if schedule == "2bw" else 1):
            found = megatron_forecast(model, schedule, depth, width, count, size, checkpointed=True)
            rates += [found.forecast.samples_per_s] if found.fits else []
    return max(rates)


def two_bw() -> Iterator[Published]:
    """The rates of section 5's figures, under the depths that the paper gives."""
    for model, width, depth, batch, flush, delayed in (
        (GPT_2_2B, 1, 8, 64, 26.0, 43.0),
        (GPT_2_2B, 1, 8, 256, 38.0, 44.0),
        (GPT_2_2B, 8, 8, 512, 110.0, 160.0),
        (GPT_2_2B, 8, 8, 2048, 145.0, 168.0),
        (GPT_3_8B, 4, 16, 512, 75.0, 127.0),
        (GPT_3_8B, 4, 16, 2048, 115.0, 135.0),
    ):
        for schedule, rate in (("1f1b", flush), ("2bw", delayed)):
            yield Published(
                f"{model.name}, {width * depth} V100, batch {batch}, {schedule}",
                "sequences/s",
                rate,
                f"{BW}, read off",
                f"{MEGATRON}; all layers recompute; the fastest micro-batch that fits",
                partial(fastest_rate, model, schedule, depth, width, batch),
            )
    for model, recompute, found in (
        (GPT_1_3B, True, {1: 31.0, 2: 47.0, 4: 58.0, 8: 63.0, 16: 66.0}),
        (GPT_1_3B, False, {1: 40.0, 2: 57.0, 4: 67.0}),
        (GPT_2_2B, True, {1: 22.0, 16: 43.0}),
        (GPT_2_2B, False, {1: 29.0}),
    ):
        for size, rate in found.items():
            forecast = partial(megatron_forecast, model, "2bw", 8, 1, 16, size, checkpointed=recompute)
            yield Published(
                f"{model.name}, 8 V100, micro-batches of {size}, {_recomputes(recompute)}",
                "sequences/s",
                rate,
                f"{BW}, read off",
                f"{MEGATRON}; 16 micro-batches in a batch",
                partial(_rate, forecast),
            )


def _rate(forecast: Callable[[], Candidate]) -> float:
    return forecast().forecast.samples_per_s


def _recomputes(recompute: bool) -> str:
    return "all layers recompute" if recompute else "nothing recomputes"


def peak_gigabytes(schedule: str) -> float:
    """The most that a device holds, of 2.2B on one server."""
    found = megatron_forecast(GPT_2_2B, schedule, 8, 1, 8, 8, checkpointed=True)
    return max(stage.peak_bytes for stage in found.forecast.stages) / 1e9


def two_bw_bytes() -> Iterator[Published]:
    """The most bytes of a GPU, of 2.2B on eight."""
    for schedule, gigabytes in (("1f1b", 10.1), ("2bw", 11.3)):
        yield Published(
            f"GPT 2.2B, 8 V100, batch 64, {schedule}",
            "GB",
            gigabytes,
            f"{BW}, read off",
            f"{MEGATRON}; micro-batches of 8; bytes of tensors",
            partial(peak_gigabytes, schedule),
        )


def two_bw_fits() -> Iterator[dict[str, Any]]:
    """Which micro-batches fit eight GPUs under 2bw, by the paper's figure, and by the forecast."""
    process_bytes = catalogue()["v100"].process_bytes or 0
    for model, recompute, size, fits in (
        (GPT_1_3B, False, 4, True),
        (GPT_1_3B, False, 8, False),
        (GPT_2_2B, False, 1, True),
        (GPT_2_2B, False, 2, False),
        (GPT_2_2B, True, 16, True),
    ):
        found = megatron_forecast(
            model, "2bw", 8, 1, 16, size, checkpointed=recompute, process_bytes=process_bytes
        )
        yield {
            "what": f"{model.name}, 8 V100, micro-batches of {size}, {_recomputes(recompute)}",
            "fits_in_paper": fits,
            "fits_in_forecast": found.fits,
            "forecast_gb": max(stage.peak_bytes for stage in found.forecast.stages) / 1e9,
            "limit_gb": min(stage.limit_bytes for stage in found.forecast.stages) / 1e9,
            "source": f"{BW}, read off",
        }


# Models of the catalogue: a plan of one stage on each device, or of a pipeline, for tokens a second and GPU.


def likely_profile(shape: TransformerShape, word: str, length: int, sizes: tuple[int, ...]) -> Profile:
    device = catalogue()[word]
    return profile_of_shape(shape, device, device.likely_attained, length, sizes)


def replicas(shape: TransformerShape, word: str, length: int, size: int, count: int, *, again: bool) -> float:
    """Sequences a second of replicas on eight devices, each of which holds the whole model."""
    cluster = machines_of(f"8x {word}").cluster({word: (1.0, 1.0)}, LINK_SHARE)
    devices = tuple(placed.name for placed in cluster.devices())
    plan = Plan(
        cuts=(),
        num_microbatches=count,
        schedule="sequential",
        width=8,
        micro_batch_sizes=(size,) * 8,
        devices=(devices,),
        recompute=(0,) if again else (),
    )
    profile = likely_profile(shape, word, length, (size,))
    return forecast_of(plan, profile, cluster, PlanRequest(8 * size * count, value_bytes=2)).samples_per_s


def replica_tokens(name: str, word: str, size: int, count: int) -> float:
    """Tokens a second and device, in sequences of 1,024."""
    return replicas(shape_of(name), word, 1024, size, count, again=False) * 1024 / 8


def pipelines(name: str, word: str, length: int, batch: int, depth: int) -> float:
    """Tokens a second and device, under the fastest synchronous pipeline of eight devices."""
    cluster = machines_of(f"8x {word}").cluster({word: (1.0, 1.0)}, LINK_SHARE)
    profile = likely_profile(shape_of(name), word, length, (1,))
    request = PlanRequest(batch, schedule="1f1b", depth=depth, width=8 // depth, micro_batch=1, value_bytes=2)
    answer = find_plan(profile, cluster, request)
    if not isinstance(answer, Answer):
        raise BiremeError(f"{name}: {answer}")
    return answer.best.forecast.samples_per_s * length / 8


def language_models() -> Iterator[Published]:
    """Tokens a second and GPU of models that were trained to the end."""
    for name, word, per_gpu, size, count, source in (
        ("gpt2", "a100", 10e9 / 5400 / 8, 64, 1, f"{LLM_C} 481: 10 billion tokens in 90 minutes on 8 A100"),
        (
            "gpt2-xl",
            "h100",
            32_000 * 2**20 / 86_400 / 8,
            16,
            8,
            f"{LLM_C} 677: 32,000 steps of 2^20 tokens in 24 hours on 8 H100",
        ),
    ):
        yield Published(
            f"{name} on 8 {word}",
            "tokens/s and GPU",
            per_gpu,
            source,
            f"{count} micro-batches of {size} · 1,024 tokens; gradients summed in float32",
            partial(replica_tokens, name, word, size, count),
        )
    for name, tokens, gpu_hours, depth, source in (
        ("llama-2-7b", 2e12, 184_320, 4, LLAMA_2),
        ("llama-2-13b", 2e12, 368_640, 8, LLAMA_2),
    ):
        yield Published(
            f"{name} on A100",
            "tokens/s and GPU",
            tokens / gpu_hours / 3600,
            source,
            "4,096 tokens; eight GPUs stand for all, as a pipeline that drains after 64 sequences",
            partial(pipelines, name, "a100", 4096, 64, depth),
        )
    yield Published(
        "llama-2-7b (as LLaMA 7B) on A100",
        "tokens/s and GPU",
        1e12 / 82_432 / 3600,
        LLAMA_1,
        "2,048 tokens; eight GPUs stand for all, as a pipeline that drains after 128 sequences",
        partial(pipelines, "llama-2-7b", "a100", 2048, 128, 4),
    )


def patrickstar() -> Iterator[Published]:
    """GPTs whose chunks lie on eight A100 and their host."""
    base = shape_of("gpt2")
    four = replace(base, name="GPT 4B", layers=64, width=2304, inner_width=9216, heads=16, shared_heads=16)
    ten = replace(base, name="GPT 10B", layers=50, width=4096, inner_width=16384, heads=16, shared_heads=16)
    four, ten = (replace(one, head_width=one.width // one.heads) for one in (four, ten))
    for shape, size, rate in ((four, 1, 8.78), (four, 16, 28.39), (ten, 16, 13.43)):
        yield Published(
            f"{shape.name} on 8 A100 of 40 GB, batch {8 * size}",
            "sequences/s",
            rate,
            PATRICKSTAR,
            "1,024 tokens, all layers recompute; copies of chunks take no time: the source does not give it, "
            "and it is a large part of a batch of 8",
            partial(replicas, shape, "a100-40gb", 1024, size, 1, again=True),
        )


def measure(asked: Namespace) -> Findings:
    rates = [*two_bw(), *language_models(), *patrickstar()]
    if asked.quick:
        rates = [one for one in rates if "64 V100" not in one.name and "a100" not in one.name.lower()]
    rows = [one.row() for one in rates]
    memory = [one.row() for one in two_bw_bytes()]
    errors = sorted(abs(row["error"]) for row in rows)
    of_bytes = [abs(row["error"]) for row in memory]
    verdicts = [
        at_most("median error of rates", statistics.median(errors), 0.10),
        at_most("worst error of rates", errors[-1], 0.50),
        at_most("worst error of bytes", max(of_bytes), 0.20),
    ]
    fits = list(two_bw_fits())
    num_wrong = sum(row["fits_in_paper"] != row["fits_in_forecast"] for row in fits)
    verdicts.append(exactly("plans that fit in the paper alone, or in the forecast alone", num_wrong, 0))
    sections = [Section("Rates", rows), Section("Bytes", memory), Section("What fits", fits)]
    return Findings(sections, verdicts)


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="without 64 GPUs and without A100")
