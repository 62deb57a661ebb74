"""Timelines as files: JSON documents, recorded timelines to be drawn later, and Chrome traces."""

import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import count, islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from bireme.documents import read_json
from bireme.errors import BiremeError
from bireme.files import write_chunks_atomically, write_text_atomically
from bireme.plan.plan import Plan
from bireme.schedule.grid import NAMES, label, number, rank_name
from bireme.schedule.instruction import AVERAGES, COMPUTE, Instruction, Kind, moved_item
from bireme.schedule.program import Program
from bireme.schedule.residency import Residency
from bireme.simulate.comparison import Lookahead, ScheduleOutcome
from bireme.timeline.timeline import (
    BUSY,
    GRADIENT_SYNC,
    Copies,
    RankTimeline,
    Timeline,
    Transfers,
    pace,
    sync_name,
)


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
        **({"tiers": list(_tiers(timeline)), "chunks": list(_chunked(timeline))} if program.tiers else {}),
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


def _chunked(timeline: Timeline) -> Iterator[dict[str, Any]]:
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


# The timeline of a few batches of a run as a file, to be drawn later.
#
# The file is the JSON document of a timeline, with when each instruction started and ended. Which
# instructions these are follows from the plan, so a file is read with the plan it was made of.

_COLUMNS = {"start_s": "d", "end_s": "d", "num_bytes": "d", "sent_by": "q", "received_by": "q"}
"""What is known of each message, and how it is kept: as floats or as whole numbers."""


def write_recorded(timeline: Timeline, path: Path) -> None:
    """Write a timeline so that `read_recorded` gives it back."""
    write_text_atomically(path, json.dumps(_recorded_document(timeline), allow_nan=False) + "\n")


def _recorded_document(timeline: Timeline) -> dict[str, Any]:
    """The document of a timeline with all its moments, in seconds from the begin of the window."""
    document = timeline_document(timeline)
    for row, rank in zip(document["ranks"], timeline.ranks, strict=True):
        row.update(_moments(rank))
    others = [[{"rank": rank.rank, **_moments(rank)} for rank in ranks] for ranks in timeline.others]
    document |= {
        "source": timeline.source,
        **({"others": others} if others else {}),
        "first_batch": timeline.program.first_batch,
        **({} if timeline.program.average_lag is None else {"average_lag": timeline.program.average_lag}),
        "transfers": [
            {"source": one.source, "destination": one.destination}
            | {name: list(getattr(one, name)) for name in _COLUMNS}
            for one in timeline.transfers
        ],
    }
    return document


def _moments(rank: RankTimeline) -> dict[str, Any]:
    return {"start_s": list(rank.start_s), "end_s": list(rank.end_s)}


def read_recorded(path: Path, plan: Plan) -> Timeline:
    """The timeline in a file, of a window of that plan."""
    document = read_json(path, _Document)
    lag = document.average_lag
    source = plan.source if lag is None else plan.averaging(lag).source
    program = source.program(document.num_batches, document.first_batch)
    if any(not rank.start_s for rank in document.ranks):
        raise BiremeError(
            f"{path} does not say when each instruction started and ended, so nothing is drawn."
        )
    lengths = [(len(track), len(track)) for track in program.tracks]
    if any(
        [(len(rank.start_s), len(rank.end_s)) for rank in ranks] != lengths
        for ranks in (document.ranks, *document.others)
    ):
        raise BiremeError(f"{path} was recorded with another plan than the one in plan.json.")
    if not all(one.belongs_to(program) for one in document.transfers):
        raise BiremeError(f"{path} tells of messages that the plan in plan.json does not send.")
    return Timeline(
        program=program,
        ranks=_ranks(program, document.ranks),
        transfers=tuple(one.transfers() for one in document.transfers),
        memory=tuple(rank.residency() for rank in document.ranks),
        source=document.source,
        others=tuple(_ranks(program, ranks) for ranks in document.others),
    )


def _ranks(program: Program, ranks: "list[_Rank]") -> tuple[RankTimeline, ...]:
    return tuple(
        RankTimeline(number, track, array("d", rank.start_s), array("d", rank.end_s))
        for number, (track, rank) in enumerate(zip(program.tracks, ranks, strict=True))
    )


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True)


class _Rank(_Table):
    rank: int
    peak_bytes: FiniteFloat = 0.0
    at_peak_bytes: dict[str, FiniteFloat] = Field(default_factory=dict)
    peak_stashed_microbatches: int = 0
    weight_versions: int = 1
    receive_buffers: int = 0
    start_s: list[FiniteFloat] = Field(default_factory=list)
    end_s: list[FiniteFloat] = Field(default_factory=list)

    def residency(self) -> Residency:
        return Residency(
            self.rank,
            self.weight_versions,
            self.peak_stashed_microbatches,
            self.receive_buffers,
            self.peak_bytes,
            at_peak=self.at_peak_bytes,
        )


class _Transfers(_Table):
    source: int
    destination: int
    start_s: list[FiniteFloat]
    end_s: list[FiniteFloat]
    num_bytes: list[FiniteFloat]
    sent_by: list[int]
    received_by: list[int]

    def belongs_to(self, program: Program) -> bool:
        """Whether its ranks and instructions are there."""
        ranks = range(program.num_ranks)
        if self.source not in ranks or self.destination not in ranks:
            return False
        count = len(self.start_s)
        columns = [getattr(self, name) for name in _COLUMNS]
        sent, received = len(program.tracks[self.source]), len(program.tracks[self.destination])
        return (
            all(len(column) == count for column in columns)
            and all(0 <= index < sent for index in self.sent_by)
            and all(0 <= index < received for index in self.received_by)
        )

    def transfers(self) -> Transfers:
        columns = {name: array(kind, getattr(self, name)) for name, kind in _COLUMNS.items()}
        return Transfers(self.source, self.destination, **columns)


class _Document(_Table):
    num_batches: int = Field(ge=1, description="how many batches the window has")
    first_batch: int = Field(0, ge=0)
    average_lag: int | None = Field(None, ge=0)
    source: str = "predicted"
    ranks: list[_Rank] = Field(description="each rank and when its instructions ran")
    others: list[list[_Rank]] = Field(default_factory=list)
    transfers: list[_Transfers] = Field(default_factory=list)


# A timeline as a Chrome trace, to walk through at https://ui.perfetto.dev or chrome://tracing.
#
# Each rank is a process: a thread for what it computes, one for each rank it gets messages from or sends to,
# one for its gradient sync, one for each way of its chunks between tiers, and a counter of its memory. What
# overlaps on one thread gets a second one. Arrows lead from a send to its receive. The file is written piece
# by piece, so a long timeline takes no more memory than it has already.

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
