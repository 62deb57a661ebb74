"""How replicas that come become members, and what those are dealt that are late."""

from dataclasses import replace

from bireme.balance import ShareLimits
from bireme.sync.coordinator.committing import with_heals
from bireme.sync.coordinator.coordinator import begun
from bireme.sync.coordinator.messages import Member, RankId, Report, RoundAt
from bireme.sync.coordinator.samples import Dealing
from bireme.sync.coordinator.state import Heard
from tests.support.coordinated import settings_for


def test_a_replica_heals_from_one_that_is_not_late_itself() -> None:
    """It could not catch up by the sums of a donor that has them long after the others."""
    state = begun(settings_for(3, 1))
    heard = {}
    for replica, committed in ((0, 5), (1, 8), (2, 0)):
        rank = RankId(replica, 0, 0)
        heard[rank] = Heard(Report(rank, 1, 1, "there", rounds=(RoundAt(committed=committed),)), 0.0)
    members = tuple(Member(replica, 0, ("there",)) for replica in range(2))
    membership = replace(state.membership, epoch=1, members=members, is_installed=True, heard=heard)
    state = replace(state, membership=membership, lines=(replace(state.lines[0], committed=9),))

    (heal,) = with_heals(state, 0.5).heals

    assert (heal.replica, heal.donor) == (2, 1)


def test_a_hold_up_that_makes_a_replica_late_in_many_rounds_halves_its_share_once() -> None:
    """Until rounds come that were dealt after it was known."""
    dealing = Dealing(24, ShareLimits((1, 1), (24, 24))).among((0, 1), 0)
    for batch in range(4):
        dealing = dealing.with_late(batch, {0}, takes_effect=4).among((0, 1), 4)
    assert dealing.counts(4) == {0: 8, 1: 16}

    dealing = dealing.with_late(4, {0}, takes_effect=8).among((0, 1), 8)
    assert dealing.counts(8)[0] in (4, 5)
