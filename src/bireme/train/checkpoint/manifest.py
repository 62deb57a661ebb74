"""`manifest.json`: what one checkpoint is, its files, and how to know that they are what they were.

Its last line is the SHA-256 of the file itself, with zeros in its own place; so a changed byte in it is
found like one in any other file. The record of a run's files (`../folder.py`) is sealed in the same way.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

import bireme
from bireme.bounds import bytes_text
from bireme.documents import validated
from bireme.errors import BiremeError
from bireme.train.checkpoint import disk

SHARES = "shares"
"""Where a run's own part of the manifest has all that decides about its shares, if they follow speeds."""

MANIFEST = "manifest.json"
RECORD: Final = "run-files.json"
"""The copies of the files of a run that a resume reads, in the folder of the run and in each checkpoint."""
_LARGEST_EXTRA_BYTES = 1 << 20

KEY = "manifest_sha256"
_NO_DIGEST = "0" * 64

Count = Annotated[int, Field(ge=1)]
Place = Annotated[int, Field(ge=0)]
_Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class CheckpointMeta:
    """The facts of a run in a checkpoint; a run that goes on from that compares them with its own.

    `next_batch` is the number of the batch to go on with, `extra` small JSON of the caller's own.
    """

    next_batch: int
    seed: int
    schedule: str
    num_stages: int
    width: int
    graph_hash: str
    extra: dict[str, JsonValue] = field(default_factory=dict)


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TensorEntry(_Document):
    """One tensor in a file; `dtype` is torch's own word for it, such as bfloat16."""

    name: str
    dtype: str
    shape: list[Place]


class FileEntry(_Document):
    """One file, without the folder it lies in. If machines share no folder, `machine` is the index of the
    machine that wrote it, and `digests` has the digest of each tensor.
    """

    name: str = Field(pattern=r"^rank-\d{4,}\.safetensors$")
    num_bytes: Place
    sha256: _Sha256
    tensors: list[TensorEntry]
    machine: Place = 0
    digests: list[str] = []


class RecordEntry(_Document):
    """The record of the run's files that a checkpoint has a copy of."""

    name: Literal["run-files.json"] = RECORD
    num_bytes: Place
    sha256: _Sha256


class Manifest(_Document):
    """The whole of what is known about a checkpoint without looking into its files."""

    format: Literal[1] = 1
    step: Place = Field(description="batches trained")
    next_batch: Place
    clip_scale: float = Field(allow_inf_nan=False)
    seed: int
    schedule: str
    num_stages: Count
    width: Count
    graph_hash: str
    torch_version: str
    bireme_version: str
    extra: dict[str, JsonValue]
    files: list[FileEntry] = Field(min_length=1)
    record: RecordEntry | None = None
    machines: list[str] = Field(default=[], description="names of machines, if these share no folder")

    @classmethod
    def of(
        cls, meta: CheckpointMeta, step: int, clip_scale: float, files: list[FileEntry], **more: Any
    ) -> Self:
        """The manifest of a checkpoint that this Bireme makes."""
        known: dict[str, Any] = {"step": step, "clip_scale": clip_scale, "files": files, **asdict(meta)}
        versions = {"torch_version": version("torch"), "bireme_version": bireme.__version__}
        return cls(**known | versions | more)

    @model_validator(mode="after")
    def _check_machines(self) -> Self:
        """Each file is of one of the machines, and has the digests of its tensors."""
        for one in self.files if self.machines else ():
            if one.machine >= len(self.machines) or len(one.digests) != len(one.tensors):
                raise ValueError(f"{one.name} lacks its machine or the digests of its tensors")
        return self

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(file.num_bytes for file in self.files)


def plain_extra(extra: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """A copy of a caller's own part of the manifest, as it will be read; refused if it is no small JSON."""
    try:
        text = json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise BiremeError(f"Extra data in a checkpoint must be JSON: {error}.") from error
    if len(text) > _LARGEST_EXTRA_BYTES:
        raise BiremeError(
            f"Extra data in a checkpoint takes {bytes_text(len(text))} of JSON, but at most "
            f"{bytes_text(_LARGEST_EXTRA_BYTES)} are allowed. Put large data into tensors or separate files."
        )
    copied: dict[str, JsonValue] = json.loads(text)
    return copied


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a folder that has none yet; return when it is on the disk."""
    write_new(folder / MANIFEST, sealed(manifest.model_dump(mode="json"), KEY))


def write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there yet; return when it is on the disk."""
    with disk.create(path) as file:
        disk.write(file, memoryview(data))
        disk.sync(file)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder; a `BiremeError` if it is not there, or not as it was written."""
    path = folder / MANIFEST
    try:
        signed = path.read_bytes()
    except FileNotFoundError:
        raise BiremeError(f"{path} is missing: without it {folder.name} is not a checkpoint.") from None
    except OSError as error:
        raise BiremeError(f"{path} cannot be read: {error.strerror or error}.") from error
    return manifest_in(signed, path)


def manifest_in(signed: bytes, path: Path) -> Manifest:
    """The manifest in the content of a file, which is or was at a path."""
    return validated(unsealed(signed, KEY, path), Manifest, source=str(path))


def sealed(document: dict[str, Any], key: str) -> bytes:
    """A document as JSON whose last line has, under `key`, the SHA-256 of all of it."""
    text = json.dumps(document, allow_nan=False, indent=1).removesuffix("\n}")
    unsigned = f'{text},\n "{key}": "{_NO_DIGEST}"\n}}\n'.encode()
    digest = hashlib.sha256(unsigned).hexdigest()
    return _last_line(key).sub(f',\n "{key}": "{digest}"\n}}\n'.encode(), unsigned)


def unsealed(signed: bytes, key: str, path: Path) -> dict[str, Any]:
    """The document that `sealed` was given; a `BiremeError` if a byte of it differs."""
    last = _last_line(key).search(signed)
    if last is None:
        raise BiremeError(f"{path} is damaged or truncated: it does not end with its own checksum.")
    unsigned = signed[: last.start(1)] + _NO_DIGEST.encode() + signed[last.end(1) :]
    if hashlib.sha256(unsigned).hexdigest().encode() != last[1]:
        raise BiremeError(f"{path} is damaged: its bytes do not match the checksum in its last line.")
    document: dict[str, Any] = json.loads(signed)
    del document[key]
    return document


def _last_line(key: str) -> re.Pattern[bytes]:
    return re.compile(rb',\n "' + key.encode() + rb'": "([0-9a-f]{64})"\n}\n\Z')
