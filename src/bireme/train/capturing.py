"""The model of a run captured for evaluation while the process that prepares the run does other work.

The two captures of a model, for training and for evaluation, take as long as each other and need nothing of
each other. So a copy of this process makes one of them, where the copy has a core. That is for the first
model of a process: what torch prepares at its first capture the copy prepares too, and later captures here
need it no more.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection

import torch

from bireme.cluster.machine import num_cores
from bireme.model.graph import Graph
from bireme.runtime.processes import has_server, start_process
from bireme.train.model import RunModel
from bireme.train.run_file import RunFile

__all__ = ["evaluation_beside"]

LEAST_CORES = 2
"""With one the two captures would only take turns."""

_earlier = count()
"""How often this process has come to capture a model."""


@contextmanager
def evaluation_beside(run: RunFile, largest: int, batch: int) -> Iterator[Callable[[RunModel], Graph]]:
    """Begin to capture the model in evaluation mode for `batch` samples; gives the way to have the graph.

    `largest` are the samples of its example inputs. What goes wrong in the copy is tried here once more, so
    that errors are the model's own.
    """
    if next(_earlier) or not has_server() or num_cores() < LEAST_CORES:
        yield lambda model: model.evaluation.graph(batch)
        return
    process, talk = start_process("bireme capture", _capture, run, largest, batch)

    def graph(model: RunModel) -> Graph:
        try:
            found: Graph | None = talk.recv()
        except (EOFError, OSError):
            found = None
        return found or model.evaluation.graph(batch)

    with talk:
        try:
            yield graph
        finally:
            process.close()


def _capture(talk: Connection, run: RunFile, largest: int, batch: int) -> None:
    torch.set_num_threads(1)
    try:
        found = RunModel.of(run, largest).evaluation.graph(batch)
    except Exception:  # whoever asked tries again, and finds out
        found = None
    talk.send(found)
