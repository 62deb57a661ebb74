"""The timeline of a few batches of a run as a file, to be drawn later.

The file is the JSON document of a timeline, with when each instruction started and ended. Which
instructions these are follows from the plan, so a file is read with the plan it was made of.
"""

import json
from array import array
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from bireme.documents import read_json
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.plan.plan import Plan
from bireme.report.document import timeline_document
from bireme.schedule.program import Program
from bireme.schedule.residency import Residency
from bireme.timeline.timeline import RankTimeline, Timeline, Transfers

_COLUMNS = {"start_s": "d", "end_s": "d", "num_bytes": "d", "sent_by": "q", "received_by": "q"}
"""What is known of each message, and how it is kept: as floats or as whole numbers."""


def write_recorded(timeline: Timeline, path: Path) -> None:
    """Write a timeline so that `read_recorded` gives it back."""
    write_text_atomically(path, json.dumps(_recorded_document(timeline), allow_nan=False) + "\n")


def _recorded_document(timeline: Timeline) -> dict[str, Any]:
    """The document of a timeline with all its moments, in seconds from the begin of the window."""
    document = timeline_document(timeline)
    for row, rank in zip(document["ranks"], timeline.ranks, strict=True):
        row |= {"start_s": list(rank.start_s), "end_s": list(rank.end_s)}
    document |= {
        "source": timeline.source,
        **({"others": _others(timeline)} if timeline.others else {}),
        "first_batch": timeline.program.first_batch,
        **({} if timeline.program.average_lag is None else {"average_lag": timeline.program.average_lag}),
        "transfers": [
            {"source": one.source, "destination": one.destination}
            | {name: list(getattr(one, name)) for name in _COLUMNS}
            for one in timeline.transfers
        ],
    }
    return document


def _others(timeline: Timeline) -> list[list[dict[str, Any]]]:
    """The moments of the other replicas' ranks."""
    return [
        [{"rank": rank.rank, "start_s": list(rank.start_s), "end_s": list(rank.end_s)} for rank in ranks]
        for ranks in timeline.others
    ]


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
