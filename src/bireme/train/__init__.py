"""The application above the engine: run file, data, loop, checkpoints, metrics."""
