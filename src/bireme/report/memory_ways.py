"""Paging in the table of a plan: what each tier of a rank does, and what other ways to save memory take."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from bireme.bounds import bytes_text
from bireme.plan.forecast import Answer, Candidate
from bireme.plan.search.stage_memory import PagedStageMemory
from bireme.plan.summary import summarize
from bireme.report.columns import columns
from bireme.report.units import seconds_text
from bireme.schedule.instruction import Item

__all__ = ["stages_table", "tiers_table", "ways_table"]


def tiers_table(best: Candidate) -> Table:
    """What each tier holds and takes in, and how long the rank waits for chunks, or for weights that replicas
    share.
    """
    headings = ("rank", "tier", "budget", "peak", "copied in a batch", "chunk", "waits a batch")
    table = columns(headings, words=("tier",))
    chunk_bytes = () if best.plan.paging is None else best.plan.paging.chunk_bytes
    for tier in best.forecast.tiers:
        is_first = tier.tier == "device"
        table.add_row(
            str(tier.rank) if is_first else "",
            tier.tier,
            "" if tier.budget_bytes is None else bytes_text(tier.budget_bytes),
            bytes_text(tier.peak_bytes),
            bytes_text(tier.predicted_bytes_moved),
            bytes_text(chunk_bytes[tier.rank]) if is_first and chunk_bytes else "",
            seconds_text(tier.waited_s) if is_first else "",
        )
    return table


def stages_table(stages: Sequence[PagedStageMemory]) -> Table:
    """What each stage copies in a batch, and what recomputation takes or would take."""
    items = [item for item in Item if any(item in stage.copied_bytes for stage in stages)]
    table = columns(
        ("stage", "rank", *items, "copies take", "recomputes", "that takes"), words=("recomputes",)
    )
    for one in stages:
        table.add_row(
            str(one.stage),
            str(one.rank),
            *(bytes_text(one.copied_bytes.get(item, 0)) for item in items),
            seconds_text(one.copies_s),
            "yes" if one.recomputes else "no",
            seconds_text(one.recompute_s),
            style=None if one.recomputes or one.copied_bytes else "dim",
        )
    return table


def ways_table(answer: Answer) -> Table:
    """What each way to live with the memory would take."""
    headings = ("memory", "schedule", "shape", "parts", "sweep", "again", "a batch", "cost")
    table = columns(headings, words=("memory", "schedule"), wrapped=("memory",))
    for way in answer.memory_ways:
        if way.candidate is None:
            table.add_row(escape(way.words), "none", style="dim")
            continue
        plan, short = way.candidate.plan, summarize(way.candidate)
        table.add_row(
            escape(way.words),
            plan.schedule,
            f"{short.depth}×{short.width}, {short.num_microbatches}×{max(short.micro_batch_sizes)}",
            str(short.num_stages // short.depth),
            str(plan.sweep),
            str(short.num_recomputed),
            seconds_text(short.batch_s),
            seconds_text(short.cost_s_per_sample),
            style="bold" if way.candidate is answer.best else None,
        )
    return table
