"""Whether the replicas of a run wait for each other for ever, which must not be, and would not end by itself.

They do if all ranks of all members wait for something that is up to the coordinator, nothing is being summed
up, and so it stays for the timeout, and for the lease: a member that is silent is dropped first. Who
computes, writes or reads does not wait.
"""

from dataclasses import replace

from bireme.sync.coordinator.state import CoordinatorState

__all__ = ["standstill", "still_until_s", "with_stillness"]


def with_stillness(state: CoordinatorState, now_s: float, *, is_news: bool) -> CoordinatorState:
    """With the time since when all wait; news starts it again."""
    if not state.settings.timeout_s or not _all_wait(state):
        return state if state.still_s is None else replace(state, still_s=None)
    return replace(state, still_s=now_s) if is_news or state.still_s is None else state


def still_until_s(state: CoordinatorState) -> float | None:
    """When it counts as a standstill, if nothing happens before."""
    return None if state.still_s is None else state.still_s + _limit_s(state)


def standstill(state: CoordinatorState, now_s: float) -> str:
    """The sentence that ends the run; empty as long as it need not end."""
    until_s = still_until_s(state)
    if until_s is None or now_s < until_s:
        return ""
    waits: dict[str, list[str]] = {}
    for member in state.membership.members:
        for one in state.membership.reports(member.own_life):
            waits.setdefault(one.waits, []).append(f"rank {one.rank.stage} of replica {member.replica}")
    what = "; ".join(f"{' and '.join(ranks)} for {what}" for what, ranks in waits.items())
    return (
        f"All replicas wait for each other, and nothing has happened for {_limit_s(state):g} s: "
        f"{what}. This is a bug in Bireme: please report it."
    )


def _limit_s(state: CoordinatorState) -> float:
    return max(state.settings.timeout_s, state.settings.lease_s)


def _all_wait(state: CoordinatorState) -> bool:
    """Whether all ranks of all members wait, and none of their agents adds anything up."""
    is_open = state.groups is not None and bool(state.groups.open)
    if is_open or any(line.grant is not None for line in state.lines):
        return False
    reports = [state.membership.reports(one.own_life) for one in state.membership.members]
    return bool(reports) and all(own and all(one.waits for one in own) for own in reports)
