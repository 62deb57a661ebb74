"""Graphs that many tests use, captured once for all workers of a run of the suite."""

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from bireme.model.graph import Graph
from bireme.model.graph_file import load_graph, save_graph

__all__ = ["captured_once"]


def captured_once(name: str, capture: Callable[[], Graph]) -> Graph:
    """The graph of that name, of the folder that workers share; it is captured by the first that asks."""
    path = Path(os.environ["BIREME_TESTS_FOLDER"], f"{sha256(name.encode()).hexdigest()[:24]}.json")
    if not path.exists():
        save_graph(capture(), path)
    return load_graph(path)
