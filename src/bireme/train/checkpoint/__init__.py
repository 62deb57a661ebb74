"""Checkpoints on disk: written while training goes on, whole or not at all, and checked before use."""
