"""How long a run will take, roughly and before anything is measured."""

from bireme.model.graph import Graph
from bireme.train.run_file import RunFile

__all__ = ["is_short"]

SHORT_S = 10.0
"""A run that is over sooner is measured and planned briefly."""

FLOPS_PER_S, CALL_S, MICRO_BATCHES = 2e10, 2e-5, 4
"""What a slow core computes, what it takes to call an operator, and how often one is called in a step."""


def is_short(run: RunFile, graph: Graph) -> bool:
    """Whether a run will be over so soon that to measure and to plan well would take longer than it saves.

    That is a guess from what its operators compute, and how many they are.
    """
    computed = 3 * run.training.batch_size * sum(one.flops for one in graph.operators) / graph.batch
    called = 3 * MICRO_BATCHES * len(graph.operators)  # a backward is worth two forwards
    return run.training.steps * (computed / FLOPS_PER_S + called * CALL_S) < SHORT_S
