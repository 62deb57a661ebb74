"""Graphs that many tests use, captured once for all workers of a run of the suite.

Those of models that are not of `tests/` are kept for the next run: what is captured depends on the code that
captures, and on nothing else. Tests of capturing itself keep nothing.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

from torch import nn

from bireme.model.capture import Captures, Inputs, Loss, batch_size, capture
from bireme.model.graph import Graph
from bireme.model.graph_file import load_graph, save_graph
from bireme.train.model import RunModel
from tests.support.kept import KEPT_GRAPHS

__all__ = ["captured_once", "remember_captures"]

OF_TESTS = "python:tests."
ALWAYS_THE_SAME = "gpt:", OF_TESTS
"""A name that begins so says all of a model, but for the part of it that learns and its type."""

FOLDER = "hf:"
"""And of such a model all that is in the folder's configuration."""


def captured_once(name: str, capture: Callable[[], Graph], *, is_kept: bool = False) -> Graph:
    """The graph of that name, of the folder that workers share; it is captured by the first that asks.

    One that `is_kept` is there for later runs too: its name says all of its model and its inputs.
    """
    folder = os.environ[KEPT_GRAPHS if is_kept else "BIREME_TESTS_FOLDER"]
    path = Path(folder, f"{sha256(name.encode()).hexdigest()[:24]}.json")
    if not path.exists():
        save_graph(capture(), path)
    return load_graph(path)


def remember_captures() -> None:
    """Have runs and commands of this process capture no model by name that was captured before."""
    settings = Captures.__init__.__kwdefaults__
    assert settings is not None
    settings["front_end"] = _remembered
    RunModel.dropouts = _remembered_dropouts  # type: ignore[method-assign, assignment]


_dropouts: dict[str, int | None] = {}
"""Of the models that this process has run in both modes."""

_count_dropouts = RunModel.dropouts


def _remembered_dropouts(of: RunModel) -> int | None:
    given, source = of.run.model, of.source
    own = None if given.loss else _named(given.source, source.model, source.example_inputs, training=True)
    if own is None:
        return _count_dropouts(of)
    if own not in _dropouts:
        _dropouts[own] = _count_dropouts(of)
    return _dropouts[own]


def _named(name: str | None, model: nn.Module, inputs: Inputs, *, training: bool) -> str | None:
    """All that a graph depends on; None where a name does not say it."""
    said = _said_by(name)
    if said is None or not isinstance(inputs, dict):
        return None
    learning = [(key, one.dtype, one.requires_grad) for key, one in model.named_parameters()]
    scales = [(key, one.scaling) for key, one in model.named_modules() if hasattr(one, "scaling")]
    given = [(key, one.shape[1:], one.dtype) for key, one in inputs.items()]
    return repr((said, training, repr(model), learning, scales, given))


def _remembered(
    model: nn.Module, inputs: Inputs, *, loss: Loss | None, training: bool, name: str | None
) -> Graph:
    make = partial(capture, model, inputs, loss=loss, training=training, name=name)
    own = None if loss else _named(name, model, inputs, training=training)
    if own is None:
        return make()
    is_kept = not name or not name.startswith(OF_TESTS)
    make_once = cache(make)
    found = captured_once(own, make_once, is_kept=is_kept)
    if not found.any_batch:
        found = captured_once(f"{own} {batch_size(inputs)}", make_once, is_kept=is_kept)
    return replace(found, name=name or found.name)


def _said_by(name: str | None) -> str | None:
    """What a model is by its name; None where that does not say it."""
    if name is None or not name.startswith(FOLDER):
        return name if name is not None and name.startswith(ALWAYS_THE_SAME) else None
    file = Path(name.removeprefix(FOLDER), "config.json")
    return file.read_text(encoding="utf-8") if file.is_file() else None
