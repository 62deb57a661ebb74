"""What rank 0 tells the processes that a launcher has started, once it has made a run ready."""

import hashlib
from dataclasses import dataclass
from typing import Any

from bireme.devices import Backend
from bireme.train.folder import RunFolder

__all__ = ["Orders", "digest_of"]


@dataclass(frozen=True, slots=True)
class Orders:
    """What rank 0 tells the others. `places[p]` is the rank that takes place p of the plan. Where replicas
    may die each process is the launcher of its host, and `hosts` is what `meet_hosts` takes.
    """

    folder: str
    digest: str
    checkpoint: str | None
    passed_over: list[str]
    places: list[int]
    backend: Backend
    device: str
    threads: int | None
    timeout_s: float
    words: dict[str, Any]
    hosts: dict[str, Any] | None = None


def digest_of(folder: RunFolder) -> str:
    """What tells whether two machines see the same folder; nothing where they see none."""
    try:
        return hashlib.sha256(folder.run_file.read_bytes() + folder.plan.read_bytes()).hexdigest()
    except OSError:
        return ""
