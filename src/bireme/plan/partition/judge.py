"""The simulator as a judge of partitions, for any schedule that puts one stage on each device."""

from dataclasses import replace

from bireme.plan.partition.autopipe import Cuts, Judge
from bireme.plan.partition.chain import Chain, Seconds
from bireme.plan.partition.loads import Loads
from bireme.plan.partition.partition import Partition, assess
from bireme.schedule.catalogue import generate, schedule_named
from bireme.schedule.program import Program
from bireme.schedule.rule import Rule
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Path, Wire
from bireme.simulate.simulator import simulate
from bireme.timeline.timeline import Timeline

__all__ = ["costs_between", "costs_of", "judged_by_simulator", "predict"]

NUM_BATCHES = 6
"""Enough that a pipeline that does not drain has come to its pace."""


def judged_by_simulator(loads: Loads) -> Judge:
    """The seconds of a batch as the simulator sees them, in the middle of a run."""

    def seconds(cuts: Cuts) -> float:
        return predict(loads, assess(loads, cuts)).steady_batch_s

    return seconds


def predict(loads: Loads, partition: Partition, num_batches: int | None = None) -> Timeline:
    """The timeline of a partition; without a number of batches, of as many as show the steady state."""
    setting = loads.setting
    if num_batches is None:
        drains = schedule_named(setting.schedule).rule is Rule.SYNCHRONOUS
        num_batches = 1 if drains else NUM_BATCHES
    program = generate(
        setting.schedule,
        num_stages=loads.num_stages,
        num_microbatches=setting.num_microbatches,
        num_batches=num_batches,
        recompute=partition.recompute,
    )
    network = _network(loads, program)
    return simulate(program, costs_of(loads, partition.cuts), network, overlap=loads.line.overlap)


def costs_of(loads: Loads, cuts: Cuts) -> Costs:
    """The costs of the stages on their devices."""
    costs = costs_between(loads.chain, cuts)
    return replace(costs, rank_speed=tuple(float(seat.speed) for seat in loads.line.seats))


def costs_between(chain: Chain, cuts: Cuts, *, half_forward_s: Seconds | None = None) -> Costs:
    """The costs of the stages between some cuts for the simulator, on devices of speed 1.

    It knows no buffers and no workspace, which are with the optimiser's bytes here, as they are always there.
    `half_forward_s` are the seconds of half a micro-batch in each unit, where they are known.
    """
    bounds = chain.bounds(cuts)
    begins, ends = list(bounds[:-1]), list(bounds[1:])
    tables = chain.bytes
    always = (tables.optimizer + tables.buffer + tables.workspace)[begins, ends]

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
        weight_bytes=tables.parameter[begins, ends].tolist(),
        gradient_bytes=tables.gradient[begins, ends].tolist(),
        optimizer_bytes=always.tolist(),
        stash_bytes=tables.kept[begins, ends].tolist(),
        input_bytes=tables.inputs[begins, ends].tolist(),
    )


def _network(loads: Loads, program: Program) -> Network:
    """A cable for each link, two where it works both ways at once."""
    wires: list[Wire] = []
    paths: dict[tuple[int, int], Path] = {}
    for stage, link in enumerate(loads.line.links):
        here, there = program.rank_of_stage[stage], program.rank_of_stage[stage + 1]
        for ends in ((here, there), (there, here)):
            if link.full_duplex or ends == (here, there):
                wires.append(Wire(f"{ends[0]} to {ends[1]}", link.bytes_per_s))
            paths[ends] = Path((len(wires) - 1,), link.latency_s)
    return Network(tuple(wires), paths)
