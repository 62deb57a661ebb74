"""Partitions of a line of devices in the simulator, for any schedule with one stage on each device."""

from dataclasses import replace

from bireme.plan.partition.autopipe import Cuts, costs_between
from bireme.plan.partition.loads import Loads
from bireme.plan.partition.partition import Partition
from bireme.schedule.catalogue import generate, schedule_named
from bireme.schedule.program import Program, Rule
from bireme.simulate.costs import Costs
from bireme.simulate.network import Network, Path, Wire
from bireme.simulate.simulator import simulate
from bireme.timeline.timeline import Timeline

NUM_BATCHES = 6
"""Enough that a pipeline that does not drain has come to its pace."""


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
    return simulate(program, costs_of(loads, partition.cuts), network)


def costs_of(loads: Loads, cuts: Cuts) -> Costs:
    """The costs of the stages on their devices."""
    costs = costs_between(loads.chain, cuts)
    return replace(costs, rank_speed=tuple(float(seat.speed) for seat in loads.line.seats))


def _network(loads: Loads, program: Program) -> Network:
    """A cable for each direction of each link."""
    wires: list[Wire] = []
    paths: dict[tuple[int, int], Path] = {}
    for stage, link in enumerate(loads.line.links):
        here, there = program.rank_of_stage[stage], program.rank_of_stage[stage + 1]
        for ends in ((here, there), (there, here)):
            wires.append(Wire(f"{ends[0]} to {ends[1]}", link.bytes_per_s))
            paths[ends] = Path((len(wires) - 1,), link.latency_s, link.overlap)
    return Network(tuple(wires), paths)
