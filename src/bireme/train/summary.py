"""The summary of a run: measured and predicted figures, as the document that ends it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from bireme.bounds import bytes_text, rate_text
from bireme.cluster.catalogue import tier_share
from bireme.cluster.cluster import Cluster
from bireme.documents import plain
from bireme.errors import BiremeError
from bireme.model.units import units_of
from bireme.plan.forecast import StageForecast, TierForecast, joules_per_sample
from bireme.plan.plan import Plan
from bireme.plan.plan_file import SavedPlan
from bireme.report.page.metrics import Metrics, Shared, read_metrics
from bireme.runtime.paging.rank_paging import TierMoves
from bireme.simulate.copies import REPLICAS
from bireme.sync.coordinator.recoveries import Recovery
from bireme.train.choices import gradient_document, idle_codec, idle_keys, main_codecs
from bireme.train.folder import RunFolder
from bireme.train.outcome import Outcome, first_of
from bireme.train.plan_search import first_delayed_step
from bireme.train.prepare import PreparedRun
from bireme.train.run_data import learns
from bireme.train.run_file import RunFile

# What is predicted of the memory that a rank is seen to have. On a processor that is all of its process, the
# host's tier included, whose memory is the same; on an accelerator it is that of tensors.


def _beside_bytes(prepared: PreparedRun, rank: int, stage: StageForecast) -> float:
    """What counts beyond the peak on a stage's device: the host's tier, and not what no tensor takes."""
    if prepared.machines.device != "cpu":
        return -stage.process_bytes
    # The most that the plan says a rank keeps on the host, if that is memory of its process that counts as
    # the device's.
    forecast, names = prepared.plan.forecast, prepared.plan.plan.rank_devices
    if forecast is None or not names:
        return 0.0
    cluster = prepared.machines.cluster
    device = cluster.devices()[cluster.number_of(names[rank][0])].device
    if device.kind != "cpu":
        return 0.0
    return sum(one.peak_bytes for one in forecast.tiers if (one.rank, one.tier) == (rank, "host"))


# What replicas that share an optimizer or weights have sent each other, beside what the plan said.


def _shared_document(run: RunFile, saved: SavedPlan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The bytes that all ranks have sent while they trained, since the run was started or resumed: weights
    that they make or keep for their replicas, and gradients to be summed. Predictions are None if the plan
    has none. Empty if nothing is shared.
    """
    if run.memory.shard == "none" or saved.plan.width == 1:
        return {}
    gathered = sum(one.own.gathered_bytes for one in outcomes)
    sent = sum(one.own.sent_sum_bytes for one in outcomes)
    times = first_of(outcomes).own.num_batches * (saved.plan.width // (run.sync.sites or 1))
    found = {
        "gathered_bytes": gathered,
        "predicted_gathered_bytes": _predicted(saved, lambda tier: tier.gathered_bytes, times),
        "summed_bytes": sent - gathered,
        "predicted_summed_bytes": _predicted(
            saved, lambda tier: tier.predicted_bytes_moved * (tier.tier == REPLICAS), times
        ),
    }
    return {"shared": found}


def _predicted(saved: SavedPlan, of: Callable[[TierForecast], float], times: int) -> float | None:
    """The sum over the tiers of a forecast in so many batches, all ranks of a replica together."""
    tiers = () if saved.forecast is None else saved.forecast.tiers
    return sum(map(of, tiers)) * times if tiers else None


# What a run that waits for its chunks says: which wire between tiers limits it, and how fast that was.

_LONG = 0.1
"""The share of the time for which ranks may wait for chunks without a word."""

_REMEDY = {
    "disk": "A faster disk, a larger memory.host or a larger memory.device would help",
    "host": "A larger memory.device would help",
}


def slow_tiers(plan: Plan, cluster: Cluster, outcomes: Sequence[Outcome]) -> list[str]:
    """One sentence about the rank that waits the longest, if any waits for long."""
    waiting = max(outcomes, key=lambda one: _waited_share(one.own.tiers), default=None)
    if waiting is None or _waited_share(waiting.own.tiers) < _LONG:
        return []
    rank, (device, *lower) = waiting.own.rank, waiting.own.tiers
    slowest = max(lower, key=lambda tier: tier.copied_s)
    if not slowest.copied_s:
        return []
    planned = rate_text(_planned(plan, cluster, rank, slowest.tier))
    measured = rate_text(slowest.copied_bytes / slowest.copied_s)
    return [
        f"Rank {rank} waited for chunks for {device.waited_s / device.window_s:.0%} of its "
        f"{device.window_s:.3g} s of training, and the {slowest.tier} is what limits: copies to and from it "
        f"ran at {measured}, where the plan counts on {planned}. {_REMEDY[slowest.tier]}."
    ]


def _waited_share(tiers: Sequence[TierMoves]) -> float:
    return tiers[0].waited_s / tiers[0].window_s if tiers and tiers[0].window_s else 0.0


def _planned(plan: Plan, cluster: Cluster, rank: int, tier: str) -> float:
    """The bytes per second that a plan counts on between a tier and the one above."""
    places = {device.name: index for index, device in enumerate(cluster.devices())}
    names = plan.process_devices
    used = [places[name] for name in names if name in places] or list(places.values())
    name = names[rank] if names else ""
    share = tier_share(cluster, places.get(name, rank), used)
    return share.disk_bytes_per_s if tier == "disk" else share.host_bytes_per_s


_FIGURES = (
    *("train_loss", "eval_loss", "eval_perplexity", "eval_bits_per_byte", "eval_loss_through_codecs"),
    *("tokens_per_s", "samples_per_s"),
)
"""What the document takes from the outcome of rank 0."""


def summary_of(
    prepared: PreparedRun, folder: RunFolder, outcomes: list[Outcome], sample: str
) -> dict[str, Any]:
    """The document of a run that has ended, from what its ranks report. JSON has no number that is not
    finite: such a loss is None.

    A bubble is the share of the time that a device waits, in the mean over all; updates are delayed, if the
    schedule delays them, after step `first_delayed_step`. `eval_loss` is that of the model as it is exported,
    without codecs on boundaries. `shares` and `membership` list the step from which each holds. Keys that
    have no meaning for a run are left out.
    """
    run, saved, own = prepared.run, prepared.plan, first_of(outcomes)
    plan, forecast, log = saved.plan, saved.forecast, _log(folder)
    shared = () if log is None else log.shares
    ranks = _ranks(prepared, outcomes)
    busy = [one.own.busy_share for one in outcomes if one.own.busy_share is not None]
    found = {
        "steps": own.steps,
        **{name: plain(getattr(own, name)) for name in _FIGURES},
        "predicted_batch_s": None if forecast is None else forecast.batch_s,
        "measured_batch_s": own.batch_s,
        "predicted_bubble": None if forecast is None else 1 - forecast.busy_share,
        "profile_spread": None if prepared.profile is None else prepared.profile.spread,
        "bubble": 1 - fmean(busy) if busy else None,
        "stages": _stages(prepared, outcomes),
        "ranks": ranks,
        "links": _links(prepared, outcomes),
        "control": _control(prepared, outcomes),
        "sync": _sync(prepared, outcomes, () if log is None else log.recoveries),
        "run_dir": str(folder.path),
        "schedule": plan.schedule,
        "first_delayed_step": first_delayed_step(run, saved),
        "model": run.model.source,
        "reason": own.reason,
        "num_skipped": own.num_skipped,
        "checkpoint": own.checkpoint,
        "sample": sample,
        "warnings": [
            *own.warnings,
            *idle_keys(run, plan),
            *idle_codec(run, plan),
            *slow_tiers(plan, prepared.machines.cluster, outcomes),
            *_kept(ranks, own),
            *_diverged(own),
        ],
        "learns": learns(run, prepared.data, prepared.graph),
        "shares": [{"step": one.step, "shares": one.shares} for one in shared],
        "membership": [] if own.sync is None else _membership(shared),
        **gradient_document(run, prepared.graph),
    }
    if prepared.census:
        counts = {server: one.num_samples for server, one in sorted(prepared.census.items())}
        found |= {"private_samples": counts, "placement": own.placement}
    if run.memory.is_on or plan.paging:
        of_ranks = sorted((one.own for one in outcomes), key=lambda one: one.rank)
        found["tiers"] = [{"rank": one.rank, **asdict(tier)} for one in of_ranks for tier in one.tiers]
    if run.has_copies(plan.width):
        sent_bytes = sum(one.own.copied_bytes for one in outcomes)
        found["second_copy"] = {"step": own.copied_step, "sent_bytes": sent_bytes}
    if forecast is not None and own.samples_per_s:
        joules = joules_per_sample(forecast.watts, own.samples_per_s)
        found |= {} if joules is None else {"joules_per_sample": joules}
    return found


def _log(folder: RunFolder) -> Metrics | None:
    """The log, which has the run's earlier starts too; None where it could not be written."""
    try:
        return read_metrics(folder.metrics)
    except (BiremeError, OSError):
        return None


def _sync(prepared: PreparedRun, outcomes: list[Outcome], recoveries: Sequence[Recovery]) -> dict[str, Any]:
    """What all ranks sent for sums of gradients, and what they would have sent without a codec. If replicas
    may die: epochs of the membership, rounds and samples that count, samples that were assigned again, and
    how long each replica took that was lost and is back, in all starts of the run.
    """
    figures = first_of(outcomes).sync
    none = dict.fromkeys(("epochs", "rounds", "samples_committed", "samples_redone"))
    return {
        "raw_bytes": sum(one.own.raw_sum_bytes for one in outcomes),
        "sent_bytes": sum(one.own.sent_sum_bytes for one in outcomes),
        **({"mode": "allreduce", **none} if figures is None else asdict(figures)),
        "recoveries": [asdict(one) for one in recoveries],
        **_shared_document(prepared.run, prepared.plan, outcomes),
    }


def _membership(shared: Sequence[Shared]) -> list[dict[str, Any]]:
    """Who met, or had samples where nobody meets, and where that changed."""
    found: list[dict[str, Any]] = []
    for one in shared:
        members = one.members or tuple(replica for replica, share in enumerate(one.shares) if share)
        if not found or found[-1]["members"] != members:
            found.append({"step": one.step, "members": members})
    return found


def _kept(ranks: Sequence[dict[str, Any]], own: Outcome) -> list[str]:
    """A sentence if replicas were away and what was held for them took more memory than was predicted."""
    if own.sync is None or own.sync.epochs < 2:
        return []
    over = [
        one
        for one in ranks
        if one["kept_bytes"] and (one["measured_peak_bytes"] or 0) > (one["predicted_peak_bytes"] or math.inf)
    ]
    most = max(over, key=lambda one: one["kept_bytes"], default=None)
    if most is None:
        return []
    held = f"Rank {most['rank']} held up to {bytes_text(most['kept_bytes'])} for replicas that were away or"
    return [
        f"{held} came back: sums of batches, and the snapshot that one of them got. The predicted memory is "
        "that of a run in which all replicas live."
    ]


def _diverged(own: Outcome) -> list[str]:
    """A sentence for each loss that is not finite."""
    losses = {"training": own.train_loss, "evaluation": own.eval_loss}
    return [
        f"The {name} loss is {value}: the model has diverged, or the data contain such numbers. Lower "
        "training.learning_rate, or check the data."
        for name, value in losses.items()
        if value is not None and not math.isfinite(value)
    ]


def _stages(prepared: PreparedRun, outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Each stage, with its first and last unit; of several replicas the largest figures count.

    Bytes and busy shares are those of its `rank` in the pipeline, which may have other stages too. A stage on
    several ranks counts as replicas of the first.
    """
    plan, forecast = prepared.plan.plan, prepared.plan.forecast
    source, names = plan.source, plan.process_devices
    bounds = (0, *plan.cuts, len(units_of(prepared.graph)))
    alike = {ranks[0]: ranks for ranks in source.routes.alike(plan.width)}
    found = []
    for stage, rank in enumerate(source.rank_of_stage):
        of_rank = [one.own for one in outcomes if one.own.rank in alike[rank]]
        peak_bytes = predicted_share = None
        if forecast is not None:
            promised = forecast.stages[stage]
            peak_bytes = promised.peak_bytes + _beside_bytes(prepared, rank, promised)
            of_stages = zip(forecast.stages, source.rank_of_stage, strict=True)
            predicted_share = sum(one.busy_s for one, of in of_stages if of == rank) / forecast.batch_s
        found.append(
            {
                "units": (bounds[stage], bounds[stage + 1] - 1),
                "rank": rank,
                "device": ", ".join(names[one] for one in alike[rank]) if names else "",
                "predicted_peak_bytes": peak_bytes,
                "measured_peak_bytes": _largest(one.peak_bytes for one in of_rank),
                "busy_share": _largest(one.busy_share for one in of_rank),
                "predicted_busy_share": predicted_share,
            }
        )
    return found


def _largest(values: Iterable[float | None]) -> float | None:
    return max((one for one in values if one is not None), default=None)


def _ranks(prepared: PreparedRun, outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """The memory of each process, replicas counted. `kept_bytes` of it is the most that it held at a time for
    replicas that were late, away or coming back.
    """
    plan, forecast = prepared.plan.plan, prepared.plan.forecast
    program = plan.program(1)
    found = []
    for own in sorted((one.own for one in outcomes), key=lambda own: own.rank):
        replica, rank = divmod(own.rank, program.num_ranks)
        promised = None
        if forecast is not None:
            number = program.stages_of(rank)[0]
            stage, ranks = forecast.stages[number], program.routes.ranks_of(number)
            _, promised, _ = list(stage.bytes_of_devices())[replica * len(ranks) + ranks.index(rank)]
            promised += _beside_bytes(prepared, rank, stage)
        found.append(
            {
                "rank": own.rank,
                "predicted_peak_bytes": promised,
                "measured_peak_bytes": own.peak_bytes,
                "kept_bytes": own.kept_bytes,
            }
        )
    return found


def _links(prepared: PreparedRun, outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """The boundaries between ranks, replicas together: the codecs in the middle of the run, and the bytes of
    all messages in both directions, without a codec and as they were sent.
    """
    plan = prepared.plan.plan
    ranks = plan.source.rank_of_stage
    sent = [link for one in outcomes for link in one.own.links]
    return [
        {
            "from_stage": boundary,
            "to_stage": boundary + 1,
            "forward": codecs.forward,
            "backward": codecs.backward,
            "raw_bytes": sum(link.raw_bytes for link in sent if link.boundary == boundary),
            "sent_bytes": sum(link.sent_bytes for link in sent if link.boundary == boundary),
        }
        for boundary, codecs in enumerate(main_codecs(prepared.run, plan))
        if ranks[boundary] != ranks[boundary + 1]
    ]


def _control(prepared: PreparedRun, outcomes: list[Outcome]) -> dict[str, float] | None:
    """The same piece of work when the model was profiled and, in the median over the ranks, while it trained.
    `speed` is that of the machine while training, relative to when it was profiled. One rank that waited long
    for a core would spoil a mean.
    """
    engine = None if prepared.profile is None else prepared.profile.engine
    took_s = [one.own.control_s for one in outcomes if one.own.control_s]
    if engine is None or not engine.control_s or not took_s:
        return None
    measured_s = median(took_s)
    speed = engine.control_s / measured_s
    return {"profiled_s": engine.control_s, "measured_s": measured_s, "speed": speed}
