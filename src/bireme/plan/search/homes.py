"""Plans that keep private samples at home: the ends of replicas are mapped onto their owners' servers."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from bireme.errors import BiremeError
from bireme.plan.homes import ranks_that_read
from bireme.plan.search.draft import Grid
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outline, Outlines

__all__ = ["at_home", "keeps_home", "why_homeless"]


def keeps_home(problem: PlanningProblem, outline: Outline, grid: Grid, cuts: Sequence[int]) -> bool:
    """Whether every owner of private samples is the home of a replica."""
    if not problem.owners:
        return True
    ranks = ranks_that_read(cuts, outline.rank_of_stage, problem.readers)
    reading = ({problem.servers[grid[rank][replica]] for rank in ranks} for replica in range(outline.width))
    return problem.owners <= {next(iter(servers)) for servers in reading if len(servers) == 1}


def at_home(problem: PlanningProblem, outline: Outline, grids: Iterable[Grid]) -> Iterator[Grid]:
    """The mappings, changed so that each owner has both ends of a replica; without those that cannot be."""
    if not problem.owners:
        yield from grids
        return
    stages = outline.rank_of_stage
    ends = tuple(dict.fromkeys((stages[0], stages[-1])))
    for grid in grids:
        found = _moved_home(problem, grid, ends)
        if found is not None:
            yield found


def _moved_home(problem: PlanningProblem, grid: Grid, ends: Sequence[int]) -> Grid | None:
    """The mapping after devices have changed places, with each other or with idle ones."""
    rows = [list(row) for row in grid]
    free = set(range(len(grid[0])))
    fixed: set[tuple[int, int]] = set()
    for owner in sorted(problem.owners):
        if not free:
            return None

        def num_there(replica: int, owner: int = owner) -> int:
            return sum(problem.servers[rows[rank][replica]] == owner for rank in ends)

        replica = max(sorted(free), key=num_there)
        free.discard(replica)
        for rank in ends:
            if problem.servers[rows[rank][replica]] != owner:
                device = _next_device(problem, rows, fixed | {(one, replica) for one in ends}, owner)
                if device is None:
                    return None
                _put(rows, device, rank, replica)
            fixed.add((rank, replica))
    return tuple(map(tuple, rows))


def _next_device(
    problem: PlanningProblem, rows: list[list[int]], fixed: set[tuple[int, int]], owner: int
) -> int | None:
    """A device of a server that is idle, or in a place that may be given up."""
    places = {device: (rank, replica) for rank, row in enumerate(rows) for replica, device in enumerate(row)}
    own = [device for device in problem.devices if problem.servers[device] == owner]
    movable = [device for device in own if places.get(device) not in fixed]
    return min(movable, key=lambda device: (device not in places, -problem.speeds[device]), default=None)


def _put(rows: list[list[int]], device: int, rank: int, replica: int) -> None:
    """Put a device there; what was there takes its place, if it had one."""
    for row in rows:
        if device in row:
            row[row.index(device)] = rows[rank][replica]
            break
    rows[rank][replica] = device


def why_homeless(problem: PlanningProblem, outlines: Iterable[Outline]) -> str:
    """Why no mapping keeps private samples at home, and what would do; nothing if some do."""
    if not problem.owners or _has_home(problem, outlines):
        return ""
    names = [server.name for server in problem.cluster.servers]
    owners = ", ".join(names[owner] for owner in sorted(problem.owners))
    used = {problem.servers[device] for device in problem.devices}
    idle = sorted(problem.owners - used)
    if idle:
        return (
            f"{names[idle[0]]} has private samples, but none of the devices to use is there. Add one of its "
            "devices."
        )
    request = problem.request
    fixed = [
        f"{name} {value}" for name in ("depth", "width") if (value := getattr(request, name)) is not None
    ]
    with_these = f" with {' and '.join(fixed)}" if fixed else ""
    schedule = "any schedule" if request.schedule == "auto" else request.schedule
    remedies = list(_remedies(problem))
    would = f" What would do: {'; or '.join(remedies)}." if remedies else " Use more of their devices."
    return (
        f"No plan{with_these} for {schedule} keeps private samples at home: each of {owners} needs a replica "
        f"whose first and last stage are on its own devices.{would}"
    )


def _remedies(problem: PlanningProblem) -> Iterator[str]:
    """The parts of the request about a plan's shape without any one of which there is such a mapping."""
    request = problem.request
    if request.schedule != "zbv" and not request.synchronous and _would(problem, schedule="zbv"):
        yield "the schedule zbv, which comes back to its first device"
    elif request.schedule != "auto" and _would(problem, schedule="auto"):
        yield "another schedule (auto)"
    for name in ("depth", "width"):
        value = getattr(request, name)
        if value is not None and _would(problem, **{name: None}):
            yield f"another {name} than {value}"
    if request.depth is not None and request.width is not None and _would(problem, depth=1, width=None):
        yield "a whole replica on each (depth 1)"
    if request.devices and _would(problem, devices=()):
        yield "all devices"


def _would(problem: PlanningProblem, **changes: object) -> bool:
    request = replace(problem.request, **changes)  # type: ignore[arg-type]  # the names and types are given above
    with suppress(BiremeError):
        other = PlanningProblem(problem.profile, problem.cluster, request)
        return _has_home(other, Outlines(other))
    return False


def _has_home(problem: PlanningProblem, outlines: Iterable[Outline]) -> bool:
    """Whether the ends of enough replicas can be where they must be, in any of these shapes."""
    count = {owner: sum(problem.servers[d] == owner for d in problem.devices) for owner in problem.owners}
    for outline in outlines:
        stages = outline.rank_of_stage
        num_ends = len({stages[0], stages[-1]})
        if outline.width >= len(count) and all(there >= num_ends for there in count.values()):
            return True
    return False
