"""Short run files: what one purpose needs, every line explained, values from the model and data named.

A recipe chooses keys; their values are those that a run without them would have, unless it sets others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from bireme.documents import toml_value
from bireme.train.run_file.checks import value_of
from bireme.train.run_file.run import RunFile
from bireme.train.run_file.text import known_keys

_ABOUT = {
    "model.source": "folder of the model, as transformers saves it",
    "model.from_scratch": "new weights, although the folder has some",
    "model.dtype": "number format of the computation",
    "model.frozen_dtype": "4 bits for each weight that stays as it is",
    "model.loss": "loss of a model that returns none",
    "model.lora.rank": "size of the adapter",
    "model.lora.alpha": "strength of the adapter: usually twice its rank",
    "data.source": "conversations, or prompts with answers, one in each line",
    "data.length": "tokens of a sample; a longer one loses its end",
    "training.epochs": "times that every sample is trained",
    "training.steps": "optimizer steps; each trains one batch",
    "training.batch_size": "samples of a step, over all devices",
    "training.learning_rate": "highest rate; too high, and the loss rises",
    "training.warmup_fraction": "share of the steps in which the rate rises",
    "links.codec": "fewer bits between machines if that saves time",
    "checkpoint.every_steps": "steps between checkpoints, for bireme resume",
    "checkpoint.every_s": "seconds between checkpoints, if machines leave",
    "elastic.patience_s": "seconds until a run goes on without a machine",
}
"""What to say about a key in a few words."""

_MODEL_KEYS = ("model.dtype", "data.length", "training.learning_rate", "training.warmup_fraction")
"""Keys whose values follow from the model."""

_TUNED = (
    *("model.source", "model.dtype", "data.source", "data.length", "training.epochs"),
    *("training.batch_size", "training.learning_rate", "training.warmup_fraction"),
)
_ADAPTER = ("model.lora.rank", "model.lora.alpha")
_MODEL, _DATA = "path/to/model", "path/to/chats.jsonl"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a purpose needs. `values` are set; other `keys` have the values of their defaults.

    `model` and `data` stand for those that were not named, `command` trains with the file.
    """

    title: str
    keys: tuple[str, ...]
    values: Mapping[str, Any]
    model: str = f"hf:{_MODEL}"
    data: str = _DATA
    about: Mapping[str, str] = field(default_factory=dict)
    command: str = "bireme train {path}"

    @property
    def starts_from_weights(self) -> bool:
        """Whether it needs a folder of transformers with weights."""
        return self.model == f"hf:{_MODEL}"


_FEW = {"training.epochs": 3.0, "training.batch_size": 16}
_LORA = {"model.lora.rank": 16, "model.lora.alpha": 32.0, **_FEW}
_STEPS = "checkpoint.every_steps"

RECIPES: Mapping[str, Recipe] = {
    "finetune": Recipe("all weights of a model go on learning", (*_TUNED, _STEPS), _FEW),
    "lora": Recipe(
        "an adapter learns, and the model's own weights stay as they are",
        (*_TUNED, *_ADAPTER, _STEPS),
        _LORA,
    ),
    "qlora": Recipe(
        "an adapter learns, and the model's own weights are kept in 4 bits",
        (*_TUNED, *_ADAPTER, "model.frozen_dtype", _STEPS),
        _LORA | {"model.frozen_dtype": "nf4"},
    ),
    "pretrain": Recipe(
        "a model learns text from new weights",
        (
            *("model.source", "data.source", "data.length", "training.steps", "training.batch_size"),
            *("training.learning_rate", "training.warmup_fraction", _STEPS),
        ),
        {"training.steps": 2000},
        "gpt:layers=8,width=256,heads=8,vocab=257,context=256",
        "path/to/texts",
        {
            "model.source": "the built-in GPT, or hf:FOLDER with a config.json",
            "data.source": "folder of text files, or rows with a text each",
        },
    ),
    "own-model": Recipe(
        "a model and data that your own functions make",
        (
            *("model.source", "model.loss", "data.source", "training.steps", "training.batch_size"),
            *("training.learning_rate", _STEPS),
        ),
        {"training.learning_rate": 1e-3, "model.loss": "cross_entropy"},
        "model.py:model",
        "model.py:samples",
        {
            "model.source": "function that returns the module and example inputs",
            "data.source": "function that returns the dataset: dicts of tensors",
        },
    ),
    "machines": Recipe(
        "an adapter learns on machines that join, over slow links",
        (*_TUNED, *_ADAPTER, "links.codec", "checkpoint.every_s", "elastic.patience_s"),
        _LORA | {"links.codec": "auto", "checkpoint.every_s": 600.0},
        command="bireme coordinate {path} --machines 2",
    ),
}
"""The recipes by what they are for."""


def recipe_toml(recipe: Recipe, run: RunFile, beginning: str, about: Mapping[str, str]) -> str:
    """The run file of a recipe with the values of `run`; `beginning` is its first comment.

    `about` says more of single keys, as what the data hold. Keys that follow from a model that was not named
    are left out.
    """
    is_named = run.model.source != recipe.model or not recipe.starts_from_weights
    keys = [key for key in recipe.keys if is_named or key not in _MODEL_KEYS]
    if run.model.from_scratch:
        keys.append("model.from_scratch")
    values = {key: value_of(run, key) for key in keys}
    return short_toml(values, _ABOUT | dict(recipe.about) | dict(about), beginning)


def short_toml(values: Mapping[str, Any], about: Mapping[str, str], beginning: str) -> str:
    """A run file of these keys, in the order of the tables, each with a comment after it."""
    keys = sorted(values, key=known_keys().index)
    texts = {key: f"{key.rpartition('.')[2]} = {toml_value(values[key])}" for key in keys}
    width = max(len(text) for text in texts.values() if len(text) <= _WIDEST)

    def lines() -> Iterator[str]:
        yield from (f"# {line}" for line in beginning.splitlines())
        yield "format = 1"
        for table, own in groupby(keys, lambda key: key.rpartition(".")[0]):
            yield from ("", f"[{table}]")
            yield from (f"{texts[key]:{width}}  # {about[key]}" for key in own)

    return "\n".join(lines()) + "\n"


_WIDEST = 44
"""A longer line does not push the comments of the others to the right."""
