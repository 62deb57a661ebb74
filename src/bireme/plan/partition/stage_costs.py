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
    inputs = chain.backward_input_s
    return Costs.per_stage(
        len(begins),
        forward_s=sums(chain.forward_s),
        backward_s=backward_s,
        backward_input_s=None if inputs is None else sums(inputs),
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
        stash_bytes=tables.kept[begins, ends].tolist(),
        input_bytes=tables.inputs[begins, ends].tolist(),
    )
