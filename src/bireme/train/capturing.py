"""The model of a run captured for evaluation, while the process that prepares the run does other work.

Most models are the same program in training and in evaluation, and are captured once. The two captures of
others take as long as each other and need nothing of each other: a copy of this process makes one of them,
where the copy has a core. That is for the first model of a process: what torch prepares at its first capture
the copy prepares too, and later captures here need it no more.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection

import torch

from bireme.cluster.machine import num_cores
from bireme.model.graph import Graph
from bireme.model.modes import in_evaluation
from bireme.runtime.processes import has_server, start_process
from bireme.train.model import RunModel
from bireme.train.run_file import RunFile

__all__ = ["evaluation_beside"]

LEAST_CORES = 2
"""With one the two captures would only take turns."""

_earlier = count()
"""How often this process has come to capture a model."""


@contextmanager
def evaluation_beside(model: RunModel, largest: int, batch: int) -> Iterator[Callable[[Graph], Graph]]:
    """Begin to capture the model in evaluation mode for `batch` samples, if it is another program then.

    Gives the way to have that graph from the one in training mode. `largest` are the samples of its example
    inputs. What goes wrong in the copy is tried here once more, so that errors are the model's own.
    """
    modes = model.modes()
    if modes is not None:
        yield lambda graph: in_evaluation(graph, modes) or model.evaluation.graph(batch)
        return
    if next(_earlier) or not has_server() or num_cores() < LEAST_CORES:
        yield lambda graph: model.evaluation.graph(batch)
        return
    process, talk = start_process("bireme capture", _capture, model.run, largest, batch)

    def found(graph: Graph) -> Graph:
        try:
            captured: Graph | None = talk.recv()
        except (EOFError, OSError):
            captured = None
        return captured or model.evaluation.graph(batch)

    with talk:
        try:
            yield found
        finally:
            process.close()


def _capture(talk: Connection, run: RunFile, largest: int, batch: int) -> None:
    torch.set_num_threads(1)
    try:
        found = RunModel.of(run, largest).evaluation.graph(batch)
    except Exception:  # whoever asked tries again, and finds out
        found = None
    talk.send(found)
