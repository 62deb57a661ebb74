"""Weights from a folder of safetensors, by name: only the tensors asked for are read.

The layout is that of the transformers package: one file `model.safetensors`, or several with an index. Tied
weights may be stored under any of their names, and all names may lack, or have, one word at their front.
Where the model is given and its package keeps checkpoints in another form than the model's (experts apart
that the model holds together, older names), that package's own rules convert them.
"""

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bireme.errors import BiremeError, closest
from bireme.model.graph import Graph, ModelState

__all__ = ["check_weights", "load_weights", "open_weights", "weight_files"]

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load_weights(
    graph: Graph,
    names: Iterable[str],
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    model: nn.Module | None = None,
) -> dict[str, Tensor]:
    """The graph's parameters and buffers of these names as a folder holds them.

    Buffers that belong into no checkpoint (they are not persistent) are left out of the result. `dtype` is
    for parameters; without it, and for buffers, the graph's own holds. `model`, on the meta device or not, is
    only asked for its package's rules.
    """
    states = {state.name: state for state in (*graph.parameters, *graph.buffers)}
    wanted = [*dict.fromkeys(names)]
    unknown = next((name for name in wanted if name not in states), None)
    if unknown is not None:
        raise BiremeError(f"The graph has no parameter or buffer {unknown}. {closest(unknown, states)}")
    with open_weights(graph, folder, device=device, dtype=dtype, model=model) as read:
        return {name: read(name) for name in wanted if states[name].persistent}


@contextmanager
def open_weights(
    graph: Graph,
    folder: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    model: nn.Module | None = None,
) -> Iterator[Callable[[str], Tensor]]:
    """Keep a folder open, and read from it one persistent parameter or buffer after the other, by name.

    The arguments are those of `load_weights`.
    """
    states = {state.name: state for state in (*graph.parameters, *graph.buffers)}
    with _Folder(folder) as files:
        sources = _Sources(files, model)

        def read(name: str) -> Tensor:
            state = states[name]
            tensor = sources.read(state)
            converts = dtype is not None and state.is_parameter and tensor.is_floating_point()
            kept = dtype if converts else getattr(torch, state.dtype)
            return tensor.to(device, kept, copy=True)

        yield read


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder that weights are read from, and the index to them if there are several."""
    with _Folder(folder, reads_data=False) as files:
        found = {folder / file for file in files.where.values()}
    return sorted(found | {path for path in (folder / INDEX,) if path.is_file()})


def check_weights(graph: Graph, folder: Path, *, model: nn.Module | None = None) -> None:
    """Refuse a folder that lacks a tensor of the graph, or holds one in another shape.

    Only the heads of its files are read, so it takes no time and no memory.
    """
    with _Folder(folder, reads_data=False) as files:
        sources = _Sources(files, model)
        for state in (*graph.parameters, *graph.buffers):
            if state.persistent:
                sources.read(state)


class _Folder:
    """The tensors in a folder's files, by name; a file is opened when the first of it is read.

    Without `reads_data` tensors have the shapes that the files say, and are on the meta device.
    """

    def __init__(self, folder: Path, *, reads_data: bool = True) -> None:
        self.folder = folder
        self.reads_data = reads_data
        self.open_files = ExitStack()
        self.handles: dict[str, Any] = {}
        self.where: dict[str, str] = {}
        """The file of every tensor."""

    def __enter__(self) -> "_Folder":
        if (self.folder / INDEX).is_file():
            self.where = self._index()
        elif (self.folder / ONE_FILE).is_file():
            self.where = dict.fromkeys(self._handle(ONE_FILE).keys(), ONE_FILE)
        else:
            raise BiremeError(
                f"{self.folder} holds no weights: neither {ONE_FILE} nor {INDEX} is there. Name a folder "
                "that a model was saved to in the safetensors format, or start from new weights."
            )
        return self

    def __exit__(self, *_error: object) -> None:
        self.open_files.close()

    def _index(self) -> dict[str, str]:
        path = self.folder / INDEX
        try:
            where = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            files = {key: file for key, file in where.items() if Path(file).name == file}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BiremeError(
                f"{path} is damaged: it holds no weight_map from tensors to files. Fetch it again."
            ) from error
        if len(files) < len(where):
            raise BiremeError(f"{path} names files outside of its folder. Use a source you trust.")
        return files

    def _handle(self, file: str) -> Any:
        if file not in self.handles:
            try:
                import safetensors
            except ImportError:
                raise BiremeError(
                    "Reading weights needs the safetensors package. Get it with: pip install 'bireme[hf]'."
                ) from None
            path = self.folder / file
            if not path.is_file():
                raise BiremeError(f"{path} is missing, but the index lists it. Fetch it again.")
            try:
                opened = self.open_files.enter_context(safetensors.safe_open(path, framework="pt"))
            except (OSError, safetensors.SafetensorError) as error:
                raise BiremeError(f"{path} is damaged or truncated ({error}). Fetch it again.") from error
            self.handles[file] = opened
        return self.handles[file]

    def __str__(self) -> str:
        """What to call the place in an error."""
        return str(self.folder / (INDEX if (self.folder / INDEX).is_file() else ONE_FILE))

    def read(self, key: str) -> Tensor:
        """One tensor."""
        handle = self._handle(self.where[key])
        if key not in handle.keys():  # noqa: SIM118 - it is no mapping
            path = self.folder / self.where[key]
            raise BiremeError(f"{path} has no tensor {key}, but the index lists it. Fetch it again.")
        if not self.reads_data:
            return torch.empty(handle.get_slice(key).get_shape(), device="meta")
        tensor: Tensor = handle.get_tensor(key)
        return tensor


@dataclass(slots=True)
class _Rule:
    """What the model's package makes of some tensors in the files: `name`, and perhaps others with it."""

    name: str
    converter: Any
    parts: list[tuple[str, str]] = field(default_factory=list)
    """The keys in the files, each with the pattern of the converter it falls under."""
    made: dict[str, Tensor] = field(default_factory=dict)


class _Sources:
    """Which tensors in the files, and which rule, a tensor of the model comes from."""

    def __init__(self, files: _Folder, model: nn.Module | None) -> None:
        self.files = files
        self.model = model
        self.key = {key: key for key in files.where}
        """The tensors that are stored as they are, by their names in the model."""
        self.rules: dict[str, _Rule] = {}
        if hasattr(model, "base_model_prefix"):
            self._apply_rules(model)
        self.shorter: dict[str, list[str]] = {}
        """The same without the first word."""
        for name in self.key:
            self.shorter.setdefault(name.partition(".")[2], []).append(name)

    def _apply_rules(self, model: Any) -> None:
        try:
            from transformers import conversion_mapping
            from transformers import core_model_loading as loading
        except ImportError:  # an older one, whose models are as their checkpoints
            return
        steps = conversion_mapping.get_model_conversion_mapping(model)
        renamings = [step for step in steps if isinstance(step, loading.WeightRenaming)]
        converters = [step for step in steps if isinstance(step, loading.WeightConverter)]
        by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}
        own = model.state_dict()
        self.key = {}
        for key in sorted(self.files.where, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(
                key, renamings, converters, model.base_model_prefix, own
            )
            if name not in own and key in own:
                name, pattern = key, None
            if pattern is None:
                self.key[name] = key
                continue
            first, *others = by_pattern[pattern].target_patterns
            rule = self.rules.setdefault(name, _Rule(name, by_pattern[pattern]))
            rule.parts.append((pattern, key))
            self.rules |= {name.replace(first, other): rule for other in others}

    def read(self, state: ModelState) -> Tensor:
        """The tensor of a state, in the shape that the graph has it."""
        names = [state.name, *state.aliases]
        rule = next((self.rules[name] for name in names if name in self.rules), None)
        if rule is not None:
            tensor, where = self._convert(state, names, rule), f"{self.files.folder}, converted,"
        else:
            key = self._key(state, names)
            tensor, where = self.files.read(key), f"{self.files.folder / self.files.where[key]}"
        if tuple(tensor.shape) != state.shape:
            raise BiremeError(
                f"{where} holds {state.name} with the shape {tuple(tensor.shape)}, and the model has "
                f"{state.shape} there. The weights belong to a model of another configuration."
            )
        return tensor

    def _key(self, state: ModelState, names: list[str]) -> str:
        exact = [self.key[name] for name in names if name in self.key]
        if exact:
            return exact[0]
        near = {self.key[short] for name in names if (short := name.partition(".")[2]) in self.key}
        near.update(self.key[longer] for name in names for longer in self.shorter.get(name, ()))
        if len(near) == 1:
            return near.pop()
        others = f" (also called {', '.join(state.aliases)})" if state.aliases else ""
        if near:
            raise BiremeError(
                f"{self.files} holds no tensor {state.name}{others}, but {' and '.join(sorted(near))}, and "
                "either may be meant. Rename one."
            )
        raise BiremeError(
            f"{self.files} holds no tensor {state.name}{others}. The weights are incomplete, or belong to "
            f"another model. {closest(state.name, self.key)}"
        )

    def _convert(self, state: ModelState, names: list[str], rule: _Rule) -> Tensor:
        if not any(name in rule.made for name in names):
            converter = copy.deepcopy(rule.converter)
            for pattern, key in rule.parts:
                converter.add_tensor(rule.name, key, pattern, partial(self.files.read, key))
            try:
                made = converter.convert(
                    rule.name, model=self.model, config=getattr(self.model, "config", None)
                )
            except (RuntimeError, ValueError, KeyError, IndexError) as error:
                raise BiremeError(
                    f"{self.files} holds no whole {state.name}: what it is made of does not fit ({error})."
                ) from error
            rule.made = {key: one[0] if isinstance(one, list) else one for key, one in made.items()}
        for name in names:
            if name in rule.made:
                return rule.made.pop(name)
        raise BiremeError(
            f"{self.files} holds no {state.name}, though it holds tensors it should be made of."
        )
