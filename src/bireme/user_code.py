"""Functions of a user, named by one text: `package.module:function`, or `file.py:function`.

Models, losses and data are named so. Importing runs the user's code, so every failure becomes one sentence.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from bireme.errors import BiremeError, closest

PREFIX = "python:"
"""May stand before every such text."""


def names_function(text: str) -> bool:
    """Whether a text is written like a function, and is not the path of an existing file."""
    place, _, name = text.removeprefix(PREFIX).rpartition(":")
    written = place.endswith(".py") or all(part.isidentifier() for part in place.split("."))
    return bool(place) and name.isidentifier() and written and not Path(text).exists()


def user_function(text: str, returns: str) -> Callable[..., Any]:
    """The function that a text names; `returns` ends the sentence "Name a function that returns …"."""
    place, _, name = text.removeprefix(PREFIX).rpartition(":")
    if not place or not name:
        raise BiremeError(
            f"{text} names no function. Write package.module:function or file.py:function, with a function "
            f"that returns {returns}."
        )
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    if not hasattr(module, name):
        public = [word for word in vars(module) if not word.startswith("_")]
        hint = closest(name, public) if public else "It has no public names."
        raise BiremeError(f"{place} has no function {name!r}. {hint}")
    function: Callable[..., Any] = getattr(module, name)
    if not callable(function):
        raise BiremeError(
            f"{place}:{name} is a {type(function).__name__}, not a function. Name a function that returns "
            f"{returns}."
        )
    return function


def reason_of(error: BaseException) -> str:
    """The kind of an error and the first two lines of its text, without a full stop at the end."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2]).rstrip('.')}" if lines else type(error).__name__


def optional_package(name: str, extra: str, user: str) -> Any:
    """A package that an extra of Bireme installs; `user` is what needs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BiremeError(
            f"{user} needs the {name} package ({error}); install bireme[{extra}]: "
            f'pip install "bireme[{extra}]".'
        ) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BiremeError(f"There is no file {path} to take a function from. Check the path.")
    path = path.resolve()
    name = f"bireme_file_{sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise BiremeError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(specification)
    # The file can import its neighbors, as when Python runs it. Last in the path, so that it hides nothing.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise BiremeError(f"{path} cannot be imported: {reason_of(error)}.") from error
    return module


def _from_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # importing runs the module, and that can fail in any way
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise BiremeError(
                f"There is no Python module {missing}. Install it, put its folder on PYTHONPATH, or name "
                "the file: file.py:function."
            ) from None
        raise BiremeError(f"The Python module {name} cannot be imported: {reason_of(error)}.") from error
