"""A snapshot: what one rank holds between two batches, by the model's own names, so that others can go on.

It is taken while other batches are under way: a stage's weights change at its updates only. A name begins
with a section: `weights/` the newest, in the precision that is stepped; `before/` those one update older,
which the next batch runs on under delayed updates; `trial/REPLICA/STAGE/` those that a stage has made up for
the next batch under fresh ones, each for itself; `optimizer/NAME/KEY`; `buffers/`;
`principal/AGE/NAME/PART` what the gradients of the next batches go on from, where they are kept so.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bireme.runtime.stage import Stage

__all__ = ["Snapshot", "load_stage", "sections_of"]

BEFORE, BUFFERS, OPTIMIZER, TRIAL, WEIGHTS = "before", "buffers", "optimizer", "trial", "weights"
PRINCIPAL = "principal"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies on the CPU of one rank's share of the state, after `num_trained` batches.

    Every name is in the snapshot of one rank. `clip_scale` is the last known factor of clipping, which trial
    steps take. `shares` is all that decides about the shares of batches to come, where they follow speeds.
    """

    num_trained: int
    clip_scale: float
    tensors: Mapping[str, Tensor]
    shares: Mapping[str, Any] | None = None


def sections_of(stage: Stage, names: Iterable[str], *, replica: int) -> dict[str, Tensor]:
    """What a stage holds of the parameters and buffers named, and all of its trial version; copied."""
    banks, wanted = stage.banks, set(names)
    found = {f"{WEIGHTS}/{name}": tensor for name, tensor in banks.newest(wanted).items()}
    for name, tensor in banks.next_to_run_on().items():
        if banks.is_fresh:
            found[f"{TRIAL}/{replica}/{stage.index}/{name}"] = tensor
        elif name in wanted:
            found[f"{BEFORE}/{name}"] = tensor
    for name, state in banks.optimizer_state().items():
        for key, value in state.items() if name in wanted else ():
            if value is not None:
                found[f"{OPTIMIZER}/{name}/{key}"] = _as_tensor(value)
    found |= {
        f"{BUFFERS}/{name}": tensor for name, tensor in stage.settled_buffers().items() if name in wanted
    }
    principal = banks.gradients.principal
    if principal is not None:
        found |= {
            f"{PRINCIPAL}/{key}": tensor
            for key, tensor in principal.state(banks.newest_version).items()
            if _name_in(key) in wanted
        }
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in found.items()}


def load_stage(stage: Stage, saved: Mapping[str, Tensor], *, version: int, replica: int) -> None:
    """Restore a stage from saved tensors, after `version` updates.

    Weights that are trained and buffers that are written must be among them; of the others, what was not
    saved stays as the stage has it. What was saved of another rule, or not at all, begins equal to the newest
    weights.
    """
    banks = stage.banks
    trained = set(banks.trainable)
    newest = {
        name: saved[key] for name in banks.names if (key := f"{WEIGHTS}/{name}") in saved or name in trained
    }
    names = tuple(newest)
    section = f"{TRIAL}/{replica}/{stage.index}" if banks.is_fresh else BEFORE
    others = {name: saved.get(f"{section}/{name}", newest[name]) for name in names}
    number = version if banks.is_fresh else version - 1
    banks.load(newest, _optimizer_state(saved, names), version=version, older={number: others})
    principal = banks.gradients.principal
    if principal is not None:
        keys = (key.partition("/") for key in saved)
        of_section = [rest for section, _, rest in keys if section == PRINCIPAL]
        own = {key: saved[f"{PRINCIPAL}/{key}"] for key in of_section if _name_in(key) in principal.shapes}
        principal.load(own, num_updates=version)
    for name, buffer in stage.buffers.items():
        if (key := f"{BUFFERS}/{name}") in saved or name in stage.function.writes:
            buffer.copy_(saved[key])


def _optimizer_state(saved: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The states of some parameters, as they are in saved tensors."""
    wanted = set(names)
    states: dict[str, dict[str, Any]] = {}
    for key in saved:
        section, _, rest = key.partition("/")
        name, _, what = rest.rpartition("/")
        if section == OPTIMIZER and name in wanted:
            states.setdefault(name, {})[what] = saved[key]
    return states


def _name_in(key: str) -> str:
    """The parameter that a part of its components is saved for, as AGE/NAME/PART."""
    return key.partition("/")[2].rpartition("/")[0]


def _as_tensor(value: object) -> Tensor:
    """A number of an optimiser's state as a tensor without axes."""
    return value if isinstance(value, Tensor) else torch.tensor(value)
