"""The initial weights of a run whose model a function of the user makes: made once, read by every rank.

The process that prepares the run calls the function on the CPU and writes the tensors to a folder in that of
the run, before any rank starts. A rank reads the tensors of its own stages, each checked by its SHA-256. The
folder is removed when the run has ended: a resume begins from a checkpoint, which holds all weights.
"""

import json
import shutil
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from bireme.errors import BiremeError
from bireme.files import new_folder
from bireme.model.graph import Graph
from bireme.model.weights import Weights
from bireme.train.checkpoint.manifest import FileEntry
from bireme.train.checkpoint.shard import SavedTensors, write_shard

_FORMAT = 1
FILE, _INDEX = "rank-0000.safetensors", "index.json"
INITIAL_FILES = FILE, _INDEX
"""The names of the files in the folder that `InitialWeights.write` makes."""


class _Index(BaseModel):
    """The file of the tensors, and the SHA-256 of each by its name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: int = _FORMAT
    file: FileEntry
    digests: dict[str, str]


class InitialWeights:
    """Tensors by the model's own names, in memory until they are written."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def num_bytes(self) -> int:
        """The bytes that `write` will put on the disk; 0 after it."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def write(self, folder: Path) -> None:
        """Put the tensors into a folder, whole or not at all, and release their memory."""
        digests = {name: _digest(tensor) for name, tensor in self._tensors.items()}
        with new_folder(folder) as draft:
            entry = write_shard(draft / FILE, self._tensors)
            index = _Index(file=entry, digests=digests)
            (draft / _INDEX).write_text(index.model_dump_json() + "\n", encoding="utf-8")
        self._tensors = {}


def remove_initial(folder: Path) -> None:
    """Remove the folder, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def read_initial(folder: Path) -> Weights:
    """Reads tensors by name from the folder that `InitialWeights.write` has made."""
    path = folder / _INDEX
    try:
        index = _Index.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError, json.JSONDecodeError) as error:
        raise BiremeError(f"{path} cannot be read ({type(error).__name__}). {_REMEDY}") from error
    saved = SavedTensors(folder, [index.file])

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        found = {}
        for name in names:
            if name not in saved:
                raise BiremeError(f"{folder} lacks the tensor {name}. {_REMEDY}")
            tensor = saved[name]
            if _digest(tensor) != index.digests.get(name):
                raise BiremeError(f"{folder / FILE} is damaged: {name} is not as it was written. {_REMEDY}")
            found[name] = tensor
        return found

    return read


_REMEDY = "`bireme resume` writes it again if the run has no checkpoint."


def placeholders(graph: Graph) -> Weights:
    """Tensors in the place of weights that a checkpoint or another replica overwrites before they are used.

    They hold NaN, so that one which is not overwritten shows in the first loss.
    """
    states = {state.name: state for state in (*graph.parameters, *graph.buffers)}

    def make(names: Sequence[str]) -> dict[str, Tensor]:
        found = {}
        for name in names:
            dtype: torch.dtype = getattr(torch, states[name].dtype)
            is_real = dtype.is_floating_point or dtype.is_complex
            if states[name].is_parameter and dtype.is_floating_point:
                dtype = torch.float32
            found[name] = torch.full(states[name].shape, float("nan") if is_real else 0, dtype=dtype)
        return found

    return make


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return sha256(flat.view(torch.uint8).numpy().data).hexdigest()
