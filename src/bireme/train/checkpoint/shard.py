"""A shard: the file of one rank, in the safetensors format, that any reader of that format can open.

It is written and read here rather than by the safetensors package, because that one maps files into memory
(where a disk's error kills the process instead of being told), knows not all types that torch has, and
would need a second pass for the checksum.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from bireme.errors import BiremeError, system_errors
from bireme.files import FileDigest
from bireme.runtime.snapshot import NamedTensors
from bireme.train.checkpoint import disk
from bireme.train.checkpoint.manifest import FileEntry, TensorEntry

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of types in the format. Tensors of any other are bytes there; the manifest says which."""
_HEAD_BYTES = 8
"""The length of the header, at the front of a file."""


def write_shard(path: Path, tensors: Mapping[str, Tensor], machine: int | None = None) -> FileEntry:
    """Write tensors on the CPU to a new file, and return when they are on the disk; what to expect there.

    Bytes are written as they lie, so nothing is copied and every bit survives. If machines share no folder,
    `machine` is the index of this one.
    """
    # The widest elements come first, so that each tensor lies at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries = [tensor_entry(name, tensors[name]) for name in names]
    digest = write_tensors(path, entries, tensors)
    found = FileEntry(name=path.name, num_bytes=digest.num_bytes, sha256=digest.sha256, tensors=entries)
    if machine is None:
        return found
    digests = [tensor_digest(tensors[name]) for name in names]
    return found.model_copy(update={"machine": machine, "digests": digests})


def tensor_digest(tensor: Tensor) -> str:
    """The digest of the bytes of a tensor."""
    return hashlib.blake2b(_bytes_of(tensor), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where the bytes of a tensor are in its file, and their digest, empty if it has none."""

    entry: TensorEntry
    begin: int
    num_bytes: int
    digest: str

    def tensor_of(self, data: Tensor) -> Tensor:
        """The tensor that has these bytes."""
        return data.view(_type_of(self.entry)).reshape(self.entry.shape)


def places_in(file: FileEntry) -> Iterator[TensorPlace]:
    """Where the tensors are in a file that `write_shard` wrote; a file of one machine alone has no digests.
    Raises a `BiremeError` if the tensors do not fill the file.
    """
    begin = len(_header(file.tensors, {}))
    if begin + sum(map(element_bytes, file.tensors)) != file.num_bytes:
        raise BiremeError(f"{file.name} has {file.num_bytes:,} bytes, and its tensors have others.")
    digests = file.digests or ("",) * len(file.tensors)
    for entry, digest in zip(file.tensors, digests, strict=True):
        yield TensorPlace(entry, begin, element_bytes(entry), digest)
        begin += element_bytes(entry)


def write_tensors(
    path: Path,
    entries: Sequence[TensorEntry],
    tensors: Mapping[str, Tensor],
    about: Mapping[str, str] | None = None,
) -> FileDigest:
    """Write a new file of these tensors in this order, and return when it is on the disk.

    Each is asked for when it is to be written, and is let go of before the next one: a mapping that reads
    them only then never has more than one in memory.
    """
    header = _header(entries, about or {})
    digest, num_bytes = hashlib.sha256(header), len(header)
    with disk.create(path) as file:
        disk.write(file, memoryview(header))
        for entry in entries:
            data = _checked_bytes(entry, tensors[entry.name])
            num_bytes += len(data)
            for begin in range(0, len(data), disk.CHUNK_BYTES):
                digest.update(data[begin : begin + disk.CHUNK_BYTES])
                disk.write(file, data[begin : begin + disk.CHUNK_BYTES])
            del data
        disk.sync(file)
    return FileDigest(num_bytes, digest.hexdigest())


def _checked_bytes(entry: TensorEntry, tensor: Tensor) -> memoryview:
    """The bytes of a tensor that must be what the header says."""
    found = tensor_entry(entry.name, tensor)
    if found != entry:
        raise BiremeError(
            f"{entry.name} was to be {entry.dtype} {entry.shape}, and is {found.dtype} {found.shape}."
        )
    return _bytes_of(tensor)


def _header(entries: Sequence[TensorEntry], about: Mapping[str, str]) -> bytes:
    places: dict[str, object] = {"__metadata__": dict(about)} if about else {}
    begin = 0
    for entry in entries:
        end = begin + element_bytes(entry)
        code = CODES.get(_type_of(entry))
        shape = [end - begin] if code is None else entry.shape
        places[entry.name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(places, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEAD_BYTES)
    return len(text).to_bytes(_HEAD_BYTES, "little") + text


def element_bytes(entry: TensorEntry) -> int:
    """The bytes of a tensor's elements."""
    return prod(entry.shape) * _type_of(entry).itemsize


def _type_of(entry: TensorEntry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise BiremeError(
            f"{entry.name} has the type {entry.dtype}, which torch {torch.__version__} does not have. "
            "Use a torch no older than the one that wrote it."
        )
    return dtype


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data


def tensor_entry(name: str, tensor: Tensor) -> TensorEntry:
    """What a file says of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name=name, dtype=dtype, shape=list(tensor.shape))


class SavedTensors(NamedTensors):
    """The tensors in the shards of a folder, by name: each is read, and new, whenever it is asked for.

    No file stays open and nothing stays mapped; several threads may read. What cannot be read is a
    `BiremeError`.
    """

    def __init__(self, folder: Path, files: Sequence[FileEntry]) -> None:
        self._folder = folder
        self.names = self._places = {
            place.entry.name: (file, place) for file in files for place in places_in(file)
        }
        self._checked = set[str]()
        """The files whose headers were read."""

    def __getitem__(self, name: str) -> Tensor:
        entry, place = self._places[name]
        path = self._folder / entry.name
        with system_errors(f"{path} cannot be read"), FileIO(path, "rb") as file:
            if entry.name not in self._checked:
                _check_header(file, path, entry)
                self._checked.add(entry.name)
            file.seek(place.begin)
            data = torch.empty(place.num_bytes, dtype=torch.uint8)
            if disk.read(file, data.numpy().data) < len(data):
                raise BiremeError(f"{path} ends inside the tensor {name}. It is damaged.")
            return place.tensor_of(data)


def _check_header(file: FileIO, path: Path, entry: FileEntry) -> None:
    """Refuse a file that does not begin as `write_shard` has begun it."""
    header = _header(entry.tensors, {})
    found = bytearray(len(header))
    disk.read(file, memoryview(found))
    if found != header:
        raise BiremeError(f"{path} has another header than the manifest lists. It is damaged.")
