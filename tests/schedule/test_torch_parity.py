"""Our synchronous programs in torch's pipeline runtime: two processes, one process's gradients."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.engine_bench.contenders import torch_schedule
from bireme.errors import BiremeError
from bireme.schedule.catalogue import generate
from bireme.schedule.program import Program
from bireme.schedule.torch_csv import parse
from tests.support.together import run_processes

NUM_RANKS = 2
NUM_MICROBATCHES = 4
WIDTH = 6
UNEVEN = (
    "0F0,1F0,0F1,1F1,1I0,0B0,0F2,1F2,1I1,0B1,1W0,1W1,0F3,1F3,1I2,0B2,1I3,0B3,1W2,1W3\n"
    "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3\n"
)
"""Two stages on rank 0, one on rank 1, and a backward in parts on one stage only."""


@dataclass(frozen=True, slots=True)
class Case:
    """A program, and whether torch runs it with our communication or its own."""

    schedule: str
    comms: bool

    def program(self) -> Program:
        if self.schedule == "uneven":
            return parse(UNEVEN, source="uneven.csv")
        num_stages = 2 * NUM_RANKS if self.schedule in ("interleaved", "zbv") else NUM_RANKS
        return generate(self.schedule, num_stages=num_stages, num_microbatches=NUM_MICROBATCHES)


NAMES = ("sequential", "gpipe", "1f1b", "zb-h1", "interleaved", "zbv", "uneven")
CASES = [Case(name, comms) for name in NAMES for comms in (False, True)]


@pytest.mark.slow
def test_torch_runs_our_programs_with_the_gradients_of_one_process(tmp_path: Path) -> None:
    parts = run_processes(NUM_RANKS, _work, tmp_path)
    for case in CASES:
        key = case.schedule, case.comms
        found = {name: gradient for part in parts for name, gradient in part[key].items()}
        wrong = _differing(found, _one_process(case.program()))
        assert not wrong, f"{case} differs in {wrong}"


def test_stages_that_do_not_fit_the_program_are_refused() -> None:
    program = generate("zbv", num_stages=4, num_microbatches=2)
    _refused(program, [], "at least one stage on every rank")
    _refused(program, [_stage(0, group_size=3), _stage(3, group_size=3)], "2 ranks, .* group has 3")
    _refused(program, [_stage(0), _stage(3, num_stages=5)], "4 stages, but PipelineStage 3 .* one of 5")
    _refused(program, [_stage(0), _stage(2)], "stages 0, 3 on rank 0, which brings 0, 2")


def test_a_torch_whose_private_names_have_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    program = generate("1f1b", num_stages=2, num_microbatches=2)
    with monkeypatch.context() as patch:
        patch.delattr(schedules, "_PipelineScheduleRuntime")
        _refused(program, [_stage(0, num_stages=2)], r"_PipelineScheduleRuntime\.\w+ is gone")
    monkeypatch.setattr(schedules.PipelineScheduleMulti, "__init__", lambda self, stages, loss_fn: None)
    _refused(program, [_stage(0, num_stages=2)], "no longer takes n_microbatches, scale_grads")


def _refused(program: Program, stages: list[PipelineStage], why: str) -> None:
    with pytest.raises(BiremeError, match=why):
        torch_schedule(program, stages, nn.functional.mse_loss)


def _stage(index: int, *, num_stages: int = 4, group_size: int = 2) -> PipelineStage:
    stage = SimpleNamespace(stage_index=index, num_stages=num_stages, group_size=group_size, group_rank=0)
    return cast("PipelineStage", stage)


def _work(rank: int) -> dict[tuple[str, bool], dict[str, torch.Tensor]]:
    results = {(case.schedule, case.comms): _pipeline(case, rank) for case in CASES}
    dist.barrier()
    return results


def _pipeline(case: Case, rank: int) -> dict[str, torch.Tensor]:
    program = case.program()
    modules = {stage: _module(stage) for stage in program.stages_of(rank)}
    stages = [_pipeline_stage(module, stage, program.num_stages) for stage, module in modules.items()]
    runtime = torch_schedule(program, stages, nn.functional.mse_loss, comms=case.comms)
    inputs, target = _data()
    feed = (inputs,) if 0 in modules else ()
    runtime.step(*feed, target=target if program.num_stages - 1 in modules else None, return_outputs=False)
    return _gradients(modules)


def _pipeline_stage(module: nn.Module, stage: int, num_stages: int) -> PipelineStage:
    """Shapes are given: torch would find them out by running the stage, and needs NumPy for that."""
    activation = torch.empty(2, WIDTH, dtype=torch.float64, device="meta", requires_grad=True)
    inputs = activation if stage else activation.detach()
    return PipelineStage(module, stage, num_stages, torch.device("cpu"), inputs, activation)


def _one_process(program: Program) -> dict[str, torch.Tensor]:
    modules = {stage: _module(stage) for stage in range(program.num_stages)}
    value, target = _data()
    for module in modules.values():
        value = module(value)
    torch.autograd.backward(nn.functional.mse_loss(value, target))
    return _gradients(modules)


def _module(stage: int) -> nn.Module:
    """The same for a stage wherever it is made."""
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)).double()


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100)
    shape = (2 * NUM_MICROBATCHES, WIDTH)
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def _gradients(modules: dict[int, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{stage}.{name}": parameter.grad
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
    }


def _differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name in found.keys() | expected.keys()
        if name not in found
        or name not in expected
        or not torch.allclose(found[name], expected[name], rtol=1e-12, atol=1e-12)
    ]
