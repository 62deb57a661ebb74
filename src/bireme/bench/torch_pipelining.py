"""Run a program in torch's own pipeline runtime.

A peer, to compare ours with. Torch keeps this runtime private, so its names are used here and nowhere else,
and looked up only when needed.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bireme.errors import BiremeError
from bireme.schedule.program import Program
from bireme.schedule.torch_csv import to_csv

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

__all__ = ["torch_dry_run", "torch_schedule"]

MODULE = "torch.distributed.pipelining.schedules"
USED = {
    "PipelineScheduleMulti.__init__": ("stages", "n_microbatches", "loss_fn", "scale_grads"),
    "_PipelineScheduleRuntime._prepare_schedule_with_comms": ("actions", "format"),
    "_Action.from_str": ("action_string",),
    "_add_send_recv": ("compute_actions", "stage_to_rank", "num_stages"),
    "_simulate_comms_compute": ("pipeline_order", "stage_to_rank", "num_stages"),
}
"""What is used of that module: the callables and their parameters."""


def torch_schedule(
    program: Program,
    stages: "Sequence[PipelineStage]",
    loss_fn: Callable[..., torch.Tensor],
    *,
    scale_grads: bool = True,
    comms: bool = False,
) -> "_PipelineScheduleRuntime":
    """Torch's runtime, loaded with one batch of the program, for the stages of this rank.

    Its `step()` runs a batch and leaves the gradients in the modules; step the optimiser after it. With
    `scale_grads` they are divided by the number of micro-batches, as for a loss that is a mean. Torch
    communicates its own way unless `comms` asks for the program's. Give the stages the shapes of their
    inputs and outputs: otherwise torch runs each once to learn them, which touches buffers and needs NumPy.
    """
    private = _private_torch()
    _check_stages(program, stages)
    runtime: _PipelineScheduleRuntime = private._PipelineScheduleRuntime(
        stages=sorted(stages, key=lambda stage: stage.stage_index),
        n_microbatches=program.num_microbatches,
        loss_fn=loss_fn,
        scale_grads=scale_grads,
    )
    runtime._prepare_schedule_with_comms(
        _actions(private, program, comms=comms),
        format="compute_comms" if comms else "compute_only",
    )
    return runtime


def torch_dry_run(program: Program) -> Callable[[], int]:
    """Torch's own dry run of one batch, ready to go: it puts in communication and counts unit steps."""
    private = _private_torch()
    ranks, num_stages = program.rank_of_stage, program.num_stages
    actions = _actions(private, program)

    def run() -> int:
        copies = {rank: list(row) for rank, row in actions.items()}
        lowered = private._add_send_recv(
            copies, stage_to_rank=lambda stage: ranks[stage], num_stages=num_stages
        )
        steps = private._simulate_comms_compute(
            lowered, stage_to_rank=lambda stage: ranks[stage], num_stages=num_stages
        )
        return max(len(row) for row in steps.values())

    return run


def _actions(private: Any, program: Program, *, comms: bool = False) -> dict[int, list[Any]]:
    rows = to_csv(program, comms=comms).splitlines()
    return {
        rank: [private._Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)
    }


def _private_torch() -> Any:
    """Torch's module of schedules, if all that is used of it is still there."""
    try:
        module: Any = importlib.import_module(MODULE)
    except ImportError:
        module = None
    for path, parameters in USED.items():
        found = module
        for name in path.split("."):
            found = getattr(found, name, None)
        known = inspect.signature(found).parameters if callable(found) else None
        lost = parameters if known is None else [name for name in parameters if name not in known]
        if lost:
            what = "is gone" if known is None else f"no longer takes {', '.join(lost)}"
            raise BiremeError(
                f"Torch {torch.__version__} cannot run programs in its pipeline runtime: {MODULE}.{path} "
                f"{what}. It is private to torch and may move with any release. Use Bireme's own engine, or "
                "torch 2.13, for which this was written."
            )
    return module


def _check_stages(program: Program, stages: "Sequence[PipelineStage]") -> None:
    if not stages:
        raise BiremeError("Torch's runtime needs at least one stage on every rank; this rank brings none.")
    num_ranks, rank = stages[0].group_size, stages[0].group_rank
    if num_ranks != program.num_ranks:
        raise BiremeError(
            f"{program.name} is made for {program.num_ranks} ranks, but the stages' process group has "
            f"{num_ranks}. Start as many processes, or make the schedule for {num_ranks}."
        )
    for stage in stages:
        if stage.num_stages != program.num_stages:
            raise BiremeError(
                f"{program.name} has {program.num_stages} stages, but PipelineStage {stage.stage_index} says "
                f"it is one of {stage.num_stages}. Cut the model into {program.num_stages}."
            )
    brought = sorted(stage.stage_index for stage in stages)
    if brought != list(program.stages_of(rank)):
        raise BiremeError(
            f"{program.name} has stages {_listed(program.stages_of(rank))} on rank {rank}, which brings "
            f"{_listed(brought)}. Build the stages that program.stages_of(rank) names."
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
