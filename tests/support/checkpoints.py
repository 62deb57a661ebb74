"""What tests of checkpoints share: snapshots that know step and rank, and the writers of several ranks."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from bireme.runtime.snapshot import Snapshot
from bireme.runtime.stores import HashStore, PrefixStore
from bireme.train.checkpoint.checkpoint import Checkpoint, find_checkpoints, step_of
from bireme.train.checkpoint.manifest import CheckpointMeta
from bireme.train.checkpoint.writer import (
    CheckpointEvent,
    CheckpointSaved,
    CheckpointWarning,
    CheckpointWriter,
    SpreadPlace,
)
from tests.support.together import run_threads

__all__ = [
    "META",
    "Ranks",
    "bits_equal",
    "fill",
    "hidden_in",
    "ignore",
    "is_step",
    "open_files",
    "random_tensor",
    "ranks",
    "snapshot_of",
    "steps_in",
]

META = CheckpointMeta(
    next_batch=7, seed=3, schedule="2bw", num_stages=2, width=1, graph_hash="abc", extra={"epoch": [1, 0.1]}
)
SMALL = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def random_tensor(dtype: torch.dtype, shape: Sequence[int], seed: int) -> Tensor:
    """Any bits, NaN and denormal numbers among them; where there is one bit in a byte, that one."""
    draws = random.Random(seed)
    empty = torch.empty(tuple(shape), dtype=dtype)
    most = 1 if dtype == torch.bool else 255
    data = bytes(draws.randint(0, most) for _ in range(empty.numel() * empty.element_size()))
    if not data:
        return empty
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(tuple(shape))


def bits_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the last bit, in type and shape too."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def snapshot_of(rank: int, step: int, *, clip_scale: float = 0.1) -> Snapshot:
    """What a rank holds at a step: like no other rank's, and at no other step."""
    tensors = {
        f"weights/block.{rank}.{dtype}".replace("torch.", ""): random_tensor(
            dtype, (5, 3), 1000 * step + rank
        )
        for dtype in SMALL
    }
    tensors[f"optimizer/block.{rank}/step"] = torch.tensor(float(step))
    return Snapshot(step, clip_scale, tensors)


@dataclass(slots=True)
class Ranks:
    """Writers of all ranks in this process, and what each was told."""

    writers: list[CheckpointWriter]
    events: list[list[CheckpointEvent]] = field(default_factory=list)

    def save(self, step: int, *, waits: bool = True) -> None:
        for rank, writer in enumerate(self.writers):
            writer.save(snapshot_of(rank, step), META)
        if waits:
            self.wait()

    def set_patience(self, timeout_s: float) -> None:
        """How long rank 0 waits for the parts of the others, from now on."""
        self.writers[0]._agreement.timeout_s = timeout_s

    def wait(self) -> None:
        for writer in self.writers:
            assert writer.wait(60.0)

    def saved(self, rank: int = 0) -> list[int]:
        return [event.step for event in self.events[rank] if isinstance(event, CheckpointSaved)]

    def warnings(self, rank: int = 0) -> list[str]:
        return [event.text for event in self.events[rank] if isinstance(event, CheckpointWarning)]


@contextmanager
def ranks(
    folder: Path,
    num_ranks: int = 2,
    *,
    keep: int = 2,
    resumed_from: Checkpoint | None = None,
    timeout_s: float = 60.0,
    store: HashStore | None = None,
    is_spread: bool = False,
) -> Iterator[Ranks]:
    """A run's writers, as threads. If it is spread, each is a machine with its own folder in `folder`."""
    store, events = store or HashStore(), [list[CheckpointEvent]() for _ in range(num_ranks)]

    def opened(rank: int) -> CheckpointWriter:
        names = tuple(map(str, range(num_ranks)))
        return CheckpointWriter(
            folder / names[rank] if is_spread else folder,
            rank,
            num_ranks,
            PrefixStore("run", store),
            keep=keep,
            on_event=events[rank].append,
            resumed_from=resumed_from if rank == 0 else None,
            place=SpreadPlace(names, rank, is_first=True) if is_spread else None,
            timeout_s=timeout_s,
        )

    together = Ranks(run_threads(num_ranks, opened), events)
    try:
        yield together
    finally:
        for writer in together.writers:
            writer.close()


def fill(folder: Path, steps: Sequence[int], num_ranks: int = 2, *, keep: int = 9) -> None:
    """Checkpoints of these steps, by one run."""
    with ranks(folder, num_ranks, keep=keep) as run:
        for step in steps:
            run.save(step)
        assert run.saved() == list(steps)


def is_step(tensors: Mapping[str, Tensor], step: int, num_ranks: int = 2) -> bool:
    """Whether these tensors are what all ranks held at a step, to the last bit, and nothing else."""
    expected: dict[str, Tensor] = {}
    for rank in range(num_ranks):
        expected |= snapshot_of(rank, step).tensors
    return set(tensors) == set(expected) and all(
        bits_equal(tensors[name], expected[name]) for name in expected
    )


def open_files() -> int:
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def ignore(_event: CheckpointEvent) -> None:
    """For who is not told what becomes of it."""


def steps_in(folder: Path) -> list[int]:
    return [step_of(path) for path in find_checkpoints(folder)]


def hidden_in(folder: Path) -> list[str]:
    """What is there of drafts and of what is being deleted."""
    return [path.name for path in folder.iterdir() if path.name.startswith((".draft", ".gone"))]
