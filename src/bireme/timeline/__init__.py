"""What happened, or would happen: the noun both interpreters of a program make."""

from bireme.timeline.timeline import Timeline, critical_path, pace

__all__ = ["Timeline", "critical_path", "pace"]
