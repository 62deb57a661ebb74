"""Lengths of axes that may depend on the batch size: whole numbers, or small expressions in `b`."""

import ast
from collections.abc import Callable
from functools import lru_cache
from typing import Any

__all__ = ["Length", "evaluate", "expand"]

Length = int | str
"""A number, or an expression in the batch size b: names, whole numbers, + − * // % and parentheses."""

OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}


def evaluate(length: Length, batch: int) -> int:
    """The length at a batch size."""
    return length if isinstance(length, int) else _evaluated(length, batch)


def expand(expression: str, batch: Any) -> Any:
    """The same for a batch size that is no number yet, but something that can be reckoned with like one."""
    return _value(ast.parse(expression, mode="eval").body, batch)


@lru_cache(maxsize=4096)
def _evaluated(expression: str, batch: int) -> int:
    return int(expand(expression, batch))


def _value(node: ast.expr, batch: Any) -> Any:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id="b"):
            return batch
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left, batch), _value(right, batch))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, batch)
    raise ValueError(f"{ast.unparse(node)} is no length")
