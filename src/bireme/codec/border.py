"""Which codecs the borders of a pipeline have, direction by direction and over a run. No torch.

A codec depends on the number of the batch alone, so that both ends of a border, and a run that is resumed,
agree on it without a word.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from bireme.codec.description import NONE, CodecChoice, parse_codec
from bireme.errors import BiremeError

__all__ = ["AS_IT_IS", "NO_CODECS", "BorderCodecs", "CodecPhase", "LinkCodecs"]


@dataclass(frozen=True, slots=True)
class BorderCodecs:
    """The codecs of one border: of what crosses it forward, and of the gradients that come back."""

    forward: str = "none"
    backward: str = "none"

    def __post_init__(self) -> None:
        there, back = parse_codec(self.forward), parse_codec(self.backward)
        if (there.share, there.life) != (back.share, back.life):
            raise BiremeError(
                f"A border has the codec {self.forward} forward and {self.backward} backward. The gradient "
                "of what keep sends goes back for the same entries: give both directions keep with the same "
                "share and the same batches, or none of the two."
            )

    def choice(self, *, forward: bool) -> CodecChoice:
        """The codec of one direction."""
        word = self.forward if forward else self.backward
        return NONE if word == "none" else parse_codec(word)

    @property
    def is_none(self) -> bool:
        """Whether everything is sent as it is."""
        return self.choice(forward=True) == self.choice(forward=False) == NONE


AS_IT_IS = BorderCodecs()


@dataclass(frozen=True, slots=True)
class CodecPhase:
    """The codecs from batch `first_batch` on: `borders[s]` has those between stage s and s+1."""

    first_batch: int
    borders: tuple[BorderCodecs, ...]


@dataclass(frozen=True, slots=True)
class LinkCodecs:
    """The codecs of all borders over a run. Without phases, and beyond the borders named, there are none."""

    phases: tuple[CodecPhase, ...] = ()

    def __post_init__(self) -> None:
        begins = [phase.first_batch for phase in self.phases]
        assert begins == sorted(set(begins)), "phases come in the order of their batches"
        assert not begins or begins[0] == 0, "the first phase begins with the run"

    @staticmethod
    def steady(borders: tuple[BorderCodecs, ...]) -> "LinkCodecs":
        """The same codecs all the time."""
        return LinkCodecs((CodecPhase(0, borders),)) if any(not one.is_none for one in borders) else NO_CODECS

    def of(self, border: int, batch: int) -> BorderCodecs:
        """The codecs of a border for a batch."""
        if not self.phases:
            return AS_IT_IS
        borders = self._phase(batch).borders
        return borders[border] if border < len(borders) else AS_IT_IS

    def held(self, batch: int) -> "LinkCodecs":
        """The codecs of that batch, all the time."""
        return LinkCodecs.steady(self._phase(batch).borders) if self.phases else self

    def between(self, rank_of_stage: Sequence[int]) -> "LinkCodecs":
        """Without those of borders between two stages of a rank, where nothing is sent."""
        far = [one != other for one, other in pairwise(rank_of_stage)]
        phases = (replace(phase, borders=tuple(map(_where, phase.borders, far))) for phase in self.phases)
        return LinkCodecs(tuple(phases))

    def _phase(self, batch: int) -> CodecPhase:
        return self.phases[bisect_right([phase.first_batch for phase in self.phases], batch) - 1]


NO_CODECS = LinkCodecs()


def _where(codecs: BorderCodecs, is_far: bool) -> BorderCodecs:
    return codecs if is_far else AS_IT_IS
