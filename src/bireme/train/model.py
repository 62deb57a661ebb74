"""The model of a run: where it comes from, its graphs, its loss, and the weights that it begins with."""

import inspect
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional

from bireme.cluster.machine import available_bytes
from bireme.errors import BiremeError, Progress
from bireme.files import new_folder
from bireme.model.capture import Captures, Inputs, Loss, batch_size, dropouts_of, resized
from bireme.model.fused_loss import fused
from bireme.model.graph import Argument, Graph, ModelState, Operator, Reference, evaluate, learned_values
from bireme.model.nf4 import with_nf4
from bireme.model.nf4_operator import packed
from bireme.model.own_model import made_states
from bireme.model.sources import ModelSource, load_source
from bireme.model.stage import StageFunction
from bireme.model.units import Unit
from bireme.model.weights import Weights, check_weights, load_weights, materialize, packing
from bireme.train.checkpoint.manifest import FileEntry
from bireme.train.checkpoint.shard import SavedTensors, tensor_digest, write_shard
from bireme.train.data.source import own_samples
from bireme.train.fetched import FetchProgress, bring_weights
from bireme.train.run_file import RunFile
from bireme.user_code import names_function, reason_of, user_function

# The initial weights of a run whose model a function of the user makes: made once, read by every rank.
#
# The process that prepares the run calls the function on the CPU and writes the tensors to a folder in that
# of the run, before any rank starts. A rank reads the tensors of its own stages, each checked by its digest.
# The folder is removed when the run has ended: a resume begins from a checkpoint, which holds all weights.

FILE, _INDEX = "rank-0000.safetensors", "index.json"
INITIAL_FILES = FILE, _INDEX
"""The names of the files in the folder that `InitialWeights.write` makes."""


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
        with new_folder(folder) as draft:
            entry = write_shard(draft / FILE, self._tensors, machine=0)
            (draft / _INDEX).write_text(entry.model_dump_json() + "\n", encoding="utf-8")
        self._tensors = {}


def remove_initial(folder: Path) -> None:
    """Remove the folder, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def read_initial(folder: Path) -> Weights:
    """Reads tensors by name from the folder that `InitialWeights.write` has made."""
    path = folder / _INDEX
    try:
        file = FileEntry.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise BiremeError(f"{path} cannot be read ({type(error).__name__}). {_WRITE_AGAIN}") from error
    saved = SavedTensors(folder, [file])
    digests = dict(zip(saved, file.digests, strict=True))

    def read(names: Sequence[str]) -> dict[str, Tensor]:
        found = {}
        for name in names:
            if name not in saved:
                raise BiremeError(f"{folder} lacks the tensor {name}. {_WRITE_AGAIN}")
            tensor = saved[name]
            if tensor_digest(tensor) != digests[name]:
                raise BiremeError(
                    f"{folder / FILE} is damaged: {name} is not as it was written. {_WRITE_AGAIN}"
                )
            found[name] = tensor
        return found

    return read


_WRITE_AGAIN = "`bireme resume` writes it again if the run has no checkpoint."


def folder_weights(graph: Graph, folder: Path, model: torch.nn.Module, otherwise: Weights) -> Weights:
    """The weights in the files of a folder, and those that it lacks from elsewhere."""

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        bring_weights(graph, names, folder, model=model)
        return load_weights(graph, names, folder, dtype=torch.float32, model=model)

    return with_rest(read, otherwise)


def with_rest(read: Weights, otherwise: Weights) -> Weights:
    """The tensors that `read` finds, and those that it does not from elsewhere."""

    def both(names: Sequence[str]) -> Mapping[str, Tensor]:
        found = read(names)
        rest = [name for name in names if name not in found]
        return {**found, **otherwise(rest)} if rest else found

    return both


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


# Whether a model keeps documents apart that share a sample: given where each begins, and checked.
#
# A model that takes `position_ids` may make of them the mask of its attention, and then no document looks at
# another. That it does is not taken on trust: the masks of the captured model are computed for two documents,
# and looked at.

POSITIONS = "position_ids"
_ATTENTION = "scaled_dot_product_attention"
_MASK = 3
"""Which of attention's arguments says what is seen."""

_MIXES = ("conv", "scan")
"""Words in the names of operators that mix neighboring places without asking a mask."""

_REMEDY = 'Set data.packing to "none", or to "stream" if documents may look at each other.'
_HIDDEN = -1e4
"""What a mask of numbers adds at least where nothing is to be seen."""


def with_positions(source: ModelSource) -> ModelSource:
    """The model with positions among its example inputs: two documents in each sample."""
    accepted = inspect.signature(source.model.forward).parameters
    ids = source.example_inputs.get("input_ids")
    if POSITIONS not in accepted or ids is None:
        raise BiremeError(
            f'data.packing is "documents", and the model {source.text} takes no position_ids, by which it '
            f"would tell documents apart. {_REMEDY}"
        )
    positions = _two_documents(ids.shape[1]).expand(ids.shape).contiguous()
    return replace(source, example_inputs=source.example_inputs | {POSITIONS: positions})


def check_documents_apart(graph: Graph, name: str) -> None:
    """Refuse a captured model in which one document of a sample looks at another."""
    found = [operator for operator in graph.operators if _ATTENTION in operator.target]
    mixing = next((one.target for one in graph.operators if any(word in one.target for word in _MIXES)), None)
    if not found or mixing is not None:
        how = f"mixes tokens by {mixing}" if mixing else "has no attention that could be checked"
        raise BiremeError(f'data.packing is "documents", and the model {name} {how}. {_REMEDY}')
    for mask in dict.fromkeys(_mask_of(operator) for operator in found):
        if mask is None or _leaks(graph, mask):
            raise BiremeError(
                f'data.packing is "documents", and in the model {name} one document of a sample looks at '
                f"another, for its attention does not go by position_ids. {_REMEDY}"
            )


def _mask_of(operator: Operator) -> str | None:
    """The value that masks an attention; None where it sees all that is before a place."""
    argument: Argument = dict(operator.keywords).get("attn_mask")
    if argument is None and len(operator.arguments) > _MASK:
        argument = operator.arguments[_MASK]
    return argument.name if isinstance(argument, Reference) else None


def _leaks(graph: Graph, mask: str) -> bool:
    """Whether the second of two documents sees a token of the first."""
    positions = next((value for value in graph.inputs if value.name == POSITIONS), None)
    places = list(_making(graph, mask))
    read = {name for place in places for name in graph.operators[place].reads()}
    inputs = tuple(value for value in graph.inputs if value.name in read)
    states = {state.name for state in (*graph.parameters, *graph.buffers)}
    if positions is None or positions.name not in read or read & states:
        return True
    unit = Unit(0, "mask", tuple(places), (), (), (), (), tuple(value.name for value in inputs), "")
    shapes = {value.name: [evaluate(length, graph.batch) for length in value.shape] for value in inputs}
    given = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    length = shapes[POSITIONS][1]
    given[POSITIONS] = _two_documents(length).expand(shapes[POSITIONS]).contiguous()
    made = StageFunction(graph, [unit], outputs=(), also=(mask,))({}, {}, given)[mask]
    seen = made if made.dtype == torch.bool else made > _HIDDEN
    first = _first_size(length)
    return bool(seen[..., first:, :first].any())


def _making(graph: Graph, name: str) -> Iterator[int]:
    """The places of the operators that a value is made by, in their order."""
    wanted = {name}
    found = []
    for place in reversed(range(len(graph.operators))):
        operator = graph.operators[place]
        if any(value is not None and value.name in wanted for value in operator.outputs):
            wanted.update(operator.reads())
            found.append(place)
    return reversed(found)


def _first_size(length: int) -> int:
    return (length + 1) // 2


def _two_documents(length: int) -> Tensor:
    """Positions of two documents, one after the other."""
    return torch.arange(length) % _first_size(length)


_TARGETS = ("labels", "y", "target", "targets")
"""What the input is called that a loss by name compares with."""

_NAMED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "l1": functional.l1_loss,
    "mse": functional.mse_loss,
}


@dataclass(frozen=True, slots=True)
class RunModel:
    """A run's model on the meta device, and how to capture it."""

    run: RunFile
    source: ModelSource
    training: Captures
    evaluation: Captures

    @classmethod
    def of(cls, run: RunFile, batch: int) -> "RunModel":
        """The model that a run names; `batch` is the size of its example inputs."""
        source = load_source(
            run.model.source,
            batch=batch,
            length=run.data.length,
            dtype=run.model.dtype,
            part=run.model.part,
            weights=None if run.model.weights is None else Path(run.model.weights),
            seed=run.model.seed,
        )
        if run.data.packing == "documents":
            source = with_positions(source)
        source = _with_target(source, run)
        loss, finish = _loss(run), partial(as_trained, run)
        given: dict[str, Any] = {"loss": loss, "name": run.model.source, "finish": finish}
        training, evaluation = (
            Captures(source.model, source.example_inputs, training=mode, **given) for mode in (True, False)
        )
        return cls(run, source, training, evaluation)

    def dropouts(self) -> int | None:
        """How many dropouts its modes differ by; None if they are two programs."""
        return dropouts_of(self.source.model, self.source.example_inputs, _loss(self.run))

    @property
    def reads_weights(self) -> bool:
        """Whether its folder's weights are what it begins with."""
        return self.source.folder is not None and not self.run.model.from_scratch

    @property
    def is_made(self) -> bool:
        """Whether it begins with the weights that a function of the user makes."""
        return self.source.is_own and self.source.folder is None and not self.run.model.from_scratch

    def check_weights(self, graph: Graph) -> None:
        """Refuse a folder whose weights do not fit, and states that only the user's function makes."""
        base = self.source.base_graph(graph)
        if self.is_made:
            return
        states = [*base.parameters, *base.buffers]
        if self.reads_weights and self.source.folder is not None:
            check_weights(base, self.source.folder, model=self.source.base)
            states = [state for state in states if not state.persistent]
        elif self.source.adapter is not None and not self.run.model.lora.merge:
            raise BiremeError(
                "model.lora trains an adapter, which is useful only with the weights that it was trained "
                f"with, and {self.run.model.source} starts from new ones, made from a seed. Set "
                "model.lora.merge = true to export the whole model, or name a folder with weights in "
                "model.source."
            )
        if self.source.is_own:
            self._fresh([state.name for state in states if not self._is_reset(state)])

    def _is_reset(self, state: ModelState) -> bool:
        """Whether the module of a state has code of its own to make it anew."""
        module = self.source.base.get_submodule(state.name.rpartition(".")[0])
        return hasattr(module, "reset_parameters")

    def check_documents(self, *graphs: Graph) -> None:
        """Refuse a captured model that does not keep documents apart, where it is to."""
        for graph in graphs if self.run.data.packing == "documents" else ():
            check_documents_apart(graph, self.run.model.source)

    def check_loss(self, graph: Graph) -> None:
        """Refuse a captured model without a loss: nothing in it would ever learn."""
        asked, name = self.run.model.loss, self.run.model.source
        made = {value.name: value for one in graph.operators for value in one.outputs if value is not None}
        loss = next((one.value for one in graph.outputs if one.name == "loss"), None)
        value = made.get(loss.name) if isinstance(loss, Reference) else None
        if value is None and asked is not None:
            raise BiremeError(f"model.loss is {asked}, which returns no tensor that depends on the model.")
        if value is None:
            raise BiremeError(
                f"The model {name} returns no loss. Make it return one, alone or as `loss`, or name "
                f"one in model.loss: {', '.join(_NAMED)}, or your own module:function or file.py:function."
            )
        if value.shape or not value.dtype.startswith(("float", "bfloat")):
            shape = ", ".join(map(str, value.shape))
            raise BiremeError(
                f"The loss of {asked or name} is {value.dtype} of shape [{shape}], where b is the number of "
                "samples. It must be a single floating-point number, such as their mean."
            )
        if value.name not in learned_values(graph):
            raise BiremeError(
                f"Nothing that learns has a part in the loss of {asked or name}. Let other parameters learn "
                "with model.train or model.freeze, or see that the model leaves some trainable."
            )

    def initial_weights(self, graph: Graph, progress: Progress) -> InitialWeights | None:
        """The weights that a function of the user makes, all of them; None if they come from elsewhere."""
        if not self.is_made:
            return None
        progress(0.0, "making the model's weights")
        return InitialWeights(self._made(graph))

    def weights(self, graph: Graph, kept: Path | None = None) -> Weights:
        """Gives parameters and buffers by name: those of a folder, of the user's function, or new ones.

        `kept` is the folder in which the run keeps those of the function; without it the function is called
        when the first of them is asked for.
        """
        base_graph = self.source.base_graph(graph)
        make = cache(lambda: self._made(graph) if kept is None else {})
        fresh = packing(base_graph, self._fresh)

        def made(names: Sequence[str]) -> Mapping[str, Tensor]:
            return {name: make()[name].clone() for name in names}

        given: Weights = fresh
        if self.reads_weights and self.source.folder is not None:
            given = folder_weights(base_graph, self.source.folder, self.source.base, fresh)
        if self.is_made:
            given = made if kept is None else read_initial(kept)
        adapter = self.source.adapter
        return given if adapter is None else adapter.weights(graph, given, self.run.model.seed)

    def bring(self, graph: Graph, names: Sequence[str], progress: FetchProgress) -> None:
        """Have the tensors of its folder here that parameters and buffers begin with, if this machine has
        fetched only pieces of the folder.
        """
        adapter, folder = self.source.adapter, self.source.folder
        if adapter is not None:
            names = [adapter.base_names[name] for name in names if name in adapter.base_names]
        if self.reads_weights and folder is not None:
            base = self.source.base
            bring_weights(self.source.base_graph(graph), names, folder, model=base, progress=progress)

    def _fresh(self, names: Sequence[str]) -> dict[str, Tensor]:
        """New weights from the seed, by the code of the model's modules alone."""
        is_own, seed = self.source.is_own, self.run.model.seed
        return materialize(self.source.base, names, seed=seed, dtype=torch.float32, guesses=not is_own)

    def _made(self, graph: Graph) -> dict[str, Tensor]:
        """All weights of the base, from the user's function, if this machine has the memory for them."""
        base = self.source.base_graph(graph)
        states = [state.unpacked for state in (*base.parameters, *base.buffers)]
        name, needed, free = self.run.model.source, sum(map(_made_bytes, states)), available_bytes()
        if needed > free:
            raise BiremeError(
                f"The weights that {name} makes take {needed / 2**30:.1f} GiB, and this machine has "
                f"{free / 2**30:.1f} GiB of free memory for them. Save them as safetensors in a folder and "
                "name it in model.weights: each process then reads only its own stages. Or set "
                "model.from_scratch = true for new weights from the initializers of the modules alone."
            )
        try:
            found = made_states(name, states, self.run.model.seed)
        except (MemoryError, RuntimeError) as error:
            raise BiremeError(
                f"The weights that {name} makes cannot be taken to the CPU: {reason_of(error)}. Save them as "
                "safetensors in a folder and name it in model.weights."
            ) from error
        for state in base.parameters:
            if state.packed is not None:
                found[state.name] = packed(found[state.name])
        return found


def _made_bytes(state: ModelState) -> int:
    """The bytes of a state as a function makes it: parameters in float32, whatever they are trained in."""
    return max(state.num_bytes, 4 * prod(state.shape)) if state.is_parameter else state.num_bytes


def _with_target(source: ModelSource, run: RunFile) -> ModelSource:
    """The source with examples of what the loss needs, if the function of the model gives no target.

    They are from the first of the run's own samples: the target of a loss by name, or all that a loss of the
    user may read. The model gets only what its forward accepts.
    """
    inputs = source.example_inputs
    if run.model.loss is None or any(name in inputs for name in _TARGETS):
        return source
    found: dict[str, Tensor] = {}
    if (data := _own_data(run)) is not None:
        sample = own_samples(data).take([0])
        wanted = [name for name in _TARGETS if name in sample][:1] if run.model.loss in _NAMED else [*sample]
        found = {name: sample[name] for name in wanted if name not in inputs}
    elif "input_ids" in inputs:
        found = {_TARGETS[0]: inputs["input_ids"].clone()}
    return replace(source, example_inputs=inputs | resized(found, batch_size(inputs)))


def _own_data(run: RunFile) -> str | None:
    """The function that makes the run's samples; None if they are cut from tokens."""
    first = run.data.mixture[0].source if run.data.mixture else run.data.source or ""
    return first if names_function(first) else None


def as_trained(run: RunFile, graph: Graph) -> Graph:
    """The graph of a run's model as the run trains it. Refuses a fused loss, or frozen weights in four bits,
    that cannot be.
    """
    fusion = fused(graph, asked=run.model.fused_loss, form=run.training.gradient_form)
    if run.model.fused_loss and fusion.reason is not None:
        raise BiremeError(
            f"model.fused_loss is true, but {fusion.reason}. Leave model.fused_loss out; the layer and its "
            "loss then run one after the other."
        )
    return fusion.graph if run.model.frozen_dtype is None else with_nf4(fusion.graph)


def _loss(run: RunFile) -> Loss | None:
    """The loss by its name, or a function of the user's."""
    text = run.model.loss
    if text is None:
        return None
    if text in _NAMED:
        return _Named(text, next_token=_own_data(run) is None)
    try:
        return user_function(text, "a scalar loss")
    except BiremeError as error:
        raise BiremeError(f"model.loss is {text}. {error}") from error


class _Named:
    """A loss of what the model returns and the one input that is its target.

    With `next_token` the labels are the tokens of the input, and each is the target of the place before it.
    """

    def __init__(self, name: str, *, next_token: bool) -> None:
        self.name = name
        self.next_token = next_token

    def __call__(self, outputs: Any, inputs: Inputs) -> Tensor:
        """The mean loss."""
        given: dict[str, Any] = dict(inputs) if isinstance(inputs, Mapping) else {}
        target = next((given[name] for name in _TARGETS if name in given), None)
        if target is None:
            raise BiremeError(
                f"model.loss is {self.name}, which needs a target named {' or '.join(_TARGETS)}, but the "
                f"inputs are {', '.join(given)}. Give the samples of the data one, rename it, or give a "
                "loss function of your own."
            )
        named: dict[str, Any] = dict(outputs) if isinstance(outputs, Mapping) else {"logits": outputs}
        found = named["logits"] if "logits" in named else next(iter(named.values()))
        if self.name == "cross_entropy" and found.ndim > 2:
            if self.next_token:
                found, target = found[:, :-1], target[:, 1:]
            found, target = found.flatten(0, -2), target.flatten()
        elif self.name != "cross_entropy" and found.shape != target.shape:
            axes = (", ".join(["b", *map(str, one.shape[1:])]) for one in (found, target))
            shapes = " and ".join(f"[{text}]" for text in axes)
            raise BiremeError(
                f"model.loss is {self.name}, which compares the output of the model with a target of the "
                f"same shape, but they are of the shapes {shapes}, where b is the number of samples. Reshape "
                "one of them."
            )
        return _NAMED[self.name](found, target)
