"""Runs in which processes are killed: what kills them, and who watches what becomes of the run."""
