"""Measured time and bytes per unit and micro-batch size; memory behavior."""
