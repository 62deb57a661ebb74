"""Between a placement and a solution of the integer program for the shortest latency: there and back."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bireme.placement.items import Floats
from bireme.placement.latency.program import LatencyProgram
from bireme.placement.latency.steps import LatencySteps

__all__ = ["LinePlacement", "line_of", "solution_of", "stand_in_line"]

ON_CPU = -1


@dataclass(frozen=True, slots=True)
class LinePlacement:
    """A placement of steps: the place in the line of each one's piece, and the accelerator of each place.

    A step on a CPU has place -1.
    """

    places: tuple[int, ...]
    accelerators: tuple[int, ...]

    def devices(self, steps: LatencySteps) -> list[int]:
        """The device of each step."""
        return [
            steps.num_accelerators if place == ON_CPU else self.accelerators[place] for place in self.places
        ]

    def pieces(self) -> list[int]:
        """The piece of each step: how many places in the line its accelerator has before."""
        return [
            0 if place == ON_CPU else self.accelerators[:place].count(self.accelerators[place])
            for place in self.places
        ]


def line_of(program: LatencyProgram, values: Floats) -> LinePlacement:
    """The placement that a solution stands for."""
    if not program.num_places:
        return LinePlacement((ON_CPU,) * len(program.steps), ())
    within = np.argmax(values[program.closes] - values[program.opens], axis=1)
    places = np.where(values[program.accelerates] > 0.5, within, ON_CPU)
    homes = np.arange(program.num_places)
    if program.num_pieces > 1:
        homes = np.argmax(values[program.homes], axis=1)
    return LinePlacement(tuple(places.tolist()), tuple(homes.tolist()))


def stand_in_line(
    steps: LatencySteps, num_pieces: int, devices: Sequence[int], pieces: Sequence[int]
) -> LinePlacement:
    """Pieces in a line such that nothing needs a later one; there must be such a line.

    Accelerators are renamed: the first in the line is accelerator 0, and so on.
    """
    jobs = [
        (device, piece) if device < steps.num_accelerators else (ON_CPU, step)
        for step, (device, piece) in enumerate(zip(devices, pieces, strict=True))
    ]
    needs: dict[tuple[int, int], set[tuple[int, int]]] = {job: set() for job in jobs}
    for step, job in enumerate(jobs):
        needs[job] |= {jobs[other] for other in steps.before.row(step)} - {job}
        if job[0] != ON_CPU:
            needs[job] |= {other for other in needs if other[0] == job[0] and other[1] < job[1]}
    order: dict[tuple[int, int], None] = {}
    while len(order) < len(needs):
        order.update(dict.fromkeys(job for job in needs if job not in order and needs[job] <= order.keys()))
    in_line = [job for job in order if job[0] != ON_CPU]
    names = list(dict.fromkeys(device for device, _ in in_line))
    names += [device for device in range(steps.num_accelerators) if device not in names]
    homes = [names.index(device) for device, _ in in_line]
    for name in range(steps.num_accelerators):
        homes += [name] * (num_pieces - homes.count(name))
    places = tuple(ON_CPU if job[0] == ON_CPU else in_line.index(job) for job in jobs)
    return LinePlacement(places, tuple(homes))


def solution_of(program: LatencyProgram, line: LinePlacement, finish: Sequence[float]) -> Floats:
    """The values of all columns for a placement in which each step is done at its `finish`."""
    values = np.zeros(program.program.num_columns)
    numbers = np.arange(program.num_places)
    places = np.array(line.places)
    opens = np.array(_gaps(program.steps, line.places))
    closes = np.where(places == ON_CPU, opens, places)
    values[program.opens] = opens[:, np.newaxis] <= numbers
    values[program.closes] = closes[:, np.newaxis] <= numbers
    values[program.accelerates] = places != ON_CPU
    within = values[program.closes] - values[program.opens]
    made_within = within[program.nets.source]
    used_within, used_outside = np.zeros_like(made_within), np.zeros_like(made_within)
    np.maximum.at(used_within, program.nets.pair_net, within[program.nets.pair_user])
    np.maximum.at(used_outside, program.nets.pair_net, 1 - within[program.nets.pair_user])
    values[program.moves_in] = used_within * (1 - made_within)
    values[program.moves_out] = made_within * used_outside
    moved = values[program.moves_in] + values[program.moves_out]
    durations = program.accelerator_time @ within + program.nets.cost @ moved
    done = np.array(finish) * program.unit
    ends = np.zeros(program.num_places)
    for place, home in enumerate(line.accelerators):
        inside = done[places == place]
        before = [ends[other] for other in range(place) if line.accelerators[other] == home]
        ends[place] = inside[0] if len(inside) else max(before, default=0.0)
    values[program.starts] = ends - durations
    values[program.durations] = durations
    values[program.done] = done
    values[program.path] = program.paths(values)
    values[program.latency] = done.max()
    if program.num_pieces > 1:
        values[program.homes] = np.eye(program.steps.num_accelerators)[list(line.accelerators)]
        for step, place in enumerate(line.places):
            if place != ON_CPU:
                home = line.accelerators[place]
                values[program.family_homes[program.steps.family[step], home]] = 1.0
    return values


def _gaps(steps: LatencySteps, places: Sequence[int]) -> list[int]:
    """For each step, how many places in the line are over once it has run: up to its own, or as it needs."""
    gaps = [0] * len(places)
    for step, place in enumerate(places):
        needed = max((gaps[other] for other in steps.before.row(step)), default=0)
        gaps[step] = needed if place == ON_CPU else place + 1
    return gaps
