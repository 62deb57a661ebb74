"""How rounds of several lines, windows and groups share one order of numbers."""

__all__ = ["PLACES"]

PLACES = 40
"""Bits of a number within a line or a window, in stamps and requests."""
