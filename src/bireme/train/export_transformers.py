"""A model in the form in which transformers saves it itself, without ever having the whole of it.

The model is made on the meta device to learn its names; the rules with which its package reverts the names
and shapes of a checkpoint run on a few tensors at a time.
"""

import importlib
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bireme.errors import BiremeError
from bireme.model.graph import Graph, ModelState
from bireme.model.sources import load_source
from bireme.train.checkpoint.manifest import TensorEntry
from bireme.train.checkpoint.shard import tensor_entry
from bireme.train.run_file import RunFile

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.model", "*.jinja")


def in_form_of_transformers(
    run: RunFile, graph: Graph, weights: Mapping[str, Tensor], to: Path
) -> tuple[list[TensorEntry], Mapping[str, Tensor]]:
    """Write configuration and tokenizer into a folder; gives the tensors to write next to them."""
    if find_spec("transformers") is None:
        raise BiremeError('To export a transformers model, install it with pip install "bireme[hf]".')
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


class _Reverted(Mapping[str, Tensor]):
    """The tensors as they are saved. Those that come of the same ones are made together, and given once each.

    They are to be asked for in the order of `entries`, or else are made more than once.
    """

    def __init__(self, model: Any, names: Mapping[str, ModelState], weights: Mapping[str, Tensor]) -> None:
        self._model, self._names, self._weights = model, names, weights
        self._group_of: dict[str, list[str]] = {}
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

    def __iter__(self) -> Iterator[str]:
        return iter(self._group_of)

    def __len__(self) -> int:
        return len(self._group_of)


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
