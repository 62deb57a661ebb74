"""Contiguous splits: the dynamic program over ideals, the best cut of a line, and when which is taken."""
