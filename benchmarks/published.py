"""Forecasts against measurements that are printed in papers and reports.

    python benchmarks/published.py [--quick] [--json]

Each row gives the source of the measured figure. Nothing is fitted to a row. GPTs of PipeDream-2BW have the
profile of `made_up/published_2bw.py`, VGG16 and GNMT that of `made_up/vgg16.py` and `made_up/gnmt.py`. All
other models have the profile of `bireme fit` on devices of the catalogue, which attain the geometric mean of
the catalogue's range. Links attain the geometric mean of the ranges of `bireme fit`. Figures marked "read
off" were read off a plot and are good to about 2 units. Figures marked [R] are recalled: no source that could
be read prints them. A row whose difference has a known cause outside the forecast gives this cause.

The authors of PipeDream-2BW measured with Megatron-LM: `scripts/driver_sweep.py` in msr-fiddle/pipedream on
GitHub, commit 9fa62318. It gives each stage the same number of layers, recomputes layer by layer, and keeps
Megatron-LM's order of ranks: the replicas of a stage are neighbors, on one server if there is room, and the
messages of a pipeline cross servers. The source does not give the bandwidth that messages between servers
attained, nor the memory of a process beside tensors, for which the catalogue's figure counts. Megatron-LM's
own data parallelism sums gradients after the last backward. Here they run beside work if the schedule allows
it; over NVLink they take about 1 % of a batch.
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
from benchmarks.made_up.gnmt import gnmt
from benchmarks.made_up.published_2bw import (
    GPT_1_3B,
    GPT_2_2B,
    SIZES,
    Model,
    p3_16xlarge,
    profile_of_model,
)
from benchmarks.made_up.vgg16 import cluster_a, v100s, vgg16
from bireme.cluster.catalogue import catalogue
from bireme.cluster.cluster import Bridge, Card, Cluster, Link, Mesh, Overlap, Route, Server
from bireme.cluster.named_machines import machines_of
from bireme.errors import BiremeError
from bireme.model.shapes import TransformerShape, shape_of
from bireme.plan.fit import LINK_SHARES, SHARED_LINK_SHARES, likely_share
from bireme.plan.forecast import Answer, Candidate
from bireme.plan.partition.loads import Recompute
from bireme.plan.plan import Plan
from bireme.plan.plan_request import Goal, PlanRequest
from bireme.plan.search.search import find_plan, forecast_of
from bireme.profile.profile import Profile
from bireme.profile.shape_profile import profile_of_shape
from bireme.simulate.links import ring_share

LINK_SHARE, SHARED_LINK_SHARE = map(likely_share, (LINK_SHARES, SHARED_LINK_SHARES))
"""The shares of their rate that links attain, and those that several GPUs of a server share, as in
`bireme fit`.
"""

NCCL_OF_2019 = 10.7e9 / 8
"""Bytes a second that NCCL 2.4.6 attained in May 2019 between two servers of eight V100 at Amazon, in sums of
300 million gradients, whatever the network could carry: iperf had 92 Gbit/s there (NVIDIA/nccl on GitHub,
issue 209, comment of 2019-05-12). Amazon's servers with 25 Gbit/s of PipeDream had NCCL of that version.
"""

GLOO_S_PER_BYTE = 0.5e-9
"""Seconds of a core in which gloo sends a byte on in a sum over processes of one machine: measured with two
and with four (torch 2.13, Intel Xeon). On a machine with eight A100 each process has cores of its own.
"""

GPT_3_8B = Model("GPT 3.8B", 32, 3072, 32)

BW = "Narayanan et al. 2021 (PipeDream-2BW)"
MEGATRON = "as its scripts/driver_sweep.py has Megatron-LM do it"
LLAMA_1 = "Touvron et al. 2023 (LLaMA), table of the carbon footprint"
LLAMA_2 = "Touvron et al. 2023 (Llama 2), table of the carbon footprint"
LLM_C = "karpathy/llm.c on GitHub, discussions"
PIPEDREAM = (
    "Narayanan et al. 2019 (PipeDream, SOSP), table 1, by a summary of it; plans and times of layers by the "
    "authors' code, msr-fiddle/pipedream on GitHub, commit 11c40c01"
)
PIPEDREAM_2018 = "Harlap et al. 2018 (PipeDream, arXiv 1806.03377), table 1, by a summary of it"
PATRICKSTAR = "hpcaitech/ColossalAI on GitHub, issue 124 (PatrickStar's author)"


@dataclass(frozen=True, slots=True)
class Published:
    """A measured figure, its source, and the forecast of it; what is assumed beyond the source, and the
    `cause` of a difference, if it is known and not the forecast's.
    """

    name: str
    unit: str
    measured: float
    source: str
    assumed: str
    forecast: Callable[[], float]
    cause: str = ""

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
            "cause": self.cause,
        }


def attained(cluster: Cluster) -> Cluster:
    """The cluster with the bytes that its links attain."""

    def link(server: Server | None, group: Bridge | Mesh | Card | Route) -> Link:
        is_shared = server is not None and len(server.devices) > 1 and isinstance(group, Card)
        share = SHARED_LINK_SHARE if is_shared else LINK_SHARE
        return replace(group.link, bytes_per_s=group.link.bytes_per_s * share)

    return cluster.with_links(link)


def best_rate(profile: Profile, cluster: Cluster, request: PlanRequest) -> float:
    """Samples a second of the best plan."""
    answer = find_plan(profile, cluster, request, advises=False)
    if not isinstance(answer, Answer):
        raise BiremeError(f"{profile.model}: {answer}")
    return answer.best.forecast.samples_per_s


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
    servers = p3_16xlarge(-(-len(names) // 8))
    cluster = attained(servers.with_devices(lambda own: replace(own, process_bytes=process_bytes)))
    request = PlanRequest(
        width * num_microbatches * size,
        goal=Goal.THROUGHPUT,
        recompute=Recompute.NEVER,
        overlaps={schedule: Overlap.NONE},
    )
    profile = profile_of_model(model, checkpointed=checkpointed)
    return Candidate(plan, forecast_of(plan, profile, cluster, request))


def paper_rate(model: Model, schedule: str, depth: int, width: int, batch: int) -> float:
    """Samples a second with the largest micro-batch that fits, as in the paper, if there are enough for all
    stages.
    """
    for size in reversed(SIZES):
        count = batch // width // size
        if count >= depth:
            found = megatron_forecast(model, schedule, depth, width, count, size, checkpointed=True)
            if found.forecast.fits:
                return found.forecast.samples_per_s
    raise BiremeError(f"{model.name} does not fit {depth} devices in batches of {batch}.")


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
                f"{MEGATRON}; all layers recompute; the largest micro-batch that fits",
                partial(paper_rate, model, schedule, depth, width, batch),
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


def peak_gigabytes(model: Model, found: Candidate) -> float:
    """The most that a device holds with one set of gradients: the authors' 2bw updates before the next
    backward. Bireme's hides the update behind it, with a second set on all stages but the first.
    """
    sums = [unit.gradient_bytes for unit in profile_of_model(model).units]
    is_second = found.plan.schedule == "2bw"
    return max(
        (stage.peak_bytes - is_second * bool(place) * sum(sums[stage.begin : stage.end])) / 1e9
        for place, stage in enumerate(found.forecast.stages)
    )


def largest(schedule: str) -> float:
    """The most that a device holds, of 2.2B on one server."""
    found = megatron_forecast(GPT_2_2B, schedule, 8, 1, 8, 8, checkpointed=True)
    return peak_gigabytes(GPT_2_2B, found)


def two_bw_bytes() -> Iterator[Published]:
    """The most bytes of a GPU, of 2.2B on eight."""
    for schedule, gigabytes in (("1f1b", 10.1), ("2bw", 11.3)):
        yield Published(
            f"GPT 2.2B, 8 V100, batch 64, {schedule}",
            "GB",
            gigabytes,
            f"{BW}, read off",
            f"{MEGATRON}; micro-batches of 8; bytes of tensors, with one set of gradients",
            partial(largest, schedule),
        )


FRAGMENTS = (
    "PyTorch's allocator gives memory in blocks, so tensors never fill a device; a forecast has no blocks"
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
        peak_gb = peak_gigabytes(model, found)
        limit_gb = min(stage.limit_bytes for stage in found.forecast.stages) / 1e9
        yield {
            "what": f"{model.name}, 8 V100, micro-batches of {size}, {_recomputes(recompute)}",
            "fits_in_paper": fits,
            "fits_in_forecast": peak_gb <= limit_gb,
            "forecast_gb": peak_gb,
            "limit_gb": limit_gb,
            "source": f"{BW}, read off",
            "cause": "" if fits == (peak_gb <= limit_gb) else FRAGMENTS,
        }


SLOW_SUMS = (
    "the head alone sets the pace of the pipeline: 81 ms here, 77 ms in the published profile. So a step of "
    "data parallelism took 4.1 s there, of which 0.5 s are work, and sums at the rate of NCCL only 1.6 s"
)

# PipeDream: VGG16 and GNMT, as multiples of what data parallelism or one device trains.


def pipeline_rate(profile: Profile, cluster: Cluster, size: int, **asked: Any) -> float:
    """Samples a second under 2bw, which like PipeDream never drains. A batch has two micro-batches for each
    device of the first stage.
    """
    count = 2 * (asked["stage_widths"][0] if "stage_widths" in asked else cluster.num_devices)
    request = PlanRequest(count * size, schedule="2bw", micro_batch=size, goal=Goal.THROUGHPUT, **asked)
    return best_rate(profile, cluster, request)


def replicas_rate(profile: Profile, cluster: Cluster, size: int, count: int = 1, **asked: Any) -> float:
    """Samples a second if each device has the whole model and `count` micro-batches of each batch."""
    devices = tuple(placed.name for placed in cluster.devices())
    sizes = (size,) * len(devices)
    plan = Plan((), count, "sequential", len(devices), micro_batch_sizes=sizes, devices=(devices,))
    return forecast_of(plan, profile, cluster, PlanRequest(sum(sizes) * count, **asked)).samples_per_s


def gain(profile: Profile, cluster: Cluster, size: int, **asked: Any) -> float:
    """The rate of a pipeline, by that of data parallelism."""
    return pipeline_rate(profile, cluster, size, **asked) / replicas_rate(profile, cluster, size)


def pipedream() -> Iterator[Published]:
    """Epochs of table 1 of the paper, and of its first version."""
    a, b = attained(cluster_a()), v100s(2, 8, LINK_SHARE * 25e9, NCCL_OF_2019)
    nccl = "; 10.7 Gbit/s between servers, as NCCL 2.4 attained in 2019 (NVIDIA/nccl on GitHub, issue 209)"
    straight = "the pipeline of the paper, with as many stages as in the published code; one replica of each"
    for words, profile, cluster, asked, found, read in (
        ("VGG16, 4 × 4 V100, 10 Gbit/s, 15-1", vgg16(), a, {"stage_widths": (15, 1)}, 5.28, True),
        ("VGG16, 2 × 8 V100, 25 Gbit/s, 15-1", vgg16(), b, {"stage_widths": (15, 1)}, 2.98, True),
        ("GNMT-16, 4 V100", gnmt(16), attained(cluster_a(1)), {"depth": 4, "width": 1}, 1.46, False),
        ("GNMT-16, 4 × 4 V100, 10 Gbit/s", gnmt(16), a, {"depth": 14, "width": 1}, 2.34, False),
        ("GNMT-16, 2 × 8 V100, 25 Gbit/s", gnmt(16), b, {"depth": 14, "width": 1}, 3.14, True),
        ("GNMT-8, 4 V100", gnmt(8), attained(cluster_a(1)), {"depth": 4, "width": 1}, 1.5, False),
        (
            "GNMT-8, 3 × 4 V100, 10 Gbit/s",
            gnmt(8),
            attained(cluster_a(3)),
            {"depth": 10, "width": 1},
            2.95,
            False,
        ),
    ):
        yield Published(
            words,
            "times data parallelism",
            found,
            f"{PIPEDREAM}{'' if read else ' [R]'}",
            ("micro-batches of 64" if "VGG" in words else straight) + nccl * (cluster is b),
            partial(gain, profile, cluster, 64, **asked),
            SLOW_SUMS if cluster is b and "GNMT" in words else "",
        )
    apart, profile = attained(v100s(8, 1, 10e9, 1.25e9)), vgg16(32)
    one = 1 / sum(unit.costs[0].forward_s + unit.costs[0].backward_s for unit in profile.units) * 32
    for words, found, rate in (
        ("7-1", 6.98, partial(pipeline_rate, profile, apart, 32, stage_widths=(7, 1))),
        ("data parallelism", 6.98 / 5.12, partial(replicas_rate, profile, apart, 32)),
    ):
        yield Published(
            f"VGG16, 8 servers of a V100, 10 Gbit/s, {words}",
            "times one V100",
            found,
            f"{PIPEDREAM_2018}: time to an accuracy",
            "micro-batches of 32; epochs are equal",
            partial(_by, rate, one),
        )


def _by(rate: Callable[[], float], one: float) -> float:
    return rate() / one


# Models of the catalogue: a plan of one stage on each device, or of a pipeline, for tokens a second and GPU.


def likely_profile(shape: TransformerShape, word: str, length: int, sizes: tuple[int, ...]) -> Profile:
    device = catalogue()[word]
    return profile_of_shape(shape, device, device.likely_attained, length, sizes)


def eight(word: str) -> Cluster:
    """A machine with eight of these devices."""
    return machines_of(f"8x {word}").cluster({word: (1.0, 1.0)}, LINK_SHARE)


def replica_tokens(name: str, word: str, size: int, count: int) -> float:
    """Tokens a second and device, in sequences of 1,024, of replicas on eight devices."""
    profile = likely_profile(shape_of(name), word, 1024, (size,))
    return replicas_rate(profile, eight(word), size, count, value_bytes=2) * 1024 / 8


def pipelines(name: str, word: str, length: int, batch: int, depth: int) -> float:
    """Tokens a second and device, under the fastest synchronous pipeline of eight devices."""
    profile = likely_profile(shape_of(name), word, length, (1,))
    request = PlanRequest(batch, schedule="1f1b", depth=depth, width=8 // depth, micro_batch=1, value_bytes=2)
    return best_rate(profile, eight(word), request) * length / 8


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
            "1,024 tokens, all layers recompute; the GPUs share weights and optimizer, which fit; gloo sums "
            "the gradients of the embedding on the host (patrickstar/core/preprocess.py on GitHub)",
            partial(patrickstar_rate, shape, size),
        )


def patrickstar_rate(shape: TransformerShape, size: int) -> float:
    """Sequences a second of eight replicas that share weights and optimizer. PatrickStar keeps the tables of
    the embedding on the host, in float32, and sums their gradients there by gloo when a backward ends.
    """
    profile = likely_profile(shape, "a100-40gb", 1024, (size,))
    request = PlanRequest(
        8 * size,
        schedule="sequential",
        width=8,
        micro_batch=size,
        recompute=Recompute.ALWAYS,
        value_bytes=2,
        shard="weights",
        goal=Goal.THROUGHPUT,
    )
    batch_s = request.batch_size / best_rate(profile, eight("a100-40gb"), request)
    table_bytes = 4 * (shape.vocab + shape.context) * shape.width
    return request.batch_size / (batch_s + GLOO_S_PER_BYTE * ring_share(8) * table_bytes)


def measure(asked: Namespace) -> Findings:
    rates, gains = [*two_bw(), *language_models(), *patrickstar()], list(pipedream())
    if asked.quick:
        rates = [one for one in rates if "64 V100" not in one.name and "a100" not in one.name.lower()]
        gains = [one for one in gains if "× 4" not in one.name and "2 ×" not in one.name]
    rows, more, memory = ([one.row() for one in some] for some in (rates, gains, two_bw_bytes()))
    own = [row for row in rows if not row["cause"]]
    verdicts = [
        at_most("median error of rates", statistics.median(map(_error, rows)), 0.10),
        at_most("worst error of rates whose difference has no cause elsewhere", max(map(_error, own)), 0.50),
        at_most("worst error of gains", max(map(_error, more)), 0.50),
        at_most("worst error of bytes", max(map(_error, memory)), 0.20),
    ]
    fits = list(two_bw_fits())
    num_wrong = sum(row["fits_in_paper"] != row["fits_in_forecast"] for row in fits)
    verdicts.append(exactly("plans that fit in the paper alone, or in the forecast alone", num_wrong, 0))
    sections = [
        Section("Rates", rows),
        Section("Gains", more),
        Section("Bytes", memory),
        Section("What fits", fits),
    ]
    return Findings(sections, verdicts)


def _error(row: dict[str, Any]) -> float:
    return abs(float(row["error"]))


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="without 64 GPUs and without A100")
