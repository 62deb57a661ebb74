"""Profiles that are estimated, once for all workers and for later runs of the suite.

To count the bytes of units takes seconds, and what comes out depends on the code that counts and on nothing
else. Tests of profiles themselves keep nothing.
"""

import os
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from bireme.cluster.device import Device
from bireme.model.graph import Graph
from bireme.model.graph_file import graph_hash
from bireme.profile import profiler
from bireme.profile.profile import Profile, load_profile, save_profile
from bireme.profile.profiler import Graphs
from tests.support.kept import KEPT_GRAPHS

__all__ = ["estimated_once"]

ROOT = Path(__file__).parents[2]
CODE = "src/bireme/profile/*.py", "src/bireme/cluster/device.py"
"""Besides what captures models, by which the folder is named (`tests/support/kept.py`)."""

_profile = profiler.profile


def estimated_once(
    graphs: Graphs, device: torch.device | Device, micro_batches: Sequence[int], **more: Any
) -> Profile:
    """`profile`, or what it found before for a device that is only described."""
    if not isinstance(device, Device):
        return _profile(graphs, device, micro_batches, **more)
    own = {name: graphs if isinstance(graphs, Graph) else graphs(name) for name in micro_batches}
    prints = [(size, graph.name, graph_hash(graph)) for size, graph in own.items()]
    asked = [(name, more[name]) for name in ("halves", "optimizer") if name in more]
    name = sha256(repr((_digest(), prints, device, asked)).encode()).hexdigest()[:24]
    path = Path(os.environ[KEPT_GRAPHS], f"profile-{name}.json")
    if not path.exists():
        save_profile(_profile(graphs, device, micro_batches, **more), path)
    return load_profile(path)


@cache
def _digest() -> str:
    digest = sha256()
    for path in sorted(path for pattern in CODE for path in ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()
