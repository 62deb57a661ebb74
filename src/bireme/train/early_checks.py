"""Mistakes of a run that are found before its model is measured: in its devices, its depth, its samples."""

from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.units import units_of
from bireme.plan.homes import check_servers
from bireme.train.data.checks import check_sizes
from bireme.train.data.mixture import sources_of
from bireme.train.data.prepare import RunData
from bireme.train.machines import Machines
from bireme.train.run_file import RunFile

__all__ = ["check_depth", "check_devices", "check_samples"]


def check_devices(run: RunFile, machines: Machines) -> None:
    """A plan for more devices than there are is refused before anything is measured."""
    check_servers(run.data.private or (), machines.cluster)
    needed, num_devices = (run.plan.depth or 1) * (run.plan.width or 1), machines.cluster.num_devices
    for name in run.plan.devices or ():
        machines.cluster.number_of(name)
    if needed > num_devices:
        remedy = "Plan for fewer devices, or name a larger cluster."
        if run.cluster.source is None:
            remedy = f"Set cluster.workers to {needed}, or plan for fewer devices."
        raise BiremeError(
            f"plan.depth times plan.width is {needed}, but the run has {num_devices} devices: each of them "
            f"is a process. {remedy}"
        )


def check_depth(run: RunFile, graph: Graph) -> None:
    """More stages than the model has units are refused before anything is measured."""
    depth, num_units = run.plan.depth or 1, len(units_of(graph))
    if depth > num_units:
        raise BiremeError(
            f"plan.depth is {depth}, but the model has {num_units} units, and each stage needs one. Set "
            f"plan.depth to {num_units} or less."
        )


def check_samples(data: RunData, graph: Graph) -> None:
    """Samples that the captured model cannot take are found here, and not by a rank."""
    for what, samples in (("training", data.training), ("evaluation", data.evaluation)):
        for one in () if samples is None else sources_of(samples).values():
            check_sizes(one, graph.inputs, what, is_text=data.is_text)
