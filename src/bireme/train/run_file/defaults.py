"""Defaults that follow from the model: the only file of this package that looks at what a key names.

A value that is filled in here does not count as given: who asks later whether a person chose it gets no.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bireme.model.shapes import has_weights
from bireme.train.run_file.tables import Tables

FINE_TUNING_RATE, ADAPTER_RATE, SCRATCH_RATE = 2e-5, 2e-4, 3e-3
"""Learning rates of a model that starts from the weights in its folder, of an adapter on such a model, and of
new weights in a model of at most `NARROW`.
"""

NARROW = 256
"""Up to this width new weights learn at `SCRATCH_RATE`; wider models get less, in inverse proportion."""

FINE_TUNING_WARMUP = 0.03
"""Share of the steps; weights that are good already need a short one."""

LONGEST = 1024
"""Largest default of data.length for a model of transformers."""

SHORT = 128
"""Up to this context a model takes exactly as many tokens as its configuration gives."""

CONTEXTS = ("max_position_embeddings", "n_positions")
WIDTHS = ("hidden_size", "n_embd", "d_model")
HALVES = ("bfloat16", "float16", "BF16", "F16")
"""Formats of two bytes, by their names in configurations and in safetensors."""

_MOST_HEADER_BYTES = 1 << 27

_Run = TypeVar("_Run", bound=Tables)


def with_model_defaults(run: _Run) -> _Run:
    """The run with the defaults that follow from its model, in the keys that were left out.

    The samples of the built-in GPT have its context as their length, those of a transformers model its
    context up to LONGEST. A model that starts from weights in its folder gets the learning rate and the
    warm-up of fine-tuning, another one a rate for its width. If the folder has weights of two bytes, the run
    computes in bfloat16: float32 takes twice the memory.
    """
    kind, _, rest = run.model.source.partition(":")
    folder = folder_of(run.model.source)
    found: dict[str, dict[str, Any]] = {}
    if kind == "gpt" and (context := re.search(r"\bcontext\s*=\s*(\d{1,7})\b", rest)):
        found["data"] = {"length": max(2, int(context[1]))}
    if folder is not None:
        config = model_config(folder)
        found["data"] = {"length": default_length(config)}
        if _format(config, folder) in HALVES:
            found["model"] = {"dtype": "bfloat16"}
        if run.model.from_scratch or not has_weights(folder):
            found["training"] = {"learning_rate": _scratch_rate(config)}
        else:
            rate = FINE_TUNING_RATE if run.model.lora.rank is None else ADAPTER_RATE
            found["training"] = {"learning_rate": rate, "warmup_fraction": FINE_TUNING_WARMUP}
    for name, values in found.items():
        table = getattr(run, name)
        new = {key: one for key, one in values.items() if one and key not in table.model_fields_set}
        filled = table.model_copy(update=new)
        filled.model_fields_set.difference_update(new)
        run = run.model_copy(update={name: filled})
    return run


def folder_of(source: str) -> Path | None:
    """The folder of a transformers model, from a `model.source`; None if it is made otherwise."""
    kind, _, rest = source.partition(":")
    return Path(rest).expanduser() if kind == "hf" else None


def model_config(folder: Path) -> Mapping[str, Any]:
    """The configuration of a transformers model, empty if it cannot be read: loading the model says why."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def context_of(config: Mapping[str, Any]) -> int | None:
    """The tokens that a transformers model reads at most; None if its configuration has no such number."""
    known = (value for value in _values(config, CONTEXTS) if isinstance(value, int) and value >= 2)
    return min(known, default=None)


def default_length(config: Mapping[str, Any], most: int = LONGEST) -> int | None:
    """The default length of the samples of a transformers model; None if its configuration has no context."""
    if (known := context_of(config)) is None:
        return None
    context = min(known, most)
    # Some families count two positions that no token has, such as 514 for 512 tokens.
    return context if context <= SHORT else context // 8 * 8


def _values(config: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[Any]:
    """The values under these names, in the configuration and in that of its text model."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            yield from (part[name] for name in names if part.get(name) is not None)


def _scratch_rate(config: Mapping[str, Any]) -> float:
    width = next((one for one in _values(config, WIDTHS) if isinstance(one, int)), NARROW)
    return float(f"{SCRATCH_RATE * min(1.0, NARROW / max(width, 1)):.2g}")


def _format(config: Mapping[str, Any], folder: Path) -> str:
    """The number format of a model's weights; without one in the configuration, that of the first tensor."""
    named = next(_values(config, ("dtype", "torch_dtype")), None)
    if named is not None:
        return str(named)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(size, _MOST_HEADER_BYTES)))
            return next(str(one["dtype"]) for name, one in header.items() if name != "__metadata__")
        except (OSError, ValueError, AttributeError, KeyError, TypeError, StopIteration):
            break  # loading the weights says what is wrong
    return ""
