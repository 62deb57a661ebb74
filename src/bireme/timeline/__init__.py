"""What happened, or would happen: the noun both interpreters of a program make."""

from bireme.timeline.critical import critical_path
from bireme.timeline.pace import pace
from bireme.timeline.timeline import Timeline

__all__ = ["Timeline", "critical_path", "pace"]
