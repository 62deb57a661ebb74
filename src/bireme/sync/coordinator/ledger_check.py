"""Reads the ledger of a run and checks that every sample counts once.

Each line says which places of the run's order it commits, and which below `fresh` are not committed yet. So
after each line all places below `fresh` are committed once, or open. An epoch of the data is finished once
all its places have been assigned and none of them is open. Lines that were lost with a machine are made good
by one line of the next coordinator, with the members of the last line before.

What a start says is not taken on trust. It may undo what lines before it commit, as after a resume from a
checkpoint. That a place is committed it can say only of what was trained before the first line, or without a
coordinator since the last one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bireme.documents import read_json_lines
from bireme.errors import BiremeError
from bireme.sync.coordinator.messages import SamplePlaces
from bireme.sync.coordinator.samples import Began, Committed, in_force, united


@dataclass(frozen=True, slots=True)
class _MembersFrom:
    """From a batch on these replicas had a part in the rounds; in that membership epoch, if each line is of
    one replica's batch.
    """

    batch: int
    members: tuple[int, ...]
    epoch: int | None = None


@dataclass(slots=True)
class CheckedLedger:
    """What a ledger says. Places that are `missing` are neither committed nor open, those in `doubled` were
    committed twice.
    """

    rounds: int = 0
    samples: int = 0
    per_epoch: int = 0
    fresh: int = 0
    open: tuple[SamplePlaces, ...] = ()
    missing: tuple[SamplePlaces, ...] = ()
    doubled: tuple[SamplePlaces, ...] = ()
    damaged: tuple[int, ...] = ()
    """The numbers of lines that nobody can read."""
    members: list[_MembersFrom] = field(default_factory=list)
    is_of_single_replicas: bool = False
    committed: tuple[SamplePlaces, ...] = ()
    next_batch: int | None = None
    """After all batches of the run that lines tell of, if there are any."""

    @property
    def is_whole(self) -> bool:
        """Whether every sample counts once, as far as it has been assigned."""
        return not (self.missing or self.doubled or self.damaged)

    @property
    def num_finished(self) -> int:
        """How many epochs of the data are finished, from the first on."""
        if not self.per_epoch:
            return 0
        first_open = self.open[0].begin if self.open else self.fresh
        return min(first_open, self.fresh) // self.per_epoch

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "ok": self.is_whole,
            "rounds": self.rounds,
            "samples_committed": self.samples,
            "samples_per_epoch": self.per_epoch or None,
            "epochs_finished": self.num_finished,
            "samples_open": sum(one.count for one in self.open),
            "missing": [self._shown(one) for one in self._by_epoch(self.missing)],
            "doubled": [self._shown(one) for one in self._by_epoch(self.doubled)],
            "damaged_lines": list(self.damaged),
            "membership": [{"batch": one.batch, "members": list(one.members)} for one in self.members],
        }

    def _by_epoch(self, samples: Iterable[SamplePlaces]) -> list[SamplePlaces]:
        """Cut where an epoch begins."""
        if not self.per_epoch:
            return list(samples)
        found = []
        for one in samples:
            begin = one.begin
            while begin < one.end:
                end = min(one.end, (begin // self.per_epoch + 1) * self.per_epoch)
                found.append(SamplePlaces(begin, end))
                begin = end
        return found

    def _shown(self, one: SamplePlaces) -> dict[str, int]:
        epoch = one.begin // self.per_epoch if self.per_epoch else 0
        first = epoch * self.per_epoch
        return {"epoch": epoch, "begin": one.begin - first, "end": one.end - first}


def check_ledger(path: Path) -> CheckedLedger:
    """What the ledger at a path says; a last line that was cut is as if it were not there."""
    if not path.is_file():
        raise BiremeError(
            f"There is no ledger {path}. A run has one if a coordinator assigns its samples: with sync.mode "
            'set to "quorum", "groups" or "diloco".'
        )
    read = read_json_lines(path, start="start")
    found, damaged = CheckedLedger(), list(read.damaged)
    for number, record in in_force(read.records).items():
        try:
            _take(found, record)
        except (KeyError, TypeError, ValueError):
            damaged.append(number)
    found.damaged = tuple(sorted(damaged))
    known = _union(found.committed, found.open)
    found.missing = _without((SamplePlaces(0, found.fresh),) if found.fresh else (), known)
    found.doubled = _union(found.doubled, _common(found.committed, found.open))
    return found


def lost_rounds(path: Path, start: Began, *, takes_up: bool) -> Committed | None:
    """The line to write before the start of a coordinator, if the copy of the ledger at a path lacks lines
    that were lost with another machine. It commits all places that the start counts and no line does.

    The start counts what a majority knows, if its coordinator `takes_up`, else what the checkpoint has that
    it begins after. If no batch is missing, no line was lost, and a start that counts more places is wrong.
    """
    found = check_ledger(path)
    told = _without((SamplePlaces(0, start.fresh),) if start.fresh else (), start.open)
    is_told = takes_up if start.mode else start.batch > (found.next_batch or 0)
    if found.next_batch is None or not is_told or not _without(told, _committed_at(found, start.batch, told)):
        return None
    members = found.members[-1].members if found.members else ()
    samples = (_without(told, found.committed),)
    return Committed(start.epoch, start.batch - 1, 0, members, samples, start.fresh, start.open)


def _take(found: CheckedLedger, record: dict[str, Any]) -> None:
    """Learn one line."""
    kind, fresh, batch = record["kind"], int(record["fresh"]), int(record["batch"])
    open_ = _read(record["open"], fresh)
    if kind == "start":
        found.per_epoch = int(record["num_samples"])
        found.is_of_single_replicas = "mode" in record
        told = _without((SamplePlaces(0, fresh),) if fresh else (), open_)
        found.committed = _committed_at(found, batch, told)
        found.next_batch = max(batch, found.next_batch or 0)
    elif kind == "round":
        samples = [one for own in record["samples"] for one in _read(own, fresh)]
        for one in samples:
            found.doubled = _union(found.doubled, _common(found.committed, (one,)))
            found.committed = _union(found.committed, (one,))
        if not found.is_of_single_replicas:  # which number their own batches, not those of the run
            found.next_batch = max(batch + 1, found.next_batch or 0)
        found.rounds += 1
        found.samples += sum(one.count for one in samples)
        _note_members(found, batch, tuple(record["members"]), int(record.get("epoch", 0)))
    else:
        raise ValueError(kind)
    found.fresh, found.open = fresh, open_


def _committed_at(
    found: CheckedLedger, batch: int, told: tuple[SamplePlaces, ...]
) -> tuple[SamplePlaces, ...]:
    """What is committed where a coordinator begins before a batch, and says that it is these places."""
    if found.next_batch is None:
        return told
    # Batches that no line tells of were trained without a coordinator, in order.
    known = (SamplePlaces(0, found.fresh),) if found.fresh else ()
    alone = _without(told, known) if batch > found.next_batch else ()
    return _common(told, _union(found.committed, alone))


def _note_members(found: CheckedLedger, batch: int, members: tuple[int, ...], epoch: int) -> None:
    last = found.members[-1] if found.members else None
    if not found.is_of_single_replicas:
        if last is None or last.members != members:
            found.members.append(_MembersFrom(batch, members))
    elif last is None or last.epoch != epoch:
        found.members.append(_MembersFrom(batch, members, epoch))
    else:
        found.members[-1] = _MembersFrom(last.batch, tuple(sorted({*last.members, *members})), epoch)


def _read(pairs: Sequence[Sequence[int]], fresh: int) -> tuple[SamplePlaces, ...]:
    """Places below the first that nobody was given."""
    found = tuple(SamplePlaces(int(begin), int(end)) for begin, end in pairs)
    begins = [0, *(one.end for one in found)]
    if any(one.begin < begin or one.end <= one.begin for one, begin in zip(found, begins, strict=False)):
        raise ValueError(pairs)
    if begins[-1] > fresh:
        raise ValueError(pairs)
    return found


def _union(one: Sequence[SamplePlaces], other: Sequence[SamplePlaces]) -> tuple[SamplePlaces, ...]:
    """The places in either, in rising order."""
    return united((*one, *_without(other, one)))


def _without(one: Sequence[SamplePlaces], other: Sequence[SamplePlaces]) -> tuple[SamplePlaces, ...]:
    """The places of one that are not in the other."""
    found = list(one)
    for cut in other:
        left = []
        for each in found:
            left += [
                piece
                for piece in (
                    SamplePlaces(each.begin, min(each.end, cut.begin)),
                    SamplePlaces(max(each.begin, cut.end), each.end),
                )
                if piece.begin < piece.end
            ]
        found = left
    return united(sorted(set(found)))


def _common(one: Sequence[SamplePlaces], other: Sequence[SamplePlaces]) -> tuple[SamplePlaces, ...]:
    """The places in both."""
    return _without(one, _without(one, other))
