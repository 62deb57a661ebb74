"""Replicas of unequal speed in the engine, on emulated devices: what they train, and what was possible."""
