"""Weights in the format of torch.distributed.checkpoint: a folder with `.metadata` and `*.distcp` files.

Tensors are written and read one by one, so a model may be larger than the memory here. The metadata are a
pickle. Only the classes that torch itself writes there are loaded, so a folder cannot run code.
"""

import gc
import pickle
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from bireme.errors import BiremeError

_MODEL = "model"
"""The key of the model in a checkpoint that holds an optimizer and counters too."""

_CHECKPOINT = "torch.distributed.checkpoint"
_CLASSES = {
    f"{_CHECKPOINT}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}
"""All that the metadata of a checkpoint consist of."""


_MOST_BYTES = 1 << 28
"""torch.save leaves each tensor in a cycle of references. After this many bytes the cycles are collected."""

_DAMAGE = (OSError, RuntimeError, ValueError, EOFError, KeyError)


def _member(of: type, name: str) -> Enum:
    """A member of an Enum, and nothing else of it."""
    if not issubclass(of, Enum):
        raise pickle.UnpicklingError(f"it reads {name} of {of.__name__}, which no metadata need")
    return of[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Refuses all other classes and functions."""
        if (module, name) == ("builtins", "getattr"):
            return _member  # as early Python 3.11 pickles members of an Enum
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which no metadata need")
        return super().find_class(module, name)


class DcpWeights:
    """The tensors of a model in a folder, by the model's own names.

    The state dict of the model may be the whole checkpoint, or its part `model`.
    """

    def __init__(self, metadata: Path) -> None:
        """`metadata` is the file of that name."""
        self.folder = metadata.parent
        self._metadata = _read_metadata(metadata)
        self._reader: Any = FileSystemReader(self.folder)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._keys = dict(_keys_of(self._metadata))

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._keys)

    @property
    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        places = self._metadata.storage_data
        found = {places[index].relative_path for index in places}
        return sorted(self.folder / path for path in found)

    def blank(self, name: str, device: str) -> Tensor:
        """A tensor without numbers, as the tensor of that name."""
        entry: Any = self._metadata.state_dict_metadata[self._keys[name]]
        return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)

    def read(self, name: str) -> Tensor:
        """One tensor, put together from its pieces."""
        found, planner = self.blank(name, "cpu"), DefaultLoadPlanner()
        try:
            planner.set_up_planner({self._keys[name]: found}, self._metadata, is_coordinator=True)
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except (*_DAMAGE, AssertionError, pickle.PickleError) as error:
            raise BiremeError(
                f"{self.folder} is damaged: {name} cannot be read ({error}). Fetch it again."
            ) from error
        return found


def _keys_of(metadata: Metadata) -> Mapping[str, str]:
    """The key of each tensor of the model in a checkpoint, by the tensor's name in the model."""
    paths: Any = metadata.planner_data or {}
    found: dict[str, str] = {}
    nested: dict[str, str] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            first, *rest = map(str, paths.get(key) or (key,))
            if not rest:
                found[first] = key
            elif first == _MODEL:
                nested[".".join(rest)] = key
    return nested or found


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except Exception as error:  # a damaged pickle raises anything
        raise BiremeError(f"{path} is damaged: {error}. Fetch the folder again.") from error
    if not isinstance(found, Metadata) or found.storage_data is None:
        raise BiremeError(f"{path} is not the metadata of torch.distributed.checkpoint. Name another folder.")
    return found


def write_dcp_weights(folder: Path, blanks: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a folder, each in a file of its own: torch keeps all tensors of a file in memory.

    Each is asked for when it is written. `blanks` are on the meta device and give the shape and the dtype.
    """
    planner, writer = _OneByOne(tensors), FileSystemWriter(folder, single_file_per_rank=False)
    planner.set_up_planner(dict(blanks), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plans = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plans[0]), planner)
    written.wait()
    writer.finish(metadata, [written.value()])


class _OneByOne(DefaultSavePlanner):
    """Takes each tensor when it is written."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors, self._num_bytes = tensors, 0

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor of that name."""
        if self._num_bytes > _MOST_BYTES:
            gc.collect()
            self._num_bytes = 0
        found = self._tensors[index.fqn].contiguous()
        self._num_bytes += found.nbytes
        return found
