"""The control: a fixed piece of work that no model changes, to tell a slow machine from a slow program.

Shared machines lend their cores to others, and by the minute. How slow a core is while a thread has it, the
control shows: the same few products of matrices are timed in turns with what is measured, once when a model
is profiled and again while it trains. They allocate nothing. For how long the thread had no core, the
operating system counts: waits are rare and long, so that now and then is too seldom to look for them.
"""

import hashlib
import json
import os
import platform
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import TypeVar

import torch

from bireme.cluster.device import Device
from bireme.cluster.machine import memory_bytes, processor_name
from bireme.devices import KINDS, device_called, is_accelerator, properties_of
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.profile.timing import Clock, CoreTime, core_time

# What this machine's devices are called and how much memory they have.


def torch_device(name: str) -> torch.device:
    """The device of this machine that torch calls so, if seconds can be measured on it."""
    device = device_called(name)
    check_measurable(device)
    return device


def check_measurable(device: torch.device) -> None:
    """Refuse a device whose seconds cannot be measured."""
    if device.type not in KINDS:
        raise BiremeError(
            f"Seconds are measured on {' and '.join(KINDS)}, not on {device}. Give the "
            "description of a device to estimate them instead."
        )


def device_here(device: torch.device) -> Device:
    """A device of this machine; how fast it is has to be measured."""
    if is_accelerator(device):
        properties = properties_of(device)
        return Device(properties.name, device.type, properties.memory_bytes)
    return Device(processor_name(), "cpu", memory_bytes())


def versions_here() -> str:
    """The software that what is measured here depends on."""
    own = metadata.version("bireme")
    return f"Bireme {own}, torch {torch.__version__}, Python {platform.python_version()}"


# What was measured before, on disk: profiles of the same graph, the engine, and codecs, on the same device
# with the same software.
#
# They lie in `$BIREME_CACHE`, or in `bireme` under `$XDG_CACHE_HOME` or `~/.cache`. A cache that cannot be
# read or written is as good as an empty one.

_Figures = TypeVar("_Figures")


def cache_folder() -> Path:
    """Where profiles are kept."""
    own = os.environ.get("BIREME_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bireme"


def cache_path(what: Sequence[object], kind: str = "profiles") -> Path:
    """The file of what these words, all that its numbers depend on, describe."""
    return cache_folder() / kind / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:24]}.json"


def cached(path: Path, read: Callable[[Path], _Figures]) -> _Figures | None:
    """What a file of the cache holds; None if it cannot be used."""
    try:
        return read(path)
    except (OSError, ValueError, TypeError, BiremeError):
        return None


def keep(path: Path, plain: Mapping[str, object]) -> None:
    """Put a JSON object into the cache, if that is possible."""
    with suppress(OSError, BiremeError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(plain, allow_nan=False) + "\n")


def cached_figures(path: Path, kind: Callable[..., _Figures]) -> _Figures | None:
    """Figures of the engine or of a codec in a file of the cache; None if it cannot be used."""
    return cached(path, lambda own: kind(**json.loads(own.read_text(encoding="utf-8"))))


CPU = torch.device("cpu")

WIDTH = 256
_NUM_PRODUCTS = 3
"""About a millisecond, in which half a core's cache is used."""

SHARE = 0.005
"""The largest share of the time that it may take while a rank trains."""

STRETCH_S = 1.0
"""For how long a machine counts as equally fast."""


@dataclass(eq=False)
class Control:
    """Times the work whenever it is asked. Its own tensors are made with it.

    With `counts_waits` a batch's slowness includes the time in which the thread waited for a core. Leave it
    out where waiting is predicted because ranks share cores.
    """

    counts_waits: bool = True
    clock: Callable[[], float] = perf_counter
    lap: Callable[[], Callable[[], float]] = lambda: Clock(CPU).lap
    cores: Callable[[], CoreTime | None] = core_time

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._left, self._right = (torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(2))
        self._product = torch.empty(WIDTH, WIDTH)
        self._ended_s = -float("inf")
        self.seconds: list[float] = []
        """What it took, waits left out; of the present stretch, where batches are noted."""
        self._passed_s = 0.0
        """What passed meanwhile, waits included."""
        self._began_s: float | None = None
        self._before: CoreTime | None = None
        self._num_batches = 0
        self._found: tuple[array[float], array[float]] = (array("d"), array("d"))
        """What it would have taken with the waits there were, and for how many batches."""

    def time(self) -> None:
        """Do the work, and note how long it took."""
        began_s, lap = self.clock(), self.lap()
        for _ in range(_NUM_PRODUCTS):
            torch.mm(self._left, self._right, out=self._product)
        self.seconds.append(lap())
        self._ended_s = self.clock()
        self._passed_s += self._ended_s - began_s

    def time_if_due(self) -> None:
        """The same, but seldom enough that other work does not feel it."""
        if not self.seconds or (self.clock() - self._ended_s) * SHARE >= self.seconds[-1]:
            self.time()

    def note_batch(self) -> None:
        """A batch has been trained that counts for the time of a step."""
        if self._began_s is None:
            self._began_s, self._before = self.clock(), self.cores()
        self.time_if_due()
        self._num_batches += 1
        if self.clock() - self._began_s >= STRETCH_S:
            self._end_stretch()

    @property
    def median_s(self) -> float:
        """What it takes on an ordinary occasion, waits left out."""
        return median(self.seconds) if self.seconds else 0.0

    def typical_s(self) -> float | None:
        """What it would have taken while the batch in the middle ran, if they are put in order by that; None
        if no batch has been noted.
        """
        if self._num_batches:
            self._end_stretch()
        in_order = sorted(zip(*self._found, strict=True))
        left = sum(count for _, count in in_order) / 2
        for seconds, count in in_order:
            left -= count
            if left <= 0:
                return seconds
        return None

    def _end_stretch(self) -> None:
        """What the control would have taken in the stretch counts for its batches."""
        now, last_s = self.cores(), self.seconds[-1]
        if now is not None and self._before is not None:
            slowdown = now.slowdown_since(self._before, counts_waits=self.counts_waits)
        else:
            slowdown = self._passed_s / sum(self.seconds) if self.counts_waits else 1.0
        self._found[0].append(slowdown * self.median_s)
        self._found[1].append(self._num_batches)
        self._began_s, self._before = self.clock(), now
        self._num_batches, self._passed_s = 0, last_s
        self.seconds = [last_s]


_TRY_S, _PAUSES_S = 0.1, (0.0, 0.3, 0.3, 0.3)
"""In all about as long as the check of a line keeps a core busy in one direction."""


def _laps_per_s(ends_s: float) -> float:
    """How often this thread does the control in a second, up to that time of `perf_counter`."""
    torch.set_num_threads(1)
    control, began_s = Control(), perf_counter()
    while not control.seconds or perf_counter() < ends_s:
        control.time()
    return len(control.seconds) / (perf_counter() - began_s)


def control_now_s(num_threads: int) -> float:
    """What the control takes on this machine, if these threads do it apart, beside all else that runs there:
    the best of several tries, so that a disturbance of a second does not count.

    Threads of one product wait for each other: if others have a core, that is 30 times as slow.
    """
    rates = list[float]()
    with ThreadPoolExecutor(num_threads) as pool:
        for pause_s in _PAUSES_S:
            sleep(pause_s)
            rates.append(sum(pool.map(_laps_per_s, [perf_counter() + _TRY_S] * num_threads)))
    return 1 / max(rates)
