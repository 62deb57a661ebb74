"""Megatron-LM: `--pipeline-model-parallel-layout`, and the arguments that go with it.

The layout is a letter for each piece of the model, `E` the embedding, `t` a layer, `L` the loss with the norm
and head before it, and `|` between stages: `Et*2|t*3|t*3|t*2L`. Stages are in the order of the forward, also
where a rank has several.
"""

from dataclasses import dataclass
from itertools import pairwise

from bireme.errors import BiremeError
from bireme.plan.export.material import Material
from bireme.plan.export.shape import (
    check_equal_replicas,
    check_pipelined,
    check_recompute,
    check_synchronous,
)
from bireme.plan.partition.chain import layer_bounds
from bireme.plan.plan import Plan

__all__ = ["layout", "megatron_arguments"]

RUNS = ("1f1b", "interleaved")
"""The schedules that Megatron-LM has."""


def megatron_arguments(material: Material) -> str:
    """The arguments of a training script of Megatron-LM, one a line."""
    plan, short = material.plan, material.short
    check_pipelined(plan, "Megatron-LM")
    check_synchronous(plan, "Megatron-LM")
    check_equal_replicas(plan, "Megatron-LM")
    if plan.schedule not in RUNS:
        raise BiremeError(
            f"Megatron-LM has no schedule {plan.schedule}. It has {' and '.join(RUNS)}: plan with --schedule "
            "1f1b."
        )
    if plan.lookahead:
        raise BiremeError(
            f"The plan runs {plan.lookahead} forwards further ahead than Megatron-LM's {plan.schedule} does. "
            "Plan with --no-lookahead."
        )
    if plan.schedule == "interleaved" and plan.num_microbatches % material.num_ranks:
        raise BiremeError(
            f"Megatron-LM interleaves stages only where the micro-batches, here {plan.num_microbatches}, are "
            f"a multiple of the ranks, here {material.num_ranks}. Plan with another --batch-size or "
            "--micro-batch."
        )
    check_recompute(plan, "Megatron-LM")
    lines = [
        f"--pipeline-model-parallel-size {material.num_ranks}",
        f'--pipeline-model-parallel-layout "{layout(plan, material.unit_names)}"',
        f"--micro-batch-size {short.micro_batch_sizes[0]}",
        f"--global-batch-size {short.batch_size}",
    ]
    if plan.recompute:
        lines.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    return "\n".join(lines) + "\n"


def layout(plan: Plan, unit_names: tuple[str, ...]) -> str:
    """The stages in the letters of Megatron-LM."""
    layers = _layers_of(unit_names)
    for cut in plan.cuts:
        _check_cut(cut, layers, unit_names)
    stages = []
    for begin, end in pairwise((0, *plan.cuts, len(unit_names))):
        count = sum(begin <= start < end for start in layers.starts)
        first = "E" if begin == 0 else ""
        last = "L" if end == len(unit_names) else ""
        stages.append(f"{first}{f't*{count}' if count > 1 else 't' * count}{last}")
    return "|".join(stages)


@dataclass(frozen=True, slots=True)
class _Layers:
    """Where the layers begin, and the unit after the last; the embedding is before them, the head after."""

    starts: tuple[int, ...]
    end: int


def _layers_of(unit_names: tuple[str, ...]) -> _Layers:
    pieces = list(pairwise(layer_bounds(unit_names)))
    layers = [(begin, end) for begin, end in pieces if _stem(unit_names[begin]) is not None]
    stems = {_stem(unit_names[begin]) for begin, _ in layers}
    if not layers:
        raise BiremeError(
            "Megatron-LM's layout counts layers, and no unit of this model has a number in its name."
        )
    if len(stems) > 1:
        named = " and ".join(sorted(str(stem) for stem in stems))
        raise BiremeError(
            f"Megatron-LM's layout has one list of layers, but this model has several: {named}."
        )
    for (_, end), (begin, _) in pairwise(layers):
        if begin != end:
            raise BiremeError(
                f"Megatron-LM's layout has nothing between two layers, but this model has {unit_names[end]} "
                "there."
            )
    return _Layers(tuple(begin for begin, _ in layers), layers[-1][1])


def _stem(name: str) -> str | None:
    """What comes before a layer's number, None where there is no number."""
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return None if place is None else ".".join(parts[:place])


def _check_cut(cut: int, layers: _Layers, unit_names: tuple[str, ...]) -> None:
    if cut in layers.starts or cut == layers.end:
        return
    if layers.starts[0] < cut < layers.end:
        raise BiremeError(
            f"The plan cuts a layer in two, before unit {cut} ({unit_names[cut]}), but Megatron-LM keeps "
            "layers whole. Plan with --whole-layers."
        )
    part, first, last = (
        ("embedding", 0, layers.starts[0] - 1)
        if cut < layers.starts[0]
        else ("head", layers.end, len(unit_names) - 1)
    )
    raise BiremeError(
        f"The plan cuts the {part} in two, before unit {cut} ({unit_names[cut]}), but Megatron-LM keeps it "
        f"whole. Plan with --together {first}..{last}."
    )
