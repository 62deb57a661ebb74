"""How long a replica takes to recover: from words of the coordinator, and from numbers that replicas send."""

import pytest

from bireme.sync.coordinator.messages import (
    Absence,
    Commit,
    CoordinatorReply,
    Gone,
    Grant,
    Progress,
    RoundPart,
)
from bireme.sync.coordinator.recoveries import HealTimes, LossTimes, Recovery, healed_in, numbers_of_healing

BOTH = (RoundPart(0, 4), RoundPart(1, 4))
ALONE = (RoundPart(0, 8),)


def word(
    *, grants: tuple[Grant, ...] = (), commits: tuple[Commit, ...] = (), **more: object
) -> CoordinatorReply:
    return CoordinatorReply(1, 1, grants=grants, commits=commits, is_installed=True, **more)  # type: ignore[arg-type]


def gone(life: int, why: Absence = Absence.SILENT) -> tuple[Gone, ...]:
    return (Gone(1, life, 7, why),)


def test_a_loss_is_noticed_so_long_after_the_last_round_that_the_replica_had_a_part_in() -> None:
    """A round that is listed again is not a new one, and neither is a later one without the replica."""
    losses = LossTimes()
    losses.note(word(grants=(Grant(0, 6, 0, BOTH),)), 10.0)
    losses.note(word(commits=(Commit(0, 6, 0, BOTH),)), 11.0)
    losses.note(word(commits=(Commit(0, 6, 0, BOTH),), grants=(Grant(0, 7, 0, ALONE),)), 12.0)
    assert losses.detect_s == {}
    losses.note(word(gone=gone(0)), 14.5)
    losses.note(word(gone=gone(0)), 20.0)
    assert losses.detect_s == {1: 4.5}


def test_the_next_loss_of_a_replica_counts_from_its_next_rounds() -> None:
    losses = LossTimes()
    losses.note(word(grants=(Grant(0, 6, 0, BOTH),)), 10.0)
    losses.note(word(gone=gone(0)), 12.0)
    losses.note(word(gone=gone(0), grants=(Grant(0, 9, 0, BOTH),)), 20.0)
    losses.note(word(gone=gone(1)), 23.0)
    assert losses.detect_s == {1: 3.0}


def test_where_replicas_train_batches_of_their_own_the_last_one_counts() -> None:
    losses = LossTimes()
    for now_s, dealt in ((1.0, 3), (2.0, 4), (3.0, 4)):
        losses.note(word(progress=(Progress(0, 9), Progress(1, dealt))), now_s)
    losses.note(word(progress=(Progress(0, 10),), gone=gone(0)), 7.0)
    assert losses.detect_s == {1: 5.0}


def test_a_loss_counts_once_its_epoch_is_installed_if_the_replica_was_seen_and_was_not_done() -> None:
    losses, late, done = LossTimes(), LossTimes(), LossTimes()
    losses.note(word(grants=(Grant(0, 6, 0, BOTH),)), 1.0)
    losses.note(CoordinatorReply(2, 2, gone=gone(0)), 2.0)
    assert losses.detect_s == {}
    for one in (losses, late):
        one.note(word(gone=gone(0)), 4.0)
    done.note(word(grants=(Grant(0, 6, 0, BOTH),)), 1.0)
    done.note(word(gone=gone(0, Absence.LEFT)), 4.0)
    assert (losses.detect_s, late.detect_s, done.detect_s) == ({1: 3.0}, {}, {})


def test_the_times_of_a_replica_that_healed_reach_the_others_with_their_sum() -> None:
    own = [numbers_of_healing(HealTimes(0.5, 2.0) if one == 1 else None, one, 3) for one in range(3)]
    assert healed_in([sum(column) for column in zip(*own, strict=True)]) == {1: HealTimes(0.5, 2.0)}
    assert healed_in([0.0] * 6) == healed_in(()) == {}


@pytest.mark.parametrize(
    ("detect_s", "noticed"), [(2.14, "its loss was noticed after 2.1 s, its state"), (None, "its state")]
)
def test_a_recovery_is_a_sentence_with_its_three_parts(detect_s: float | None, noticed: str) -> None:
    assert Recovery(1, 120, detect_s, 0.8, 1.5).text == (
        f"Replica 1 is back at step 120: {noticed} took 0.8 s to arrive, and it caught up in 1.5 s."
    )
