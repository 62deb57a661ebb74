"""What a run file asks of a plan, and the search for it."""

from collections.abc import Callable
from dataclasses import replace

from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.plan.forecast import Answer
from bireme.plan.partition.loads import Recompute
from bireme.plan.penalties import delay_warmup_of
from bireme.plan.plan_request import Goal, PlanRequest
from bireme.plan.search.search import find_plan
from bireme.plan.tier_limits import TierLimits
from bireme.plan.unit_names import pins_of, ranges_of
from bireme.profile.profile import Profile
from bireme.schedule.rule import Rule
from bireme.train.machines import Machines
from bireme.train.run_file import Memory, RunFile
from bireme.train.sums import sums_of

__all__ = ["plan_request_of", "planned"]

Progress = Callable[[float, str], None]


def plan_request_of(run: RunFile, graph: Graph) -> PlanRequest:
    """What a run file asks of a plan for a model."""
    asked = run.plan
    penalties = {Rule.DELAYED: asked.penalties.delayed, Rule.FRESH: asked.penalties.fresh}
    return PlanRequest(
        batch_size=run.training.batch_size,
        largest_batch=asked.largest_batch,
        schedule=asked.schedule,
        synchronous=asked.synchronous,
        goal=Goal(asked.objective),
        penalties={rule: steps for rule, steps in penalties.items() if steps is not None},
        delay_warmup=_start(run),
        memory_fraction=asked.memory_fraction,
        depth=asked.depth,
        width=asked.width,
        micro_batch=asked.micro_batch,
        devices=asked.devices or (),
        recompute=Recompute(asked.recompute.replace("-", " ")),
        lookahead=asked.lookahead,
        owners=tuple(sorted(run.data.private or ())),
        sums=sums_of(run, graph),
        codec=run.links.codec or "none",
        borders=tuple((one.number, one.codecs) for one in run.links.borders or ()),
        has_ending=run.links.schedule.last_fraction > 0,
        value_bytes=2 if run.model.dtype == "bfloat16" else 4,
        memory=_tier_limits(run.memory, compiles=run.model.compile),
        whole_backwards=run.training.gradient_form is not None,
        shard=run.memory.shard,
    )


def _tier_limits(memory: Memory, *, compiles: bool) -> TierLimits | None:
    """What each process may use of each tier; None where nothing is paged.

    What torch compiles keeps its activations itself.
    """
    if not memory.is_on:
        return None
    return TierLimits(
        memory.device_bytes,
        memory.host_bytes,
        memory.most_disk_bytes,
        memory.stashes and not compiles,
        memory.optimizer,
        memory.updates == "apart",
    )


def _start(run: RunFile) -> float | None:
    """The share of the run without delayed updates; None leaves it to what a plan does by itself."""
    steps = run.training.steps
    asked = run.plan.num_delay_warmup_steps(steps)
    if asked is not None:
        return asked / steps
    return delay_warmup_of(steps, run.training.num_warmup_steps) if run.plan.schedule == "auto" else None


def planned(
    run: RunFile, graph: Graph, measured: Profile, machines: Machines, progress: Progress, *, is_brief: bool
) -> Answer:
    """The plans that a search finds for a run on some machines; a `BiremeError` where none fits."""
    asked, names = run.plan, [unit.name for unit in measured.units]
    request = replace(
        plan_request_of(run, graph),
        pinned=pins_of(asked.pin or (), names, "plan.pin"),
        together=ranges_of(asked.together or (), names, "plan.together", whole_layers=asked.whole_layers),
    )
    if asked.depth is None and asked.width is None and run.cluster.source is None:
        # On this machine alone a run shows the pipeline; who wants replicas says so.
        num_devices = len(request.devices) or machines.cluster.num_devices
        request = replace(request, depth=min(num_devices, len(names)))
    found = find_plan(
        measured,
        machines.cluster,
        request,
        progress=lambda done: progress(done, "planning"),
        is_brief=is_brief,
    )
    if not isinstance(found, Answer):
        raise BiremeError(str(found))
    return found
