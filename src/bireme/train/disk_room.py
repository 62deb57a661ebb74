"""Room on the disk for what a run saves: how much its checkpoints and its model take, and how much is free.

Sizes are those of the tensors, which follow from the graph, the optimizer and the rule of updates. Those of
the initial weights that a function of the user made count until they are written. Headers of files come on
top, and what a run keeps of components of gradients (`principal/` in `runtime/snapshot.py`). A quota of a
user is not seen unless the file system reports it as its own size.
"""

from dataclasses import asdict, dataclass
from typing import Any

from bireme.bounds import bytes_text, counted
from bireme.errors import BiremeError
from bireme.files import free_bytes
from bireme.profile.optimizers import SHORT, optimizer_bytes
from bireme.schedule.program import Rule
from bireme.train.base_weights import has_base, names_in_base
from bireme.train.checkpoint.checkpoint import find_checkpoints
from bireme.train.checkpoint.writer import LEAST_KEPT
from bireme.train.folder import RunFolder
from bireme.train.prepare import PreparedRun


@dataclass(frozen=True, slots=True)
class _DiskRoom:
    """What a run needs of the disk, and what is free there. `num_checkpoints` are those that come on top of
    the checkpoints that exist, at the moment when there are most; with `deletes_one` an old checkpoint goes
    before the model is exported. `initial_bytes` are those of the initial weights that are still to be
    written, and stay until the run has ended. `free_bytes` is None if it is not known.
    """

    checkpoint_bytes: int
    num_checkpoints: int
    export_bytes: int
    deletes_one: bool
    initial_bytes: int
    free_bytes: int | None

    @property
    def needed_bytes(self) -> int:
        """Of all that is written, at the moment when there is most."""
        before = self.num_checkpoints * self.checkpoint_bytes
        at_end = before - self.deletes_one * self.checkpoint_bytes + self.export_bytes
        return self.initial_bytes + max(before, at_end)

    @property
    def is_short(self) -> bool:
        """Whether it is certain that not all can be saved."""
        return self.free_bytes is not None and self.free_bytes < self.needed_bytes

    @property
    def sentence(self) -> str:
        """What is needed and what is free, for people."""
        each = f"of {bytes_text(self.checkpoint_bytes)}"
        saved = [f"initial weights of {bytes_text(self.initial_bytes)}"] if self.initial_bytes else []
        saved += [f"{counted(self.num_checkpoints, 'checkpoint')} {each}"] if self.num_checkpoints else []
        saved += [f"the model of {bytes_text(self.export_bytes)}"] if self.export_bytes else []
        free = "an unknown amount" if self.free_bytes is None else bytes_text(self.free_bytes)
        needed = bytes_text(self.needed_bytes)
        listed = f"{', '.join(saved[:-1])} and {saved[-1]}" if len(saved) > 1 else "".join(saved)
        return f"{listed} need up to {needed} at a time, and {free} is free"

    def document(self) -> dict[str, Any]:
        """In the words of JSON."""
        return asdict(self) | {"needed_bytes": self.needed_bytes}


def disk_room(prepared: PreparedRun, folder: RunFolder, step: int = 0) -> _DiskRoom | None:
    """What a run needs from that step on; None if it saves nothing."""
    run, wanted, steps = prepared.run, prepared.run.checkpoint, prepared.run.training.steps
    most = int(step < steps and (wanted.at_end or wanted.every_s is not None))
    if step < steps and (every := wanted.every_steps):
        most += (steps - 1) // every - step // every
    there = len(find_checkpoints(folder.checkpoints(run)))
    initial_bytes = 0 if prepared.initial is None else prepared.initial.num_bytes
    if not most and not there and not initial_bytes:
        return None
    limit = max(LEAST_KEPT, wanted.keep) + 1 - there
    deletes_one = bool(most and wanted.keep) and most >= limit
    return _DiskRoom(
        _checkpoint_bytes(prepared),
        max(1, limit) if deletes_one else most,
        _export_bytes(prepared) if run.export.at_end and (most or there) else 0,
        deletes_one,
        initial_bytes,
        free_bytes(folder.path),
    )


def check_room(prepared: PreparedRun, folder: RunFolder, step: int = 0) -> None:
    """Refuse a run that cannot save its checkpoints and its model where its folder lies."""
    room = disk_room(prepared, folder, step)
    if room is None or not room.is_short:
        return
    keep = prepared.run.checkpoint.keep
    fewer = f" Or lower checkpoint.keep, which is {keep}." if keep > LEAST_KEPT else ""
    raise BiremeError(
        f"The disk of {folder.path} has no room for what this run saves: {room.sentence}. Free space, or set "
        f"log.folder to a folder on another disk.{fewer} To start all the same, add --anyway."
    )


def kept_bytes(prepared: PreparedRun, folder: RunFolder, step: int, num_machines: int) -> int:
    """Bytes of checkpoints that each machine keeps on average if all have folders of their own: what its
    ranks write, and its copies of what others write.
    """
    room = disk_room(prepared, folder, step)
    if room is None:
        return 0
    num = min(1 + prepared.run.checkpoint.copies, num_machines)
    return room.num_checkpoints * room.checkpoint_bytes * num // num_machines


def check_kept(folder: RunFolder, needed_bytes: int) -> None:
    """Refuse a run whose checkpoints and copies this machine cannot keep in a folder of its own."""
    free = free_bytes(folder.path)
    if free is not None and free < needed_bytes:
        raise BiremeError(
            f"The disk of {folder.path} has {bytes_text(free)} free. Checkpoints of this machine and copies "
            f"of those of others take {bytes_text(needed_bytes)}. Free space, lower checkpoint.keep, or set "
            "log.folder, under bireme join BIREME_RUNS, to a folder on another disk."
        )


def _checkpoint_bytes(prepared: PreparedRun) -> int:
    """The tensors of one checkpoint over all ranks."""
    run, graph, plan = prepared.run, prepared.graph, prepared.plan.plan
    left_out = names_in_base(graph) if has_base(run) else frozenset[str]()
    copies = {Rule.DELAYED: 1, Rule.FRESH: plan.width}.get(plan.source.rule, 0)
    found = sum(one.num_bytes for one in graph.buffers if one.persistent and one.name not in left_out)
    for one in graph.parameters:
        if not one.trainable:
            found += 0 if one.name in left_out else one.num_bytes
            continue
        stepped = 0 if one.dtype in SHORT else one.num_bytes  # of short weights the optimizer has the copy
        found += stepped + optimizer_bytes(one, run.training.optimizer) + copies * one.num_bytes
    return found


def _export_bytes(prepared: PreparedRun) -> int:
    """The tensors of the exported model, or of its adapter."""
    run, graph = prepared.run, prepared.graph
    is_adapter = run.model.lora.rank is not None and not run.model.lora.merge
    states = [*graph.parameters, *(one for one in graph.buffers if one.persistent)]
    return sum(one.unpacked.num_bytes for one in states if one.trainable or not is_adapter)
