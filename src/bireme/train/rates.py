"""Learning-rate schedules: the factor on the learning rate, batch by batch.

A factor depends on the number of the batch alone, so a run that was interrupted goes on as if it had not
been.
"""

import math
from collections.abc import Callable

from bireme.train.run_file.training import Training


def rate_factor(training: Training) -> Callable[[int], float]:
    """The factor on the learning rate for batch t, counted from 0.

    The schedule goes over all steps, or over `schedule_steps`. After these it holds its last factor, or
    begins again, over the steps that are left.
    """
    length = training.num_schedule_steps
    first = _over(training, length)
    if training.after_schedule == "hold" or training.steps <= length:
        return first
    again = _over(training, training.steps - length)
    return lambda batch: first(batch) if batch < length else again(batch - length)


def _over(training: Training, steps: int) -> Callable[[int], float]:
    """The schedule over so many steps.

    With n steps and w of warm-up it rises in equal parts, (t + 1) / w, and is 1 at t = w - 1. From there
    it is constant, or falls until the last batch, n - 1, has `final_fraction`, and stays so after it. Of
    wsd only the last part falls, straight. Where warm-up leaves no batch to fall in, it ends at 1.
    """
    warmup = training.warmup_steps
    if warmup is None:
        warmup = round((training.warmup_fraction or 0.0) * steps)
    last = steps - 1
    begin = max(warmup - 1, 0)
    if training.schedule == "wsd":
        begin = max(begin, last - max(1, round(training.decay_fraction * steps)))
    final = training.final_fraction
    is_flat = training.schedule == "constant" or last <= begin
    is_round = training.schedule == "cosine"

    def factor(batch: int) -> float:
        if batch < warmup:
            return (batch + 1) / warmup
        if is_flat or batch <= begin:
            return 1.0
        done = min((batch - begin) / (last - begin), 1.0)
        left = (1 + math.cos(math.pi * done)) / 2 if is_round else 1 - done
        return left + final * (1 - left)

    return factor
