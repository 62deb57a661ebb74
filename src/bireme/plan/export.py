"""All exports by name, and the one way to make one."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from bireme.bounds import widths_text
from bireme.cluster.cluster import Overlap
from bireme.errors import BiremeError, closest
from bireme.grouping import grouped
from bireme.model.graph import Graph
from bireme.model.units import Unit, units_of
from bireme.plan.forecast import Candidate, PlanSummary, summarize
from bireme.plan.partition.chain import layer_bounds
from bireme.plan.plan import Plan
from bireme.schedule.catalogue import schedule_named
from bireme.schedule.program import Rule
from bireme.schedule.torch_csv import to_csv

# The modules of each stage, as frameworks that cut a model by names of modules want them.
#
# torchtitan and NeMo AutoModel copy the whole model to every rank and delete what a stage does not name. They
# keep or delete a module whole, and of a list of layers single ones. So a stage names the largest modules
# that it alone runs, and layers one by one. What runs on no weights and in several stages, such as a table of
# positions, is named in each of them.


def module_parts(plan: Plan, graph: Graph) -> tuple[tuple[str, ...], ...]:
    """For each stage the names of its modules, in the order they run."""
    units = units_of(graph)
    stage_of = [stage for stage in range(plan.num_stages) for _ in plan.units_of(stage, len(units))]
    _check_weights(units, stage_of, graph)
    root = _tree(graph, units, stage_of)
    parts: list[list[str]] = [[] for _ in range(plan.num_stages)]
    for module in root.children.values():
        _assign(module, parts)
    for stage, names in enumerate(parts):
        if not names:
            raise BiremeError(
                f"Stage {stage} runs no module of its own, only code between modules, but a stage is named "
                "by its modules. Cut elsewhere: plan.whole_layers = true cuts between layers only."
            )
    return tuple(tuple(names) for names in parts)


@dataclass(slots=True)
class _Module:
    """A module, the stages that run operators in it, and the first of them."""

    name: str
    stages: set[int] = field(default_factory=set)
    own_stages: set[int] = field(default_factory=set)
    """Those that run an operator in it that no other unit repeats for itself."""
    has_parameters: bool = False
    children: dict[str, "_Module"] = field(default_factory=dict)

    @property
    def is_layer(self) -> bool:
        return self.name.rpartition(".")[2].isdecimal()

    @property
    def is_list(self) -> bool:
        return bool(self.children) and all(child.is_layer for child in self.children.values())

    @property
    def runs_in(self) -> set[int]:
        """What is repeated elsewhere belongs to who runs the rest of the module, if anyone does."""
        return self.own_stages or self.stages


def _tree(graph: Graph, units: Sequence[Unit], stage_of: Sequence[int]) -> _Module:
    """All modules with operators, those with parameters that no operator names included."""
    runs = grouped((place, stage_of[unit.index]) for unit in units for place in unit.operators)
    root = _Module("")
    for place, operator in enumerate(graph.operators):
        stages = runs.get(place, [])
        for module in _way(root, operator.module):
            module.stages.update(stages)
            if len(stages) == 1:
                module.own_stages.update(stages)
    parameters = (name for state in graph.parameters for name in (state.name, *state.aliases))
    for name in parameters:
        for module in _way(root, name.rpartition(".")[0], make=False):
            module.has_parameters = True
    return root


def _way(root: _Module, name: str, *, make: bool = True) -> list[_Module]:
    """The modules from the outermost to the one of that name."""
    way, module, done = [], root, list[str]()
    for part in name.split(".") if name else []:
        done.append(part)
        if part not in module.children:
            if not make:
                break
            module.children[part] = _Module(".".join(done))
        module = module.children[part]
        way.append(module)
    return way


def _assign(module: _Module, parts: list[list[str]]) -> None:
    """Name the module in its stages, or the modules in it where it is in several."""
    stages = sorted(module.runs_in)
    if len(stages) == 1 and not module.is_list:
        parts[stages[0]].append(module.name)
        return
    if module.is_layer and len(stages) > 1:
        inside = ", ".join(
            f"{child.name.rpartition('.')[2]} in stage {_listed(child.runs_in)}"
            for child in module.children.values()
        )
        raise BiremeError(
            f"{module.name} is cut in two ({inside}), but these frameworks keep layers whole. "
            "Plan with plan.whole_layers = true."
        )
    if module.children:
        for child in module.children.values():
            _assign(child, parts)
    elif module.has_parameters:
        raise BiremeError(
            f"{module.name} runs in stages {_listed(stages)}, and its weights would be copies that drift "
            "apart there. Plan with plan.together so that one stage runs it."
        )
    else:
        for stage in stages:
            parts[stage].append(module.name)


def _listed(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))


def _check_weights(units: Sequence[Unit], stage_of: Sequence[int], graph: Graph) -> None:
    """Refuse weights that two stages use: to keep those equal is beyond these frameworks."""
    users = grouped((name, stage_of[unit.index]) for unit in units for name in unit.parameters)
    tied: Mapping[str, tuple[str, ...]] = {state.name: state.aliases for state in graph.parameters}
    for name, own in users.items():
        if len(stages := set(own)) > 1:
            both = f"{name} (also {', '.join(tied[name])})" if tied[name] else name
            raise BiremeError(
                f"{both} is used in stages {_listed(stages)}: tied weights, of which these frameworks would "
                "train a copy in each. Untie them in the model, or plan with plan.together."
            )


# What an export is made of.

NEEDS_MODEL = (
    "{} needs names of modules, which a profile does not have. Name the model too, in model.source; "
    "it is not measured again."
)
"""Why an export cannot be made of a profile alone."""


@dataclass(frozen=True)
class Material:
    """A candidate and the names of the model's units; the `graph` where the model is at hand.

    `csv` names the schedule file that is written along with it, if one is.
    """

    candidate: Candidate
    unit_names: tuple[str, ...]
    graph: Graph | None = None
    csv: str = ""

    @property
    def plan(self) -> Plan:
        """The plan to say."""
        return self.candidate.plan

    @cached_property
    def short(self) -> PlanSummary:
        """Its shape in numbers."""
        return summarize(self.candidate)


# What other frameworks cannot say of a plan, whatever its stages: refused with the reason.


def _check_sayable(plan: Plan, framework: str) -> None:
    """Refuse what is no pipeline, update rules that only Bireme has, halves of micro-batches, unequal
    replicas and stages, and forwards that are run again on some stages alone.
    """
    if plan.num_stages == 1:
        what = "data parallelism" if plan.width > 1 else "one device"
        raise BiremeError(
            f"The best plan is {what}, without a pipeline, so there is nothing to export to {framework}. Ask "
            "for a pipeline with plan.depth = 2 or more if you want one anyway."
        )
    rule = schedule_named(plan.schedule).rule
    if rule is not Rule.SYNCHRONOUS:
        raise BiremeError(
            f"{framework} cannot run {plan.schedule}: its update rule is {rule}, with weights of two batches "
            "at once, and other frameworks update when the pipeline has drained. Plan with "
            "plan.synchronous = true."
        )
    if schedule_named(plan.schedule).slices:
        raise BiremeError(
            f"{framework} cannot run {plan.schedule}, which slices micro-batches in halves. Plan with "
            "plan.schedule = 1f1b, which computes the same."
        )
    _check_equal_replicas(plan, framework)
    if plan.recompute_units or 0 < len(plan.recompute) < plan.num_stages:
        where = ", ".join(map(str, plan.recompute)) or "parts of stages"
        raise BiremeError(
            f"The plan recomputes only on stages {where} of {plan.num_stages}, but {framework} "
            "recomputes on all stages or none. Plan with plan.recompute = always or never."
        )


def _check_equal_replicas(plan: Plan, framework: str) -> None:
    """Refuse replicas that get different numbers of samples, and stages of unequal width."""
    if plan.stage_widths:
        raise BiremeError(
            f"The stages have {widths_text(plan.stage_widths)} replicas, but {framework} gives all stages "
            "the same number. Plan with plan.stage_widths = equal."
        )
    if len(set(plan.micro_batch_sizes)) > 1:
        sizes = " and ".join(map(str, sorted(set(plan.micro_batch_sizes))))
        raise BiremeError(
            f"The replicas get micro-batches of {sizes} samples, as their devices differ, but {framework} "
            "gives all the same size. Plan with plan.micro_batch or plan.width = 1."
        )


# Megatron-LM: `--pipeline-model-parallel-layout`, and the arguments that go with it.
#
# The layout is a letter for each piece of the model, `E` the embedding, `t` a layer, `L` the loss with the
# norm and head before it, and `|` between stages: `Et*2|t*3|t*3|t*2L`. Stages are in the order of the
# forward, also where a rank has several.

_RUNS = ("1f1b", "interleaved")
"""The schedules that Megatron-LM has."""


def _megatron_arguments(material: Material) -> str:
    """The arguments of a training script of Megatron-LM, one a line."""
    plan, short = material.plan, material.short
    _check_sayable(plan, "Megatron-LM")
    if plan.schedule not in _RUNS:
        raise BiremeError(
            f"Megatron-LM has no schedule {plan.schedule}. It has {' and '.join(_RUNS)}: plan with "
            "plan.schedule = 1f1b."
        )
    if plan.lookahead:
        raise BiremeError(
            f"The plan runs {plan.lookahead} forwards further ahead than Megatron-LM's {plan.schedule} does. "
            "Plan with plan.lookahead = false."
        )
    if plan.schedule == "interleaved" and plan.num_microbatches % material.short.depth:
        raise BiremeError(
            f"Megatron-LM interleaves stages only where the micro-batches, here {plan.num_microbatches}, are "
            f"a multiple of the ranks, here {material.short.depth}. Plan with another training.batch_size or "
            "plan.micro_batch."
        )
    lines = [
        f"--pipeline-model-parallel-size {material.short.depth}",
        f'--pipeline-model-parallel-layout "{layout(plan, material.unit_names)}"',
        f"--micro-batch-size {short.micro_batch_sizes[0]}",
        f"--global-batch-size {short.batch_size}",
    ]
    if plan.recompute:
        lines.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    return "\n".join(lines) + "\n"


def layout(plan: Plan, unit_names: tuple[str, ...]) -> str:
    """The stages in the letters of Megatron-LM."""
    starts, layers_end = _layers_of(unit_names)
    for cut in plan.cuts:
        _check_cut(cut, starts, layers_end, unit_names)
    stages = []
    for begin, end in pairwise((0, *plan.cuts, len(unit_names))):
        count = sum(begin <= start < end for start in starts)
        first = "E" if begin == 0 else ""
        last = "L" if end == len(unit_names) else ""
        stages.append(f"{first}{f't*{count}' if count > 1 else 't' * count}{last}")
    return "|".join(stages)


def _layers_of(unit_names: tuple[str, ...]) -> tuple[tuple[int, ...], int]:
    """Where the layers begin, and the unit after the last; the embedding is before them, the head after."""
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
    return tuple(begin for begin, _ in layers), layers[-1][1]


def _stem(name: str) -> str | None:
    """What comes before a layer's number, None where there is no number."""
    parts = name.split(".")
    place = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return None if place is None else ".".join(parts[:place])


def _check_cut(cut: int, starts: tuple[int, ...], layers_end: int, unit_names: tuple[str, ...]) -> None:
    if cut in starts or cut == layers_end:
        return
    if starts[0] < cut < layers_end:
        raise BiremeError(
            f"The plan cuts a layer in two, before unit {cut} ({unit_names[cut]}), but Megatron-LM keeps "
            "layers whole. Plan with plan.whole_layers = true."
        )
    part, first, last = "embedding", 0, starts[0] - 1
    if cut > layers_end:
        part, first, last = "head", layers_end, len(unit_names) - 1
    raise BiremeError(
        f"The plan cuts the {part} in two, before unit {cut} ({unit_names[cut]}), but Megatron-LM keeps it "
        f"whole. Plan with plan.together = {first}..{last}."
    )


# torchtitan and NeMo AutoModel, which run torch.distributed.pipelining: a table of their configuration.
#
# torchtitan: `[parallelism]` with `module_fqns_per_model_part` and the schedule by torch's name or as a file.
# NeMo AutoModel: the arguments of its `PipelineConfig`, `pp_schedule` and the like.

_TORCH_NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
}
"""What torch calls the schedules that it makes itself."""

_FROM_FILE = "PipelineScheduleMulti"
"""What torch calls a schedule that comes from a file, and whose stages lie round the ranks."""


def _torchtitan_toml(material: Material) -> str:
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
        f"pipeline_parallel_degree = {material.short.depth}",
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


def _nemo_yaml(material: Material) -> str:
    """The `distributed` section of a recipe of NeMo AutoModel that says the plan."""
    parts = _parts(material, "NeMo AutoModel")
    plan, short = material.plan, material.short
    lines = [
        "distributed:",
        "  strategy: fsdp2",
        f"  pp_size: {material.short.depth}",
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
    _check_sayable(plan, framework)
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
                    "model as model.source."
                )


def _schedule(material: Material, framework: str) -> str:
    """Torch's name of the plan's schedule, if torch would run it."""
    plan = material.plan
    name = _TORCH_NAMES.get(plan.schedule)
    if material.csv:
        # The name says where stages lie, the file what is done.
        return "ZBVZeroBubble" if plan.schedule == "zbv" else _FROM_FILE
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
    if name == "Interleaved1F1B" and micro_batches % max(1, micro_batches // material.short.depth):
        raise BiremeError(
            f"Torch's Interleaved1F1B runs micro-batches in rounds of equal size, and {micro_batches} on "
            f"{material.short.depth} ranks have none. Add --export torch-csv:FILE, so that it is read from "
            "there."
        )
    return name


def _names(names: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, names))}]"


def _text(text: str) -> str:
    """A string as TOML and YAML both read it."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Export:
    """A way to say a plan elsewhere; `needs_graph` where it takes more than a profile holds. `overlaps` says
    of schedules how far messages overlap with work there, where that is not fully; with `reads_csv` they
    always do if the schedule is read from a file of torch.
    """

    name: str
    summary: str
    needs_graph: bool
    text: Callable[[Material], str]
    overlaps: Mapping[str, Overlap] = field(default_factory=dict)
    reads_csv: bool = False


def _torch_csv(material: Material) -> str:
    _check_equal_replicas(material.plan, "A schedule file of torch")
    return to_csv(material.plan.program(1))


# What frameworks do while a message crosses.
#
# Megatron-LM's 1F1B exchanges what a pass made for what the next one needs, and waits for both on both ends;
# its interleaved schedule overlaps them. So does torch's 1F1B wait; its GPipe waits for what it receives. All
# other schedules of torch, and those from a file, post receives early and wait for no send.

_MEGATRON = {"1f1b": Overlap.NONE}
_TORCH = {"1f1b": Overlap.NONE, "gpipe": Overlap.RECEIVER}


def overlaps_of(names: Iterable[str], *, with_csv: bool) -> dict[str, Overlap]:
    """How far messages overlap with work, by schedule, in all frameworks that a plan is exported to; with a
    schedule file of torch or without.
    """
    exports = [export_named(name) for name in names]
    own = [one.overlaps for one in exports if not (with_csv and one.reads_csv)]
    schedules = sorted({schedule for one in own for schedule in one})
    return {name: Overlap.least(one.get(name, Overlap.FULL) for one in own) for name in schedules}


_NEMO_SUMMARY = "the distributed section of a NeMo AutoModel recipe, in YAML"
EXPORTS = {
    export.name: export
    for export in (
        Export("torch-csv", "the schedule, for torch.distributed.pipelining", False, _torch_csv),
        Export("torchtitan", "configuration tables, in TOML", True, _torchtitan_toml, _TORCH, reads_csv=True),
        Export("nemo", _NEMO_SUMMARY, True, _nemo_yaml, _TORCH, reads_csv=True),
        Export(
            "megatron", "arguments of Megatron-LM, with its layout", False, _megatron_arguments, _MEGATRON
        ),
    )
}
"""All exports."""


def export_named(name: str) -> Export:
    """The export of that name."""
    if name not in EXPORTS:
        raise BiremeError(f"There is no export {name!r}. {closest(name, EXPORTS)}")
    return EXPORTS[name]
