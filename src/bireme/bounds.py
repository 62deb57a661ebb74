"""Numbers with the bounds that a file must keep to: the types of fields that are read from files.

To the program they are plain numbers; `documents.py` refuses a file that goes beyond them.
"""

from typing import Annotated

from annotated_types import Ge, Gt, Le

__all__ = ["Bytes", "Count", "NumBytes", "Place", "Positive", "Seconds", "Share"]

Count = Annotated[int, Ge(1)]
"""How many there are, of what there is at least one."""

Place = Annotated[int, Ge(0)]
"""A number counted from 0 on."""

Bytes = Annotated[int, Ge(0)]
NumBytes = Annotated[float, Ge(0)]
"""Bytes as they are counted, and as they come out of a calculation."""

Seconds = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1 + 1e-9)]
"""From 0 to 1, and a sum of shares that rounding brought a little above."""
