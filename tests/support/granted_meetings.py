"""Meetings of replicas in groups that were granted."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bireme.schedule.instruction import Instruction
from bireme.schedule.proofs.deadlock import Meetings


@dataclass(slots=True, eq=False)
class GrantedMeetings(Meetings):
    """Replicas average the weights of stages in the groups that were granted."""

    groups: dict[tuple[int, int, int], Mapping[int, int]] = field(default_factory=dict)

    def members(self, replica: int, step: Instruction) -> Mapping[int, int]:
        return self.groups.get((replica, step.stage, step.batch), {replica: step.batch})


def granted(num_replicas: int, grants: Iterable[tuple[int, Mapping[int, int]]]) -> GrantedMeetings:
    """The meetings of these grants."""
    meetings = GrantedMeetings(num_replicas)
    for stage, members in grants:
        meetings.groups |= {(replica, stage, batch): members for replica, batch in members.items()}
    return meetings
