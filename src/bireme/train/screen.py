"""The lines that a run shows while it goes: one for each of its log, plain, so that a file takes them."""

import sys
from time import monotonic
from typing import Any

from bireme.bounds import bytes_text
from bireme.report.units import seconds_text

__all__ = ["Screen"]


class Screen:
    """Prints to standard error, where progress belongs."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._begin_s = monotonic()
        self._begin_step = 0

    def show(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Print an event of the run."""
        match kind:
            case "start":
                self._begin_s, self._begin_step = monotonic(), step
                self._say(f"step {self._of(step)}  the pipeline is ready")
            case "train":
                self._say(self._line(step, values))
            case "evaluation":
                self._say(f"step {self._of(step)}  evaluation loss {values['loss']:.4f}{_more(values)}")
            case "checkpoint":
                self._say(
                    f"step {self._of(step)}  checkpoint, {bytes_text(values['num_bytes'])}, pause "
                    f"{seconds_text(values['stall_s'])}, written in {seconds_text(values['write_s'])}"
                )
            case "schedule":
                self._say(
                    f"step {self._of(step)}  switches to {values['schedule']}; updates are delayed from here"
                )
            case "shares" if step:
                self._say(f"step {self._of(step)}  shares {' + '.join(map(str, values['shares']))}")
            case "warning" | "private":
                self._say(f"step {self._of(step)}  {values['text']}")

    def _line(self, step: int, values: dict[str, Any]) -> str:
        parts = [f"step {self._of(step)}", f"loss {values['loss']:.4f}", f"norm {values['grad_norm']:.3f}"]
        if values["tokens_per_s"]:
            parts.append(f"{values['tokens_per_s']:,.0f} tokens/s")
        elif values["samples_per_s"]:
            parts.append(f"{values['samples_per_s']:,.1f} samples/s")
        known = [bytes_text(one) for one in values["memory_bytes"] if one]
        if known:
            parts.append(f"memory {' + '.join(known)}")
        done = step - self._begin_step
        if done and step < self._num_steps:
            left_s = (monotonic() - self._begin_s) / done * (self._num_steps - step)
            parts.append(f"{_clock(left_s)} left")
        return "  ".join(parts)

    def _of(self, step: int) -> str:
        return f"{step:>{len(str(self._num_steps))}}/{self._num_steps}"

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)  # noqa: T201 (this is what the file is for)


def _more(values: dict[str, Any]) -> str:
    """What else there is to say about an evaluation's loss."""
    perplexity, bits = values["perplexity"], values["bits_per_byte"]
    parts = [] if perplexity is None else [f"perplexity {perplexity:,.4g}"]
    parts += [] if bits is None else [f"{bits:.4f} bits per byte"]
    return "".join(f"  {part}" for part in parts)


def _clock(seconds: float) -> str:
    """Such as 1:05 or 2:03:10."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
