"""A timeline as a Chrome trace, to walk through at https://ui.perfetto.dev or chrome://tracing.

Each rank is a process: a thread for what it computes, one for each rank it gets messages from or sends to,
one for its gradient sync, one for each way of its chunks between tiers, and a counter of its memory. What
overlaps on one thread gets a second one. Arrows lead from a send to its receive. The file is written piece by
piece, so a long timeline takes no more memory than it has already.
"""

import json
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from bireme.files import write_chunks_atomically
from bireme.schedule.grid import NAMES, label, number, rank_name
from bireme.schedule.instruction import AVERAGES, COMPUTE, Instruction, Kind, moved_item
from bireme.schedule.program import Program
from bireme.timeline.timeline import (
    BUSY,
    GRADIENT_SYNC,
    Copies,
    RankTimeline,
    Timeline,
    Transfers,
    sync_name,
)

_Event = dict[str, Any]

COLOURS = (
    "rail_response",
    "rail_animation",
    "rail_idle",
    "rail_load",
    "thread_state_runnable",
    "thread_state_iowait",
)
"""Names of colours that chrome://tracing knows, one for each batch in turn; Perfetto takes its own."""

_EVENTS_A_CHUNK = 1000

_AGREEMENT = "agreement of stages"
"""What a rank without other replicas does in REDUCE: it waits for what all stages of its pipeline found."""


def write_trace(timeline: Timeline, path: Path, *, has_replicas: bool = True) -> None:
    """Write the trace; memory is in it if the timeline kept the series.

    Without replicas no event is named a gradient sync.
    """
    write_chunks_atomically(path, _chunks(_events(timeline, GRADIENT_SYNC if has_replicas else _AGREEMENT)))


def _chunks(events: Iterator[_Event]) -> Iterator[bytes]:
    yield b'{"displayTimeUnit":"ms","traceEvents":[\n'
    separator = ""
    while some := list(islice(events, _EVENTS_A_CHUNK)):
        yield (separator + ",\n".join(json.dumps(event, separators=(",", ":")) for event in some)).encode()
        separator = ",\n"
    yield b"\n]}\n"


def _events(timeline: Timeline, reduce_name: str) -> Iterator[_Event]:
    threads = _Threads(timeline.program.num_ranks)
    for rank in timeline.ranks:
        process = _process(rank.rank)
        name = {"name": rank_name(timeline.program, rank.rank)}
        yield {"ph": "M", "name": "process_name", "pid": process, "args": name}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": rank.rank}}
        yield from _computed(timeline.program, rank, threads, reduce_name)
        yield from _memory(timeline, rank)
    for moved in timeline.paging:
        for copies in moved.copies:
            yield from _copies(timeline, moved.rank, copies, threads)
    flows = count(1)
    for transfers in timeline.transfers:
        if transfers.is_sync:
            yield from _syncs(timeline, transfers, threads)
        else:
            yield from _messages(timeline, transfers, threads, flows)


def _process(rank: int) -> int:
    """The number of a rank's process; Perfetto keeps 0 for itself."""
    return rank + 1


def _ns(time_s: float) -> int:
    """Whole nanoseconds, so that what follows each other without a gap does so in the file."""
    return round(time_s * 1e9)


class _Threads:
    """Gives every event a thread on which nothing else happens at its time, and names new threads."""

    def __init__(self, num_ranks: int) -> None:
        self.numbers = count(_process(num_ranks))
        """No thread has the number of a process, which would make it that process's main thread."""
        self.rows: dict[tuple[int, str], list[tuple[int, int]]] = {}
        """For each rank and name its threads, each with the end of the last event on it."""

    def event(self, rank: int, name: str, start_s: float, end_s: float, what: _Event) -> Iterator[_Event]:
        """The event, complete or, where it takes no time, instant, on a thread of that name."""
        start, end = _ns(start_s), _ns(end_s)
        rows = self.rows.setdefault((rank, name), [])
        row = next((i for i, (_, free) in enumerate(rows) if free <= start), len(rows))
        if row == len(rows):
            rows.append((next(self.numbers), end))
            yield from self._named(rank, name if row == 0 else f"{name} ({row + 1})", rows[row][0])
        thread = rows[row][0]
        rows[row] = thread, end
        place = {"pid": _process(rank), "tid": thread, "ts": start / 1000}
        if end > start:
            yield {"ph": "X", **place, "dur": (end - start) / 1000, **what}
        else:
            yield {"ph": "i", "s": "t", **place, **what}

    def _named(self, rank: int, name: str, thread: int) -> Iterator[_Event]:
        place = {"pid": _process(rank), "tid": thread}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": thread}}


def _computed(program: Program, rank: RankTimeline, threads: _Threads, reduce_name: str) -> Iterator[_Event]:
    for interval in rank.intervals():
        step = interval.instruction
        if step.kind in BUSY:
            name = label(program, step) if step.kind in COMPUTE else step.kind.name.capitalize()
            category = NAMES.get(step.kind, "step")
        elif step.kind is Kind.REDUCE and interval.end_s > interval.start_s:
            name, category = reduce_name, "sync"
        elif step.kind in AVERAGES:
            name, category = step.kind.name.replace("_", " ").capitalize(), "sync"
        else:
            continue
        what = {"name": name, "cat": category, "cname": _colour(step), "args": _args(step)}
        yield from threads.event(rank.rank, "compute", interval.start_s, interval.end_s, what)


def _colour(step: Instruction) -> str:
    return COLOURS[step.batch % len(COLOURS)]


def _args(step: Instruction) -> _Event:
    args: _Event = {"stage": step.stage, "batch": step.batch}
    if step.microbatch is not None:
        args["micro-batch"] = step.microbatch
    if step.half is not None:
        args["half"] = step.half
    if step.version is not None:
        args["version"] = step.version
    if step.seen is not None:
        args["gradients seen"] = step.seen
    return args


def _memory(timeline: Timeline, rank: RankTimeline) -> Iterator[_Event]:
    """A sample where the bytes change."""
    series = timeline.memory[rank.rank].series if timeline.memory else None
    if series is None:
        return
    before = None
    for start_s, num_bytes in zip(rank.start_s, series, strict=True):
        if num_bytes != before:
            yield {
                "ph": "C",
                "name": "memory",
                "pid": _process(rank.rank),
                "ts": _ns(start_s) / 1000,
                "args": {"bytes": num_bytes},
            }
            before = num_bytes


def _copies(timeline: Timeline, rank: int, copies: Copies, threads: _Threads) -> Iterator[_Event]:
    track = timeline.ranks[rank].track
    for start_s, end_s, num_bytes, index in zip(
        copies.start_s, copies.end_s, copies.num_bytes, copies.posted_by, strict=True
    ):
        step = track[index]
        chunk = {} if step.page is None else {"chunk": step.page.chunk}
        what = {
            "name": f"{step.kind.name.lower()} {moved_item(step)}",
            "cat": "copy",
            "cname": _colour(step),
            "args": {**_args(step), **chunk, "bytes": num_bytes},
        }
        yield from threads.event(rank, f"{copies.source} to {copies.destination}", start_s, end_s, what)


def _syncs(timeline: Timeline, transfers: Transfers, threads: _Threads) -> Iterator[_Event]:
    rank, name = transfers.source, sync_name(timeline, transfers)
    for start_s, end_s, num_bytes, index in zip(
        transfers.start_s, transfers.end_s, transfers.num_bytes, transfers.sent_by, strict=True
    ):
        step = timeline.ranks[rank].track[index]
        what = {"name": name, "cat": "sync", "args": {**_args(step), "bytes": num_bytes}}
        yield from threads.event(rank, name, start_s, end_s, what)


def _messages(
    timeline: Timeline, transfers: Transfers, threads: _Threads, flows: Iterator[int]
) -> Iterator[_Event]:
    """Each message on both ranks, and an arrow between the two where it takes time."""
    source, destination = transfers.source, transfers.destination
    track = timeline.ranks[source].track
    for start_s, end_s, num_bytes, sent_by in zip(
        transfers.start_s, transfers.end_s, transfers.num_bytes, transfers.sent_by, strict=True
    ):
        step = track[sent_by]
        message = step.carries()
        kind = "activation" if message.forward else "gradient"
        what = {
            "name": f"{kind} {number(timeline.program, step)}",
            "cat": "message",
            "cname": _colour(step),
            "args": {**_args(step), "to stage": message.to_stage, "bytes": num_bytes},
        }
        sent = list(threads.event(source, f"send to rank {destination}", start_s, end_s, what))
        received = list(threads.event(destination, f"receive from rank {source}", start_s, end_s, what))
        yield from sent
        yield from received
        if sent[-1]["ph"] == "X":
            yield from _arrow(sent[-1], received[-1], next(flows))


def _arrow(sent: _Event, received: _Event, flow: int) -> Iterator[_Event]:
    """From the begin of a send to just before the end of its receive, where it still belongs to it."""
    arrow = {"name": "message", "cat": "message", "id": flow}
    last = (round((received["ts"] + received["dur"]) * 1000) - 1) / 1000
    yield {"ph": "s", **arrow, "pid": sent["pid"], "tid": sent["tid"], "ts": sent["ts"]}
    yield {"ph": "f", "bp": "e", **arrow, "pid": received["pid"], "tid": received["tid"], "ts": last}
