"""A plan as one JSON document, for programs that read what the command line found."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise, product
from typing import Any

from bireme.bounds import bytes_text, seconds_text
from bireme.cluster.cluster import Cluster, Overlap, link_notes
from bireme.codec.description import AS_IT_IS
from bireme.grouping import grouped
from bireme.plan.agreements import AgreementForecast
from bireme.plan.explain import Help
from bireme.plan.forecast import (
    Answer,
    Candidate,
    ConsideredWay,
    Forecast,
    MemoryWay,
    Origin,
    PlanSummary,
    headroom_bytes,
    summarize,
)
from bireme.plan.plan import Plan, servers_of_places
from bireme.plan.plan_file import SavedPlan
from bireme.plan.plan_request import PlanRequest
from bireme.plan.search.draft_paging import PagedStageMemory
from bireme.profile.estimate import device_profiles
from bireme.profile.profile import Profile


def plan_document(answer: Answer, profile: Profile, planning_s: float) -> dict[str, Any]:
    """The best plan, what it promises of each stage and device, all candidates, and where it comes from."""
    best = answer.best
    names = [unit.name for unit in profile.units]
    return {
        **_document(profile.model, best.plan, best.forecast, names, answer.origin),
        "planning_s": planning_s,
        "num_tried": answer.num_tried,
        "candidates": [_candidate(summarize(candidate)) for candidate in answer.candidates],
        **({"memory_ways": _ways(answer.memory_ways)} if answer.memory_ways else {}),
        **({"shard_ways": _ways(answer.shard_ways)} if answer.shard_ways else {}),
        **({"ways": [_way(way) for way in answer.ways]} if answer.ways else {}),
    }


def saved_plan_document(
    model: str, saved: SavedPlan, names: Sequence[str], batch_size: int
) -> dict[str, Any]:
    """The same of a plan from a file, for a model whose units have these names; what it does not say is null.

    A step has `batch_size` samples.
    """
    return {
        **_document(model, saved.plan, saved.forecast, names, saved.origin),
        "batch_size": batch_size,
        "planning_s": None,
        "num_tried": None,
        "candidates": [],
    }


def _document(
    model: str, plan: Plan, forecast: Forecast | None, names: Sequence[str], origin: Origin | None
) -> dict[str, Any]:
    """What a plan is, and what its forecast promises, if it has one."""
    best = None if forecast is None else Candidate(plan, forecast)
    return {
        "model": model,
        **dict.fromkeys((*_NAMES.values(), "micro_batch_size")),
        "schedule": plan.schedule,
        "depth": plan.num_stages if plan.stage_widths else plan.source.num_ranks,
        "width": plan.width,
        "stage_widths": list(plan.stage_widths),
        "num_stages": plan.num_stages,
        "num_micro_batches": plan.num_microbatches,
        "num_recomputed": len(plan.recompute),
        **({} if best is None else _candidate(summarize(best))),
        "fits": None if forecast is None else forecast.fits,
        "lookahead": plan.lookahead,
        "num_sliced": plan.num_sliced,
        "stage_shares": [list(share) for share in plan.shares],
        "stages_per_rank": plan.stages_per_rank,
        "codecs": _codecs(plan),
        "codec_penalty": None if forecast is None else forecast.codec_penalty,
        "sum_penalty": None if forecast is None else forecast.sum_penalty,
        "agreement_penalty": None if forecast is None else forecast.agreement_penalty,
        "stages": [] if best is None else _stages(best, names),
        "headroom_bytes": None if best is None else headroom_bytes(best),
        "origin": None if origin is None else asdict(origin),
        **_memory(plan, forecast),
    }


def sync_document(request: PlanRequest) -> dict[str, Any]:
    """The codec of sums over replicas: bytes of a replica's message, and what it keeps, for each of its
    gradients' bytes; of averages with what they send and keep of the optimizer's state.
    """
    sums, rounds = request.sums, request.rounds
    found: dict[str, Any] = {
        "codec": str(sums.codec),
        "message_share": sums.message_share + (0.0 if rounds is None else rounds.state_share),
        "kept_share": sums.kept_share + (0.0 if rounds is None else rounds.kept_share),
    }
    return found if request.shard == "none" else found | {"shard": request.shard}


def _memory(plan: Plan, forecast: Forecast | None) -> dict[str, Any]:
    """What is paged or shared, of a plan that does so.

    Bytes moved are those that are copied into the tier in a batch.
    """
    found: dict[str, Any] = {}
    if plan.sweep > 1:
        found["sweep"] = plan.sweep
    if plan.whole_weights:
        found["whole_weights"] = plan.whole_weights
    tiers = () if forecast is None else forecast.tiers
    if plan.paging is not None or plan.whole_weights or tiers:
        found["tiers"] = [asdict(tier) for tier in tiers]
    if plan.paging is not None:
        found["chunk_bytes"] = list(plan.paging.chunk_bytes)
        if plan.paging.host_updates:
            found["host_updates"] = True
    return found


def _ways(ways: Sequence[MemoryWay]) -> list[dict[str, Any]]:
    return [
        {
            "way": way.words,
            "refusal": way.refusal if way.candidate is None else None,
            "plan": None if way.candidate is None else _candidate(summarize(way.candidate)),
        }
        for way in ways
    ]


def _way(way: ConsideredWay) -> dict[str, Any]:
    """A way that the planner considered. `time_to_loss_s` is for a synchronous batch."""
    found = None if way.candidate is None else summarize(way.candidate)
    return {
        "codecs": way.codecs,
        "sum_codec": way.sum_codec,
        "sync_mode": way.mode,
        "refusal": way.refusal or None,
        "time_to_loss_s": None if found is None else found.penalty * found.batch_s,
        "link": way.link or None,
        "link_bytes": None if found is None else way.link_bytes,
        "plan": None if found is None else _candidate(found),
    }


def _codecs(plan: Plan) -> list[dict[str, Any]]:
    """The codecs of each boundary between two ranks."""
    ranks = plan.source.rank_of_stage
    named = (*plan.codecs, *(AS_IT_IS,) * (plan.num_stages - 1 - len(plan.codecs)))
    return [
        {"from_stage": stage, "to_stage": stage + 1, "forward": one.forward, "backward": one.backward}
        for stage, one in enumerate(named)
        if ranks[stage] != ranks[stage + 1]
    ]


def plan_notes(
    profile: Profile, cluster: Cluster, request: PlanRequest, candidates: Sequence[Candidate]
) -> list[str]:
    """What makes the numbers of plans doubtful, with all that the forecast of any candidate assumes."""
    devices = [placed.device for placed in cluster.devices()]
    found = device_profiles(profile, devices)
    # The devices on which the seconds of the profile count as they are, or by their speed.
    given = [
        device
        for device, index, speed in zip(devices, found.of_device, found.memory_speeds, strict=True)
        if index == 0 and speed is None
    ]
    kinds = {device.kind for device in given} - {"emulated"}
    notes = []
    if kinds and profile.device_kind not in kinds:
        there = " and ".join(sorted(kinds))
        here = f"{profile.device} ({profile.device_kind})"
        notes.append(
            f"The times are those of {here}, where the model was profiled, but the cluster's devices "
            f"are {there}. Set their speed in the cluster file, or profile the model there."
        )
    names = sorted({device.name for device in given})
    if len(names) > 1 and len({device.speed for device in given}) == 1:
        notes.append(
            f"The cluster's devices are of different makes ({', '.join(names)}) and all have the speed "
            f"{given[0].speed:g}, so the plan treats them as equally fast. Set their speed in the "
            "cluster file; `bireme cluster probe` measures it."
        )
    notes += link_notes(cluster)
    notes += [sentence for one in candidates for sentence in one.forecast.assumptions]
    waits = [f"under {name} {one.words}" for name, one in request.overlaps.items()]
    if waits:
        notes.append(
            "The plans are for the framework of the export, where messages do not overlap with work: "
            f"{', '.join(waits)} while a message crosses."
        )
    elif waiting := _waiting_links(cluster, candidates[0].plan):
        notes.append(
            f"Messages of the plan count as its links give it: while one crosses, {waiting}. Bireme's own "
            "engine computes meanwhile on any link, so its runs may be faster."
        )
    if not profile.is_measured:
        notes.append("The times are estimated, not measured; ratios between plans are more reliable.")
    return list(dict.fromkeys(notes))


_SHARED = {
    "none": "sharing nothing",
    "optimizer": "sharing the optimizer",
    "weights": "sharing weights, gradients and the optimizer",
}


def shard_note(answer: Answer) -> list[str]:
    """A sentence on what replicas share by the planner's choice, with the figures of each way; none if it did
    not choose.
    """
    if not answer.shard_ways:
        return []
    best = answer.best
    others = "; ".join(
        f"{_SHARED[way.words]} {'is not possible' if way.candidate is None else _figures(way.candidate)}"
        for way in answer.shard_ways
        if way.words != best.plan.shard
    )
    chosen = best.plan.shard
    promise = f"{_SHARED[chosen]} {_figures(best)}"
    return [f'memory.shard = "auto" chose "{chosen}": {promise}. By comparison, {others}.']


def ways_note(answer: Answer) -> list[str]:
    """Sentences on the codecs and the agreement that the planner chose, on the next best ones, and on what it
    did not propose; none if it did not choose.
    """
    known = [way for way in answer.ways if way.candidate is not None]
    if not known:
        return []
    best, others = known[0], known[1:]
    found = [
        f"The planner chose {way_words(best)}: {_to_loss(best)}."
        + (f" Next best is {way_words(others[0])}: {_to_loss(others[0])}." if others else "")
    ]
    refused = grouped((way.refusal, way_words(way)) for way in answer.ways if way.candidate is None)
    found += [f"Not proposed: {'; '.join(words)}. {why}" for why, words in refused.items()]
    return found


def way_words(way: ConsideredWay) -> str:
    """Such as `allreduce with int4 in sums`."""
    sums = "" if way.sum_codec == "none" else f" with {way.sum_codec} in sums"
    codecs = "" if way.codecs == "none" else f" and {way.codecs} at stage boundaries"
    return f"{way.mode}{sums}{codecs if sums else codecs.replace(' and', ' with', 1)}"


def sent_words(plan: Plan) -> str:
    """What a plan sends otherwise than as it is, such as `int4 sums, int5`."""
    found = [plan.sync_mode] if plan.sync_mode not in ("", "allreduce") else []
    found += [f"{plan.sum_codec} sums"] if plan.sum_codec not in ("", "none") else []
    words = dict.fromkeys(word for one in plan.codecs for word in (one.forward, one.backward))
    return ", ".join((*found, *words)) or "as it is"


def _to_loss(way: ConsideredWay) -> str:
    assert way.candidate is not None, "it has a plan"
    plan, forecast = way.candidate.plan, way.candidate.forecast
    seconds = seconds_text(forecast.penalty * forecast.batch_s)
    return (
        f"{plan.schedule} takes {seconds_text(forecast.batch_s)} a step and {forecast.penalty:.2f} steps for "
        f"one, so {seconds} to the same loss"
    )


def apart_note(plan: Plan, clip_norm: float) -> list[str]:
    """A sentence on how gradients are clipped, if stages of the plan step apart; nothing without clipping."""
    if plan.paging is None or not plan.paging.updates_apart or not clip_norm:
        return []
    return [
        "Stages of the plan step apart, so each is clipped by the norm of its own gradient, to its share of "
        f"training.clip_norm = {clip_norm:g}, and not by the norm of the whole gradient. To clip by the norm "
        'of the whole gradient, plan with memory.updates = "agreed".'
    ]


def _figures(candidate: Candidate) -> str:
    peak = max(stage.peak_bytes for stage in candidate.forecast.stages)
    offloads = "" if candidate.plan.paging is None else " with offloading"
    batch_s = candidate.forecast.batch_s
    return f"takes {seconds_text(batch_s)} a step and {bytes_text(peak)} of a device{offloads}"


def _waiting_links(cluster: Cluster, plan: Plan) -> str:
    """Which ends wait while messages of a plan cross, in words; nothing if both ends compute."""
    grid = [tuple(map(cluster.number_of, row)) for row in plan.devices]
    if plan.stage_widths:  # a row is a stage, and its replicas send to any of the next
        ends = {pair for one, other in pairwise(grid) for pair in product(one, other)}
    else:
        ends = {
            pair
            for one, other in pairwise(plan.source.rank_of_stage)
            for pair in zip(grid[one], grid[other], strict=True)
            if one != other
        }
    overlap = Overlap.least(cluster.overlap(*pair) for pair in ends)
    return "" if overlap is Overlap.FULL else overlap.words


def shared_hosts_note(plan: Plan, cluster: Cluster, num_sites: int) -> list[str]:
    """A sentence if all replicas that may die, or all sites, have devices on one host."""
    each, per_site = servers_of_places(plan, cluster), plan.num_ranks // num_sites
    of_sites = [set(each[first : first + per_site]) for first in range(0, len(each), per_site)]
    shared = sorted(set[str].intersection(*of_sites))
    if not shared or len(cluster.servers) == 1:
        return []
    return [
        f"All replicas have stages on {' and '.join(shared)}: if that host is gone, none can go on without "
        "it. The plan is the fastest one; name other devices (plan.devices) to avoid this."
    ]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What would help, how else replicas could agree, and how each stage that offloads uses its memory."""

    helps: tuple[Help, ...]
    agreements: tuple[AgreementForecast, ...]
    stages: tuple[PagedStageMemory, ...]


def explanation_document(answer: Answer, found: Explanation) -> dict[str, Any]:
    """What limits the candidates is with them; this is what would help, with `gain` in samples' worth, and
    what other ways for the replicas to agree would give.
    """
    return {
        "agreements": [asdict(one) for one in found.agreements],
        "helps": [
            {"with": one.words, "gain": one.gain, **_candidate(summarize(one.candidate))}
            for one in found.helps
        ],
        "candidates_headroom_bytes": [headroom_bytes(candidate) for candidate in answer.candidates],
        **({"stage_memory": [asdict(one) for one in found.stages]} if found.stages else {}),
    }


_NAMES = {one.name: one.name for one in fields(PlanSummary)} | {
    "batch_s": "predicted_batch_s",
    "num_microbatches": "num_micro_batches",
}
"""The names that documents have for what is predicted and counted."""


def _candidate(short: PlanSummary) -> dict[str, Any]:
    """A candidate in short."""
    return {
        **{_NAMES[name]: value for name, value in asdict(short).items()},
        "micro_batch_size": max(short.micro_batch_sizes),
    }


def _stages(best: Candidate, names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "units": list(range(stage.begin, stage.end)),
            "names": list(names[stage.begin : stage.end]),
            "devices": list(stage.devices),
            "recompute": stage.recompute,
            "predicted_busy_s": stage.busy_s,
            "peak_bytes": stage.peak_bytes,
            "process_bytes": stage.process_bytes,
            "limit_bytes": stage.limit_bytes,
            "headroom_bytes": stage.limit_bytes - stage.peak_bytes,
        }
        for stage in best.forecast.stages
    ]
