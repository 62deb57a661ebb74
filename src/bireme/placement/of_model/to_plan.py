"""From a placement of a model back to a `Plan` that the engine runs, where it is a chain of stages.

A plan cuts between units and gives each device one stretch of them. A placement of operators that cuts inside
units can be rounded to their boundaries, which changes its value.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from bireme.errors import BiremeError
from bireme.placement.contraction import Weightless, fits, items_of, loads_of, value_of
from bireme.placement.latency.latency import latency_of
from bireme.placement.of_model.from_model import ModelWorkload
from bireme.placement.workload import Objective, Placement
from bireme.plan.plan import Plan
from bireme.plan.search.shapes import PARTS


@dataclass(frozen=True, slots=True)
class _PlacedPlan:
    """A plan, the device of each node under it, and what the objective comes to now and came to before."""

    plan: Plan
    devices: tuple[int, ...]
    value: float
    value_before: float

    @property
    def note(self) -> str:
        """What rounding to the boundaries of units has changed, as a sentence; empty where nothing."""
        if self.value == self.value_before:
            return ""
        change = 100 * (self.value / self.value_before - 1) if self.value_before else float("inf")
        return (
            f"Cuts were moved to the nearest boundaries of units; the value is {self.value:.6g} ms instead "
            f"of {self.value_before:.6g} ms ({change:+.1f} %)."
        )


def plan_of(
    model: ModelWorkload,
    placement: Placement,
    *,
    num_microbatches: int,
    schedule: str = "2bw",
) -> _PlacedPlan:
    """The plan that runs each unit where the placement has it, stages in the order of the chain.

    If the placement is no chain of stages at the boundaries of units, the devices are in the order of what
    they run, each cut goes to the nearest boundary in time, and a device that is left without a unit is not
    used. Units that a colour binds together stay so.
    """
    if len(placement.devices) != len(model.workload.nodes):
        raise BiremeError(
            f"The placement has devices for {len(placement.devices)} nodes, and the model's workload has "
            f"{len(model.workload.nodes)}. It was made for another workload."
        )
    if schedule in PARTS:
        raise BiremeError(
            f"{schedule} gives each device several stages, and a placement gives it one stretch of the "
            "model. Use another schedule, such as 1f1b or 2bw."
        )
    devices, value = placement.devices, placement.value
    if not _is_in_line(model, devices):
        devices = _snapped(model, placement.devices)
        value = _value(model, devices, placement.objective)
    device_of = dict(zip(model.units, devices, strict=True))
    stages = [unit for unit in sorted(device_of) if device_of[unit] != device_of.get(unit - 1)]
    plan = Plan(
        cuts=tuple(stages[1:]),
        num_microbatches=num_microbatches,
        schedule=schedule,
        micro_batch_sizes=(model.micro_batch,),
        devices=tuple((model.device_names[device_of[unit]],) for unit in stages),
    )
    return _PlacedPlan(plan, devices, value, placement.value)


def _is_in_line(model: ModelWorkload, devices: Sequence[int]) -> bool:
    """Whether the placement is a chain of stages that are cut at the boundaries of units."""
    by_unit: dict[int, set[int]] = defaultdict(set)
    for unit, device in zip(model.units, devices, strict=True):
        by_unit[unit].add(device)
    line = [key for key, _ in groupby(by_unit[unit] for unit in sorted(by_unit))]
    return all(len(own) == 1 for own in line) and len({min(own) for own in line}) == len(line)


def _snapped(model: ModelWorkload, devices: Sequence[int]) -> tuple[int, ...]:
    """The device of each node when every cut is moved to the nearest boundary of units."""
    nodes = model.workload.nodes
    time_of_device: dict[int, float] = defaultdict(float)
    places: dict[int, list[int]] = defaultdict(list)
    time_of_unit = [0.0] * len(model.unit_names)
    for place, (node, device) in enumerate(zip(nodes, devices, strict=True)):
        time_of_device[device] += node.accelerator_time
        time_of_unit[model.units[place]] += node.accelerator_time
        if not node.is_backward:
            places[device].append(place)
    line = sorted(places, key=lambda device: (sum(places[device]) / len(places[device]), device))
    through = list(accumulate(time_of_unit, initial=0.0))
    boundaries = _boundaries(model)
    device_of_unit: list[int] = []
    done = 0.0
    for device in line:
        done += time_of_device[device]
        boundary = min(boundaries, key=lambda unit: abs(through[unit] - done))
        device_of_unit += [device] * (boundary - len(device_of_unit))
    device_of_unit += [line[-1]] * (len(time_of_unit) - len(device_of_unit))
    return tuple(device_of_unit[unit] for unit in model.units)


def _boundaries(model: ModelWorkload) -> list[int]:
    """The units that a stage may begin with, and the end: not those between units of one colour."""
    first: dict[int, int] = {}
    inside: set[int] = set()
    for unit, node in sorted(zip(model.units, model.workload.nodes, strict=True), key=lambda pair: pair[0]):
        if node.colour is not None:
            inside.update(range(first.setdefault(node.colour, unit) + 1, unit + 1))
    return [unit for unit in range(len(model.unit_names) + 1) if unit not in inside]


def _value(model: ModelWorkload, devices: Sequence[int], objective: Objective) -> float:
    """What the objective comes to with these devices, which are the same for all nodes of a colour."""
    if objective is Objective.LATENCY:
        report = latency_of(model.workload, devices)
        if report.reason is not None:
            raise BiremeError(f"{report.reason} That is with the cuts moved to the boundaries of units.")
        return report.latency
    items = items_of(model.workload, contiguous=False, weightless=Weightless.STAY)
    where = [devices[members[0]] for members in items.members]
    if not fits(items, where):
        raise BiremeError(
            "With the cuts moved to the boundaries of units a device has more than it can hold. Place units "
            "in place of operators."
        )
    return value_of(loads_of(items, where), objective)
