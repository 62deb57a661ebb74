"""Weights from a seed, for a part of a model: those of one stage, the same whatever the other stages are.

The model may lie on the meta device and is left as it was. Its own code initializes the weights, one module
after the other: all others are on the meta device meanwhile, where initializing costs nothing.
"""

import copy
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bireme.errors import BiremeError, closest
from bireme.grouping import grouped
from bireme.model.graph import Graph, ModelState
from bireme.model.nf4_operator import packed
from bireme.model.shapes import METADATA
from bireme.model.torch_private import (
    DispatchMode,
    own_buffers,
    own_parameters,
    storage_id,
    tensor_places,
    written,
)
from bireme.pieces import PieceFile, check_here
from bireme.user_code import optional_package

if TYPE_CHECKING:
    from bireme.model.dcp_weights import DcpWeights

Weights = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Gives parameters and buffers by name."""

# Weights from a folder, by name: only the tensors asked for are read.
#
# The folder has safetensors in the layout of the transformers package: one file `model.safetensors`, or
# several with an index. Or it has a checkpoint of torch.distributed.checkpoint. Tied weights may be stored
# under any of their names, and all names may lack, or have, one word at their front. Where the model is given
# and its package keeps checkpoints in another form than the model's (experts apart that the model holds
# together, older names), that package's own rules convert them.

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_MAPPED_BYTES = 2**25
"""Bytes of tensors after which files are opened anew: what was read of an open one counts as memory."""


def load_weights(
    graph: Graph,
    names: Iterable[str],
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    model: nn.Module | None = None,
) -> dict[str, Tensor]:
    """The graph's parameters and buffers of these names as a folder holds them, on the CPU.

    Buffers that belong into no checkpoint (they are not persistent) are left out of the result. `dtype` is
    for parameters that learn; without it, and for all others, the graph's own holds. Weights that the graph
    has packed are packed one by one. `model`, on the meta device or not, is only asked for its package's
    rules.
    """
    states = {state.name: state for state in (*graph.parameters, *graph.buffers)}
    wanted = [*dict.fromkeys(names)]
    unknown = next((name for name in wanted if name not in states), None)
    if unknown is not None:
        raise BiremeError(f"The graph has no parameter or buffer {unknown}. {closest(unknown, states)}")
    with open_weights(graph, folder, dtype=dtype, model=model) as read:
        return {name: read(name) for name in wanted if states[name].persistent}


@contextmanager
def open_weights(
    graph: Graph,
    folder: Path,
    *,
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
            if state.packed is not None:
                return packed(tensor)
            converts = dtype is not None and state.trainable and tensor.is_floating_point()
            kept = dtype if converts else getattr(torch, state.dtype)
            return tensor.to("cpu", kept, copy=True)

        yield read


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder that weights are read from, and the index to them if there are several."""
    with _Folder(folder, reads_data=False) as files:
        if files.dcp is not None:
            return [folder / METADATA, *files.dcp.files]
        found = {folder / file for file in files.where.values()}
    return sorted(found | {path for path in (folder / _INDEX,) if path.is_file()})


def check_weights(graph: Graph, folder: Path, *, model: nn.Module | None = None) -> None:
    """Refuse a folder that lacks a tensor of the graph, or holds one in another shape.

    Only the heads of its files are read, so it takes no time and no memory.
    """
    with _Folder(folder, reads_data=False) as files:
        sources = _Sources(files, model)
        for state in (*graph.parameters, *graph.buffers):
            if state.persistent:
                sources.read(state)


def packing(graph: Graph, given: Weights) -> Weights:
    """Gives the same tensors by name, with those packed that the graph has packed, one after the other."""
    names_packed = {state.name for state in graph.parameters if state.packed is not None}

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        found = dict(given([name for name in names if name not in names_packed]))
        return found | {name: packed(given([name])[name]) for name in names if name in names_packed}

    return read


def weight_ranges(
    graph: Graph, names: Iterable[str], folder: Path, *, model: nn.Module | None = None
) -> dict[Path, list[tuple[int, int]]]:
    """The bytes of files in the safetensors format that these parameters and buffers are made from."""
    wanted = set(names)
    with _Folder(folder, reads_data=False) as files:
        sources = _Sources(files, model)
        for state in (*graph.parameters, *graph.buffers):
            if state.persistent and state.name in wanted:
                sources.read(state)
        places = map(files.place, files.keys_read if files.dcp is None else ())
        return grouped((path, (begin, end)) for path, begin, end in places)


def header_bytes(beginning: bytes) -> int:
    """The bytes of a file in the safetensors format before its tensors, by its first 8 bytes."""
    return _LENGTH_BYTES + int.from_bytes(beginning[:_LENGTH_BYTES], "little")


_LENGTH_BYTES = 8


class _Folder:
    """The tensors in a folder's files, by name; a file is opened when the first of it is read.

    Without `reads_data` tensors have the shapes that the files say, and are on the meta device.
    """

    def __init__(self, folder: Path, *, reads_data: bool = True) -> None:
        self.folder = folder
        self.reads_data = reads_data
        self.open_files = ExitStack()
        self.handles: dict[str, Any] = {}
        self.mapped_bytes = 0
        self.where: dict[str, str] = {}
        """The file of every tensor."""
        self.dcp: DcpWeights | None = None
        """The tensors, if they are a checkpoint of torch.distributed.checkpoint."""
        self.keys_read: dict[str, None] = {}
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}

    def __enter__(self) -> "_Folder":
        if (self.folder / _INDEX).is_file():
            self.where = self._index()
        elif (self.folder / _ONE_FILE).is_file():
            self.where = dict.fromkeys(self._handle(_ONE_FILE).keys(), _ONE_FILE)
        elif (self.folder / METADATA).is_file():
            from bireme.model.dcp_weights import DcpWeights  # its import takes most of a second

            self.dcp = DcpWeights(self.folder / METADATA)
            self.where = dict.fromkeys(self.dcp.names, METADATA)
        else:
            raise BiremeError(
                f"{self.folder} holds no weights: neither {_ONE_FILE} nor {_INDEX} nor {METADATA} is there. "
                "Name a folder that a model was saved to in the safetensors format or by "
                "torch.distributed.checkpoint, or start from new weights. transformers loads "
                "pytorch_model.bin, and its save_pretrained writes safetensors."
            )
        return self

    def __exit__(self, *_error: object) -> None:
        self.open_files.close()

    def _index(self) -> dict[str, str]:
        path = self.folder / _INDEX
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
            safetensors = optional_package("safetensors", "hf", "Reading weights")
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
        if self.dcp is not None:
            return str(self.folder)
        return str(self.folder / (_INDEX if (self.folder / _INDEX).is_file() else _ONE_FILE))

    def place(self, key: str) -> tuple[Path, int, int]:
        """The file of a tensor, and where its bytes begin and end there."""
        path = self.folder / self.where[key]
        if path.name not in self._headers:
            with path.open("rb") as file:
                begin = header_bytes(file.read(_LENGTH_BYTES))
                self._headers[path.name] = begin, json.loads(file.read(begin - _LENGTH_BYTES))
        begin, header = self._headers[path.name]
        first, end = header[key]["data_offsets"]
        return path, begin + first, begin + end

    def read(self, key: str) -> Tensor:
        """One tensor."""
        self.keys_read[key] = None
        if self.dcp is not None:
            return self.dcp.read(key) if self.reads_data else self.dcp.blank(key, "meta")
        if self.mapped_bytes > _MAPPED_BYTES:
            self.open_files.close()
            self.handles.clear()
            self.mapped_bytes = 0
        handle = self._handle(self.where[key])
        if key not in handle.keys():  # noqa: SIM118 - it is no mapping
            path = self.folder / self.where[key]
            raise BiremeError(f"{path} has no tensor {key}, but the index lists it. Fetch it again.")
        if not self.reads_data:
            return torch.empty(handle.get_slice(key).get_shape(), device="meta")
        if PieceFile.at(self.folder / self.where[key]) is not None:
            check_here(*self.place(key))
        tensor: Tensor = handle.get_tensor(key)
        self.mapped_bytes += tensor.nbytes
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
        self.shorter = grouped((name.partition(".")[2], name) for name in self.key)
        """The same without the first word."""

    def _apply_rules(self, model: Any) -> None:
        from transformers import conversion_mapping
        from transformers import core_model_loading as loading

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
        """The tensor of a state, in the shape that the graph has it; of a packed state its weight."""
        state = state.unpacked
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


_STANDARD_DEVIATION = 0.02
"""Of a parameter with several axes that no code of the model initializes."""


def materialize(
    model: nn.Module,
    names: Iterable[str],
    *,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    guesses: bool = True,
) -> dict[str, Tensor]:
    """The parameters and buffers of these names, as the model's own code initializes them.

    Every module's `reset_parameters` runs, and then `_init_weights` of the model around it where there is
    one, children before parents. What they draw depends on the seed, the module's name and the module's code
    alone: not on what else is asked for, and not on the device, for they draw on the CPU. A tied parameter
    is made once, under its first name.

    A parameter that none of this code writes to is normal with a deviation of 0.02 where it has several axes,
    one where it has one and is called `weight`, and zero else. If the model holds numbers, its buffers that
    nothing writes to keep theirs, and so does a parameter whose elements are all equal. Without `guesses`
    a parameter on the meta device that none of this code writes to is refused. `dtype` is for
    parameters; without it, and for buffers, the model's own holds. The caller's random state is untouched.
    """
    parts = _Parts(model)
    firsts = {name: parts.first_name(name) for name in names}
    wanted = dict.fromkeys(firsts.values())
    made: dict[str, Tensor] = {}
    with parts.swapped(), torch.random.fork_rng(devices=[]), torch.no_grad():
        for module in dict.fromkeys(first.rpartition(".")[0] for first in wanted):
            fresh = parts.bring(module)
            draws = _initialized(model, module, seed)
            for first in (name for name in fresh if name in wanted):
                tensor = _made(first, parts, draws, guesses=guesses)
                converts = dtype is not None and parts.is_parameter(first) and tensor.is_floating_point()
                made[first] = tensor.detach().to(device, dtype if converts else tensor.dtype)
            for first in fresh:
                parts.put(first, "meta")
    return {name: made[first] for name, first in firsts.items()}


class _Parts:
    """Where each tensor of a model is, and what is made in its place."""

    def __init__(self, model: nn.Module) -> None:
        self.place = {one.name: one for one in tensor_places(model)}
        """Of every tensor, under all its names."""
        self.own: dict[str, Tensor] = {name: one.table[one.key] for name, one in self.place.items()}
        self.fresh: dict[str, Tensor] = {}
        self.of_module = grouped((name.rpartition(".")[0], name) for name in self.place)
        self.first: dict[int, str] = {}
        for name, tensor in self.own.items():
            self.first.setdefault(id(tensor), name)

    def first_name(self, name: str) -> str:
        """The name under which a tensor is made that may have others."""
        if name not in self.own:
            raise BiremeError(f"The model has no parameter or buffer {name}. {closest(name, self.own)}")
        return self.first[id(self.own[name])]

    def is_parameter(self, name: str) -> bool:
        return isinstance(self.own[name], nn.Parameter)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace all tensors with ones without numbers; then put all back."""
        modules = {one.module for one in self.place.values()}
        before = [(module, dict(own_parameters(module)), dict(own_buffers(module))) for module in modules]
        try:
            for name in self.own:
                self.put(name, "meta")
            yield
        finally:
            for module, parameters, buffers in before:
                own_parameters(module).update(parameters)
                own_buffers(module).update(buffers)

    def bring(self, module: str) -> list[str]:
        """Give a module's own tensors memory.

        Not a tied one which is first elsewhere: as if it was tied to that one later.
        """
        fresh = [name for name in self.of_module[module] if self.first_name(name) == name]
        for name in fresh:
            self.put(name, "cpu")
        return fresh

    def put(self, name: str, device: str) -> None:
        _, module, _, key = self.place[name]
        fresh = torch.empty_like(self.own[name], device=device, requires_grad=False)
        if self.is_parameter(name):
            fresh = own_parameters(module)[key] = nn.Parameter(fresh, requires_grad=False)
        else:
            own_buffers(module)[key] = fresh
        self.fresh[name] = fresh

    def now(self, name: str) -> Tensor:
        """What is where a tensor was; the model's code may have put something of its own there."""
        _, module, _, key = self.place[name]
        found: Tensor = (own_parameters(module) | own_buffers(module))[key]
        return found


class _Draws(DispatchMode):
    """Seeds every draw by where it is made, and remembers which storages are written to."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.seed = seed
        self.where = ""
        self.num_draws = 0
        self.written: set[int] = set()

    def start(self, where: str) -> None:
        self.where, self.num_draws = where, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            text = f"{self.seed}/{self.where}/{self.num_draws}"
            digest = hashlib.sha256(text.encode()).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            self.num_draws += 1
        changed = written(func, args, kwargs)
        self.written |= {storage_id(given) for given in changed if isinstance(given, Tensor)}
        return func(*args, **kwargs)


def _initialized(model: nn.Module, module: str, seed: int) -> _Draws:
    """Run all code of the model that initializes a module's own tensors."""
    draws = _Draws(seed)
    with draws:
        for name, method, initialize in _initializers(model, module):
            draws.start(f"{module}/{name}/{method}")
            try:
                initialize()
            except Exception as error:  # the code is the model's: anything can come out of it
                raise BiremeError(
                    f"{method} of {name or 'the model'} cannot run for {module or 'its own tensors'} alone: "
                    f"{error}. Save the whole model's weights to a folder, and read them from there."
                ) from error
    return draws


def _initializers(model: nn.Module, module: str) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """What the model's constructor runs on a module and on those around it, in order, with names."""
    parts = module.split(".") if module else []
    around = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
    found = {name: model.get_submodule(name) for name in around}
    for name in around:
        for method in ("reset_parameters", "_reset_parameters"):
            reset = getattr(found[name], method, None)
            if reset is not None and _takes(reset, 0):
                yield name, method, reset
                break
    for place, name in enumerate(around):
        for outer in around[place:]:
            initialize = getattr(found[outer], "_init_weights", None)
            if initialize is not None and _takes(initialize, 1):
                yield name, "_init_weights", partial(initialize, found[name])
                break


def _takes(function: Any, num_arguments: int) -> bool:
    """Whether it can be called with so many arguments."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*range(num_arguments))
    except (TypeError, ValueError):
        return False
    return True


def _made(name: str, parts: _Parts, draws: _Draws, *, guesses: bool) -> Tensor:
    """What a wanted tensor has become."""
    own, now = parts.own[name], parts.now(name)
    is_written = now is not parts.fresh[name] or storage_id(now) in draws.written
    if parts.is_parameter(name):
        if not own.is_meta and (own.numel() > 1 or not is_written) and _is_constant(own):
            return own.detach().cpu().clone()
        if not is_written and not guesses:
            raise BiremeError(
                f"New weights come from reset_parameters() and _init_weights() of the model's modules, and "
                f"none of them writes {name}. Let a reset_parameters() of its module write it, or leave out "
                "model.from_scratch to start with the weights that the function makes."
            )
        return now if is_written else _by_default(name, now, draws)
    if is_written:
        return now
    if own.is_meta:
        raise BiremeError(
            f"The model is on the meta device, where its buffer {name} holds no numbers, and no code but its "
            "constructor writes them. Build the model on the cpu, or let a reset_parameters() of its module "
            "write them."
        )
    return own.detach().cpu().clone()


def _is_constant(tensor: Tensor) -> bool:
    flat = tensor.detach().flatten()
    return bool((flat == flat[:1]).all())


def _by_default(name: str, parameter: Tensor, draws: _Draws) -> Tensor:
    if parameter.ndim > 1:
        draws.start(name)
        with draws:
            return nn.init.normal_(parameter, 0.0, _STANDARD_DEVIATION)
    is_scale = parameter.ndim == 1 and name.split(".")[-1] == "weight"
    return nn.init.constant_(parameter, 1.0 if is_scale else 0.0)
