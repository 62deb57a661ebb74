"""Timelines as JSON documents, for programs that read what the command line found."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from bireme.simulate.comparison import Lookahead, ScheduleOutcome
from bireme.timeline.timeline import Timeline, pace


def timeline_document(timeline: Timeline, advice: Lookahead | None = None) -> dict[str, Any]:
    """A timeline in numbers: the window, the ranks, the links, what set the pace, what would help."""
    program = timeline.program
    return {
        "schedule": program.name,
        "rule": program.rule,
        "num_stages": program.num_stages,
        "num_microbatches": program.num_microbatches,
        "num_batches": program.num_batches,
        "num_sliced": program.num_sliced,
        "num_instructions": program.num_instructions,
        **_window(timeline),
        "ranks": [
            {
                "rank": rank.rank,
                "stages": program.stages_of(rank.rank),
                "busy_s": rank.busy_s,
                "peak_bytes": kept.peak_bytes,
                "at_peak_bytes": kept.at_peak,
                "peak_stashed_microbatches": kept.peak_stashed_microbatches,
                "weight_versions": kept.weight_versions,
                "receive_buffers": kept.receive_buffers,
            }
            for rank, kept in zip(timeline.ranks, timeline.memory, strict=True)
        ],
        "links": [
            {
                "source": transfers.source,
                "destination": transfers.destination,
                "num_messages": len(transfers.start_s),
                "num_bytes": sum(transfers.num_bytes),
            }
            for transfers in timeline.transfers
            if not transfers.is_sync
        ],
        "pace": [asdict(part) for part in pace(timeline)],
        "advice": None if advice is None else _advice(advice),
        **({"tiers": list(_tiers(timeline)), "chunks": list(_chunks(timeline))} if program.tiers else {}),
    }


def _tiers(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Each tier of the ranks that page; bytes moved are those that are copied into it during the window."""
    for kept in timeline.memory:
        for tier in kept.tiers:
            yield {
                "rank": kept.rank,
                "tier": tier.name,
                "budget_bytes": tier.budget_bytes,
                "peak_bytes": tier.peak_bytes,
                "predicted_bytes_moved": tier.copied_in_bytes,
            }


def _chunks(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for moved in timeline.paging:
        tiers = timeline.program.tiers_of(moved.rank)
        if tiers is not None:
            yield {
                "rank": moved.rank,
                "chunk_bytes": tiers.chunk_bytes,
                "num_copies": sum(len(copies.start_s) for copies in moved.copies),
                "waited_s": moved.waited_s,
                **({"host_updates": sorted(tiers.host_updates)} if tiers.host_updates else {}),
            }


def comparison_document(contenders: Iterable[ScheduleOutcome]) -> dict[str, Any]:
    """All schedules compared; one that cannot run in this shape says why."""
    rows: list[dict[str, Any]] = []
    for contender in contenders:
        row: dict[str, Any] = {
            "schedule": contender.schedule.name,
            "rule": contender.schedule.rule,
            "refused": contender.refused,
            "advice": None if contender.advice is None else _advice(contender.advice),
        }
        if contender.timeline is not None:
            memory = contender.timeline.memory
            row |= _window(contender.timeline) | {
                "peak_bytes": max(kept.peak_bytes for kept in memory),
                "peak_stashed_microbatches": max(kept.peak_stashed_microbatches for kept in memory),
                "weight_versions": max(kept.weight_versions for kept in memory),
                "receive_buffers": max(kept.receive_buffers for kept in memory),
            }
        rows.append(row)
    return {"comparison": rows}


def _advice(advice: Lookahead) -> dict[str, float]:
    return {"lookahead": advice.lookahead, "steady_batch_s": advice.steady_batch_s}


def _window(timeline: Timeline) -> dict[str, float]:
    return {
        "makespan_s": timeline.makespan_s,
        "steady_batch_s": timeline.steady_batch_s,
        "bubble_fraction": timeline.bubble_fraction,
        "steady_bubble_fraction": timeline.steady_bubble_fraction,
    }
