"""When the launchers of several hosts start a replica, and in which incarnation."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from bireme.runtime.replicas.hosts import StartAgreement, start_agreement
from bireme.sync.coordinator.messages import HostStart, Incarnation

HOSTS = (1, 2, 5)


def start(host: int, number: int, replica: int = 3) -> HostStart:
    return HostStart(host, Incarnation(replica, number), f"host{host}:1")


def test_a_replica_starts_once_all_hosts_propose_the_same_incarnation() -> None:
    there = [start(1, 4), start(2, 4)]
    assert start_agreement(3, HOSTS, there) == StartAgreement(4, (5,), "host1:1")
    assert start_agreement(3, HOSTS, [*there, start(5, 4)]) == StartAgreement(4, (), "host1:1")


def test_the_greatest_incarnation_counts_and_who_proposes_less_is_missing() -> None:
    there = [start(1, 4), start(2, 0), start(5, 7)]
    assert start_agreement(3, HOSTS, there) == StartAgreement(7, (1, 2), "")


def test_what_an_earlier_launcher_of_a_host_said_does_not_count_beside_the_later() -> None:
    there = [start(1, 9), start(2, 9), start(5, 9), start(5, 2)]
    assert start_agreement(3, HOSTS, there).missing == ()


def test_other_replicas_and_other_hosts_change_nothing() -> None:
    there = [start(1, 1), start(2, 1), start(5, 1), start(2, 8, replica=0), start(4, 8)]
    assert start_agreement(3, HOSTS, there) == StartAgreement(1, (), "host1:1")


@dataclass
class Launcher:
    """A host's launcher, which does what `_Supervision` does with an agreement."""

    host: int
    number: int = 0
    runs: bool = False
    known: dict[int, HostStart] = field(default_factory=dict)

    @property
    def said(self) -> HostStart:
        return start(self.host, self.number)

    def act(self) -> bool:
        """Whether it starts its ranks now."""
        found = start_agreement(3, HOSTS, [self.said, *self.known.values()])
        if found.number > self.number:
            self.runs, self.number = False, found.number
        elif not self.runs and not found.missing:
            self.runs = True
            return True
        return False


@given(st.lists(st.tuples(st.sampled_from(["hears", "fails", "is replaced"]), st.permutations(range(3)))))
def test_hosts_never_start_different_incarnations_and_end_up_in_the_same(
    events: list[tuple[str, list[int]]],
) -> None:
    """Whatever dies, and whenever news arrives. What runs is only seen later by the others."""
    launchers = [Launcher(host) for host in HOSTS]
    started: dict[int, set[int]] = {}
    for clock, (event, (one, two, _)) in enumerate(events, start=1):
        if event == "hears":
            launchers[one].known[HOSTS[two]] = launchers[two].said
        elif event == "fails" and launchers[one].runs:
            launchers[one].runs, launchers[one].number = False, launchers[one].number + 1
        elif event == "is replaced":  # by one that counts seconds: greater than all before
            launchers[one] = Launcher(HOSTS[one], 1000 * clock)
        if launchers[one].act():
            number = launchers[one].number
            assert all(other.number >= number or not other.runs for other in launchers)
            assert one not in started.setdefault(number, set())
            started[number].add(one)
    for _ in range(4):
        for each in launchers:
            for other in launchers:
                each.known[other.host] = other.said
            each.act()
    assert all(each.runs for each in launchers)
    assert len({each.number for each in launchers}) == 1
