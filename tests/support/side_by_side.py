"""All replicas of a plan in one event simulation: each has its own ranks, stages and messages, and only sums
are written down once.

The replicas are one program whose stages are those of the first replica, then those of the second, and so on.
On both sides of a replica is a stage that does nothing, on the rank next to it, so that no message leaves the
replica. The sums over replicas set out when the first replica is ready for them.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from bireme.cluster.cluster import Cluster
from bireme.schedule.instruction import Instruction, Kind
from bireme.schedule.program import Program, Track
from bireme.schedule.routes import Routes
from bireme.simulate.costs import Costs
from bireme.simulate.links import cluster_network
from bireme.simulate.simulator import Until, simulate


def side_by_side_s(
    program: Program,
    costs: Sequence[Costs],
    cluster: Cluster,
    grid: Sequence[Sequence[int]],
    until: Until | None = None,
) -> float:
    """The seconds of a batch where replica q of rank r, with the costs q, is on device `grid[r][q]`.

    The clock stops when `until` says so of the ends of batches so far.
    """
    width = len(costs)
    joint = _joint(program, width)
    devices = [row[replica] for replica in range(width) for row in grid]
    rings = {rank: grid[rank] if rank < len(grid) else [device] for rank, device in enumerate(devices)}
    network = cluster_network(cluster, joint, devices, replicas=rings)
    return simulate(joint, _joint_costs(costs), network, agree=True, until=until).steady_batch_s


def _joint(program: Program, width: int) -> Program:
    ranks, tracks = list[int](), list[Track]()
    for replica in range(width):
        first, shift = replica * program.num_ranks, replica * (program.num_stages + 2) + 1
        own = [first + rank for rank in program.rank_of_stage]
        ranks += [own[0], *own, own[-1]]
        for track in program.tracks:
            steps = [step for one in track for step in _steps(one, shift, program.num_stages)]
            tracks.append(Track(tuple(steps)))
    return replace(
        program,
        routes=Routes(tuple(ranks)),
        banks=(1, *program.banks, 1) * width,
        tracks=tuple(tracks),
        recomputed=frozenset(
            replica * (program.num_stages + 2) + 1 + stage
            for replica in range(width)
            for stage in program.recomputed
        ),
    )


def _steps(step: Instruction, shift: int, num_stages: int) -> list[Instruction]:
    """The step of a replica, with the sums of the stages that do nothing beside those next to them."""
    found = [step._replace(stage=shift + step.stage)]
    if step.kind is Kind.REDUCE:
        ends = [stage for stage, near in ((-1, 0), (num_stages, num_stages - 1)) if step.stage == near]
        found += [step._replace(stage=shift + stage) for stage in ends]
    return found


def _joint_costs(costs: Sequence[Costs]) -> Costs:
    changed: dict[str, Any] = {}
    for field in fields(Costs):
        values = [getattr(one, field.name) for one in costs]
        if isinstance(values[0], tuple) and values[0]:
            edge = () if field.name == "rank_speed" else (0.0,)
            changed[field.name] = tuple(one for own in values for one in (*edge, *own, *edge))
    sums = costs[0].reduce_bytes
    changed["reduce_bytes"] = (0.0, *sums, 0.0, *(0.0,) * (len(costs) - 1) * (len(sums) + 2))
    return replace(costs[0], **changed)
