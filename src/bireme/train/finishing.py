"""What a run leaves: room on the disk for it, an exported model, a sample of its text, and a summary."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bireme.bounds import bytes_text, counted
from bireme.errors import BiremeError
from bireme.files import free_bytes, write_text_atomically
from bireme.model.sources import load_source
from bireme.profile.optimizers import SHORT, optimizer_bytes
from bireme.runtime.token_line import SCORES, ModelPart, Tensors, continued
from bireme.schedule.program import Rule
from bireme.train.checkpoint.checkpoint import Checkpoint, find_checkpoints, newest_good
from bireme.train.checkpoint.writer import LEAST_KEPT
from bireme.train.data.encoding import chat_form
from bireme.train.data.prepare import RunData
from bireme.train.data.samples import IGNORED
from bireme.train.data.tokenizer import Tokenizer
from bireme.train.export import NewestWeights, export_checkpoint
from bireme.train.folder import RunFolder
from bireme.train.generating import Choice, WritingStyle, end_ids
from bireme.train.model import remove_initial
from bireme.train.outcome import Outcome, first_of
from bireme.train.prepare import PreparedRun
from bireme.train.resume_checks import base_folder, names_in_base
from bireme.train.run_file import Log, RunFile
from bireme.train.summary import summary_of

DONE = ("finished", "time limit")
"""The reasons to stop that leave a trained model."""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The result of a run that was started here, and how it ended."""

    summary: dict[str, Any]
    reason: str
    lost: str = ""
    """Why the result that was asked for is not on the disk, and what to do; empty if it is."""

    @property
    def is_stopped(self) -> bool:
        """Whether it was asked to stop before it had done all steps, or all that its time allowed."""
        return self.reason not in DONE


def finish(prepared: PreparedRun, folder: RunFolder, outcomes: list[Outcome]) -> FinishedRun:
    """Export the model, let it write a sample, and write down what came of the run."""
    own, run = first_of(outcomes), prepared.run
    sample = lost = ""
    newest = newest_good(folder.checkpoints(run))
    if own.reason in DONE:
        lost = _without_checkpoint(run, folder, own.steps, newest)
    if own.reason in DONE and newest is not None and not lost:
        if run.export.at_end:
            lost = _exported(prepared, folder, newest)
        with NewestWeights(run, prepared.graph, newest) as weights:
            sample = written(run, weights, prepared.data)
    if not lost:
        remove_initial(folder.initial)
    summary = summary_of(prepared, folder, outcomes, sample)
    try:
        text = json.dumps(summary, ensure_ascii=False, indent=1) + "\n"
        write_text_atomically(folder.summary, text)
    except BiremeError as error:  # what it says is shown all the same
        summary["warnings"].append(str(error))
    return FinishedRun(summary, own.reason, lost)


def _without_checkpoint(run: RunFile, folder: RunFolder, steps: int, newest: Checkpoint | None) -> str:
    """Why a run that has done its steps has no result, in sentences; empty if the checkpoint is there."""
    every = run.checkpoint.every_steps
    due = (
        steps if run.checkpoint.at_end else (steps - 1) // every * every if every and run.export.at_end else 0
    )
    found = 0 if newest is None else newest.manifest.step
    if found >= due:
        return ""
    free = free_bytes(folder.path)
    room = "" if free is None else f" {bytes_text(free)} is free there."
    kept = f"The newest checkpoint is that of step {found}" if found else "There is no checkpoint"
    again = f"repeats steps {found + 1} to {steps}"
    return (
        f"The run has done {counted(steps, 'step')}, but the checkpoint of step {due} could not be written "
        f"to {folder.checkpoints(run)}, so there is no trained model.{room} {kept}. Free space; then "
        f"`bireme resume {shlex.quote(str(folder.path))}` {again}."
    )


def _exported(prepared: PreparedRun, folder: RunFolder, newest: Checkpoint) -> str:
    """Export the model; what went wrong, in sentences, empty if nothing did."""
    try:
        export_checkpoint(prepared.run, prepared.graph, newest, folder.model)
    except BiremeError as error:
        own, free = shlex.quote(str(folder.path)), free_bytes(folder.path)
        room = "" if free is None else f" {bytes_text(free)} is free there."
        return (
            f"The model could not be exported: {error}{room} The checkpoint of step {newest.manifest.step} "
            f"is whole: `bireme export {own} --to FOLDER` writes the model to any disk; or free space, and "
            f"`bireme resume {own}`."
        )
    return ""


# A sample of what a trained language model writes.

_TEMPERATURE = 0.8

_LEAST_SHARED_BYTES = 64 * 2**20
"""Of a model whose products are worth several threads: in a smaller one these mostly wait."""

_NUM_TRIED = 64
"""Samples in which an answer is looked for: those that are cut off may have none."""

_LARGEST_BYTES = 8 * 2**30
"""Of a model that is loaded whole only to write a sample."""


@torch.no_grad()
def written(run: RunFile, weights: NewestWeights, data: RunData) -> str:
    """What the model writes after the run's prompt; nothing if it is large, or if a function's model needs
    more than `input_ids` to predict.

    A model that has learned answers gets a question, in the form in which it has learned them: the prompt as
    a user's message, or the first question of its data if the run file has no prompt of its own.
    """
    tokenizer = data.tokenizer
    if tokenizer is None or not run.log.sample_tokens or weights.num_bytes > _LARGEST_BYTES:
        return ""
    example = _example(data) if data.has_answers else None
    first = tokenizer.encode(run.log.prompt) or [tokenizer.end_of_text or 0]
    if example is not None:
        first = _question(run, data, tokenizer, example)
    ends = end_ids(run, tokenizer, () if example is None else example.answer)
    part = _WholeModel(run, weights)
    style = WritingStyle(run.log.sample_tokens, _TEMPERATURE, seed=0)
    before = torch.get_num_threads()
    if weights.num_bytes < _LEAST_SHARED_BYTES:
        torch.set_num_threads(1)
    try:
        made = continued(part, first, Choice(style, tokenizer.num_tokens, ends), style.num_tokens)
        return tokenizer.decode([*first, *made])
    except Exception:
        if run.model.source.startswith(("gpt:", "hf:")):
            raise
        return ""  # a model of the user's own may need labels, or return only its loss
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class _Example:
    """A sample's ids up to its first answer, and those of the answer."""

    question: list[int]
    answer: list[int]


def _example(data: RunData) -> _Example | None:
    """The first sample with an answer, of those to evaluate with if there are any."""
    samples = data.training if data.evaluation is None else data.evaluation
    for number in range(min(len(samples), _NUM_TRIED)):
        sample = samples.take([number])
        ids, counts = sample["input_ids"][0], sample["labels"][0] != IGNORED
        if counts.any():
            begin = int(counts.int().argmax())
            end = begin + int((~counts[begin:]).int().argmax())
            return _Example(ids[:begin].tolist(), ids[begin : end if end > begin else len(ids)].tolist())
    return None


def _question(run: RunFile, data: RunData, tokenizer: Tokenizer, example: _Example) -> list[int]:
    """The ids of the run's own prompt, in the data's form; those of the example if the run has none."""
    prompt = run.log.prompt
    if prompt == Log().prompt:
        return example.question
    if any(one.form for one in data.recognized):  # it holds conversations, or becomes conversations
        return chat_form(tokenizer).question(prompt)
    return tokenizer.encode(prompt) or example.question


class _WholeModel(ModelPart):
    """The model of a run, whole and without a cache."""

    def __init__(self, run: RunFile, weights: NewestWeights) -> None:
        self.context = run.data.length
        model: Any = load_source(
            run.model.source, length=run.data.length, device="cpu", training=False, part=run.model.part
        ).model
        own = model.state_dict()
        for name in weights.keys() & own.keys():
            own[name].copy_(weights[name])
        if hasattr(model, "tie_weights"):
            model.tie_weights()
        self._model = model

    def run(self, ids: Sequence[int], count: int, received: Tensors) -> Tensors:
        """The scores after these tokens."""
        outputs = self._model(input_ids=torch.tensor([ids]))
        return {SCORES: (outputs if isinstance(outputs, Tensor) else outputs["logits"])[0, -1]}


# Room on the disk for what a run saves: how much its checkpoints and its model take, and how much is free.
#
# Sizes are those of the tensors, which follow from the graph, the optimizer and the rule of updates. Those of
# the initial weights that a function of the user made count until they are written. Headers of files come on
# top, and what a run keeps of components of gradients (`principal/` in `runtime/snapshot.py`). A quota of a
# user is not seen unless the file system reports it as its own size.


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
    left_out = names_in_base(graph) if base_folder(run) is not None else frozenset[str]()
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
