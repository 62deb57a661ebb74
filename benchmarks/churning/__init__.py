"""Machines that come and go by a trace: the trace, runs over it, and what they are compared with."""
