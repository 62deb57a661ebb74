"""What a coordinator is told before it begins: the same on all machines, so that any of them can take up."""

from dataclasses import dataclass
from enum import StrEnum

from bireme.balance.shares import ShareLimits
from bireme.sync.coordinator.messages import SamplePlaces

__all__ = ["SILENT_LEASES", "CoordinatorSettings", "GroupSettings", "SyncMode"]

SILENT_LEASES = 0.4
"""Leases without a report after which a replica is silent: it has missed two of the five in a lease."""


class SyncMode(StrEnum):
    """How replicas agree, where that may change while they train."""

    QUORUM = "quorum"
    """Gradients of the living, in every batch."""
    GROUPS = "groups"
    """Weights within the group that is ready."""
    OUTER = "outer"
    """The drift since the last round, a fragment at a time."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How groups form: they connect all replicas at least every `connect_every` batches of each.

    With more than `pairs_above` replicas a group that is not forced is cut into pairs.
    """

    connect_every: int = 10
    pairs_above: int = 8


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """A run of `num_replicas` pipelines of `num_stages` ranks.

    A batch has `batch_size` samples whatever the members are; `limits` are the fewest and the most that each
    replica can train of it. A replica that was not heard of for `lease_s` is dropped. A round may go on
    without some replicas once `quorum` contributions are ready (0: more than half of the members) and no
    other has come for `grace_s`. The run begins at the batch `first`, with the samples `waiting` and those
    from the place `fresh` on. A pass over the data has `num_samples`, 0 if it has no end. A run in which all
    replicas wait for each other ends after `timeout_s`, and not before `lease_s`, if `timeout_s` is not 0.
    """

    mode: SyncMode
    num_replicas: int
    num_stages: int
    batch_size: int
    limits: ShareLimits
    lease_s: float = 10.0
    grace_s: float = 1.0
    quorum: int = 0
    num_lines: int = 1
    first: int = 0
    fresh: int = 0
    waiting: tuple[SamplePlaces, ...] = ()
    num_samples: int = 0
    timeout_s: float = 0.0
    groups: GroupSettings = GroupSettings()

    @property
    def averages(self) -> bool:
        """Whether replicas train batches of their own, and average weights."""
        return self.mode is not SyncMode.QUORUM

    @property
    def mode_in_ledger(self) -> str:
        """How the ledger names the mode; not at all where each line is of all replicas."""
        return str(self.mode) if self.averages else ""

    @property
    def silent_s(self) -> float:
        """How long a replica that still is a member may say nothing before rounds go on without it."""
        return SILENT_LEASES * self.lease_s
