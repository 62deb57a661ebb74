"""torchtitan and NeMo AutoModel, which run torch.distributed.pipelining: a table of their configuration.

torchtitan: `[parallelism]` with `module_fqns_per_model_part` and the schedule by torch's name or as a file.
NeMo AutoModel: the arguments of its `PipelineConfig`, `pp_schedule` and the like.
"""

import json
from collections.abc import Sequence

from bireme.errors import BiremeError
from bireme.plan.export.material import NEEDS_MODEL, Material
from bireme.plan.export.modules import module_parts
from bireme.plan.export.shape import (
    check_equal_replicas,
    check_pipelined,
    check_recompute,
    check_synchronous,
)

__all__ = ["nemo_yaml", "torchtitan_toml"]

TORCH_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
}
"""What torch calls the schedules that it makes itself."""

FROM_FILE = "PipelineScheduleMulti"
"""What torch calls a schedule that comes from a file, and whose stages lie round the ranks."""


def torchtitan_toml(material: Material) -> str:
    """The tables of torchtitan's configuration that say the plan."""
    parts = _parts(material, "torchtitan")
    plan, short = material.plan, material.short
    lines = [
        "[training]",
        f"local_batch_size = {short.batch_size // plan.width}",
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {plan.width}",
        "data_parallel_shard_degree = 1",
        f"pipeline_parallel_degree = {material.num_ranks}",
        f"pipeline_parallel_microbatch_size = {short.micro_batch_sizes[0]}",
        f"pipeline_parallel_schedule = {_text(_schedule(material, 'torchtitan'))}",
        *([f"pipeline_parallel_schedule_csv = {_text(material.csv)}"] if material.csv else []),
        "module_fqns_per_model_part = [",
        *(f"    {_names(names)}," for names in parts),
        "]",
    ]
    if plan.recompute:
        lines += ["", "[activation_checkpoint]", 'mode = "full"']
    return "\n".join(lines) + "\n"


def nemo_yaml(material: Material) -> str:
    """The `distributed` section of a recipe of NeMo AutoModel that says the plan."""
    parts = _parts(material, "NeMo AutoModel")
    plan, short = material.plan, material.short
    lines = [
        "distributed:",
        "  strategy: fsdp2",
        f"  pp_size: {material.num_ranks}",
        f"  dp_size: {plan.width}",
        f"  dp_replicate_size: {plan.width}",
        *(["  activation_checkpointing: true"] if plan.recompute else []),
        "  pipeline:",
        f"    pp_schedule: {_text(_schedule(material, 'NeMo AutoModel'))}",
        *([f"    pp_schedule_csv: {_text(material.csv)}"] if material.csv else []),
        f"    pp_microbatch_size: {short.micro_batch_sizes[0]}",
        f"    pp_batch_size: {short.batch_size // plan.width}",
        "    module_fqns_per_model_part:",
        *(f"      - {_names(names)}" for names in parts),
    ]
    return "\n".join(lines) + "\n"


def _parts(material: Material, framework: str) -> tuple[tuple[str, ...], ...]:
    plan = material.plan
    check_pipelined(plan, framework)
    check_synchronous(plan, framework)
    check_equal_replicas(plan, framework)
    check_recompute(plan, framework)
    if material.graph is None:
        raise BiremeError(NEEDS_MODEL.format(framework))
    parts = module_parts(plan, material.graph)
    if framework == "torchtitan":
        _check_top_level(parts)
    return parts


def _check_top_level(parts: Sequence[Sequence[str]]) -> None:
    for names in parts:
        for name in names:
            outer, _, inner = name.partition(".")
            if inner and not inner.isdecimal():
                raise BiremeError(
                    f"torchtitan cuts at a model's own children and the layers of a list among them, and "
                    f"{name} lies deeper, in {outer}. Export to nemo, which looks inside, or give the inner "
                    "model as --model."
                )


def _schedule(material: Material, framework: str) -> str:
    """Torch's name of the plan's schedule, if torch would run it."""
    plan = material.plan
    name = TORCH_NAMES.get(plan.schedule)
    if material.csv:
        # The name says where stages lie, the file what is done.
        return "ZBVZeroBubble" if plan.schedule == "zbv" else FROM_FILE
    if name is None:
        raise BiremeError(
            f"Torch has no schedule named {plan.schedule}, so {framework} needs it as a file: add "
            "--export torch-csv:FILE."
        )
    if plan.lookahead:
        raise BiremeError(
            f"The plan runs {plan.lookahead} forwards further ahead, and torch's {name} does not. Add "
            "--export torch-csv:FILE, so that it is read from there."
        )
    stages, micro_batches = plan.num_stages, plan.num_microbatches
    if name == "1F1B" and micro_batches < stages:
        raise BiremeError(
            f"Torch's 1F1B needs as many micro-batches as stages, but the plan has {micro_batches} for "
            f"{stages}. Add --export torch-csv:FILE, so that it is read from there."
        )
    if name == "Interleaved1F1B" and micro_batches % max(1, micro_batches // material.num_ranks):
        raise BiremeError(
            f"Torch's Interleaved1F1B runs micro-batches in rounds of equal size, and {micro_batches} on "
            f"{material.num_ranks} ranks have none. Add --export torch-csv:FILE, so that it is read from "
            "there."
        )
    return name


def _names(names: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, names))}]"


def _text(text: str) -> str:
    """A string as TOML and YAML both read it."""
    return json.dumps(text, ensure_ascii=False)
