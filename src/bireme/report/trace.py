"""A timeline as a Chrome trace, to walk through at https://ui.perfetto.dev or chrome://tracing.

Each rank is a process: a thread for what it computes, one for each rank it gets messages from or sends to,
one for its gradient sync, and a counter of its memory. Arrows lead from a send to its receive. The file is
written event by event, so a long timeline takes no more memory than it has already.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from bireme.files import write_chunks_atomically
from bireme.schedule.grid import NAMES, label
from bireme.schedule.instruction import COMPUTE, Instruction, Kind
from bireme.schedule.program import Program
from bireme.timeline.timeline import BUSY, RankTimeline, Timeline, Transfers

__all__ = ["write_trace"]

Event = dict[str, Any]

COLOURS = (
    "rail_response",
    "rail_animation",
    "rail_idle",
    "rail_load",
    "thread_state_runnable",
    "thread_state_iowait",
)
"""Names of colours that chrome://tracing knows, one for each batch in turn; Perfetto takes its own."""

COMPUTE_THREAD = 0
SYNC_THREAD = 1
RECEIVE_THREADS = 10
EVENTS_A_CHUNK = 1000


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace; it has memory in it where the timeline kept the series."""
    write_chunks_atomically(path, _chunks(_events(timeline)))


def _chunks(events: Iterator[Event]) -> Iterator[bytes]:
    yield b'{"displayTimeUnit": "ms", "traceEvents": [\n'
    separator = b""
    while batch := list(islice(events, EVENTS_A_CHUNK)):
        yield separator + ",\n".join(json.dumps(event, separators=(",", ":")) for event in batch).encode()
        separator = b",\n"
    yield b"\n]}\n"


def _events(timeline: Timeline) -> Iterator[Event]:
    for rank in timeline.ranks:
        yield from _process(timeline, rank.rank)
        yield from _computed(timeline.program, rank)
        yield from _memory(timeline, rank)
    threads = _Threads(timeline.program.num_ranks)
    for number, transfers in enumerate(timeline.transfers):
        if transfers.is_sync:
            yield from _syncs(timeline, transfers, threads)
        else:
            yield from _messages(timeline, transfers, number, threads)
