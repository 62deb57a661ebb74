"""The engine: programs interpreted on ranks."""
