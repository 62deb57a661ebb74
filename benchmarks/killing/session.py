"""The processes of a session, as Linux lists them."""

import re
from contextlib import suppress
from pathlib import Path

__all__ = ["living", "name_of"]


def living(session: int) -> list[int]:
    """The processes of a session that run, without those that have ended and are not waited for yet."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _parent, _group, own, *_ = re.sub(r"^.*\) ", "", stat.read_text()).split()
            if own == str(session) and state != "Z":
                found.append(int(stat.parent.name))
    return found


def name_of(pid: int) -> str:
    """What a process is called; empty if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""
