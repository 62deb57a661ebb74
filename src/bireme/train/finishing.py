"""What comes of a run that has ended: an exported model, a sample of what it writes, and a summary."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bireme.bounds import bytes_text, counted
from bireme.errors import BiremeError
from bireme.files import free_bytes
from bireme.model.sources import load_source
from bireme.train.checkpoint.checkpoint import Checkpoint, newest_good
from bireme.train.data.encoding import chat_form
from bireme.train.data.prepare import RunData
from bireme.train.data.samples import IGNORED
from bireme.train.data.tokenizer import Tokenizer
from bireme.train.export import NewestWeights, export_checkpoint
from bireme.train.folder import RunFolder
from bireme.train.generating import TextRequest, continued, end_ids
from bireme.train.initial_weights import remove_initial
from bireme.train.outcome import Outcome, first_of
from bireme.train.prepare import PreparedRun
from bireme.train.run_file import Log, RunFile
from bireme.train.summary import RunSummary, summary_of

DONE = ("finished", "time limit")
"""The reasons to stop that leave a trained model."""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The result of a run that was started here, and how it ended."""

    summary: RunSummary
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
        summary.write(folder.summary)
    except BiremeError as error:  # what it says is shown all the same
        summary = replace(summary, warnings=(*summary.warnings, str(error)))
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
    model = _model(run, weights)

    def predict(ids: Sequence[int]) -> Tensor:
        outputs = model(input_ids=torch.tensor([ids]))
        scores: Tensor = (outputs if isinstance(outputs, Tensor) else outputs["logits"])[0, -1]
        return scores

    asked = TextRequest(run.log.prompt, run.log.sample_tokens, _TEMPERATURE, seed=0)
    before = torch.get_num_threads()
    if weights.num_bytes < _LEAST_SHARED_BYTES:
        torch.set_num_threads(1)
    try:
        made = continued(
            predict, first, asked, context=run.data.length, num_tokens=tokenizer.num_tokens, ends=ends
        )
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
    if data.has_chats:
        return chat_form(tokenizer).question(prompt)
    return tokenizer.encode(prompt) or example.question


def _model(run: RunFile, weights: NewestWeights) -> Any:
    model: Any = load_source(
        run.model.source, length=run.data.length, device="cpu", training=False, part=run.model.part
    ).model
    own = model.state_dict()
    for name in weights.keys() & own.keys():
        own[name].copy_(weights[name])
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model
