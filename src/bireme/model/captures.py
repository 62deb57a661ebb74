"""Captures of one model at several batch sizes: one graph where it holds for any, else one for each size.

A model specialises where its code makes a number of the batch size, as by reshaping with a literal one. Then
every size of a micro-batch is a program of its own, captured when it is first asked for.
"""

from collections.abc import Callable
from typing import Any

from bireme.model.capture import Inputs, Loss, batch_size, capture, resized
from bireme.model.graph import Graph

__all__ = ["Captures"]


class Captures:
    """The graphs of a model by batch size, each captured once.

    The samples of the example inputs are repeated or left out to make a size. `front_end` is `capture` for a
    module, or `chain` where `model` is the modules of a chain.
    """

    def __init__(
        self,
        model: Any,
        example_inputs: Inputs,
        *,
        loss: Loss | None = None,
        training: bool = True,
        name: str | None = None,
        front_end: Callable[..., Graph] = capture,
    ) -> None:
        self._model = model
        self._inputs = example_inputs
        self._settings: dict[str, Any] = {"loss": loss, "training": training, "name": name}
        self._front_end = front_end
        self._for_any: Graph | None = None
        self._for_one: dict[int, Graph] = {}

    def graph(self, batch: int | None = None) -> Graph:
        """The graph that holds for a batch size; without one, for that of the example inputs."""
        if self._for_any is not None:
            return self._for_any
        size = batch_size(self._inputs) if batch is None else batch
        if size not in self._for_one:
            inputs = resized(self._inputs, size)
            graph = self._front_end(self._model, inputs, **self._settings)
            if graph.any_batch:
                self._for_any = graph
                return graph
            self._for_one[size] = graph
        return self._for_one[size]
