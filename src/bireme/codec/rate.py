"""How long a codec takes for a value."""

from dataclasses import dataclass

__all__ = ["CodecRate", "sum_name"]


@dataclass(frozen=True, slots=True)
class CodecRate:
    """Seconds for a value of a tensor. `back` is for gradients: `keep` takes the entries that it knows."""

    codec: str
    encode_s: float
    decode_s: float
    back_encode_s: float
    back_decode_s: float


def sum_name(codec: object) -> str:
    """What a codec of sums over replicas is called among others: a border may have one of the same name."""
    return f"{codec} in sums"
