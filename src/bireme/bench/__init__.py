"""Measurements of the engine, compared with its limits and its peer, for `bireme bench`."""
