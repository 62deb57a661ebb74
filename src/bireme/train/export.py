"""The trained model for others: safetensors by the model's own names, or a folder that transformers loads."""

import importlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.sources import load_source
from bireme.train.checkpoint.checkpoint import Checkpoint
from bireme.train.run_file import RunFile

__all__ = ["export_checkpoint", "exported_step", "newest_weights"]

WEIGHTS = "model.safetensors"
ABOUT = "bireme.json"

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.model", "*.jinja")


def newest_weights(graph: Graph, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The newest weights and persistent buffers of a checkpoint, by the model's own names, tied ones once."""
    saved = checkpoint.snapshot().tensors
    found = {}
    for section, states in (("weights", graph.parameters), ("buffers", graph.buffers)):
        for state in states:
            key = f"{section}/{state.name}"
            if state.persistent and key in saved:
                found[state.name] = saved[key].to(getattr(torch, state.dtype)).contiguous()
    return found


def exported_step(folder: Path) -> int | None:
    """The step of the checkpoint whose model is in a folder; None where there is none."""
    try:
        return int(json.loads((folder / ABOUT).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def export_checkpoint(
    run: RunFile, graph: Graph, checkpoint: Checkpoint, to: Path, *, merged: bool | None = None
) -> None:
    """Write a checkpoint's model into a folder, in the place of what was there: whole, or not at all.

    Of a run with an adapter that is the adapter alone, or with `merged` the whole model with the adapter
    added to its weights; None leaves it to the run file.
    """
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    except OSError as error:
        raise BiremeError(f"The model cannot be written to {to}: {error.strerror or error}.") from error
    try:
        weights = newest_weights(graph, checkpoint)
        adapter = load_source(run.model.source, part=run.model.part).adapter if run.model.part.lora else None
        if adapter is not None and (run.model.lora.merge if merged is None else merged):
            weights, graph = adapter.merged(weights), adapter.base_graph(graph)
            adapter = None
        if adapter is not None:
            adapter.save(weights, draft, base=_base_of(run))
        elif run.model.source.startswith("hf:"):
            _as_transformers(run, graph, weights, draft)
        else:
            save_file(weights, str(draft / WEIGHTS), metadata={"format": "pt"})
        about = {"format": 1, "model": run.model.source, "step": checkpoint.manifest.step}
        (draft / ABOUT).write_text(json.dumps(about) + "\n", encoding="utf-8")
        draft.chmod(0o755)
        if to.exists():
            shutil.rmtree(to)
        draft.replace(to)
    except OSError as error:
        raise BiremeError(f"The model cannot be written to {to}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _base_of(run: RunFile) -> str:
    """Where the weights lie that an adapter belongs to, as peft looks for them."""
    kind, _, rest = run.model.source.partition(":")
    return str(Path(rest).resolve()) if kind == "hf" else run.model.source


def _as_transformers(run: RunFile, graph: Graph, weights: Mapping[str, Tensor], to: Path) -> None:
    """The way transformers writes the model itself, with its configuration and tokenizer."""
    if find_spec("transformers") is None:
        raise BiremeError('To export a transformers model, install it with pip install "bireme[hf]".')
    folder = Path(run.model.source.partition(":")[2])
    model: Any = load_source(run.model.source, dtype="float32").model
    named = dict(weights)
    for state in (*graph.parameters, *graph.buffers):
        if state.name in weights:
            named |= dict.fromkeys(state.aliases, weights[state.name])
    model.load_state_dict(named, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise BiremeError(
            f"The checkpoint lacks {missing[0]} and {len(missing) - 1} more, so nothing is written."
        )
    with _without_bar():
        model.save_pretrained(to)
    source = _tokenizer_folder(run.data.tokenizer, folder if folder.is_dir() else folder.parent)
    if source is None:
        return
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            if path.is_file() and not (to / path.name).exists():
                shutil.copy2(path, to / path.name)


def _tokenizer_folder(asked: str, of_model: Path) -> Path | None:
    """Where the tokenizer is that the model has learned with; bytes need none."""
    if asked == "bytes":
        return None
    return of_model if asked == "auto" else Path(asked)


@contextmanager
def _without_bar() -> Iterator[None]:
    """Transformers draws a bar for what takes a moment, on a terminal or not."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            logging.enable_progress_bar()
