"""Mappings: which device runs which rank of which replica.

AutoPipe-H maps stages to devices "considering server heterogeneity, to reduce communication contention". More
than that abstract is not public; what is done here is our own design. Devices are put in an order, server by
server, and dealt out in tiles: a tile of g replicas takes, for one rank after the other, g devices in a row.

    g = 1: each replica's ranks are neighbors        g = w: each rank's replicas are neighbors
    0a 1a 2a 3a | 0b 1b 2b 3b                         0a 0b 1a 1b | 2a 2b 3a 3b

What lies between mixes both. Which of them is best is judged by the bytes that meet on the lanes, then by the
simulator. Where all mappings are few, all are gone through, each once of those that equal devices make alike.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, permutations, product
from typing import Any

from bireme.bounds import ANY
from bireme.errors import BiremeError
from bireme.grouping import grouped
from bireme.plan.plan import ranks_that_read
from bireme.plan.plan_request import Goal, PlanRequest
from bireme.plan.search.draft import Grid
from bireme.plan.search.problem import PlanningProblem
from bireme.plan.search.shapes import Outline, Outlines

# Plans that keep private samples at home: the ends of replicas are mapped onto their owners' servers.


def keeps_home(problem: PlanningProblem, outline: Outline, grid: Grid, cuts: Sequence[int]) -> bool:
    """Whether every owner of private samples is the home of a replica."""
    if not problem.owners:
        return True
    ranks = ranks_that_read(cuts, outline.rank_of_stage, problem.readers)
    reading = ({problem.servers[grid[rank][replica]] for rank in ranks} for replica in range(outline.width))
    return problem.owners <= {next(iter(servers)) for servers in reading if len(servers) == 1}


def _at_home(problem: PlanningProblem, outline: Outline, grids: Iterable[Grid]) -> Iterator[Grid]:
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
    return min(
        movable, key=lambda device: (device not in places, -problem.usual_speeds[device]), default=None
    )


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
    remedies = list(_remedies(problem))
    would = f" What would do: {'; or '.join(remedies)}." if remedies else " Use more of their devices."
    return (
        f"No plan{problem.request.shape_words} keeps private samples at home: each of {owners} needs a "
        f"replica whose first and last stage are on its own devices.{would}"
    )


def _remedies(problem: PlanningProblem) -> Iterator[str]:
    """The parts of the request about a plan's shape without any one of which there is such a mapping."""
    request = problem.request
    if request.schedule != "zbv" and not request.synchronous and _would(problem, schedule="zbv"):
        yield "the schedule zbv, which comes back to its first device"
    yield from (words for words, changes in given_up(request) if _would(problem, **changes))
    if request.depth is not None and request.width is not None and _would(problem, depth=1, width=None):
        yield "a whole replica on each (depth 1)"
    if request.devices and _would(problem, devices=()):
        yield "all devices"


def given_up(request: PlanRequest) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts of the request about a plan's shape, in words, and the request without each."""
    if request.schedule != "auto":
        yield 'another schedule (plan.schedule = "auto")', {"schedule": "auto"}
    for name in ("depth", "width"):
        value = getattr(request, name)
        if value is not None:
            yield f"another {name} than {value}", {name: None}
    if isinstance(request.stage_widths, tuple):
        yield "stages of any width", {"stage_widths": ANY}


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


_MOST_ORDERS = 20_000
"""Before those that are alike are left out."""

_MOST_PINNED = 64
"""Ways to deal out ranks to pinned devices that are tried with each order of devices."""

_MOST_REPLICAS = 4
"""With more, mappings are not all gone through."""


def all_grids(problem: PlanningProblem, outline: Outline, most: int) -> list[Grid] | None:
    """All mappings but those that exchanging equal devices or replicas makes alike; None if over `most`."""
    if outline.width > _MOST_REPLICAS:
        return None
    found: dict[tuple[tuple[int, ...], ...], Grid] = {}
    for number, order in enumerate(orders_of_devices(problem, outline.num_devices)):
        if number > _MOST_ORDERS:
            return None
        pipelines = _dealt(order, outline)
        sites = problem.request.site_width(outline.width)
        key = min(_written(problem, exchange) for exchange in _exchanges(pipelines, outline.sizes, sites))
        found.setdefault(key, tuple(zip(*pipelines, strict=True)))
        if len(found) > most:
            return None
    return list(found.values())


def orders_of_devices(
    problem: PlanningProblem, left: int, used: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """All orders of `left` devices after `used`, without orders that differ only in equal devices."""
    if not left:
        yield used
        return
    free = problem.symmetry.choices(used) if problem.is_symmetric else problem.devices
    for device in free:
        if device not in used:
            yield from orders_of_devices(problem, left - 1, (*used, device))


def _dealt(order: Sequence[int], outline: Outline) -> tuple[tuple[int, ...], ...]:
    """The devices of each replica."""
    depth = outline.num_ranks
    return tuple(tuple(order[r * depth : (r + 1) * depth]) for r in range(outline.width))


def _exchanges(
    pipelines: tuple[tuple[int, ...], ...], sizes: Sequence[int], per_site: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to number the replicas, those of equal micro-batches among themselves, and those of a site
    together.
    """
    for order in permutations(range(len(sizes))):
        sites = [
            {one // per_site for one in order[first : first + per_site]}
            for first in range(0, len(order), per_site)
        ]
        if all(len(site) == 1 for site in sites) and [sizes[one] for one in order] == [*sizes]:
            yield tuple(pipelines[one] for one in order)


def _written(problem: PlanningProblem, pipelines: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    if not problem.is_symmetric:
        return pipelines
    order = problem.symmetry.canonical([device for pipeline in pipelines for device in pipeline])
    depth = len(pipelines[0])
    return tuple(order[r * depth : (r + 1) * depth] for r in range(len(pipelines)))


def promising_grids(problem: PlanningProblem, outline: Outline) -> Iterator[Grid]:
    """Mappings worth a look."""
    seen: set[Grid] = set()
    for order in device_orders(problem, outline.num_devices):
        for tile in _tiles(outline.width):
            pinned = _with_pins(problem, _tiled(order, outline, tile))
            for grid in _at_home(problem, outline, pinned):
                if grid not in seen:
                    seen.add(grid)
                    yield grid


def _with_pins(problem: PlanningProblem, grid: Grid) -> Iterator[Grid]:
    """The mappings in which pinned devices have changed places with others, to run any of the ranks."""
    pinned = list(dict.fromkeys(device for _, device in sorted(problem.pins.items())))
    for ranks in islice(product(range(len(grid)), repeat=len(pinned)), _MOST_PINNED):
        rows = [list(row) for row in grid]
        for device, rank in zip(pinned, ranks, strict=True):
            if device not in rows[rank]:
                place = next((c for c, one in enumerate(rows[rank]) if one not in pinned), 0)
                _put(rows, device, rank, place)
        yield tuple(map(tuple, rows))


def _tiles(width: int) -> list[int]:
    divisors = [g for g in range(1, width + 1) if width % g == 0]
    if len(divisors) <= 4:
        return divisors
    return [g for g in divisors if g in (1, 2, 4, 8, width)]


def _tiled(order: Sequence[int], outline: Outline, tile: int) -> Grid:
    depth, width = outline.num_ranks, outline.width
    grid = [[-1] * width for _ in range(depth)]
    places = iter(order)
    for first in range(0, width, tile):
        for rank in range(depth):
            for replica in range(first, first + tile):
                grid[rank][replica] = next(places)
    return tuple(map(tuple, grid))


def device_orders(problem: PlanningProblem, count: int) -> Iterator[tuple[int, ...]]:
    """Orders of `count` devices, with the devices of a server next to each other."""
    speed, memory = problem.usual_speeds.__getitem__, problem.limits.__getitem__
    by_server = grouped((problem.servers[device], device) for device in problem.devices)

    def arranged(value: Callable[[int], float], *, rising: bool) -> tuple[int, ...]:
        sign = 1 if rising else -1
        servers = sorted(by_server.values(), key=lambda own: (sign * sum(map(value, own)) / len(own), own[0]))
        return tuple(d for own in servers for d in sorted(own, key=lambda d: (sign * value(d), d)))

    fastest = arranged(speed, rising=False)[:count]
    chosen = set(fastest)
    yield fastest
    strongest = sorted(
        (sorted(own, key=lambda d: (-speed(d), d))[:count] for own in by_server.values()),
        key=lambda own: (-sum(map(speed, own)), own[0]),
    )  # on few servers, as links between them may be slow
    yield tuple(device for own in strongest for device in own)[:count]
    for order in (
        problem.devices,
        arranged(memory, rising=False),
        arranged(speed, rising=True),
        arranged(memory, rising=True),
    ):
        yield tuple(device for device in order if device in chosen)
    roomiest = arranged(memory, rising=False)[:count]
    if set(roomiest) != chosen:
        yield roomiest
    if problem.request.goal is Goal.ENERGY:
        yield tuple(sorted(problem.devices, key=lambda device: problem.watts[device] / speed(device))[:count])
    pinned = [device for _, device in sorted(problem.pins.items()) if device not in chosen]
    if pinned:
        yield (*fastest[: count - len(pinned)], *pinned)
        yield (*pinned, *fastest[: count - len(pinned)])


def exchanged(problem: PlanningProblem, grid: Grid) -> Iterator[Grid]:
    """The mappings in which two unlike devices have changed places, or an unlike idle one has come in."""
    used = [device for row in grid for device in row]
    taken = set(used)
    idle = {_look(problem, device): device for device in reversed(problem.devices) if device not in taken}
    for place, one in enumerate(used):
        for other in (*used[place + 1 :], *idle.values()):
            if _look(problem, one) != _look(problem, other):
                changed = {one: other, other: one}
                yield tuple(tuple(changed.get(device, device) for device in row) for row in grid)


def _look(problem: PlanningProblem, device: int) -> tuple[int, float, float]:
    return problem.servers[device], problem.usual_speeds[device], problem.limits[device]
