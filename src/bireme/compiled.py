"""Loops that numba compiles where it is installed, and that Python runs elsewhere, a hundred times slower.

And work that Python's collector of cycles does not interrupt.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

IS_COMPILED = find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0")
"""Whether such loops are fast here. Numba's own variable turns its compiler off."""

FEWEST_VALUES = 1 << 15
"""For fewer values numba is not imported: that takes longer than it saves on many of them."""


LEAST_COMPILED = 1 << 22
"""Trained elements of a stage from which on its trial steps are a compiled loop, in spite of its memory."""

COMPILER_BYTES = 120 << 20
"""Memory that numba and a loop that it has loaded take in a process."""


def compiled(function: _Function) -> _Function:
    """The function, compiled at its first call and kept on disk; it releases the interpreter's lock."""
    return _compiled(function)


def compiled_fused(function: _Function) -> _Function:
    """The same, where a product that is added may be rounded with the sum, and not before it."""
    return _compiled(function, fastmath={"contract"})


def compiled_dividing(function: _Function) -> _Function:
    """The same, where a division by zero gives no error but infinity; the others check each divisor."""
    return _compiled(function, error_model="numpy")


def _compiled(function: _Function, **options: Any) -> _Function:
    if not IS_COMPILED:
        return function
    import numba
    from numba.core.types import unliteral

    compile_lazily: Any = numba.njit  # its types leave out some of what it takes
    fast = compile_lazily(function, nogil=True, cache=True, no_cfunc_wrapper=True, **options)
    template = fast.get_call_template

    def of_any_value(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return template(tuple(map(unliteral, arguments)), keywords)

    # Else a loop that calls this with a number written out, such as 0, has it compiled for that number alone.
    fast.get_call_template = of_any_value
    compiled_function: _Function = fast
    return compiled_function


def pays_off(num_values: int) -> bool:
    """Whether a codec's compiled loop is faster than operations of torch and numpy. Loops that are loaded are
    faster for any number of values.
    """
    return IS_COMPILED and (num_values >= FEWEST_VALUES or "bireme.codec.loops" in sys.modules)


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python's collector of cycles from running in the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
