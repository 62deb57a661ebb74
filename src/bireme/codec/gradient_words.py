"""How the gradients of weights are kept, in the words of a run file: whole, or as components of a low rank.

A description only, without tensors, so planners can read it. `principal.py` has the mathematics.
"""

import re
from dataclasses import dataclass

from bireme.errors import BiremeError

__all__ = ["GRADIENT_WORDS", "GradientForm", "parse_gradient"]

GRADIENT_WORDS = "whole, principal:RANK or principal:RANK:PAIRS"

MOST = 65536

PRINCIPAL = re.compile(r"principal:([0-9]+)(?::([0-9]+))?")


@dataclass(frozen=True, slots=True)
class GradientForm:
    """Components of `rank`, which turn after every `piece` pairs of an input and what flows back into its
    output; 0 stands for all pairs that a micro-batch brings at once.

    `patterns` name the weights that it is for; None stands for all that it makes smaller.
    """

    rank: int
    piece: int = 0
    patterns: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """As a run file has it."""
        return f"principal:{self.rank}" + (f":{self.piece}" if self.piece else "")

    def num_elements(self, rows: int, columns: int) -> int:
        """The numbers that stand for a gradient of so many rows and columns: k (a + b + 1)."""
        return self.rank * (rows + columns + 1)

    def is_smaller(self, rows: int, columns: int) -> bool:
        """Whether they are fewer than the gradient has."""
        return self.num_elements(rows, columns) < rows * columns


def parse_gradient(text: str, patterns: tuple[str, ...] | None = None) -> GradientForm | None:
    """The form that a text names, None if gradients are whole; a `BiremeError` where there is none such."""
    word = text.strip()
    if word == "whole":
        return None
    found = PRINCIPAL.fullmatch(word)
    if found is None:
        raise BiremeError(f"Gradients cannot be kept as {text!r}. Use {GRADIENT_WORDS}.")
    rank, piece = int(found[1]), int(found[2] or 0)
    if not 1 <= rank <= MOST:
        raise BiremeError(
            f"{text!r} is impossible: the rank {rank} must be 1 to {MOST}. Use {GRADIENT_WORDS}."
        )
    if found[2] is not None and not 1 <= piece <= MOST:
        raise BiremeError(
            f"{text!r} is impossible: {piece} pairs, where 1 to {MOST} can be. Use {GRADIENT_WORDS}."
        )
    return GradientForm(rank, piece, patterns)
