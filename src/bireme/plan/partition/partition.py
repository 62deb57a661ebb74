"""The noun here: a `Partition`, a chain cut into stages, with what each takes and where it lives.

It may not fit: what its stages miss is then with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bireme.bounds import bytes_text
from bireme.plan.partition.loads import Loads


@dataclass(frozen=True, slots=True)
class _StageLoad:
    """A stage on its device: the units from `begin` up to but without `end`.

    The seconds are the device's, those of a forward that is run again included. `busy_s` is how long a
    micro-batch keeps it busy, with its share of the update and, where messages do not overlap, with those.
    """

    begin: int
    end: int
    device: str
    recompute: bool
    forward_s: float
    backward_s: float
    busy_s: float
    peak_bytes: float
    limit_bytes: float

    @property
    def missing_bytes(self) -> float:
        """What it takes more than the device has; zero if it fits."""
        return max(self.peak_bytes - self.limit_bytes, 0.0)


@dataclass(frozen=True, slots=True)
class Partition:
    """The stages, and `pace_s`: the busiest device's or link's seconds for a micro-batch."""

    stages: tuple[_StageLoad, ...]
    pace_s: float

    @property
    def cuts(self) -> tuple[int, ...]:
        """The units at which a new stage begins, as in a `Plan`."""
        return tuple(stage.begin for stage in self.stages[1:])

    @property
    def recompute(self) -> tuple[int, ...]:
        """The stages that run their forward again."""
        return tuple(place for place, stage in enumerate(self.stages) if stage.recompute)

    @property
    def fits(self) -> bool:
        """Whether every stage fits its device."""
        return not any(stage.missing_bytes for stage in self.stages)


@dataclass(frozen=True, slots=True)
class Misfit:
    """That nothing fits. `nearest` is the partition whose worst device misses least, `stage` that of it."""

    nearest: Partition
    stage: int

    @property
    def device(self) -> str:
        """The device that misses most."""
        return self.nearest.stages[self.stage].device

    @property
    def missing_bytes(self) -> float:
        """How many bytes that is."""
        return self.nearest.stages[self.stage].missing_bytes

    def __str__(self) -> str:
        one = self.nearest.stages[self.stage]
        return (
            f"No partition into {len(self.nearest.stages)} stages fits. Of the one that comes nearest, stage "
            f"{self.stage} (units {one.begin} to {one.end - 1}) takes {bytes_text(one.peak_bytes)} on "
            f"{one.device}, which has {bytes_text(one.limit_bytes)}: {bytes_text(one.missing_bytes)} are "
            "missing."
        )


def assess(loads: Loads, cuts: Sequence[int]) -> Partition:
    """The partition with these cuts, whether it fits or not."""
    chain, line = loads.chain, loads.line
    stages = []
    link_s = [0.0]
    for place, (begin, end) in enumerate(pairwise(chain.bounds(cuts))):
        seat = line.seats[place]
        again = loads.is_recomputed(place, begin, end)
        backward_s = chain.recompute_backward_s if again else chain.backward_s
        stage = _StageLoad(
            begin=begin,
            end=end,
            device=seat.name,
            recompute=again,
            forward_s=float(chain.forward_s[begin:end].sum()) / seat.speed,
            backward_s=float(backward_s[begin:end].sum()) / seat.speed,
            busy_s=loads.busy_of(place, begin, end),
            peak_bytes=loads.bytes_of(place, begin, end),
            limit_bytes=seat.memory_bytes,
        )
        stages.append(stage)
        if end < chain.num_units:
            link_s.append(loads.link_of(place, end))
    return Partition(tuple(stages), max(*link_s, *(stage.busy_s for stage in stages)))
