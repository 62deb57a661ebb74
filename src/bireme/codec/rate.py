"""How long a codec takes for a value."""

from dataclasses import dataclass

__all__ = ["CodecRate"]


@dataclass(frozen=True, slots=True)
class CodecRate:
    """Seconds for a value of a tensor. `back` is for gradients: `keep` takes the entries that it knows."""

    codec: str
    encode_s: float
    decode_s: float
    back_encode_s: float
    back_decode_s: float
