"""Which values of a graph learn: they receive a gradient, because a trainable parameter comes before them.

If nothing before a cut learns, as after a frozen embedding, no gradient crosses it.
"""

from bireme.model.graph import Graph

__all__ = ["learned_values"]

STOPS = ("aten.detach.", "aten.detach_.", "aten.argmax.", "aten.argsort.")
FLOATING = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")


def learned_values(graph: Graph) -> frozenset[str]:
    """The names of the floating values that depend on a trainable parameter."""
    learned = {state.name for state in graph.parameters if state.trainable}
    found: set[str] = set()
    values: set[str] = set()
    for operator in graph.operators:
        values |= {v.name for v in operator.outputs if v is not None and v.dtype in FLOATING}
        if operator.no_grad or operator.target.startswith(STOPS):
            continue
        if any(name in learned for name in operator.reads()):
            made = {v.name for v in operator.outputs if v is not None} | set(operator.mutates)
            made &= values  # a buffer that is written to, such as a running mean, gets no gradient
            learned |= made
            found |= made
    return frozenset(found)
