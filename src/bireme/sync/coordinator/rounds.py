"""A line of rounds: who is ready, who is granted a round, when it is made again, and when it counts.

    contributions ready ──▶ granted (attempt 0) ──▶ all hold the sum ──▶ committed
                               │        ▲
                               ▼        │ the next attempt, without who is gone
                            a member is lost

A round is granted once all who contribute are ready, or once the quorum is ready and no other has come for
the grace window, or is expected: who says nothing is not waited for. It counts once every rank of it holds
the sum of the same attempt.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from bireme.sync.coordinator.messages import Grant, Report, RoundAt, RoundPart

__all__ = ["RoundSequence", "is_broken", "is_ready", "is_summed", "next_grant"]


@dataclass(frozen=True, slots=True)
class RoundSequence:
    """A line of rounds: so many are `committed`, and the next one is granted or gathers contributions.

    `ready` are the replicas whose contributions have come, the last of them at `since_s`. Who was not heard
    of since `broken_s`, when an attempt broke, is not ready.
    """

    number: int
    committed: int = 0
    first_attempt: int = 0
    """Of a round: that of another term is another one, even with the same members."""
    attempts: int = 0
    """Attempts of the present round that were granted."""
    grant: Grant | None = None
    ready: frozenset[int] = frozenset()
    since_s: float = 0.0
    broken_s: float = 0.0

    def with_ready(self, ready: Collection[int], now_s: float) -> "RoundSequence":
        """With those who are ready now."""
        found = frozenset(ready)
        return self if found == self.ready else replace(self, ready=found, since_s=now_s)

    def granted(self, parts: tuple[RoundPart, ...]) -> "RoundSequence":
        """With an attempt at the present round."""
        grant = Grant(self.number, self.committed, self.first_attempt + self.attempts, parts)
        return replace(self, grant=grant, attempts=self.attempts + 1)

    def after_commit(self) -> "RoundSequence":
        """Ready for the next round."""
        return replace(self, committed=self.committed + 1, attempts=0, grant=None, ready=frozenset())

    def with_epoch(self) -> "RoundSequence":
        """In another epoch: what was granted in the one before is off."""
        return replace(self, grant=None)

    def broken(self, now_s: float) -> "RoundSequence":
        """After an attempt in which a rank could not reach another."""
        return replace(self, grant=None, broken_s=now_s)


def is_ready(line: RoundSequence, reports: Collection[Report]) -> bool:
    """Whether all ranks of a replica have kept their contribution to the present round."""
    places = [_at(one, line.number) for one in reports]
    return bool(places) and all(one.ready == line.committed == one.committed for one in places)


def is_summed(grant: Grant, reports: Collection[Report]) -> bool:
    """Whether all ranks of a replica hold the sum of the attempt that is granted."""
    places = [_at(one, grant.line) for one in reports]
    return bool(places) and all(one.summed == grant.round and one.attempt == grant.attempt for one in places)


def is_broken(grant: Grant, reports: Collection[Report]) -> bool:
    """Whether a rank could not reach another in the attempt that is granted."""
    places = [_at(one, grant.line) for one in reports]
    return any(one.lost and one.ready == grant.round and one.attempt == grant.attempt for one in places)


def next_grant(
    line: RoundSequence,
    ready: Mapping[int, int],
    contributors: Collection[int],
    *,
    quorum: int,
    grace_s: float,
    now_s: float,
    silent: Collection[int] = (),
) -> RoundSequence:
    """The line with its present round granted, if that is due, to those `ready` with so many samples. Nobody
    waits for who is `silent`, once the quorum is ready.
    """
    line = line.with_ready(ready, now_s)
    if not ready:
        return line
    missing = set(contributors) - ready.keys()
    is_over = missing <= set(silent) or now_s >= line.since_s + grace_s
    if missing and not (len(ready) >= quorum and is_over):
        return line
    return line.granted(tuple(RoundPart(replica, num) for replica, num in sorted(ready.items())))


def _at(report: Report, line: int) -> RoundAt:
    return report.rounds[line] if line < len(report.rounds) else RoundAt()
