"""How long a rank's device works on each batch: its passes, without waits for messages and sums.

On a CPU that is the time of calls, on an accelerator the time between two marks in the device's stream, as
the recorder has it. Other programs on the device count too: that is what makes it slow.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

from bireme.devices import is_accelerator, mark
from bireme.runtime.recorder import Moment

__all__ = ["Stopwatch"]


class Stopwatch:
    """Adds up the work of one rank's device, batch by batch."""

    def __init__(self, device: torch.device) -> None:
        self._is_marked = is_accelerator(device)
        self.now: Callable[[], Moment] = partial(mark, device) if self._is_marked else perf_counter
        """This moment of the device."""
        self._spans: defaultdict[int, list[tuple[Any, Any]]] = defaultdict(list)

    def note(self, batch: int, begin: Moment, end: Moment) -> None:
        """The device worked on a batch from then to then."""
        self._spans[batch].append((begin, end))

    def take(self, batch: int) -> float:
        """The seconds of a batch whose passes are all noted; they are forgotten. From any thread."""
        spans = self._spans.pop(batch, [])
        if not self._is_marked:
            return float(sum(end - begin for begin, end in spans))
        if spans:
            spans[-1][1].synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in spans)) / 1e3

    def alone(self, batch: int) -> tuple[float]:
        """The same as the only number that a rank gives along."""
        return (self.take(batch),)
