"""What `make gpu` measures, each task a function that gives rows. `kind` is a device's type: cuda, or cpu to
try the tasks themselves.
"""

from statistics import median
from typing import Any

from benchmarks.on_gpu.models import Gpt, Measured, plan_on, profiled, train
from bireme.cluster.cluster import Cluster
from bireme.devices import Backend, num_accelerators
from bireme.errors import BiremeError
from bireme.plan.forecast import Candidate
from bireme.plan.plan import Plan
from bireme.profile.profile import Profile
from bireme.profile.stages import stage_cost
from bireme.runtime.launch import launch
from bireme.schedule.instruction import Kind
from bireme.timeline.timeline import Timeline
from bireme.train.machines import server_here, shared

__all__ = ["card", "cards", "units"]

STAGES = 4
"""Of the model that fills a card."""

FRACTION = 0.85
"""Of a card's memory that a plan may take: contexts of processes and gaps between tensors take the rest."""

BYTES_PER_PARAMETER = 26
"""Two versions, Adam's moments and gradients of float32 under 2bw, and some for what is kept of a forward."""

TRIES = 6
TIMEOUT_S = 150.0
SMALL = Gpt(4, 64, 2, vocab=256, context=64)
"""For `--quick`, and for where there is no GPU."""

PARTS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.UPDATE: "update",
}


def card(kind: str, *, quick: bool) -> list[dict[str, Any]]:
    """A GPT that fills one device, as several stages that share it: seconds and bytes, and the plan's."""
    (device,) = server_here(kind, 1).devices
    cluster = Cluster((shared(server_here(kind, 1), STAGES),))
    rows = []
    for schedule in ("2bw",) if quick else ("2bw", "1f1b"):
        gpt = SMALL if quick else sized(device.memory_bytes)
        rows += _trained(gpt, cluster, schedule, kind, is_shared=True)
    return rows


def cards(kind: str, *, quick: bool) -> list[dict[str, Any]]:
    """The same over several devices, a process for each."""
    num = num_accelerators() if kind != "cpu" else 2
    server = server_here(kind, num)
    gpt = SMALL if quick else sized(sum(device.memory_bytes for device in server.devices))
    return _trained(gpt, Cluster((server,)), "2bw", kind, is_shared=False)


def units(kind: str, *, quick: bool) -> list[dict[str, Any]]:
    """What a stage's instructions take, and what the profiler says of its units; times of the device."""
    gpt = SMALL if quick else Gpt(12, 1024, 16, samples=4)
    (measured,) = launch(profiled, 1, gpt, kind, timeout_s=TIMEOUT_S, device=kind)
    plan = Plan((), gpt.num_microbatches, "1f1b")
    (found,) = launch(train, 1, gpt, plan, timeout_s=TIMEOUT_S, device=kind)
    cost = stage_cost(measured, 0, len(measured.units), gpt.samples)
    predicted = {Kind.FORWARD: cost.forward_s, Kind.BACKWARD: cost.backward_s, Kind.UPDATE: cost.update_s}
    assert found.timeline is not None
    rows = []
    for part, seconds in _medians(found.timeline).items():
        error = seconds / predicted[part] - 1
        told = {"predicted_ms": predicted[part] * 1e3, "measured_ms": seconds * 1e3, "error": error}
        rows.append({"instruction": PARTS[part], **told})
    return rows


def sized(memory_bytes: int) -> Gpt:
    """A GPT whose training takes so much, of as many layers as are usual for its width."""
    parameters = FRACTION * memory_bytes / BYTES_PER_PARAMETER
    width = next((one for one in (4096, 3072, 2048, 1536, 1024) if parameters / (12 * one**2) >= 16), 512)
    return Gpt(max(STAGES, int(parameters / (12 * width**2))), width, width // 64)


def _trained(
    gpt: Gpt, cluster: Cluster, schedule: str, kind: str, *, is_shared: bool
) -> list[dict[str, Any]]:
    """Plan and train; with fewer layers as long as no plan fits."""
    num_ranks = cluster.num_devices
    found = _fitting(gpt, cluster, schedule, kind)
    backend: Backend = "gloo" if is_shared or kind == "cpu" else "nccl"
    ranks = launch(
        train, num_ranks, found.gpt, found.candidate.plan, timeout_s=TIMEOUT_S, backend=backend, device=kind
    )
    return [_row(found.gpt, schedule, found.candidate, rank, one) for rank, one in enumerate(ranks)]


class _Found:
    """A model that fits, and its plan."""

    def __init__(self, gpt: Gpt, candidate: Candidate) -> None:
        self.gpt = gpt
        self.candidate = candidate


def _fitting(gpt: Gpt, cluster: Cluster, schedule: str, kind: str) -> _Found:
    (measured,) = launch(profiled, 1, gpt, kind, timeout_s=TIMEOUT_S, device=kind)
    profile: Profile = measured
    for _ in range(TRIES):
        try:
            return _Found(gpt, plan_on(gpt, profile, cluster, schedule, FRACTION))
        except BiremeError as error:
            reason = error
        fewer = max(STAGES, gpt.layers * 7 // 8)
        gpt = Gpt(fewer, gpt.width, gpt.heads, samples=gpt.samples)
        # A layer more or less changes nothing of what each takes: the units measured before are found again.
        (profile,) = launch(profiled, 1, gpt, kind, timeout_s=TIMEOUT_S, device=kind)
    raise reason


def _row(gpt: Gpt, schedule: str, candidate: Candidate, rank: int, found: Measured) -> dict[str, Any]:
    forecast, program = candidate.forecast, candidate.plan.program(1)
    own = [forecast.stages[stage] for stage, of in enumerate(program.rank_of_stage) if of == rank]
    return {
        "rank": rank,
        "schedule": schedule,
        "parameters": gpt.num_parameters,
        "predicted_peak_bytes": int(max(stage.peak_bytes - stage.process_bytes for stage in own)),
        "measured_peak_bytes": found.peak_bytes,
        "process_bytes": int(own[0].process_bytes),
        "predicted_step_s": forecast.batch_s,
        "measured_step_s": found.step_s,
        "tokens_per_s": gpt.batch_size * gpt.context / found.step_s,
        "first_loss": found.first_loss,
        "last_loss": found.last_loss,
    }


def _medians(timeline: Timeline) -> dict[Kind, float]:
    """The median seconds of each kind of instruction on the first rank."""
    took: dict[Kind, list[float]] = {kind: [] for kind in PARTS}
    for interval in timeline.ranks[0].intervals():
        if interval.instruction.kind in took:
            took[interval.instruction.kind].append(interval.end_s - interval.start_s)
    return {kind: median(seconds) for kind, seconds in took.items() if seconds}
