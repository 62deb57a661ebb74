"""How the launchers of several hosts agree on when their replica starts, and in which incarnation.

Each host proposes an incarnation once none of its ranks of an earlier one runs. All propose the greatest
number that they hear of, and start when all hosts have proposed it:

    host 2   runs 0 ── a rank dies ── proposes 1 ─────────────────────────── 7 ── starts 7
    host 3   runs 0 ── dies                        is started again: 7 ───── 7 ── starts 7

A host that hears of a greater number than that of the incarnation it runs ends its ranks: the incarnation is
over. So no two hosts run different incarnations of a replica for longer than a proposal takes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bireme.sync.coordinator.messages import HostStart


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
