"""Which part of a model learns: chosen parameters, or an adapter on frozen weights.

It is data and imports no torch: a run file and the command line make it, `load_source` applies it.
"""

from dataclasses import dataclass

ALL_LINEAR = "all-linear"
"""The target that stands for every linear layer but the output head."""


@dataclass(frozen=True, slots=True)
class LoraPart:
    """A low-rank adapter: every target W becomes W + alpha / rank · B A, and only A and B learn.

    `targets` are names of modules, or ends of names, as in the peft library; `alpha` is twice the rank where
    it is None. With `use_rslora` alpha is divided by the square root of the rank. With `use_dora` W + … is
    scaled row by row to lengths that learn too.
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    use_rslora: bool = False
    use_dora: bool = False


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """What learns. `train` and `freeze` are fnmatch patterns over the model's own parameter names."""

    train: tuple[str, ...] | None = None
    freeze: tuple[str, ...] | None = None
    lora: LoraPart | None = None


WHOLE = TrainedPart()
"""All that the model itself leaves trainable."""
