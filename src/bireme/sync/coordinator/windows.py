"""Samples where each replica trains batches of its own: `groups` and `diloco`.

A replica is assigned its share of a batch whenever it wants one, as long as its window has places left. So a
fast one trains more batches, and all are done at about the same time; with equal shares none is assigned more
than the others in a window, unless one of these ends. In `groups`, where the coordinator sees how long each
takes, a slow one is not assigned a last batch that the others would have to wait for: its window ends there,
and they take what is left. A sample counts once it is in weights that others have, in all parts of the model:
stages in `groups`, fragments in `diloco`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import inf

from bireme.sync.coordinator.messages import End, Progress, Report, Window, replace
from bireme.sync.coordinator.samples import Dealing, SyncMode
from bireme.sync.coordinator.state import CoordinatorState

# Who trains the last batches of a window, where replicas train batches of their own.
#
# All wait for the one that ends last. So a slow replica gets none of the last batches where the others would
# be done with all of them before it were done with one. It learns so at once, because a pipeline goes on with
# the batches that it has only when it knows whether there is another one.
#
#     deals:   fast  ▭▭▭▭▭▭▭▭▭▭▭▭▭▭▭│          fast  ▭▭▭▭▭▭▭▭▭▭▭▭▭▭▭▭│
#              slow  ▭▭▭▭▭▭▭▭ ▭▭▭▭▭▭▭▭│         slow  ▭▭▭▭▭▭▭▭        │


@dataclass(frozen=True, slots=True)
class Trainer:
    """A replica that is done at `free_s` with all that it was assigned, and takes `batch_s` for a batch of so
    many samples, its `share`.
    """

    free_s: float
    batch_s: float
    share: int


def done_without(others: Iterable[Trainer], num_samples: int, before_s: float) -> float:
    """When the others are done with what they were assigned and with that many samples, each batch of which
    goes to the one that ends it first. Of times that are not before `before_s` the answer is any.
    """
    there = list(others)
    last_s = max((one.free_s for one in there), default=-inf)
    ends = [(one.free_s + one.batch_s, place) for place, one in enumerate(there)]
    heapify(ends)
    while num_samples > 0 and last_s < before_s:
        if not ends:
            return inf
        end_s, place = ends[0]
        last_s = max(last_s, end_s)
        num_samples -= there[place].share
        heapreplace(ends, (end_s + there[place].batch_s, place))
    return last_s


_NO_END = Window(0, 1 << 62)
"""Of ranks that name no window."""


def with_own_deals(state: CoordinatorState, now_s: float) -> CoordinatorState:
    """With the samples of all batches that a member wants, and the ends of windows that have none left."""
    for replica in state.membership.replicas:
        state = _with_deals_of(state, replica, now_s)
    return state


def _with_deals_of(state: CoordinatorState, replica: int, now_s: float) -> CoordinatorState:
    reports = state.reports(replica)
    wants = max((one.wants for one in reports), default=0)
    window = _window(reports)
    batch = first = state.first_undealt(replica)
    if batch >= wants or state.has_ended(replica, window.number):
        return state
    dealing = state.dealing.among(state.membership.replicas, batch)
    pool, ends, until = state.pool, state.ends, _until(state, window)
    # Who came back into a window that the others have left has nothing to do in it.
    is_over = window is not _NO_END and window.number < state.lines[-1].committed
    while batch < wants:
        left = 0 if is_over else pool.num_left(until)
        count = _count(state, replica, dealing.counts(batch)[replica], left)
        if state.settings.is_equal:
            is_done = _has_equal_share(state, dealing, replica, batch, window, left)
        else:
            is_done = _would_end_last(state, dealing, replica, batch, window, left, now_s)
        if not count or is_done:
            end = End(replica, window.number, batch, until)
            ends = (*(one for one in ends if one.replica != replica), end)
            break
        pool = pool.with_deal(batch, {replica: count})
        batch += 1
    paces = state.paces.begun(replica, now_s) if batch > first else state.paces
    dealt_to = state.dealt_to | {replica: batch}
    return replace(state, dealing=dealing, pool=pool, ends=ends, dealt_to=dealt_to, paces=paces)


def _has_equal_share(
    state: CoordinatorState, dealing: Dealing, replica: int, batch: int, window: Window, left: int
) -> bool:
    """Whether the batches of a replica below that one are as many as the run's own in the window, and the
    others still train all that is left in theirs.
    """
    settings = state.settings

    def num_missing(one: int, dealt: int) -> int:
        """How many batches that replica lacks in the window, to which those below `dealt` were assigned."""
        last = state.last_end(one)
        if last is not None and last.window == window.number:
            return 0
        begun, fresh = (settings.first, settings.fresh) if last is None else (last.batch, last.until)
        return max(-(-(window.until - fresh) // settings.batch_size) - (dealt - begun), 0)

    if window is _NO_END or num_missing(replica, batch):
        return False
    counts = dealing.counts(batch)
    others = (one for one in state.membership.replicas if one != replica)
    return left <= sum(num_missing(one, state.first_undealt(one)) * counts[one] for one in others)


def _would_end_last(
    state: CoordinatorState,
    dealing: Dealing,
    replica: int,
    batch: int,
    window: Window,
    left: int,
    now_s: float,
) -> bool:
    """Whether a replica would end that batch after the others have trained all that is left. Each has a batch
    of each window, so that it is known how long it takes.
    """
    own, last = _trainer(state, dealing, replica, batch, now_s), state.last_end(replica)
    if own is None or batch == (state.settings.first if last is None else last.batch):
        return False
    others = []
    for other in state.membership.replicas:
        found = _trainer(state, dealing, other, state.first_undealt(other), now_s)
        if other != replica and found is not None:
            has_ended = state.has_ended(other, window.number)
            others.append(replace(found, batch_s=inf) if has_ended else found)
    end_s = own.free_s + own.batch_s
    return done_without(others, left, end_s) < end_s


def _trainer(
    state: CoordinatorState, dealing: Dealing, replica: int, dealt: int, now_s: float
) -> Trainer | None:
    """A replica to which the batches below `dealt` were assigned, as its last stage was seen to come to
    groups; None if it is not known how long it takes.
    """
    last = state.settings.num_formers - 1
    batch_s = state.paces.batch_s.get((last, replica), 0.0)
    if state.groups is None or not batch_s:
        return None
    done = state.groups.formers[last].latest.get(replica, dealt - 1) + 1
    since_s = state.paces.last_s.get((last, replica), now_s)
    free_s = max(since_s + (dealt - done) * batch_s, now_s) if dealt > done else now_s
    return Trainer(free_s, batch_s, dealing.counts(dealt)[replica])


def _window(reports: list[Report]) -> Window:
    """The last window that a rank of the replica is in. Until a rank enters its first one, it names that
    without any place: another rank of its replica, which wants a batch, may have entered it before.
    """
    found = [one.window for one in reports if one.window is not None]
    return max(found, key=lambda one: (one.number, one.until), default=_NO_END)


def _until(state: CoordinatorState, window: Window) -> int:
    """The place at which a window ends: where it has ended for a replica, or after this batch of the run if
    a rank has asked for its end.
    """
    known = [one.until for one in state.ends if one.window == window.number]
    if known:
        return min(known)
    if not any(one.report.means > window.number for one in state.membership.heard.values()):
        return window.until
    batch_size = state.settings.batch_size
    return min(window.until, -(-state.pool.fresh // batch_size) * batch_size)


def _count(state: CoordinatorState, replica: int, share: int, left: int) -> int:
    """How many samples a batch has, of those that are left: so that no rest is too small for a batch."""
    limits = state.settings.limits
    least, most = limits.least[replica], limits.most[replica]
    if left < least:
        return 0
    if left >= share + least:
        return share
    return left if left <= most else max(left - least, least)


def num_parts_of(state: CoordinatorState) -> int:
    """Of how many parts of the model it is known whether others have a replica's samples in their weights."""
    is_diloco = state.settings.mode is SyncMode.DILOCO
    return len(state.lines) - 1 if is_diloco else state.settings.num_formers


def progress_of(state: CoordinatorState) -> tuple[Progress, ...]:
    """Where each member is, for a coordinator that may take up after this one."""
    if not state.settings.averages:
        return ()
    parts = range(num_parts_of(state))
    return tuple(
        Progress(
            replica,
            state.first_undealt(replica),
            tuple(state.trained.get((replica, part), 0) for part in parts),
        )
        for replica in state.membership.replicas
    )


def with_trained(state: CoordinatorState) -> CoordinatorState:
    """With the samples of each replica that count, as `trained` says of each part."""
    parts = range(num_parts_of(state))
    for replica, batch in sorted(state.pool.deals):
        if batch < min(state.trained.get((replica, part), 0) for part in parts):
            state = state.with_counted(batch, 0, (replica,))
    return state
