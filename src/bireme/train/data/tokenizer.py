"""Text to tokens and back: the bytes themselves, or a tokenizer in a folder of the transformers package.

A tokenizer is named as `bytes`, as a folder, or as `auto`, which is the model's folder if it has one. Nothing
is downloaded, and code that lies in a folder is never run.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bireme.errors import BiremeError
from bireme.user_code import optional_package, reason_of

# How many bytes of text each token of a tokenizer stands for, read from the tokenizer's own description.
#
# With that a loss per token becomes one per byte, which compares models whatever their tokenizers. It is
# known where a token stands for text of its own: byte-level tokenizers, and those that write spaces as
# letters.

_SPACE = "\u2581"
"""How the tokenizers of sentencepiece write a space."""

_ONE_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def byte_lengths(description: Mapping[str, Any], num_tokens: int) -> NDArray[np.int64] | None:
    """The bytes of each token, by id; None where a token alone does not tell.

    `description` is what `tokenizer.json` holds. Tokens that stand for no text, such as marks, have none.
    """
    decoder = description.get("decoder") or {}
    kinds = {one.get("type") for one in decoder.get("decoders", (decoder,))}
    if "ByteLevel" in kinds:
        is_bytes = True
    elif kinds & {"ByteFallback", "Metaspace"}:
        is_bytes = False
    else:
        return None
    lengths = np.zeros(num_tokens, np.int64)
    vocabulary = description["model"]["vocab"]  # a table, or a list of tokens with their scores
    if not isinstance(vocabulary, Mapping):
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    for token, number in vocabulary.items():
        lengths[number] = len(token) if is_bytes else _length(token)
    for added in description.get("added_tokens") or ():
        lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return lengths


def _length(token: str) -> int:
    return 1 if _ONE_BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode())


Ids = NDArray[np.int64]

_NUM_BYTES = 256


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """Text in UTF-8, a token for each byte, and one more for the end of a text."""

    has_end_of_text: bool = True

    @property
    def num_tokens(self) -> int:
        """256, or 257: ids are below this."""
        return _NUM_BYTES + self.has_end_of_text

    num_learned = num_tokens

    @property
    def end_of_text(self) -> int | None:
        """The id after each document, above those of the bytes; None if there is no such token."""
        return _NUM_BYTES if self.has_end_of_text else None

    @property
    def identity(self) -> str:
        """Which of the two it is."""
        return f"bytes {self.num_tokens}"

    def encode(self, text: str) -> list[int]:
        """The bytes of a text, with no marks put around them."""
        return list(text.encode(errors="replace"))

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """The bytes of each text."""
        return [np.frombuffer(text.encode(errors="replace"), np.uint8).astype(np.int64) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that are none in UTF-8 show as U+FFFD."""
        return bytes(number for number in ids if 0 <= number < _NUM_BYTES).decode(errors="replace")

    def marked(self, ids: Sequence[int]) -> str:
        """The text, and a mark for each end of a text."""
        parts = (b"<end>" if number == _NUM_BYTES else bytes((number,)) for number in ids)
        return b"".join(parts).decode(errors="replace")

    def byte_lengths(self) -> Ids:
        """One each, and none for the end of a text."""
        return (np.arange(self.num_tokens) < _NUM_BYTES).astype(np.int64)


class FolderTokenizer:
    """The tokenizer in a folder that transformers reads."""

    def __init__(self, folder: Path) -> None:
        self.backend = _loaded(folder)
        """The tokenizer itself, as transformers has it."""
        self._folder = folder
        vocabulary, added = self.backend.get_vocab(), self.backend.get_added_vocab()
        if not vocabulary:
            raise BiremeError(f"The tokenizer in {folder} has no tokens. Name another folder.")
        self.num_tokens = int(max(vocabulary.values())) + 1
        """Ids are below this: the vocabulary with what was added to it."""
        self.num_learned = 1 + max((one for word, one in vocabulary.items() if word not in added), default=-1)
        """Ids of ordinary text are below this. Some models lack an added token, such as that of images."""

    @property
    def end_of_text(self) -> int | None:
        """Its end of sequence, or what separates texts where it knows no end."""
        for number in (self.backend.eos_token_id, self.backend.sep_token_id):
            if number is not None:
                return int(number)
        return None

    @property
    def identity(self) -> str:
        """A digest of what the tokenizer does, or else of its files: the same in any folder."""
        own = getattr(self.backend, "backend_tokenizer", None)
        words = sha256(f"{type(self.backend).__name__} {self.end_of_text}".encode())
        if own is not None:
            words.update(own.to_str().encode())
        else:
            for path in sorted(path for path in self._folder.iterdir() if _may_tell(path)):
                words.update(path.name.encode() + b"\0" + path.read_bytes())
        return f"tokenizer {words.hexdigest()}"

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without a mark for its beginning or end."""
        return [int(number) for number in self._ids([text])[0]]

    def encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text; many at once are on many cores."""
        return [np.asarray(ids, np.int64) for ids in self._ids(list(texts))] if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        """The text; ids beyond the vocabulary, which a model with a larger one can write, are left out."""
        known = [int(number) for number in ids if 0 <= number < self.num_tokens]
        return str(self.backend.decode(known, skip_special_tokens=True))

    def marked(self, ids: Sequence[int]) -> str:
        """The text with special tokens; ids beyond the vocabulary show as such."""
        if any(number >= self.num_tokens for number in ids):
            return " ".join(f"<{number}>" for number in ids)
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def byte_lengths(self) -> Ids | None:
        """From the tokenizer's description of itself, if it has one."""
        own = getattr(self.backend, "backend_tokenizer", None)
        return None if own is None else byte_lengths(json.loads(own.to_str()), self.num_tokens)

    def _ids(self, texts: list[str]) -> list[list[int]]:
        encoded = self.backend(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids


Tokenizer = ByteTokenizer | FolderTokenizer
"""What turns text into token ids and back. `identity` differs when the same text may give other ids."""


def load_tokenizer(
    name: str, *, model_folder: Path | None = None, model_vocabulary: int | None = None
) -> Tokenizer:
    """The tokenizer of this name: `bytes`, a folder, or `auto`.

    Bytes have no token for the end of a text where the model has just 256 tokens.
    """
    if name == "auto":
        if model_folder is not None and has_tokenizer(model_folder):
            return FolderTokenizer(model_folder)
        name = "bytes"
    if name == "bytes":
        return ByteTokenizer(has_end_of_text=model_vocabulary != _NUM_BYTES)
    return FolderTokenizer(Path(name))


_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
LARGEST_BYTES = 1 << 26


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer of transformers."""
    return any((folder / name).is_file() for name in _FILES)


def _may_tell(path: Path) -> bool:
    weights = (".safetensors", ".bin", ".pt", ".h5", ".gguf", ".msgpack", ".onnx")
    return path.is_file() and path.suffix not in weights and path.stat().st_size <= LARGEST_BYTES


def _loaded(folder: Path) -> Any:
    if not folder.is_dir():
        raise BiremeError(
            f"There is no tokenizer {str(folder)!r}: use bytes, auto, or a folder with a tokenizer of "
            "transformers. Nothing is downloaded."
        )
    if not has_tokenizer(folder):
        raise BiremeError(
            f"The folder {folder} has no tokenizer: it has none of {', '.join(_FILES)}. Save one there, "
            "or use bytes."
        )
    transformers = optional_package("transformers", "hf", f"The tokenizer in {folder}")
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a tokenizer's mistakes come as whatever its reader stumbles over
        raise BiremeError(f"The tokenizer in {folder} cannot be read: {reason_of(error)}.") from error
