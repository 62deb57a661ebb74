"""A partition's stages as costs for the simulator."""

from bireme.plan.partition.autopipe import Cuts
from bireme.plan.partition.chain import Chain, Seconds
from bireme.simulate.costs import Costs

__all__ = ["costs_between"]


def costs_between(chain: Chain, cuts: Cuts, *, half_forward_s: Seconds | None = None) -> Costs:
    """The costs of the stages between some cuts for the simulator, on devices of speed 1.

    `half_forward_s` are the seconds of half a micro-batch in each unit, where they are known.
    """
    bounds = chain.bounds(cuts)
    begins, ends = list(bounds[:-1]), list(bounds[1:])
    tables = chain.bytes

    def sums(values: Seconds) -> list[float]:
        return [float(values[begin:end].sum()) for begin, end in zip(begins, ends, strict=True)]

    backward_s = sums(chain.backward_s)
    again_s = sums(chain.recompute_backward_s)
    input_s, weight_s = _halves_s(chain, begins, ends)
    return Costs.per_stage(
        len(begins),
        forward_s=sums(chain.forward_s),
        backward_s=backward_s,
        backward_input_s=input_s,
        backward_weight_s=weight_s,
        half_forward_s=None if half_forward_s is None else sums(half_forward_s),
        recompute_s=[max(again - once, 0.0) for again, once in zip(again_s, backward_s, strict=True)],
        update_s=sums(chain.update_s),
        trial_s=sums(chain.trial_s),
        reduce_busy_s=sums(chain.reduce_s),
        message_bytes=[*(float(chain.boundary_bytes[end - 1]) for end in ends[:-1]), 0.0],
        gradient_message_bytes=[*(float(chain.returned_bytes[end - 1]) for end in ends[:-1]), 0.0],
        weight_bytes=tables.parameter[begins, ends].tolist(),
        gradient_bytes=tables.gradient[begins, ends].tolist(),
        optimizer_bytes=tables.optimizer[begins, ends].tolist(),
        buffer_bytes=tables.buffer[begins, ends].tolist(),
        frozen_bytes=tables.frozen[begins, ends].tolist(),
        workspace_bytes=tables.workspace[begins, ends].tolist(),
        waiting_bytes=tables.waiting[begins, ends].tolist(),
        halves_bytes=tables.halves[begins, ends].tolist(),
        stash_bytes=tables.kept[begins, ends].tolist(),
        input_bytes=tables.inputs[begins, ends].tolist(),
    )


def _halves_s(
    chain: Chain, begins: list[int], ends: list[int]
) -> tuple[list[float] | None, list[float] | None]:
    """The seconds of the two halves of each stage's backward, where they are known.

    Together they take longer than a whole one. A stage that sends no gradient back has nothing to do in the
    first but to find that out, and does all of a whole one in the second.
    """
    inputs, weights = chain.backward_input_s, chain.backward_weight_s
    if inputs is None or weights is None:
        return None, None
    input_s, weight_s = list[float](), list[float]()
    for begin, end in zip(begins, ends, strict=True):
        goes_back = begin > 0 and chain.returned_bytes[begin - 1] > 0
        input_s.append(float(inputs[begin:end].sum() if goes_back else inputs[begin]))
        weight_s.append(float((weights if goes_back else chain.backward_s)[begin:end].sum()))
    return input_s, weight_s
