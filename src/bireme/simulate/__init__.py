"""The interpreter on a clock: what a program would take, in seconds and in bytes."""
