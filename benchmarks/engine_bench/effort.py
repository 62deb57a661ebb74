"""How much is measured: which shapes, how many batches and rounds, and what besides the shapes."""

from dataclasses import dataclass, field

from benchmarks.engine_bench.emulated import StagePace
from bireme.errors import BiremeError


@dataclass(frozen=True, slots=True)
class BenchShape:
    """Devices in a pipeline, and micro-batches in a batch."""

    num_ranks: int
    num_microbatches: int

    def __post_init__(self) -> None:
        if not 2 <= self.num_ranks <= self.num_microbatches:
            raise BiremeError(
                f"{self.num_microbatches} micro-batches on {self.num_ranks} devices cannot be measured: all "
                "schedules need two devices at least, and as many micro-batches as devices."
            )


@dataclass(frozen=True, slots=True)
class BenchEffort:
    """What to measure. `counted` batches in the steady state make one figure, of which there are `rounds`.

    `small_gpt` are the numbers of micro-batches that the small GPT is trained with; `footprint` asks for the
    peak resident sets; `hosts` for the two replicas over a slow link.
    """

    shapes: tuple[BenchShape, ...]
    pace: StagePace = field(default=StagePace(0.010, 0.020))
    counted: int = 3
    rounds: int = 3
    overhead_microbatches: int = 64
    overhead_batches: int = 12
    overhead_rounds: int = 7
    buffers: tuple[int, ...] = (4, 16, 64)
    small_gpt: tuple[int, ...] = ()
    footprint: bool = False
    hosts: bool = False

    def __post_init__(self) -> None:
        least = min(self.counted, self.rounds, self.overhead_batches, self.overhead_rounds)
        if least < 1 or min(self.pace.forward_s, self.pace.backward_s) < 0:
            raise BiremeError("A benchmark needs at least one batch and one round, and seconds of 0 or more.")


QUICK = BenchEffort(shapes=(BenchShape(4, 4),), counted=2, rounds=2, overhead_batches=8, overhead_rounds=3)
FULL = BenchEffort(
    shapes=(BenchShape(4, 4), BenchShape(4, 8), BenchShape(8, 8), BenchShape(8, 16)),
    small_gpt=(4, 8),
    footprint=True,
)
