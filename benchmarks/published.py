"""Forecasts against measurements that are printed in papers and reports.

    python benchmarks/published.py [--quick] [--json]

Each row gives the source of the measured figure. Nothing is fitted to a row: GPTs of PipeDream-2BW have the
profile of `made_up/published_2bw.py` (a V100 attains at most 60 TFLOP/s, less in small micro-batches), all
other models the profile of `bireme fit` on devices of the catalogue, which attain the geometric mean of the
catalogue's range. Figures marked "read off" were read off a plot and are good to about 2 units.
"""

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
    Model,
    p3_16xlarge,
    profile_of_model,
)
from bireme.cluster.catalogue import catalogue
from bireme.cluster.cluster import Cluster
from bireme.cluster.named_machines import machines_of
from bireme.errors import BiremeError
from bireme.model.shapes import TransformerShape, shape_of
from bireme.plan.forecast import Answer, Candidate
from bireme.plan.partition.loads import Recompute
from bireme.plan.plan import Plan
from bireme.plan.plan_request import Goal, PlanRequest
from bireme.plan.search.search import find_plan, forecast_of
from bireme.profile.profile import Profile
from bireme.profile.shape_profile import profile_of_shape

GPT_3_8B = Model("GPT 3.8B", 32, 3072, 32)

BW = "Narayanan et al. 2021 (PipeDream-2BW)"
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


# PipeDream-2BW: GPTs of 512 tokens on servers of eight V100.


def planned(model: Model, num_servers: int, request: PlanRequest) -> Candidate:
    """The best plan. What was measured did fit, so a rate is forecast whether its plan fits or not."""
    cluster = p3_16xlarge(num_servers)
    if request.micro_batch is not None:
        servers = (
            replace(one, devices=tuple(replace(own, memory_bytes=2**40) for own in one.devices))
            for one in cluster.servers
        )
        cluster = Cluster(tuple(servers))
    answer = find_plan(profile_of_model(model), cluster, request, advises=False)
    if not isinstance(answer, Answer):
        raise BiremeError(f"{model.name}: {answer}")
    return answer.best


def planned_rate(model: Model, num_servers: int, request: PlanRequest) -> float:
    return planned(model, num_servers, request).forecast.samples_per_s


def planned_gigabytes(request: PlanRequest) -> float:
    """The most that a device holds, of 2.2B on one server."""
    return max(stage.peak_bytes for stage in planned(GPT_2_2B, 1, request).forecast.stages) / 1e9


def two_bw() -> Iterator[Published]:
    """The rates and bytes of section 5's figures, under the depths that the paper gives."""
    rates = [
        (GPT_2_2B, 1, 8, 64, 26.0, 43.0),
        (GPT_2_2B, 1, 8, 256, 38.0, 44.0),
        (GPT_2_2B, 8, 8, 512, 110.0, 160.0),
        (GPT_2_2B, 8, 8, 2048, 145.0, 168.0),
        (GPT_3_8B, 8, 16, 512, 75.0, 127.0),
        (GPT_3_8B, 8, 16, 2048, 115.0, 135.0),
    ]
    for model, servers, depth, batch, flush, delayed in rates:
        for schedule, rate in (("1f1b", flush), ("2bw", delayed)):
            request = PlanRequest(
                batch,
                schedule=schedule,
                goal=Goal.THROUGHPUT,
                depth=depth,
                width=8 * servers // depth,
                recompute=Recompute.ALWAYS,
            )
            yield Published(
                f"{model.name}, {8 * servers} V100, batch {batch}, {schedule}",
                "sequences/s",
                rate,
                f"{BW}, read off",
                "all stages recompute; the fastest micro-batch that fits",
                partial(planned_rate, model, servers, request),
            )
    micro_batches = [
        (GPT_1_3B, Recompute.ALWAYS, {1: 31.0, 2: 47.0, 4: 58.0, 8: 63.0, 16: 66.0}),
        (GPT_1_3B, Recompute.NEVER, {1: 40.0, 2: 57.0, 4: 67.0}),
        (GPT_2_2B, Recompute.ALWAYS, {1: 22.0, 16: 43.0}),
        (GPT_2_2B, Recompute.NEVER, {1: 29.0}),
    ]
    for model, recompute, found in micro_batches:
        for size, rate in found.items():
            request = PlanRequest(
                16 * size,
                schedule="2bw",
                goal=Goal.THROUGHPUT,
                depth=8,
                width=1,
                micro_batch=size,
                recompute=recompute,
            )
            yield Published(
                f"{model.name}, 8 V100, micro-batches of {size}, recompute {recompute}",
                "sequences/s",
                rate,
                f"{BW}, read off",
                "16 micro-batches in a batch",
                partial(planned_rate, model, 1, request),
            )


def two_bw_bytes() -> Iterator[Published]:
    """The most bytes of a GPU, of 2.2B on eight."""
    for schedule, gigabytes in (("1f1b", 10.1), ("2bw", 11.3)):
        request = PlanRequest(
            64,
            schedule=schedule,
            goal=Goal.THROUGHPUT,
            depth=8,
            width=1,
            micro_batch=8,
            recompute=Recompute.ALWAYS,
        )
        yield Published(
            f"GPT 2.2B, 8 V100, batch 64, {schedule}",
            "GB",
            gigabytes,
            f"{BW}, read off",
            "micro-batches of 8; no process beside tensors",
            partial(planned_gigabytes, request),
        )


def two_bw_fits() -> Iterator[dict[str, Any]]:
    """Which micro-batches fit eight GPUs under 2bw, by the paper's figure, and by the forecast."""
    for model, recompute, size, fits in (
        (GPT_1_3B, Recompute.NEVER, 4, True),
        (GPT_1_3B, Recompute.NEVER, 8, False),
        (GPT_2_2B, Recompute.NEVER, 1, True),
        (GPT_2_2B, Recompute.NEVER, 2, False),
        (GPT_2_2B, Recompute.ALWAYS, 16, True),
    ):
        request = PlanRequest(
            16 * size, schedule="2bw", depth=8, width=1, micro_batch=size, recompute=recompute
        )
        found = find_plan(profile_of_model(model), p3_16xlarge(), request, advises=False)
        missing = 0.0 if isinstance(found, Answer) else found.missing_bytes / 1e9
        yield {
            "what": f"{model.name}, 8 V100, micro-batches of {size}, recompute {recompute}",
            "fits_in_paper": fits,
            "fits_in_forecast": isinstance(found, Answer),
            "missing_gb": missing,
            "source": f"{BW}, read off",
        }


# Models of the catalogue: a plan of one stage on each device, or of a pipeline, for tokens a second and GPU.


def likely_profile(shape: TransformerShape, word: str, length: int, sizes: tuple[int, ...]) -> Profile:
    device = catalogue()[word]
    return profile_of_shape(shape, device, device.likely_attained, length, sizes)


def replicas(shape: TransformerShape, word: str, length: int, size: int, count: int, *, again: bool) -> float:
    """Sequences a second of replicas on eight devices, each of which holds the whole model."""
    cluster = machines_of(f"8x {word}").cluster({word: (1.0, 1.0)})
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
    cluster = machines_of(f"8x {word}").cluster({word: (1.0, 1.0)})
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
            "1,024 tokens, all layers recompute; copies of chunks take no time",
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
