"""Measurements of the engine beside its limits and its peer, for `bireme bench`."""
