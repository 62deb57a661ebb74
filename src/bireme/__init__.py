"""Bireme trains neural networks that do not fit on one device, over few, unequal, slowly joined machines.

The package's own namespace stays light: importing `bireme` imports no torch, and what needs it is fetched
when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from bireme.errors import BiremeError as BiremeError

if TYPE_CHECKING:
    from bireme.model.capture import capture as capture
    from bireme.model.chain import chain as chain
    from bireme.plan.plan import Plan as Plan
    from bireme.plan.plan_file import load_plan as load_plan
    from bireme.plan.program_plan import ProgramPlan as ProgramPlan
    from bireme.plan.search.search import find_plan as find_plan
    from bireme.runtime.launch import launch as launch
    from bireme.runtime.pipeline import Pipeline as Pipeline
    from bireme.runtime.settings import PipelineSettings as PipelineSettings
    from bireme.runtime.settings import named_optimizer as named_optimizer
    from bireme.runtime.world import World as World
    from bireme.schedule.source import source_of as source_of

__version__ = "0.1.0"

PLACES = {
    "Pipeline": "bireme.runtime.pipeline",
    "PipelineSettings": "bireme.runtime.settings",
    "Plan": "bireme.plan.plan",
    "ProgramPlan": "bireme.plan.program_plan",
    "World": "bireme.runtime.world",
    "capture": "bireme.model.capture",
    "chain": "bireme.model.chain",
    "find_plan": "bireme.plan.search.search",
    "launch": "bireme.runtime.launch",
    "load_plan": "bireme.plan.plan_file",
    "named_optimizer": "bireme.runtime.settings",
    "source_of": "bireme.schedule.source",
}


def __getattr__(name: str) -> Any:
    if name in PLACES:
        return getattr(importlib.import_module(PLACES[name]), name)
    raise AttributeError(f"module 'bireme' has no attribute {name!r}")
