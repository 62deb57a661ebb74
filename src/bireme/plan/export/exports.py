"""All exports by name, and the one way to make one."""

from collections.abc import Callable
from dataclasses import dataclass

from bireme.errors import BiremeError, closest
from bireme.plan.export.material import NEEDS_MODEL, Material
from bireme.plan.export.megatron import megatron_arguments
from bireme.plan.export.shape import check_equal_replicas
from bireme.plan.export.torch_frameworks import nemo_yaml, torchtitan_toml
from bireme.schedule.torch_csv import to_csv

__all__ = ["EXPORTS", "NEEDS_MODEL", "Export", "export_named"]


@dataclass(frozen=True, slots=True)
class Export:
    """A way to say a plan elsewhere; `needs_graph` where it takes more than a profile holds."""

    name: str
    summary: str
    needs_graph: bool
    text: Callable[[Material], str]


def _torch_csv(material: Material) -> str:
    check_equal_replicas(material.plan, "A schedule file of torch")
    return to_csv(material.plan.program(1))


EXPORTS = {
    export.name: export
    for export in (
        Export("torch-csv", "the schedule, for torch.distributed.pipelining", False, _torch_csv),
        Export("torchtitan", "configuration tables, in TOML", True, torchtitan_toml),
        Export("nemo", "the distributed section of a NeMo AutoModel recipe, in YAML", True, nemo_yaml),
        Export("megatron", "arguments of Megatron-LM, with its layout", False, megatron_arguments),
    )
}
"""All exports."""


def export_named(name: str) -> Export:
    """The export of that name."""
    if name not in EXPORTS:
        raise BiremeError(f"There is no export {name!r}. {closest(name, EXPORTS)}")
    return EXPORTS[name]
