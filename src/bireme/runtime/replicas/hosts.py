"""One host among those of a run whose replicas may die, and what its launcher does about the other hosts.

Each host has a launcher, which starts the replicas of that host, and a coordinator; one of these coordinates.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bireme.runtime.board import RunFailed
from bireme.runtime.coordinator_client import BEAT_S, Address, Observer, coordinating
from bireme.runtime.coordinator_process import CoordinatorProcess
from bireme.sync.coordinator.messages import Absence, CoordinatorReply, HostStart, Incarnation
from bireme.sync.coordinator.samples import CoordinatorSettings, SyncMode
from bireme.sync.coordinator.state import Changes

LOOK_S = 1.0
"""How often a host that hears of no coordinator looks into the run's folder."""
MOST_ALONE_S = 1800.0
"""How long a host waits for the others."""
_UNHEARD_S = 4 * BEAT_S
"""A host that has not answered for so long cannot be reached now."""


@dataclass(frozen=True, slots=True)
class ReplicaPart:
    """The `ranks` of a replica that are started on one host. The replica is on `hosts`, and its rank 0 on the
    first of them.
    """

    replica: int
    ranks: tuple[int, ...]
    hosts: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether all ranks of the replica are on this host."""
        return len(self.hosts) == 1


@dataclass(frozen=True, slots=True)
class LaunchHost:
    """The host `number` of a run, and the `parts` of replicas that are started there. `hosts` are where the
    coordinators of all hosts listen; callers know the `token`. Its `coordinator` has been started. The run
    began at `began_s`, by the clock of this machine (`time.monotonic`); the first incarnations here have the
    number `first_life`. `how_it_ended` returns the sentence that says how the run ended, as its folder has
    it, or nothing.
    """

    number: int
    coordinator: CoordinatorProcess
    hosts: tuple[Address, ...]
    token: str
    parts: tuple[ReplicaPart, ...]
    began_s: float
    first_life: int = 0
    how_it_ended: Callable[[], str] = lambda: ""

    @property
    def num_ranks(self) -> int:
        """How many ranks are started on this host."""
        return sum(len(part.ranks) for part in self.parts)

    @property
    def spans(self) -> bool:
        """Whether a replica of this host has ranks on other hosts."""
        return not all(part.is_whole for part in self.parts)

    @property
    def others(self) -> str:
        """The addresses of the other hosts, for people."""
        return ", ".join(address for number, (address, _) in enumerate(self.hosts) if number != self.number)

    @property
    def is_alone(self) -> bool:
        """Whether the run has no other host."""
        return len(self.hosts) == 1

    def coordinates(self, word: CoordinatorReply) -> bool:
        """Whether a word is of the coordinator on this host."""
        return coordinating(word, self.hosts) == self.number


# How the launchers of several hosts agree on when their replica starts, and in which incarnation.
#
# Each host proposes an incarnation once none of its ranks of an earlier one runs. All propose the greatest
# number that they hear of, and start when all hosts have proposed it:
#
#     host 2   runs 0 ── a rank dies ── proposes 1 ─────────────────────────── 7 ── starts 7
#     host 3   runs 0 ── dies                        is started again: 7 ───── 7 ── starts 7
#
# A host that hears of a greater number than that of the incarnation it runs ends its ranks: the incarnation
# is over. So no two hosts run different incarnations of a replica for longer than a proposal takes.


@dataclass(frozen=True, slots=True)
class StartAgreement:
    """The greatest `number` of an incarnation that a host of the replica proposes, the hosts `missing` that
    do not propose it yet, and the address of the store that the first host has for it.
    """

    number: int
    missing: tuple[int, ...]
    store: str


def start_agreement(replica: int, hosts: Sequence[int], starts: Iterable[HostStart]) -> StartAgreement:
    """The agreement of the hosts of a replica, by their starts. Several of one host count as the greatest."""
    newest: dict[int, HostStart] = {}
    for one in sorted(starts, key=lambda one: one.incarnation.life):
        if one.incarnation.replica == replica and one.host in hosts:
            newest[one.host] = one
    number = max((one.incarnation.life for one in newest.values()), default=0)
    missing = tuple(host for host in hosts if host not in newest or newest[host].incarnation.life < number)
    store = newest[hosts[0]].store if hosts[0] not in missing else ""
    return StartAgreement(number, missing, store)


class HostContact:
    """What the launcher of a host says and does about the other hosts, by what its `observer` hears. `store`
    is the address of this host's store for ranks.

    A replica with ranks on several hosts starts once the launchers of all its hosts agree.

    A host that is cut off cannot know whether the others go on, so its replicas wait. It finds the end of the
    run in the run's folder, if it can reach that. If all other hosts refuse its calls, their launchers have
    ended. Else it waits until it hears of them, is asked to stop, or has waited for long.
    """

    def __init__(
        self,
        here: LaunchHost,
        observer: Observer,
        settings: CoordinatorSettings,
        tell: Callable[[str], None],
        store: str = "",
    ) -> None:
        self.observer = observer
        self._here, self._lease_s, self._tell, self._store = here, settings.lease_s, tell, store
        self._proposed_s: dict[int, float] = {}
        """When each replica began to wait for its hosts; those of which that was reported are absent."""
        self._changes = Changes(settings.batch_size, is_quorum=settings.mode is SyncMode.QUORUM)
        self._noted: CoordinatorReply | None = None
        self._is_silence_told = False
        self._looked_s = 0.0

    def propose(self, incarnation: Incarnation) -> None:
        """Say that this host can start its ranks of an incarnation, and runs no ranks of an earlier one."""
        self.observer.say_start(HostStart(self._here.number, incarnation, self._store))
        self._proposed_s[incarnation.replica] = time.monotonic()

    def agreement(self, part: ReplicaPart) -> StartAgreement:
        """What the hosts of a replica propose now."""
        return start_agreement(part.replica, part.hosts, self.observer.starts(self._lease_s))

    def unheard(self, part: ReplicaPart) -> list[int]:
        """The other hosts of a replica that do not answer this host. Their proposals may come by way of a
        third host, but ranks that were started now could not reach each other.
        """
        return [host for host in self.others(part) if self.observer.unheard_s(host) > _UNHEARD_S]

    def others(self, part: ReplicaPart) -> list[int]:
        """The other hosts of a replica."""
        return [host for host in part.hosts if host != self._here.number]

    def tell_missing(self, part: ReplicaPart, missing: Sequence[int]) -> None:
        """Report once which hosts a replica waits for, when it has waited for a lease."""
        since_s = self._proposed_s.get(part.replica)
        if since_s is None or time.monotonic() < since_s + self._lease_s:
            return
        del self._proposed_s[part.replica]
        self._tell(
            f"Replica {part.replica} waits for {self.addresses(missing)}. If bireme train has ended there, "
            "start it again in the same way as before; if not, restore the connection. The replica starts "
            "once all of its hosts reach each other."
        )

    def addresses(self, hosts: Sequence[int]) -> str:
        """The addresses of hosts, for people."""
        return " and ".join(f"host {number} ({self._here.hosts[number][0]})" for number in hosts)

    def note_word(self) -> None:
        """Report which replicas of other hosts have gone or come back."""
        word = self.observer.word
        if word is self._noted or word.is_lost:
            return
        self._noted = word
        for change in self._changes.in_word(word):
            if change.replica in {part.replica for part in self._here.parts}:
                continue  # the launcher has seen that by itself
            if change.why is None:
                self._tell(f"{change.text}.")
                continue
            why = "its processes have ended"
            if change.why is Absence.SILENT:
                why = f"it was not heard of for {self._lease_s:g} s (sync.lease_s)"
            left = " and ".join(str(one.replica) for one in word.members)
            number = "replicas" if len(word.members) > 1 else "replica"
            self._tell(f"{change.text}: {why}. The run continues with {number} {left}.")

    def has_ended(self, *, is_asked_to_stop: bool) -> bool:
        """Whether the run has ended while this host was cut off. Raises a `RunFailed` if this host is to wait
        no longer for hosts that it does not hear of.
        """
        silent_s, now_s = self.observer.silent_s, time.monotonic()
        if silent_s < self._lease_s:
            if self._is_silence_told:
                self._tell("This host hears of the run's coordinator again.")
            self._is_silence_told = False
            return False
        if is_asked_to_stop:
            raise RunFailed(
                f"This host was asked to stop while no coordinator of the run answered, for {silent_s:.0f} s "
                f"({self._here.others}). So it ends without the others and without saving: if they go on, "
                "they have all that counts; if not, bireme resume goes on from the newest checkpoint."
            )
        if now_s < self._looked_s + LOOK_S:
            return False
        self._looked_s = now_s
        if self._here.how_it_ended():
            return True
        self._check_patience(silent_s)
        if not self._is_silence_told:
            self._is_silence_told = True
            self._tell(
                f"No coordinator of the run has answered this host for {silent_s:.0f} s: it is cut off from "
                f"{self._here.others}, or these are gone. Its replicas wait, and go on with the others when "
                "they can be reached again; an interrupt ends this host."
            )
        return False

    def _check_patience(self, silent_s: float) -> None:
        others = [number for number in range(len(self._here.hosts)) if number != self._here.number]
        if all(self.observer.refused_s(number) > self._lease_s for number in others):
            raise RunFailed(
                f"The bireme train of all other hosts ({self._here.others}) has ended, and the run's folder "
                "does not say that the run has. Their output may say why. Start bireme train on all hosts "
                "again: the run resumes from its newest checkpoint."
            )
        if silent_s > MOST_ALONE_S:
            raise RunFailed(
                f"No coordinator of the run has answered this host for {silent_s / 60:.0f} minutes "
                f"({self._here.others}). If the others go on, start bireme train here again once they can be "
                "reached; if not, start it on all hosts, and the run resumes from its newest checkpoint."
            )
