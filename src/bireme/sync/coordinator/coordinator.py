"""The coordinator as a pure state machine: `step(state, event, now_s)` gives the next state, words for ranks,
and lines for the ledger. The lines must be written before a word is sent.

An event is a `Report`, an `Ended`, or a `Tick`; after `wake_s(state)` a tick can change something. Each step
brings the state to where nothing more follows from what is known. So no order of events is special, and a
report that comes twice changes nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import islice
from operator import attrgetter
from typing import TypeVar

from bireme.sync.coordinator.committing import (
    committed_rounds,
    goes_on,
    is_lost,
    is_waiting_to_begin,
    num_rounds,
    quorum_of,
    with_beginning,
    with_deals,
    with_entries,
    with_heals,
    with_rounds,
    with_sources,
    without_lost,
)
from bireme.sync.coordinator.groups import (
    Drained,
    GroupEvent,
    GroupMembers,
    GroupSummed,
    groups_begun,
    groups_step,
    next_deadline_s,
)
from bireme.sync.coordinator.messages import (
    TERM,
    Commit,
    CoordinatorReply,
    GroupReply,
    RankId,
    Report,
    joint,
    put,
    replace,
)
from bireme.sync.coordinator.samples import Began, CoordinatorSettings, Dealing, Pool, SyncMode
from bireme.sync.coordinator.state import (
    CoordinatorState,
    CoordinatorStep,
    Ended,
    Event,
    Membership,
    RoundSequence,
    is_ready,
    is_summed,
)
from bireme.sync.coordinator.windows import progress_of, with_trained

# Groups of the coordinator: what ranks report as events of `groups.py`, and its replies as words.


def _with_groups(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """With the groups that the last reports of all members lead to."""
    members, settings = frozenset(state.membership.replicas), state.settings
    groups = state.groups or groups_begun(settings.groups, settings.num_formers, members)
    state, gone = replace(state, groups=groups), groups.members - members
    if groups.members != members:
        state = _with_event(state, GroupMembers(members), now_s)
        words = {key: word for key, word in state.group_words.items() if key[1] not in gone}
        state = replace(state, group_words=words, paces=state.paces.without(gone))
    for _, heard in sorted(state.membership.heard.items()):
        state = _with_group_of(state, heard.report, now_s)
    return with_trained(_with_event(state, None, now_s))


def _with_group_of(state: CoordinatorState, report: Report, now_s: float) -> CoordinatorState:
    """With the groups that the report of a rank leads to."""
    stage, replica = state.settings.former_of(report.rank.stage), report.rank.replica
    of_replicas = state.settings.groups.of_replicas
    reports = state.membership.reports(report.rank.own_life) if of_replicas else [report]
    at = joint([one.group for one in reports])
    is_known = all(one.epoch == state.membership.epoch for one in reports)
    if at is None or not is_known or replica not in state.membership.replicas:
        return state
    assert state.groups is not None, "with_groups makes it"
    if at.arrived is not None and not state.groups.has_come(stage, replica, at.arrived):
        state = replace(state, paces=state.paces.with_arrival(stage, replica, now_s))
        arrived = state.paces.arrived(stage, replica, at.arrived, at.wait_s)
        state = _with_event(state, arrived, now_s)
    word = state.group_words.get((stage, replica))
    assert state.groups is not None, "an event leaves it there"
    is_present = replica in state.groups.formers[stage].present
    if at.summed is not None and (stage, at.summed) in state.groups.open:
        state = _with_event(state, GroupSummed(stage, replica, at.summed, at.attempt), now_s)
    elif at.summed is None and at.is_broken and word is not None:
        broken = GroupSummed(stage, replica, word.number, at.attempt, is_broken=True)
        state = _with_event(state, broken, now_s)
    # What a rank said before the last mean over all replicas is of the window before.
    windows = [one.window for one in reports if one.window is not None]
    has_drained = at.is_drained and all(one.number >= state.lines[-1].committed for one in windows)
    if has_drained == is_present:
        if has_drained:
            state = replace(state, paces=state.paces.idle(stage, replica))
        state = _with_event(state, Drained(stage, replica, has_drained), now_s)
    return state


def _with_event(state: CoordinatorState, event: GroupEvent, now_s: float) -> CoordinatorState:
    assert state.groups is not None, "with_groups makes it"
    groups, new = groups_step(state.groups, event, now_s)
    if not new:
        return state if groups is state.groups else replace(state, groups=groups)
    words, trained = dict(state.group_words), dict(state.trained)
    for group in new:
        reply = GroupReply(group.number, group.attempt, group.members, is_settled=group.is_settled)
        # What a replica did alone goes with it if it dies.
        is_shared = len(group.members) > 1 or len(groups.members) == 1
        for one in group.members:
            words[group.stage, one.replica] = reply
            if group.is_settled and is_shared:
                trained[one.replica, group.stage] = one.batch + 1
    return replace(state, groups=groups, group_words=words, trained=trained)


# Whether the replicas of a run wait for each other for ever, which must not be, and would not end by itself.
#
# They do if all ranks of all members wait for something that is up to the coordinator, nothing is being
# summed up, and so it stays for the timeout, and for the lease: a member that is silent is dropped first. Who
# computes, writes or reads does not wait.


def _with_stillness(state: CoordinatorState, now_s: float, *, is_news: bool) -> CoordinatorState:
    """With the time since when all wait, which news starts again, and the sentence that ends the run once
    that is too long ago.
    """
    if not state.settings.timeout_s or not _all_wait(state):
        return replace(state, still_s=None)
    if is_news or state.still_s is None:
        return replace(state, still_s=now_s)
    if state.standstill or now_s < state.still_s + _still_limit_s(state):
        return state
    waits: dict[str, list[str]] = {}
    for member in state.membership.members:
        for one in state.membership.reports(member.own_life):
            waits.setdefault(one.waits, []).append(f"rank {one.rank.stage} of replica {member.replica}")
    what = "; ".join(f"{' and '.join(ranks)} for {what}" for what, ranks in waits.items())
    sentence = (
        f"All replicas wait for each other, and nothing has happened for {_still_limit_s(state):g} s: "
        f"{what}. This is a bug in Bireme: please report it."
    )
    return replace(state, standstill=sentence)


def _still_limit_s(state: CoordinatorState) -> float:
    return max(state.settings.timeout_s, state.settings.lease_s)


def _all_wait(state: CoordinatorState) -> bool:
    """Whether all ranks of all members wait, and none of their agents adds anything up."""
    is_open = state.groups is not None and bool(state.groups.open)
    if is_open or any(line.grant is not None for line in state.lines):
        return False
    reports = map(state.membership.reports, state.membership.members)
    return bool(state.membership.members) and all(own and all(one.waits for one in own) for own in reports)


_NO_REPLICA = -1
_MOST_COMMITS = 32
"""In one word; who lacks more gets the others later."""


def begun(settings: CoordinatorSettings, *, term: int = 0) -> CoordinatorState:
    """No replica has come yet."""
    # The last line of those that average weights has the means over all replicas.
    num_lines = {SyncMode.GROUPS: 1, SyncMode.DILOCO: settings.num_lines + 1}.get(
        settings.mode, settings.num_lines
    )
    first = 0 if settings.averages else settings.first
    return CoordinatorState(
        settings,
        Membership(settings.num_stages, term * TERM),
        tuple(
            RoundSequence(number, committed=first, first_attempt=term * TERM) for number in range(num_lines)
        ),
        Pool(settings.fresh, settings.waiting),
        Dealing(settings.batch_size, settings.limits),
        dealt=settings.first,
    )


def step(state: CoordinatorState, event: Event, now_s: float) -> CoordinatorStep:
    """What follows from an event at that time."""
    state = before = replace(state, ledger=()) if state.ledger else state
    if isinstance(event, Ended):
        state = replace(state, membership=state.membership.with_over(event.life))
    elif isinstance(event, Report):
        last = _last_of(state, event, now_s)
        state = replace(state, membership=state.membership.with_report(event, now_s))
        if last is not None:
            quiet = _without_more(state, event, last, now_s)
        else:
            is_quiet = state.word is not None and not event.is_empty and is_waiting_to_begin(state, now_s)
            quiet = state if is_quiet else None
        if quiet is not None:
            return CoordinatorStep(quiet, tuple(_words(quiet, quiet.word, [event.rank])))
        if last is not None and _is_of_groups(state, event, last):
            state = with_trained(_with_group_of(state, event, now_s))
            return _told(before, with_deals(state, now_s), event, now_s, is_of_groups=True)
        if is_behind(state, event) and state.membership.is_installed:  # it can take no word from here
            state = replace(state, membership=state.membership.without(event.rank.own_life))
    state = _settled(state, now_s)
    state = replace(
        state,
        settled_s=now_s,
        silence_s=_silence_s(state, now_s),
        has_broken=_has_broken(state),
        num_to_confirm=state.membership.num_to_confirm,
    )
    return _told(before, state, event, now_s)


# Most reports change nothing for anybody: a rank lives, or it is ready or holds a sum while others do not.
# What follows from all reports together takes time in proportion to the members, so here one replica that the
# others still wait for is enough to know that nothing follows.


_NAMES = [one.name for one in fields(Report) if one.name != "number"]
_all_of = attrgetter(*_NAMES)
_rest_of = attrgetter(*(one for one in _NAMES if one not in {"epoch", "wants", "rounds"}))


def _without_more(
    state: CoordinatorState, report: Report, last: Report, now_s: float
) -> CoordinatorState | None:
    """The state after a report of a rank whose `last` one is known, if nothing more follows from it; None if
    something may. The state is the step's own copy, in which this is set.
    """
    if _all_of(report) == _all_of(last):  # it lives
        return state
    is_free = state.is_quorum and len(state.lines) == 1 and state.still_s is None and not state.has_broken
    if not is_free or report.epoch > state.membership.epoch or any(at.lost for at in report.rounds):
        return None
    if _rest_of(report) != _rest_of(last):
        return None
    membership, life, num_to_confirm = state.membership, report.rank, state.num_to_confirm
    if membership.is_installed:
        heal = next((one for one in state.heals if one.replica == life.replica), None)
        is_entering = heal is None or goes_on(state, heal, life)
        if report.wants > state.dealt or (is_entering and membership.member(life) is None):
            return None
    elif num_to_confirm > 1 and membership.members:
        num_to_confirm -= report.epoch != last.epoch
    else:
        return None
    line = state.lines[0]
    place, summing, lacking = state.awaited
    is_ready_now = is_ready(line, membership.reports(life)) and membership.confirms(life)
    if membership.member(life) is None or not membership.is_installed:
        pass
    elif line.grant is not None:
        grant, parts = line.grant, line.grant.parts
        at = _search(parts, summing, lambda one: not is_summed(grant, state.reports(one.replica)))
        if at is None:
            return None
        summing = at
    elif is_ready_now != (life.replica in line.ready):
        added = _with_ready(state, line, report.rank, now_s)
        if added is None:
            return None
        line, place = added
    if state.commits:
        oldest = state.commits[0].round
        at = _search(membership.members, lacking, lambda one: num_rounds(state, one.replica, 0, 0) <= oldest)
        if at is None and all(num_rounds(state, one.replica, 0, one.batch) > oldest for one in state.heals):
            return None
        lacking = lacking if at is None else at
    if line is state.lines[0] and num_to_confirm == state.num_to_confirm:
        awaited = place, summing, lacking
        return put(state, awaited=awaited)
    return put(state, lines=(line,), awaited=(place, summing, lacking), num_to_confirm=num_to_confirm)


def _with_ready(
    state: CoordinatorState, line: RoundSequence, rank: RankId, now_s: float
) -> tuple[RoundSequence, int] | None:
    """The line with one more replica ready, and the place of a member that it waits for; None if it is the
    first one, if no round can be granted now, or if one may be.
    """
    membership, settings = state.membership, state.settings
    is_due = any(one.first is not None and one.first <= line.committed for one in state.heals)
    is_there = membership.is_heard(rank, line.broken_s)
    if not line.ready or rank.replica in line.ready or is_due or not is_there or settings.grace_s <= 0:
        return None
    ready, place = line.ready | {rank.replica}, state.awaited[0]
    if len(ready) >= quorum_of(state, line):
        since_s = now_s - settings.silent_s
        found = _search(
            membership.members,
            place,
            lambda one: one.replica not in ready and membership.is_heard(one, since_s),
        )
        if found is None:
            return None
        place = found
    return replace(line, ready=ready, since_s=now_s), place


_Item = TypeVar("_Item")


def _search(items: Sequence[_Item], first: int, is_it: Callable[[_Item], bool]) -> int | None:
    """The first place, from `first` on downward and around the start, of such an item. Ranks are heard in
    the order of their numbers more often than in the reverse.
    """
    if items and is_it(items[first % len(items)]):  # as nearly always
        return first % len(items)
    places = (one % len(items) for one in range(first - 1, first - len(items), -1))
    return next((at for at in places if is_it(items[at])), None)


def _silence_s(state: CoordinatorState, now_s: float) -> float:
    """The next time at which something could follow from the silence of a rank."""
    settings, heard = state.settings, state.membership.heard.values()
    limits = {settings.lease_s}
    if any(line.grant is None and line.ready for line in state.lines):
        limits.add(settings.silent_s)
    times = [each.at_s for each in heard]
    return min(
        (one + limit for limit in limits for one in times if one + limit >= now_s),
        default=now_s + settings.lease_s,
    )


def _has_broken(state: CoordinatorState) -> bool:
    """Whether a rank cannot reach another one, or a member has no source of a committed sum."""
    if any(at.lost for each in state.membership.heard.values() for at in each.report.rounds):
        return True
    members = set(state.membership.replicas)
    return any(
        not members <= {*(part.replica for part in one.parts), *(to.target for to in one.sources)}
        for one in state.commits
    )


def _told(
    before: CoordinatorState,
    state: CoordinatorState,
    event: Event,
    now_s: float,
    *,
    is_of_groups: bool = False,
) -> CoordinatorStep:
    """What has come of an event: whoever it is news for has a word. One of groups is none for everybody."""
    is_of_all = not is_of_groups and _of_all(state) != _of_all(before)
    is_news, told = is_of_all or _of_replicas(state) != _of_replicas(before), set[RankId]()
    if is_of_all or (is_news and state.is_quorum):
        told = {*before.membership.heard, *state.membership.heard}  # also whoever is let go
        if state.has_many and _pressing(state) == _pressing(before):
            touched = _touched(before, state)
            told = {rank for rank in told if rank.replica in touched}
    elif is_news:
        told = _concerned(before, state)
    state = _with_stillness(state, now_s, is_news=is_news)
    if state.standstill != before.standstill:
        is_news, told = True, set(state.membership.heard)
    if is_news:
        state = replace(state, number=state.number + 1)
    if isinstance(event, Report):
        told.add(event.rank)
    if state.is_quorum and not is_news and before.word is not None:
        word = replace(before.word, kept=_kept(state))
    else:
        word = _word(state, before)
    state = replace(state, word=word)
    words = tuple(_words(state, word, sorted(told, key=attrgetter("replica", "life", "stage"))))
    # If this is the only machine, lines must survive it. Where replicas average weights the run then goes on
    # from a checkpoint, which is of a mean over all replicas.
    is_lasting = state.is_quorum or any(isinstance(one, Began) for one in state.ledger)
    is_lasting |= state.lines[-1].committed > before.lines[-1].committed
    return CoordinatorStep(state, words, is_lasting=is_lasting)


def _is_of_groups(state: CoordinatorState, report: Report, last: Report) -> bool:
    """Whether a report of a member says nothing new after its `last` one but where its rank is in groups, and
    which samples it wants. That is most of what is said in `groups`, and nothing else can follow from it.
    """
    membership = state.membership
    if state.groups is None or not membership.is_installed or not membership.member(report.rank):
        return False
    return replace(report, number=last.number, group=last.group, wants=last.wants) == last


def _last_of(state: CoordinatorState, report: Report, now_s: float) -> Report | None:
    """The report before this one, if nothing else can follow from this one than from what differs: its rank
    was heard of, and no time is over.
    """
    last = state.membership.heard.get(report.rank)
    if last is None or report.number <= last.report.number:
        return None
    is_known = last.at_s >= now_s - state.settings.lease_s
    is_known &= all(line.broken_s < last.at_s for line in state.lines)
    return last.report if is_known and now_s < wake_s(state, state.settled_s) else None


def is_behind(state: CoordinatorState, report: Report) -> bool:
    """Whether a rank has a later word of another coordinator than the one that this one took up from.

    If this one is not installed yet, it must start again: others may have continued without it.
    """
    held = None if report.known is None else report.known.held
    term = state.membership.epoch // TERM
    if report.epoch // TERM > term:
        return True
    return held is not None and held.epoch // TERM != term and held.place > state.after


def wake_s(state: CoordinatorState, now_s: float) -> float:
    """The next time at which a `Tick` could change something."""
    settings = state.settings
    found = state.silence_s if state.silence_s >= now_s else _silence_s(state, now_s)
    for line in state.lines:
        if line.grant is None and line.ready and now_s <= line.since_s + settings.grace_s < found:
            found = line.since_s + settings.grace_s
    if state.first_heard_s is not None and now_s <= state.first_heard_s + settings.lease_s < found:
        found = state.first_heard_s + settings.lease_s
    if state.still_s is not None and not state.standstill:
        limit_s = state.still_s + _still_limit_s(state)
        found = limit_s if now_s <= limit_s < found else found
    deadline_s = None if state.groups is None else next_deadline_s(state.groups)
    return found if deadline_s is None else min(found, max(deadline_s, now_s))


def word_for(state: CoordinatorState, rank: RankId) -> CoordinatorReply:
    """All that holds, for one rank."""
    return next(word for _, word in _words(state, _word(state), [rank]))


def _words(
    state: CoordinatorState, word: CoordinatorReply | None, ranks: Iterable[RankId]
) -> Iterator[tuple[RankId, CoordinatorReply]]:
    """The word of all with what is of each of these ranks. Ranks with nothing of their own get one object."""
    word = word or _word(state)
    membership, donors = state.membership, {one.donor for one in state.heals}
    made: dict[tuple[int, ...], tuple[Commit, ...]] = {}
    common: dict[tuple[int, ...], CoordinatorReply] = {}
    for rank in ranks:
        heard = membership.heard.get(rank)
        known = () if heard is None else tuple(at.committed for at in heard.report.rounds)
        if known not in made:
            places = dict(enumerate(known))
            lacks = (one for one in state.commits if one.round >= places.get(one.line, 0))
            made[known] = tuple(islice(lacks, _MOST_COMMITS)) if membership.is_installed else ()
            common[known] = replace(word, commits=made[known]) if made[known] != word.commits else word
        group = state.group_words.get((state.settings.former_of(rank.stage), rank.replica))
        is_dropped, is_donor = membership.is_over(rank), rank.replica in donors
        own = common[known]
        if group is not None or is_dropped or is_donor:
            kept = _kept(state, rank.replica) if is_donor else own.kept
            own = replace(own, group=group, is_dropped=is_dropped, kept=kept)
        yield rank, own


def _kept(state: CoordinatorState, donor: int = _NO_REPLICA) -> tuple[int, ...]:
    """The rounds whose sums a replica need not keep: all members have them, and those that heal by it."""
    return tuple(committed_rounds(state, donor=donor))


def _word(state: CoordinatorState, before: CoordinatorState | None = None) -> CoordinatorReply:
    """What holds for all ranks, with the first commits. Long lists that are as `before` are not made anew."""
    membership = state.membership
    last = None if before is None else before.word
    voters = deals = None
    if before is not None and last is not None:
        voters = last.voters if before.membership.voters is membership.voters else None
        deals = last.deals if before.pool.deals is state.pool.deals else None
    if voters is None:
        by_number = attrgetter("replica", "life")
        voters = tuple(tuple(sorted(own, key=by_number)) for own in membership.voters)
    return CoordinatorReply(
        epoch=membership.epoch,
        number=state.number,
        committed=tuple(line.committed for line in state.lines),
        kept=_kept(state),
        members=membership.members,
        gone=state.gone,
        voters=voters,
        is_installed=membership.is_installed,
        after=state.after,
        grants=tuple(line.grant for line in state.lines if line.grant is not None),
        commits=state.commits[:_MOST_COMMITS] if membership.is_installed else (),
        deals=state.pool.listed() if deals is None else deals,
        ends=state.ends,
        progress=progress_of(state),
        waiting=state.pool.waiting,
        fresh=state.pool.fresh,
        heals=state.heals,
        standstill=state.standstill,
        is_lost=is_lost(state),
    )


def _settled(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """The state from which nothing more follows now."""
    picture = _of_all(state), _of_replicas(state)
    while True:
        before = picture
        state = without_lost(with_beginning(state, now_s), now_s)
        state = replace(state, membership=state.membership.installed())
        state = with_heals(state, now_s)
        if state.membership.is_installed or state.has_many:
            state = with_entries(state)
        if state.membership.is_installed:
            if state.settings.mode is SyncMode.GROUPS:
                state = _with_groups(state, now_s)
            state = with_rounds(with_deals(state, now_s), now_s)
        state = with_sources(state)
        picture = _of_all(state), _of_replicas(state)
        if picture == before:
            return state


def _concerned(before: CoordinatorState, state: CoordinatorState) -> set[RankId]:
    """The ranks of those replicas of which there is news. Where replicas average weights, what one of them is
    assigned and which group it is in is none for the others: each hears of it with its own next news.
    """
    heard = set(state.membership.heard)
    changed = {one: _of_one(before, one) != _of_one(state, one) for one in {rank.replica for rank in heard}}
    return {rank for rank in heard if changed[rank.replica]}


def _of_replicas(state: CoordinatorState) -> tuple[object, ...]:
    """What words tell of single replicas."""
    return state.pool, state.ends, state.group_words


def _of_one(state: CoordinatorState, replica: int) -> tuple[object, ...]:
    """What words tell of one replica that trains batches of its own."""
    return (
        {key: own for key, own in state.pool.deals.items() if key[0] == replica},
        [one for one in state.ends if one.replica == replica],
        {key: word for key, word in state.group_words.items() if key[1] == replica},
    )


def _pressing(state: CoordinatorState) -> tuple[object, ...]:
    """The news of all that ranks wait for in `quorum`."""
    return tuple((line.committed, line.grant) for line in state.lines), state.dealt, is_lost(state)


def _touched(before: CoordinatorState, state: CoordinatorState) -> set[int]:
    """The replicas that enter, leave or heal, the donors, and those that get a committed sum from another."""
    heals = {*before.heals} ^ {*state.heals}
    commits = {*before.commits} ^ {*state.commits}
    return {
        *(one.replica for one in {*before.membership.members} ^ {*state.membership.members}),
        *(one.replica for one in before.membership.dropped ^ state.membership.dropped),
        *(replica for one in heals for replica in (one.replica, one.donor)),
        *(to.target for one in commits for to in one.sources),
    }


def _of_all(state: CoordinatorState) -> tuple[object, ...]:
    """What is news for everybody. Who has which rounds already is none in `quorum`. Where replicas average
    weights, members wait for it at the end of the run, whoever still heals.
    """
    return (
        state.membership.epoch,
        state.membership.members,
        state.membership.voters,
        tuple((line.committed, line.grant) for line in state.lines),
        None if state.is_quorum else committed_rounds(state, donor=_NO_REPLICA),
        state.commits,
        state.heals,
        state.membership.dropped,
        state.membership.is_installed,
        is_lost(state),
    )
