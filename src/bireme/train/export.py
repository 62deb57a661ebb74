"""The trained model for others: safetensors by the model's own names, or a folder that transformers loads.

A model may be larger than the memory here, so it goes from a checkpoint to its files tensor by tensor. Its
folder is there whole or not at all.
"""

import importlib
import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.files import new_folder
from bireme.model.graph import Graph, ModelState, evaluate
from bireme.model.nf4_operator import plain
from bireme.model.sources import load_source
from bireme.runtime.snapshot import NamedTensors
from bireme.train.checkpoint.checkpoint import Checkpoint
from bireme.train.checkpoint.manifest import TensorEntry
from bireme.train.checkpoint.shard import element_bytes, tensor_entry, write_tensors
from bireme.train.folder import ABOUT, RunFolder, exported_step
from bireme.train.resume_checks import BaseWeights, base_of_checkpoint, names_in_base
from bireme.train.run_file import RunFile

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class NewestWeights(NamedTensors, ExitStack):
    """The newest weights and persistent buffers of a checkpoint, by the model's own names, tied ones once and
    none packed.

    Each is read whenever it is asked for, and is new then: frozen ones from the run's base, where the
    checkpoint leaves them out. Use it as a context.
    """

    def __init__(self, run: RunFile, graph: Graph, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._saved = checkpoint.snapshot().tensors
        identity = base_of_checkpoint(checkpoint.manifest)
        self._base = None
        if identity is not None:
            self._base = self.enter_context(BaseWeights(run, graph, identity, str(checkpoint.folder)))
        in_base = frozenset[str]() if identity is None else names_in_base(graph)
        self.names = self._keys = dict[str, str]()
        self._states: dict[str, ModelState] = {}
        for section, states in (("weights", graph.parameters), ("buffers", graph.buffers)):
            for state in states:
                key = f"{section}/{state.name}"
                if state.persistent and (key in self._saved or state.name in in_base):
                    self._keys[state.name] = key
                    self._states[state.name] = state

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(state.unpacked.num_bytes for state in self._states.values())

    def __getitem__(self, name: str) -> Tensor:
        key = self._keys[name]
        found = self._base[name] if self._base is not None and key not in self._saved else self._saved[key]
        return plain(found, self._states[name])


def has_ended(run: RunFile, folder: RunFolder, step: int) -> bool:
    """Whether a run with a checkpoint of this step has done all: its steps, and what comes after them."""
    if step < run.training.steps:
        return False
    return exported_step(folder.model) == step if run.export.at_end else folder.summary.is_file()


def export_checkpoint(
    run: RunFile,
    graph: Graph,
    checkpoint: Checkpoint,
    to: Path,
    *,
    merged: bool | None = None,
    as_dcp: bool = False,
) -> None:
    """Write a checkpoint's model into a folder, where it replaces what was there: whole, or not at all.

    Of a run with an adapter that is the adapter alone, or with `merged` the whole model with the adapter
    added to its weights; None leaves it to the run file. With `as_dcp` the weights of a whole model are in
    the format of torch.distributed.checkpoint.
    """
    write = _write_dcp if as_dcp else partial(_write_weights, run.export.shard_bytes)
    adapter = load_source(run.model.source, part=run.model.part).adapter if run.model.part.lora else None
    with NewestWeights(run, graph, checkpoint) as newest, new_folder(to) as draft:
        weights: Mapping[str, Tensor] = newest
        if adapter is not None and (run.model.lora.merge if merged is None else merged):
            weights, graph = adapter.merged(weights), adapter.base_graph(graph)
            adapter = None
        graph = replace(graph, parameters=tuple(state.unpacked for state in graph.parameters))
        if adapter is not None:
            source = run.model.source  # where the weights lie that it belongs to, as peft looks for them
            base = str(Path(source[3:]).resolve()) if source.startswith("hf:") else source
            adapter.save(weights, draft, base=base)
        elif run.model.source.startswith("hf:"):
            entries, tensors = in_form_of_transformers(run, graph, weights, draft)
            write(entries, tensors, draft)
        else:
            states = [one for one in (*graph.parameters, *graph.buffers) if one.name in weights]
            entries = [TensorEntry(name=one.name, dtype=one.dtype, shape=[*one.shape]) for one in states]
            write(entries, weights, draft)
        about = {"format": 1, "model": run.model.source, "step": checkpoint.manifest.step, **_length(graph)}
        (draft / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")


def _length(graph: Graph) -> dict[str, int]:
    """The tokens of the samples that a model of token ids was trained on."""
    ids = next((value for value in graph.inputs if value.name == "input_ids" and len(value.shape) == 2), None)
    return {} if ids is None else {"length": evaluate(ids.shape[1], 1)}


def _write_dcp(entries: Sequence[TensorEntry], tensors: Mapping[str, Tensor], to: Path) -> None:
    from bireme.model.dcp_weights import write_dcp_weights  # its import takes most of a second

    blanks = {
        one.name: torch.empty(one.shape, dtype=getattr(torch, one.dtype), device="meta") for one in entries
    }
    write_dcp_weights(to, blanks, tensors)


def _write_weights(
    shard_bytes: int, entries: Sequence[TensorEntry], tensors: Mapping[str, Tensor], to: Path
) -> None:
    """Write one file, or several with an index, each no larger than asked unless one tensor alone is."""
    files = _in_files(entries, shard_bytes)
    if len(files) == 1:
        write_tensors(to / _WEIGHTS, files[0], tensors, {"format": "pt"})
        return
    places: dict[str, str] = {}
    for number, own in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_tensors(to / name, own, tensors, {"format": "pt"})
        places |= dict.fromkeys((entry.name for entry in own), name)
    index = {"metadata": {"total_size": sum(map(element_bytes, entries))}, "weight_map": places}
    (to / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _in_files(entries: Sequence[TensorEntry], shard_bytes: int) -> list[list[TensorEntry]]:
    """The tensors of each file, in their order; in a file wide elements come first, as readers like it."""
    files: list[list[TensorEntry]] = [[]]
    free = shard_bytes
    for entry in entries:
        size = element_bytes(entry)
        if size > free and files[-1]:
            files.append([])
            free = shard_bytes
        files[-1].append(entry)
        free -= size
    return [sorted(own, key=lambda entry: -getattr(torch, entry.dtype).itemsize) for own in files]


# A model in the form in which transformers saves it itself, without ever having the whole of it.
#
# The model is made on the meta device to learn its names; the rules with which its package reverts the names
# and shapes of a checkpoint run on a few tensors at a time.

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.model", "*.jinja")


def in_form_of_transformers(
    run: RunFile, graph: Graph, weights: Mapping[str, Tensor], to: Path
) -> tuple[list[TensorEntry], Mapping[str, Tensor]]:
    """Write configuration and tokenizer into a folder; gives the tensors to write next to them."""
    if find_spec("transformers") is None:
        raise BiremeError('To export a transformers model, install bireme[hf]: pip install "bireme[hf]".')
    folder = Path(run.model.source.partition(":")[2])
    model: Any = load_source(run.model.source, dtype=run.model.dtype).model
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(to)
    if model.can_generate():
        model.generation_config.save_pretrained(to)
    if run.data.tokenizer != "bytes":
        _copy_tokenizer(folder if run.data.tokenizer == "auto" else Path(run.data.tokenizer), to)
    reverted = _Reverted(model, _names(model, graph, weights), weights)
    return reverted.entries, reverted


def _copy_tokenizer(source: Path, to: Path) -> None:
    """Copy the tokenizer that the model has learned with."""
    for pattern in _TOKENIZER_FILES:
        for path in source.glob(pattern):
            if path.is_file() and not (to / path.name).exists():
                shutil.copyfile(path, to / path.name)


def _names(model: Any, graph: Graph, weights: Mapping[str, Tensor]) -> dict[str, ModelState]:
    """The names under which a model saves its tensors, tied ones once, each with its state in the graph."""
    states = {
        name: state
        for state in (*graph.parameters, *graph.buffers)
        if state.name in weights
        for name in (state.name, *state.aliases)
    }
    missing = [name for name, _ in model.named_parameters() if name not in states]
    if missing:
        raise BiremeError(
            f"The checkpoint lacks {missing[0]} and {len(missing) - 1} more, so nothing is written."
        )
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    own = [name for name in model.state_dict() if name in states and name not in ignored]
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    # A tied tensor is under the name that the others are tied to, unless that is no name of the model's.
    kept = {states[name].name for name in own if name not in tied}
    return {name: states[name] for name in own if name not in tied or states[name].name not in kept}


class _Reverted(NamedTensors):
    """The tensors as they are saved. Those that come of the same ones are made together, and given once each.

    They are to be asked for in the order of `entries`, or else are made more than once.
    """

    def __init__(self, model: Any, names: Mapping[str, ModelState], weights: Mapping[str, Tensor]) -> None:
        self._model, self._names, self._weights = model, names, weights
        self.names = self._group_of = dict[str, list[str]]()
        self._made: dict[str, Tensor] = {}
        self.entries: list[TensorEntry] = []
        for group in _groups(model, list(names)):
            blank = {name: _blank(names[name]) for name in group}
            for name, tensor in _revert(model, blank).items():
                self._group_of[name] = group
                self.entries.append(tensor_entry(name, tensor))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            self._made.clear()
            read = {own: self._weights[self._names[own].name] for own in self._group_of[name]}
            self._made = _revert(self._model, read)
        return self._made.pop(name)


def _blank(state: ModelState) -> Tensor:
    return torch.empty(state.shape, dtype=getattr(torch, state.dtype), device="meta")


def _groups(model: Any, names: list[str]) -> list[list[str]]:
    """Which tensors are reverted together: one by one, unless a rule makes something of several."""
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        steps = mapping.get_model_conversion_mapping(model, add_legacy=False)
        backward = [step.reverse_transform() for step in reversed(steps)]
        converters = [step for step in backward if isinstance(step, loading.WeightConverter)]
        found: dict[str, list[str]] = {}
        for name in names:
            made, _ = loading.apply_converters(name, converters)
            found.setdefault(made, []).append(name)
    except (ImportError, AttributeError, TypeError):  # of another transformers: then all of them together
        return [names]
    return list(found.values())


def _revert(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the model's names, as the model's package saves them."""
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        reverted: dict[str, Tensor] = loading.revert_weight_conversion(model, tensors)
    except (ImportError, AttributeError):  # of an older transformers, whose models are as their checkpoints
        return tensors
    return reverted
