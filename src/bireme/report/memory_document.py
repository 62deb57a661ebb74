"""Memory behavior as a JSON document, for programs that read what the command line found."""

from dataclasses import asdict
from typing import Any

from bireme.profile.behavior import Behavior, Idle, MemoryBlock, idle_intervals, percentile
from bireme.profile.swapping import BlockPaging, SwapPlan
from bireme.report.memory_table import PUBLISHED

_PERCENTS = (10, 25, 50, 75, 90, 99, 100)


def memory_document(
    behavior: Behavior, alone: SwapPlan, in_turn: SwapPlan, paging: BlockPaging | None
) -> dict[str, Any]:
    """Everything about the iteration: its peak, its blocks, how it repeats, what can be swapped.

    `alone` gives each block the link for itself; `in_turn` lets copies wait for each other.
    """
    peak, repetition = behavior.peak, behavior.repetition
    intervals = idle_intervals(behavior)
    return {
        "device": behavior.device,
        "duration_s": behavior.duration_s,
        "traced_s": behavior.traced_s,
        "phases": [asdict(span) for span in behavior.spans],
        "peak_bytes": peak.num_bytes,
        "peak_at_s": peak.at_s,
        "peak_phase": peak.phase,
        "peak_operator": peak.operator,
        "by_owner": {owner.value: num_bytes for owner, num_bytes in behavior.by_owner().items()},
        "num_events": behavior.num_events,
        "num_iterations": repetition.num_iterations,
        "iteration_stable": repetition.is_stable,
        "period_events": repetition.period_events,
        "intervals": _intervals(intervals),
        **_swapping(alone),
        "swappable_bytes_in_turn": in_turn.saved_bytes,
        "paging": None if paging is None else asdict(paging),
        "published": [asdict(figure) for figure in PUBLISHED],
        "allocator": None if behavior.allocator is None else asdict(behavior.allocator),
        "blocks": _blocks(behavior, intervals),
    }


def _intervals(intervals: list[Idle]) -> dict[str, Any]:
    if not intervals:
        return {"count": 0, "percentiles_s": {}, "percentiles_events": {}}
    seconds = [idle.seconds for idle in intervals]
    events = [idle.num_events for idle in intervals]
    return {
        "count": len(intervals),
        "percentiles_s": {str(percent): percentile(seconds, percent) for percent in _PERCENTS},
        "percentiles_events": {str(percent): percentile(events, percent) for percent in _PERCENTS},
    }


def _swapping(plan: SwapPlan) -> dict[str, Any]:
    return {
        "out_bytes_per_s": plan.bandwidth.out_bytes_per_s,
        "in_bytes_per_s": plan.bandwidth.in_bytes_per_s,
        "num_swappable_intervals": plan.num_feasible,
        "num_swappable_blocks": plan.num_swappable_blocks,
        "swappable_block_bytes": plan.swappable_block_bytes,
        "swappable_bytes": plan.saved_bytes,
        "swapped_peak_bytes": plan.peak_bytes,
        "swaps": [
            {
                "block": swap.idle.block.id,
                "bytes": swap.idle.block.num_bytes,
                "idle_from_s": swap.idle.start_s,
                "idle_until_s": swap.idle.end_s,
                "away_from_s": swap.out_s,
                "away_until_s": swap.in_s,
            }
            for swap in plan.swaps
        ],
    }


def _blocks(behavior: Behavior, intervals: list[Idle]) -> list[dict[str, Any]]:
    longest_s: dict[int, float] = {}
    for idle in intervals:
        longest_s[idle.block.id] = max(idle.seconds, longest_s.get(idle.block.id, 0.0))
    return [
        _block(block, longest_s.get(block.id, 0.0), lives_at_peak=block.lives_after(behavior.peak.event))
        for block in behavior.blocks
    ]


def _block(block: MemoryBlock, longest_idle_s: float, *, lives_at_peak: bool) -> dict[str, Any]:
    return {
        "id": block.id,
        "bytes": block.num_bytes,
        "owner": block.owner,
        "name": block.name or None,
        "module": block.module or None,
        "address": block.address,
        "birth_s": block.birth_s,
        "birth_operator": block.birth_operator or None,
        "birth_phase": block.birth_phase,
        "death_s": block.death_s,
        "lives_at_peak": lives_at_peak,
        "longest_idle_s": longest_idle_s,
        "num_accesses": len(block.accesses),
        "accesses": [asdict(access) for access in block.accesses],
    }
