"""The pipeline of a rank, from its run file and its plan; two of them if the run has a delay warm-up."""

from dataclasses import replace
from pathlib import Path

import torch

from bireme.model.graph import Graph
from bireme.model.graph_file import load_graph
from bireme.plan.plan_file import SavedPlan
from bireme.runtime.balancer import Sharing
from bireme.runtime.paging.settings import PagingSettings
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.prepared import Weights
from bireme.train.averaging_replica import AveragingReplica
from bireme.train.delay_warmup import flush_twin
from bireme.train.initial_weights import placeholders
from bireme.train.link_codecs import link_codecs
from bireme.train.loop import ScheduleSwitch
from bireme.train.optimizer import optimizer_of
from bireme.train.rank_part import RankPart
from bireme.train.rates import rate_factor
from bireme.train.shares import mode_of, sharing_of

__all__ = ["pipelines_of"]


def pipelines_of(
    part: RankPart, saved: SavedPlan, *, step: int, first_delayed_step: int
) -> tuple[Pipeline, ScheduleSwitch | None]:
    """The pipeline for the steps after `step`, and the schedule switch, if there is one."""
    twin = flush_twin(saved.plan) if step < first_delayed_step else None
    if twin is None:
        return _pipeline(part, saved), None
    return _pipeline(part, replace(saved, plan=twin)), ScheduleSwitch(
        first_delayed_step, lambda: _pipeline(part, saved)
    )


def _pipeline(part: RankPart, plan: SavedPlan) -> Pipeline:
    run, world, graph = part.run, part.world, load_graph(part.folder.graph)
    lr, averaging = rate_factor(run.training), None
    if isinstance(part.member, AveragingReplica):
        lr, averaging = part.member.rate(lr), part.member.averaging
    return Pipeline(
        graph,
        plan,
        world,
        weights=_weights(part, graph),
        optimizer=optimizer_of(run.training),
        evaluation=load_graph(part.folder.evaluation_graph),
        clip_norm=run.training.clip_norm or None,
        lr=lr,
        seed=run.training.seed,
        device=world.device,
        bank_dtype=torch.bfloat16 if run.model.dtype == "bfloat16" else None,
        compile=run.model.compile,
        sharing=_sharing(part, plan),
        reads_apart=bool(part.start.census),
        sum_codec=run.sync.codec,
        gradient=run.training.gradient,
        gradient_of=run.training.gradient_of,
        codecs=link_codecs(run, plan.plan),
        shard=run.memory.shard,
        paging=PagingSettings(None if run.memory.disk is None else Path(run.memory.disk)),
        agreement=None if part.member is None else part.member.agreement,
        averaging=averaging,
    )


def _weights(part: RankPart, graph: Graph) -> Weights:
    """The weights to make the stages with. If a checkpoint or another replica gives them later, a function of
    the user is not called for them again.
    """
    if not part.model.is_made:
        return part.model.weights(graph)
    if part.start.checkpoint is not None or (part.order is not None and part.order.is_empty):
        return placeholders(graph)
    return part.model.weights(graph, kept=part.folder.initial)


def _sharing(part: RankPart, saved: SavedPlan) -> Sharing | None:
    """How batches are shared out. Where nothing follows, nothing is read for it."""
    if part.member is not None or mode_of(part.run, saved.plan, part.cluster) == "off":
        return None
    return sharing_of(part.run, saved, part.cluster, part.profile, part.samples)
