"""The modules of each stage, as frameworks that cut a model by names of modules want them.

torchtitan and NeMo AutoModel copy the whole model to every rank and delete what a stage does not name. They
keep or delete a module whole, and of a list of layers single ones. So a stage names the largest modules that
it alone runs, and layers one by one. What runs on no weights and in several stages, such as a table of
positions, is named in each of them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.units import Unit, units_of
from bireme.plan.plan import Plan

__all__ = ["module_parts"]


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
                "by its modules. Cut elsewhere: --whole-layers cuts between layers only."
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
    runs: defaultdict[int, list[int]] = defaultdict(list)
    for unit in units:
        for place in unit.operators:
            runs[place].append(stage_of[unit.index])
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
            "Plan with --whole-layers."
        )
    if module.children:
        for child in module.children.values():
            _assign(child, parts)
    elif module.has_parameters:
        raise BiremeError(
            f"{module.name} runs in stages {_listed(stages)}, and its weights would be copies that drift "
            "apart there. Plan with --together so that one stage runs it."
        )
    else:
        for stage in stages:
            parts[stage].append(module.name)


def _listed(numbers: Iterable[int]) -> str:
    return " and ".join(map(str, sorted(numbers)))


def _check_weights(units: Sequence[Unit], stage_of: Sequence[int], graph: Graph) -> None:
    """Refuse weights that two stages use: to keep those equal is beyond these frameworks."""
    users: defaultdict[str, set[int]] = defaultdict(set)
    for unit in units:
        for name in unit.parameters:
            users[name].add(stage_of[unit.index])
    tied: Mapping[str, tuple[str, ...]] = {state.name: state.aliases for state in graph.parameters}
    for name, stages in users.items():
        if len(stages) > 1:
            both = f"{name} (also {', '.join(tied[name])})" if tied[name] else name
            raise BiremeError(
                f"{both} is used in stages {_listed(stages)}: tied weights, of which these frameworks would "
                "train a copy in each. Untie them in the model, or plan with --together."
            )
