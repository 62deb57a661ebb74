"""A host on which a coordinator may run: it coordinates, or waits to be called by enough ranks to take up.

A pure state machine around `coordinator.step`. It resigns, which closes all connections, where another may
have replaced it: when a rank knows a later term, when a rank was told more than it took up from, and when so
many members are out of reach that others may have taken up. Then it waits like any other host.
"""

from dataclasses import dataclass, field, replace

from bireme.sync.coordinator.coordinator import begun, is_behind, wake_s, word_for
from bireme.sync.coordinator.coordinator import step as coordinator_step
from bireme.sync.coordinator.joining import is_cut_off
from bireme.sync.coordinator.ledger_line import Began, Committed
from bireme.sync.coordinator.membership import Heard
from bireme.sync.coordinator.messages import TERM, CoordinatorReply, Incarnation, RankId, Report
from bireme.sync.coordinator.settings import CoordinatorSettings
from bireme.sync.coordinator.state import CoordinatorState, CoordinatorStep, Ended, Event, Tick
from bireme.sync.coordinator.succession import CoordinatorCandidate, taken_up

__all__ = ["Host", "HostStep", "beginner", "host_step", "host_wake_s", "waiting"]

LATENESS = 0.5
"""Leases for which a host waits for all members to call, once enough have."""


@dataclass(frozen=True, slots=True)
class Host:
    """One that has a `state` coordinates. One that has none has `heard` ranks since `since_s`, and of
    lives that have `ended`.
    """

    settings: CoordinatorSettings
    candidate: CoordinatorCandidate
    state: CoordinatorState | None = None
    heard: dict[RankId, Heard] = field(default_factory=dict)
    ended: frozenset[Incarnation] = frozenset()
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostStep:
    """What an event leads to. The lines must be written before the words are sent, and on the disk if they
    are `is_lasting`. One that `resigns` closes all connections.
    """

    host: Host
    words: tuple[tuple[RankId, CoordinatorReply], ...] = ()
    lines: tuple[Began | Committed, ...] = ()
    is_lasting: bool = True
    resigns: bool = False


def beginner(settings: CoordinatorSettings, num_hosts: int, *, used: int = -1) -> Host:
    """The first host, where the run begins, in a term after those that it has `used` before."""
    candidate = CoordinatorCandidate(0, num_hosts, used=used)
    return Host(settings, candidate, begun(settings, term=candidate.next_term(used)))


def waiting(settings: CoordinatorSettings, candidate: CoordinatorCandidate) -> Host:
    """A host that coordinates only if it is called."""
    return Host(settings, candidate)


def host_wake_s(host: Host, now_s: float) -> float:
    """The next time at which a `Tick` could change something."""
    if host.state is not None:
        return wake_s(host.state, now_s)
    return now_s + LATENESS * host.settings.lease_s


def host_step(host: Host, event: Event, now_s: float) -> HostStep:
    """What follows from an event at that time."""
    if host.state is None:
        return _gathered(host, event, now_s)
    # Where replicas average weights, one that is the only one waits for members that are all silent: it
    # knows more of their samples than they do.
    may_be_replaced = not host.settings.averages or host.candidate.num_candidates > 1
    if _is_replaced(host.state, event, now_s, may_be_replaced=may_be_replaced):
        candidate = replace(host.candidate, recorded=None)
        return HostStep(replace(host, candidate=candidate, state=None, heard={}), resigns=True)
    done = coordinator_step(host.state, event, now_s)
    # What ranks are told another host may take up, which then reads the lines.
    is_lasting = done.is_lasting or host.candidate.num_candidates > 1
    return HostStep(replace(host, state=done.state), done.words, done.lines, is_lasting)


def _is_replaced(state: CoordinatorState, event: Event, now_s: float, *, may_be_replaced: bool) -> bool:
    membership = state.membership
    if isinstance(event, Report):
        is_later = event.epoch // TERM > membership.epoch // TERM
        return is_later or (is_behind(state, event) and not membership.is_installed)
    return may_be_replaced and isinstance(event, Tick) and is_cut_off(state, now_s)


def _gathered(host: Host, event: Event, now_s: float) -> HostStep:
    """Learn who calls, and take up if enough do."""
    alive_s = now_s - host.settings.lease_s
    heard = {rank: one for rank, one in host.heard.items() if one.at_s >= alive_s}
    since_s = host.since_s if heard else now_s
    if isinstance(event, Report):
        last = heard.get(event.rank)
        if last is None or last.report.number < event.number:
            heard[event.rank] = Heard(event, now_s)
    ended = host.ended | {event.life} if isinstance(event, Ended) else host.ended
    heard = {rank: one for rank, one in heard.items() if rank.own_life not in ended}
    host = replace(host, heard=heard, ended=ended, since_s=since_s)
    is_late = now_s >= host.since_s + LATENESS * host.settings.lease_s
    taken = taken_up(host.settings, host.candidate, heard, ended=ended, is_late=is_late)
    if taken is None:
        return HostStep(host)
    return _begun(host, taken, now_s)


def _begun(host: Host, taken: CoordinatorStep, now_s: float) -> HostStep:
    done = coordinator_step(taken.state, Tick(), now_s)
    state = done.state
    candidate = replace(host.candidate, used=state.membership.epoch // TERM)
    words = tuple((rank, word_for(state, rank)) for rank in sorted(state.membership.heard))
    host = replace(host, candidate=candidate, state=state, heard={}, ended=frozenset())
    return HostStep(host, words, (*taken.lines, *done.lines))
