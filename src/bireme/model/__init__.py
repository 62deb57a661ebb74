"""Capture of any module into a graph, the units between its narrow cuts, and the functions of stages."""
