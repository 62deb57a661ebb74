"""Choosing the parameters that learn, by patterns over the model's own names."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from bireme.errors import BiremeError, closest

__all__ = ["choose_trainable"]


def choose_trainable(
    model: nn.Module, *, train: Iterable[str] | None = None, freeze: Iterable[str] | None = None
) -> None:
    """Let only the parameters that `train` matches learn, or let those that `freeze` matches not learn.

    A tied parameter is matched under any of its names. A pattern that matches nothing is an error, and so is
    a model in which nothing learns afterwards.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    if train is not None:
        chosen = _matched(model, named, train, "model.train")
        for parameter in named.values():
            parameter.requires_grad_(False)
        for name in chosen:
            named[name].requires_grad_(named[name].is_floating_point() or named[name].is_complex())
    if freeze is not None:
        for name in _matched(model, named, freeze, "model.freeze"):
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        key = "model.train" if train is not None else "model.freeze"
        raise BiremeError(f"With this {key} no parameter learns. Let at least one of {len(named)} learn.")


def _matched(
    model: nn.Module, named: Mapping[str, nn.Parameter], patterns: Iterable[str], key: str
) -> list[str]:
    found: dict[str, None] = {}
    for pattern in patterns:
        own = [name for name in named if fnmatchcase(name, pattern)]
        if not own:
            modules = {f"{module}.*" for name in named for module in _modules_around(name)}
            raise BiremeError(
                f"{key} has {pattern!r}, which matches none of the model's {len(named)} parameters. "
                f"{closest(pattern, [*modules, *named])}"
            )
        found.update(dict.fromkeys(own))
    return list(found)


def _modules_around(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]
