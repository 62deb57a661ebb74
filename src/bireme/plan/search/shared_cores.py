"""Who shares a processor: devices of one server that want more cores than it has.

A replica is simulated on its part of the cores, which is that of its threads among all that compute there.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from bireme.plan.search.problem import PlanningProblem
from bireme.simulate.processors import Processors

__all__ = ["cores_needed", "processors_of"]


def cores_needed(problem: PlanningProblem, device_s: Mapping[int, float]) -> list[tuple[float, str]]:
    """For how long a batch keeps the cores of each server busy that its devices share, and their name."""
    work_s: defaultdict[int, float] = defaultdict(float)
    for device, seconds in device_s.items():
        work_s[problem.servers[device]] += problem.threads[device] * seconds
    servers = problem.cluster.servers
    return [
        (seconds / servers[place].num_cores, f"the cores of {servers[place].name}")
        for place, seconds in work_s.items()
        if servers[place].num_cores
    ]


def processors_of(problem: PlanningProblem, grid: Sequence[Sequence[int]], replica: int) -> Processors | None:
    """The cores that the ranks of a replica share, machines in the order in which ranks come to them.

    None where every rank has its own.
    """
    wanted: defaultdict[int, int] = defaultdict(int)
    for device in (device for row in grid for device in row):
        wanted[problem.servers[device]] += problem.threads[device]
    own = [row[replica] for row in grid]
    # An accelerator computes on nobody's cores: it counts as a machine of its own.
    machines = [problem.servers[device] if problem.threads[device] else -1 - device for device in own]
    threads = [max(1, problem.threads[device]) for device in own]
    numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
    cores = []
    for machine in numbers:
        here = sum(count for count, one in zip(threads, machines, strict=True) if one == machine)
        has = problem.cluster.servers[machine].num_cores if machine >= 0 else 0
        cores.append(here * min(1.0, has / wanted[machine]) if has else float(here))
    found = Processors(tuple(cores), tuple(numbers[machine] for machine in machines), tuple(threads))
    return found if found.is_shared() else None
