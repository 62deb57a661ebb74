"""Flows that meet on lanes: how fast each of them goes when all want to go as fast as they can.

Rates are max-min fair: the lane with the least for each of its flows settles their rates, then the next
one. This is a moment, without messages or time; a network in time is for who simulates.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

__all__ = ["fair_rates"]

Lane = TypeVar("Lane", bound=Hashable)


def fair_rates(paths: Sequence[Sequence[Lane]], capacity: Mapping[Lane, float]) -> list[float]:
    """The bytes a second of each flow; infinite where it crosses no lane."""
    rates = [math.inf] * len(paths)
    on_lane: dict[Lane, list[int]] = {}
    for flow, path in enumerate(paths):
        for lane in dict.fromkeys(path):
            on_lane.setdefault(lane, []).append(flow)
    room = {lane: capacity[lane] for lane in on_lane}
    waiting = {lane: len(flows) for lane, flows in on_lane.items()}
    while waiting:
        scarcest = min(waiting, key=lambda lane: room[lane] / waiting[lane])
        rate = room[scarcest] / waiting[scarcest]
        if rate == math.inf:
            break
        for flow in on_lane[scarcest]:
            if rates[flow] < math.inf:
                continue
            rates[flow] = rate
            for lane in dict.fromkeys(paths[flow]):
                room[lane] = max(room[lane] - rate, 0.0)
                waiting[lane] -= 1
        waiting = {lane: count for lane, count in waiting.items() if count}
    return rates
