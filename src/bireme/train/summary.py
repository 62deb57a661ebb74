"""The summary of a run: measured and predicted figures, as the final document."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from bireme.bounds import bytes_text, rate_text
from bireme.cluster.cluster import Cluster
from bireme.cluster.tiers import tier_share
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
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
    return _host_tier_bytes(prepared, rank)


def _host_tier_bytes(prepared: PreparedRun, rank: int) -> float:
    """The most that the plan says a rank of a pipeline keeps on the host, if that is memory of its process
    that counts as the device's.
    """
    forecast, names = prepared.plan.forecast, prepared.plan.plan.rank_devices
    if forecast is None or not names:
        return 0.0
    cluster = prepared.machines.cluster
    device = cluster.devices()[cluster.number_of(names[rank][0])].device
    if device.kind != "cpu":
        return 0.0
    return sum(one.peak_bytes for one in forecast.tiers if (one.rank, one.tier) == (rank, "host"))


# What replicas that share an optimizer or weights have sent each other, beside what the plan said.


@dataclass(frozen=True, slots=True)
class _SharedSummary:
    """What all ranks have sent while they trained, since the run was started or resumed: weights that they
    make or keep for their replicas, and gradients to be summed. Predictions are None where the plan has none.
    """

    gathered_bytes: int
    predicted_gathered_bytes: float | None
    summed_bytes: int
    predicted_summed_bytes: float | None


def _shared_summary(run: RunFile, saved: SavedPlan, outcomes: Sequence[Outcome]) -> _SharedSummary | None:
    """That of a run; None where nothing is shared."""
    if run.memory.shard == "none" or saved.plan.width == 1:
        return None
    gathered = sum(one.own.gathered_bytes for one in outcomes)
    sent = sum(one.own.sent_sum_bytes for one in outcomes)
    times = first_of(outcomes).own.num_batches * (saved.plan.width // (run.sync.sites or 1))
    return _SharedSummary(
        gathered,
        _predicted(saved, lambda tier: tier.gathered_bytes, times),
        sent - gathered,
        _predicted(saved, lambda tier: tier.predicted_bytes_moved * (tier.tier == REPLICAS), times),
    )


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


@dataclass(frozen=True, slots=True)
class _StageSummary:
    """One stage. `units` are its first and last; of several replicas the largest figures count.

    Bytes and busy shares are those of its `rank` in the pipeline, which may have other stages too. A stage on
    several ranks counts as replicas of the first.
    """

    units: tuple[int, int]
    rank: int
    device: str
    predicted_peak_bytes: float | None
    measured_peak_bytes: int | None
    busy_share: float | None
    predicted_busy_share: float | None


@dataclass(frozen=True, slots=True)
class _RankSummary:
    """The memory of one process, replicas counted. `kept_bytes` of it is the most that it held at a time for
    replicas that were late, away or coming back.
    """

    rank: int
    predicted_peak_bytes: float | None
    measured_peak_bytes: int | None
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _ControlSummary:
    """The same piece of work when the model was profiled and, in the mean over the ranks, while it trained.

    `speed` is that of the machine while training, relative to when it was profiled.
    """

    profiled_s: float
    measured_s: float
    speed: float


@dataclass(frozen=True, slots=True)
class _ShareSummary:
    """The samples of a batch that each replica trained, from a step on."""

    step: int
    shares: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _SyncSummary:
    """What all ranks sent for sums of gradients, and what they would have sent without a codec. Where
    replicas may die: the epochs of their membership, rounds and samples that count, and samples that were
    dealt again. `shared`, in the document where replicas share an optimizer or weights, says which bytes are
    which.
    """

    raw_bytes: int
    sent_bytes: int
    mode: str = "allreduce"
    epochs: int | None = None
    rounds: int | None = None
    samples_committed: int | None = None
    samples_redone: int | None = None
    recoveries: tuple[Recovery, ...] = ()
    """How long each replica took that was lost and is back, in all starts of the run."""
    shared: _SharedSummary | None = None


@dataclass(frozen=True, slots=True)
class _MembershipSummary:
    """The replicas that had a part in the batches from a step on."""

    step: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _CopySummary:
    """The newest second copy: its step, None if none was whole, and what all ranks sent to other hosts."""

    step: int | None
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class _LinkSummary:
    """A boundary between two stages: its codecs in the middle of the run, and the bytes of all its messages
    in both directions, without a codec and as they were sent.
    """

    from_stage: int
    to_stage: int
    forward: str
    backward: str
    raw_bytes: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class _TierSummary:
    """A tier of a rank that pages: the most that its chunks took of it, and the bytes that were copied into
    it while training, by the program and as measured. A budget of None is no limit. What follows is as in
    `TierMoves`.
    """

    rank: int
    tier: str
    budget_bytes: int | None
    peak_bytes: int
    predicted_bytes_moved: int
    bytes_moved: int
    copied_bytes: int
    copied_s: float
    waited_s: float
    window_s: float


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The whole of a run. A bubble is the share of the time that a device waits, in the mean over all;
    updates are delayed, if the schedule delays them, after step `first_delayed_step`. There are `shares`
    where there are replicas. `eval_loss` is that of the model as it is exported, without codecs on
    boundaries.
    """

    steps: int
    train_loss: float | None
    eval_loss: float | None
    eval_perplexity: float | None
    eval_bits_per_byte: float | None
    eval_loss_through_codecs: float | None
    tokens_per_s: float | None
    samples_per_s: float | None
    predicted_batch_s: float | None
    measured_batch_s: float | None
    predicted_bubble: float | None
    profile_spread: float | None
    bubble: float | None
    stages: tuple[_StageSummary, ...]
    ranks: tuple[_RankSummary, ...]
    links: tuple[_LinkSummary, ...]
    control: _ControlSummary | None
    sync: _SyncSummary
    run_dir: str
    schedule: str
    first_delayed_step: int
    model: str
    reason: str
    num_skipped: int
    checkpoint: int | None
    sample: str
    warnings: tuple[str, ...]
    learns: Mapping[str, Any] = field(default_factory=dict)
    """What the run learns from; see `learns`."""
    shares: tuple[_ShareSummary, ...] = ()
    membership: tuple[_MembershipSummary, ...] = ()
    """How that changed, where replicas may die."""
    private_samples: Mapping[str, int] = field(default_factory=dict)
    """How many private samples each server holds."""
    placement: Mapping[str, Any] | None = None
    """What an epoch takes of them and of public ones; both are in the document where there are any."""
    tiers: tuple[_TierSummary, ...] | None = None
    """In the document where anything may be paged; empty if all has fitted."""
    second_copy: _CopySummary | None = None
    """In the document where the run has second copies."""
    joules_per_sample: float | None = None
    """By the watts of the devices, in the document where they are known."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """What is kept of gradients, where they are not whole; see `kept_gradients`."""

    def document(self) -> dict[str, Any]:
        """In the words of JSON, which has no number that is not finite: such a loss is null."""
        names = (*_LOSSES, "eval_perplexity", "eval_bits_per_byte", "eval_loss_through_codecs")
        found = asdict(self) | {name: _finite(getattr(self, name)) for name in names}
        found |= found.pop("kept")
        if not self.private_samples:
            del found["private_samples"], found["placement"]
        if self.sync.shared is None:
            del found["sync"]["shared"]
        for name in ("tiers", "second_copy", "joules_per_sample"):
            if found[name] is None:
                del found[name]
        return found

    def write(self, path: Path) -> None:
        """Into a file: whole, or not at all."""
        write_text_atomically(path, json.dumps(self.document(), ensure_ascii=False, indent=1) + "\n")


def summary_of(prepared: PreparedRun, folder: RunFolder, outcomes: list[Outcome], sample: str) -> RunSummary:
    """The summary of a run from what its ranks tell."""
    own = first_of(outcomes)
    saved = prepared.plan
    forecast, log = saved.forecast, _log(folder)
    shared = () if log is None else log.shares
    return RunSummary(
        steps=own.steps,
        train_loss=own.train_loss,
        eval_loss=own.eval_loss,
        eval_perplexity=own.eval_perplexity,
        eval_bits_per_byte=own.eval_bits_per_byte,
        eval_loss_through_codecs=own.eval_loss_through_codecs,
        tokens_per_s=own.tokens_per_s,
        samples_per_s=own.samples_per_s,
        predicted_batch_s=None if forecast is None else forecast.batch_s,
        measured_batch_s=own.batch_s,
        predicted_bubble=None if forecast is None else 1 - forecast.busy_share,
        profile_spread=None if prepared.profile is None else prepared.profile.spread,
        bubble=_bubble(outcomes),
        stages=_stages(prepared, outcomes),
        ranks=_ranks(prepared, outcomes),
        links=_links(prepared, outcomes),
        control=_control(prepared, outcomes),
        sync=_sync(prepared, outcomes, () if log is None else tuple(log.recoveries)),
        run_dir=str(folder.path),
        schedule=saved.plan.schedule,
        first_delayed_step=first_delayed_step(prepared.run, saved),
        model=prepared.run.model.source,
        reason=own.reason,
        num_skipped=own.num_skipped,
        checkpoint=own.checkpoint,
        sample=sample,
        warnings=(
            *own.warnings,
            *idle_keys(prepared.run, saved.plan),
            *idle_codec(prepared.run, saved.plan),
            *slow_tiers(saved.plan, prepared.machines.cluster, outcomes),
            *_kept(_ranks(prepared, outcomes), own),
            *_diverged(own),
        ),
        learns=learns(prepared.run, prepared.data, prepared.graph),
        shares=tuple(_ShareSummary(one.step, one.shares) for one in shared),
        membership=() if own.sync is None else _membership(shared),
        private_samples={server: one.num_samples for server, one in sorted(prepared.census.items())},
        placement=own.placement,
        tiers=_tiers(outcomes) if prepared.run.memory.is_on or saved.plan.paging else None,
        second_copy=_second_copy(prepared, outcomes),
        joules_per_sample=_joules(prepared, own),
        kept=gradient_document(prepared.run, prepared.graph),
    )


def _second_copy(prepared: PreparedRun, outcomes: list[Outcome]) -> _CopySummary | None:
    if not prepared.run.has_copies(prepared.plan.plan.width):
        return None
    return _CopySummary(first_of(outcomes).copied_step, sum(one.own.copied_bytes for one in outcomes))


def _log(folder: RunFolder) -> Metrics | None:
    """The log, which has the run's earlier starts too; None where it could not be written."""
    try:
        return read_metrics(folder.metrics)
    except (BiremeError, OSError):
        return None


def _sync(prepared: PreparedRun, outcomes: list[Outcome], recoveries: tuple[Recovery, ...]) -> _SyncSummary:
    raw_bytes = sum(one.own.raw_sum_bytes for one in outcomes)
    sent_bytes = sum(one.own.sent_sum_bytes for one in outcomes)
    figures = first_of(outcomes).sync
    shared = _shared_summary(prepared.run, prepared.plan, outcomes)
    found = {} if figures is None else asdict(figures)
    return _SyncSummary(raw_bytes, sent_bytes, **found, recoveries=recoveries, shared=shared)


def _membership(shared: Sequence[Shared]) -> tuple[_MembershipSummary, ...]:
    """Who met, or had samples where nobody meets, and where that changed."""
    found: list[_MembershipSummary] = []
    for one in shared:
        members = one.members or tuple(replica for replica, share in enumerate(one.shares) if share)
        if not found or found[-1].members != members:
            found.append(_MembershipSummary(one.step, members))
    return tuple(found)


def _joules(prepared: PreparedRun, own: Outcome) -> float | None:
    forecast = prepared.plan.forecast
    if forecast is None or not own.samples_per_s:
        return None
    return joules_per_sample(forecast.watts, own.samples_per_s)


def _bubble(outcomes: list[Outcome]) -> float | None:
    shares = [one.own.busy_share for one in outcomes if one.own.busy_share is not None]
    return 1 - fmean(shares) if shares else None


_LOSSES = ("train_loss", "eval_loss")


def _kept(ranks: Sequence[_RankSummary], own: Outcome) -> list[str]:
    """A sentence if replicas were away and what was held for them took more memory than was predicted."""
    if own.sync is None or own.sync.epochs < 2:
        return []
    over = [
        one
        for one in ranks
        if one.kept_bytes and (one.measured_peak_bytes or 0) > (one.predicted_peak_bytes or math.inf)
    ]
    most = max(over, key=lambda one: one.kept_bytes, default=None)
    if most is None:
        return []
    return [
        f"Rank {most.rank} held up to {bytes_text(most.kept_bytes)} for replicas that were away or came "
        "back: sums of batches, and the snapshot that one of them got. The predicted memory is that of a run "
        "in which all replicas live."
    ]


def _diverged(own: Outcome) -> list[str]:
    """A sentence for each loss that is not finite."""
    names = {"train_loss": "training", "eval_loss": "evaluation"}
    return [
        f"The {names[name]} loss is {value}: the model has diverged, or the data contain such numbers. Lower "
        "training.learning_rate, or check the data."
        for name in _LOSSES
        if (value := getattr(own, name)) is not None and not math.isfinite(value)
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _stages(prepared: PreparedRun, outcomes: list[Outcome]) -> tuple[_StageSummary, ...]:
    plan, forecast = prepared.plan.plan, prepared.plan.forecast
    source = plan.source
    bounds = (0, *plan.cuts, len(units_of(prepared.graph)))
    alike = {ranks[0]: ranks for ranks in source.routes.alike(plan.width)}
    names = plan.process_devices
    found = []
    for stage, rank in enumerate(source.rank_of_stage):
        of_rank = [one.own for one in outcomes if one.own.rank in alike[rank]]
        peaks = [one.peak_bytes for one in of_rank if one.peak_bytes is not None]
        shares = [one.busy_share for one in of_rank if one.busy_share is not None]
        promised = None if forecast is None else forecast.stages[stage]
        found.append(
            _StageSummary(
                units=(bounds[stage], bounds[stage + 1] - 1),
                rank=rank,
                device=", ".join(names[one] for one in alike[rank]) if names else "",
                predicted_peak_bytes=None
                if promised is None
                else promised.peak_bytes + _beside_bytes(prepared, rank, promised),
                measured_peak_bytes=max(peaks, default=None),
                busy_share=max(shares, default=None),
                predicted_busy_share=None
                if forecast is None
                else sum(
                    one.busy_s
                    for one, of in zip(forecast.stages, source.rank_of_stage, strict=True)
                    if of == rank
                )
                / forecast.batch_s,
            )
        )
    return tuple(found)


def _ranks(prepared: PreparedRun, outcomes: list[Outcome]) -> tuple[_RankSummary, ...]:
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
        found.append(_RankSummary(own.rank, promised, own.peak_bytes, own.kept_bytes))
    return tuple(found)


def _links(prepared: PreparedRun, outcomes: list[Outcome]) -> tuple[_LinkSummary, ...]:
    """The boundaries between ranks, replicas together."""
    plan = prepared.plan.plan
    ranks = plan.source.rank_of_stage
    sent = [link for one in outcomes for link in one.own.links]
    found = []
    for boundary, codecs in enumerate(main_codecs(prepared.run, plan)):
        own = [link for link in sent if link.boundary == boundary]
        if ranks[boundary] != ranks[boundary + 1]:
            raw_bytes, sent_bytes = sum(link.raw_bytes for link in own), sum(link.sent_bytes for link in own)
            words = codecs.forward, codecs.backward
            found.append(_LinkSummary(boundary, boundary + 1, *words, raw_bytes, sent_bytes))
    return tuple(found)


def _tiers(outcomes: list[Outcome]) -> tuple[_TierSummary, ...]:
    of_ranks = sorted((one.own for one in outcomes), key=lambda own: own.rank)
    return tuple(_TierSummary(own.rank, **asdict(tier)) for own in of_ranks for tier in own.tiers)


def _control(prepared: PreparedRun, outcomes: list[Outcome]) -> _ControlSummary | None:
    engine = None if prepared.profile is None else prepared.profile.engine
    took_s = [one.own.control_s for one in outcomes if one.own.control_s]
    if engine is None or not engine.control_s or not took_s:
        return None
    return _ControlSummary(engine.control_s, fmean(took_s), engine.control_s / fmean(took_s))
