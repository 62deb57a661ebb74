"""How many bytes of text each token of a tokenizer stands for, read from the tokenizer's own description.

With that a loss per token becomes one per byte, which compares models whatever their tokenizers. It is known
where a token stands for text of its own: byte-level tokenizers, and those that write spaces as letters.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["byte_lengths"]

SPACE = "\u2581"
"""How the tokenizers of sentencepiece write a space."""

ONE_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def byte_lengths(description: Mapping[str, Any], num_tokens: int) -> NDArray[np.int64] | None:
    """The bytes of each token, by id; None where a token alone does not tell.

    `description` is what `tokenizer.json` holds. Tokens that stand for no text, such as marks, have none.
    """
    kinds = {one.get("type") for one in _parts(description.get("decoder"))}
    if "ByteLevel" in kinds:
        is_bytes = True
    elif kinds & {"ByteFallback", "Metaspace"}:
        is_bytes = False
    else:
        return None
    lengths = np.zeros(num_tokens, np.int64)
    for token, number in _vocabulary(description["model"]["vocab"]):
        lengths[number] = len(token) if is_bytes else _length(token)
    for added in description.get("added_tokens") or ():
        lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return lengths


def _parts(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A decoder, or those that it is a sequence of."""
    if decoder is not None:
        yield from decoder.get("decoders", (decoder,))


def _vocabulary(vocabulary: Any) -> Iterator[tuple[str, int]]:
    """Tokens with their ids: a table, or a list of tokens with their scores."""
    if isinstance(vocabulary, Mapping):
        yield from vocabulary.items()
    else:
        yield from ((token, number) for number, (token, _) in enumerate(vocabulary))


def _length(token: str) -> int:
    return 1 if ONE_BYTE.fullmatch(token) else len(token.replace(SPACE, " ").encode())
