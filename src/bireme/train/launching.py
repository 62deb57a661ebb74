"""Starting the processes of a run on this machine, or joining those that torchrun has started.

A signal to the process that people started is passed on to its ranks, which agree on where to stop; the
processes are ended the hard way only if somebody asks a second time.
"""

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from bireme.bounds import bytes_text, counted
from bireme.devices import num_accelerators
from bireme.errors import BiremeError, SampleError
from bireme.files import free_bytes
from bireme.model.sources import load_source
from bireme.plan.plan_file import planned_units, saved_plan
from bireme.plan.search.search import timeline_of
from bireme.report.page.recorded import write_recorded
from bireme.runtime.board import RankFailed, RunFailed
from bireme.runtime.launch import launch, signal_ranks
from bireme.train.checkpoint.checkpoint import Checkpoint, newest_good
from bireme.train.data.encoding import ChatTemplate
from bireme.train.data.prepare import RunData
from bireme.train.data.samples import IGNORED
from bireme.train.data.tokenizer import FolderTokenizer, Tokenizer
from bireme.train.export import NewestWeights, export_checkpoint
from bireme.train.folder import RunFolder
from bireme.train.initial_weights import remove_initial
from bireme.train.link_codecs import sums_of
from bireme.train.machines import visible_gpus
from bireme.train.outcome import REPLAN, Outcome, first_of
from bireme.train.plan_search import (
    chooses_batch,
    full_request_of,
    plan_request_of,
    planned,
    with_batch_of,
)
from bireme.train.prepare import PreparedRun, write_prepared
from bireme.train.rank_part import RunStart
from bireme.train.recorded_batches import RECORDED
from bireme.train.replicas import run_replicas
from bireme.train.run_data import learns
from bireme.train.run_file import Log, RunFile
from bireme.train.shares import slowed
from bireme.train.stops import count_start
from bireme.train.summary import RunSummary, summary_of
from bireme.train.worker import train_rank

# A new plan for a run on its way, one of whose devices has become slow.


def _replanned(prepared: PreparedRun, outcome: Outcome) -> PreparedRun:
    """The run with the best plan for its devices as they are now, or as it is if that would be no faster.

    What is known of the machines stays as it was: a device that is slow today may be its old self tomorrow.
    """
    if prepared.profile is None or outcome.slow is None:
        return prepared
    cluster = slowed(prepared.machines.cluster, prepared.plan.plan, outcome.slow)
    run, names = prepared.run, [unit.name for unit in prepared.profile.units]
    request = full_request_of(run, sums_of(run, prepared.graph), prepared.graph, names, cluster)
    answer = planned(prepared.profile, cluster, request, lambda _done, _what: None, is_brief=False)
    if outcome.batch_s is not None and answer.best.forecast.batch_s >= outcome.batch_s:
        return prepared
    return replace(prepared, plan=saved_plan(answer, planned_units(prepared.profile)), answer=answer)


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
    ends = _ends(run, tokenizer, example)
    model = _model(run, weights)
    before = torch.get_num_threads()
    if weights.num_bytes < _LEAST_SHARED_BYTES:
        torch.set_num_threads(1)
    try:
        return tokenizer.decode(_continued(model, first, run, tokenizer.num_tokens, ends))
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
    if data.uses_template:
        return ChatTemplate(tokenizer, run.data.named).question(prompt)
    return tokenizer.encode(prompt) or example.question


def _ends(run: RunFile, tokenizer: Tokenizer, example: _Example | None) -> frozenset[int]:
    """The ids after which a text is over: the tokenizer's end, those of the model's folder, and the special
    token at the end of an answer.
    """
    found = set() if tokenizer.end_of_text is None else {tokenizer.end_of_text}
    if run.model.source.startswith("hf:"):
        for name in ("config.json", "generation_config.json"):
            try:
                path = Path(run.model.source.removeprefix("hf:")) / name
                own = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            except (OSError, ValueError, AttributeError):
                continue
            found.update(one for one in (own if isinstance(own, list) else [own]) if isinstance(one, int))
    if example is not None and isinstance(tokenizer, FolderTokenizer):
        special = set(tokenizer.backend.all_special_ids)
        found.update([one for one in example.answer if one in special][-1:])
    return frozenset(found)


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


def _continued(
    model: Any, first: list[int], run: RunFile, num_tokens: int, ends: frozenset[int]
) -> list[int]:
    """Samples ids below `num_tokens` one by one from the model's prediction after the last of the context, up
    to one of the `ends`.
    """
    generator = torch.Generator().manual_seed(0)
    ids = list(first)
    for _ in range(run.log.sample_tokens):
        outputs = model(input_ids=torch.tensor([ids[-run.data.length :]]))
        logits: Tensor = (outputs if isinstance(outputs, Tensor) else outputs["logits"])[0, -1].float()
        logits[num_tokens:] = -torch.inf
        shares = torch.softmax(logits / _TEMPERATURE, dim=-1)
        chosen = int(torch.multinomial(shares, 1, generator=generator))
        if chosen in ends:
            break
        ids.append(chosen)
    return ids


# A few batches of a run as the simulator foresees them, to be drawn above those that were measured.


def write_predicted(prepared: PreparedRun, path: Path, *, num_batches: int) -> None:
    """Write the predicted timeline; nothing where the plan does not name devices or nobody profiled."""
    if prepared.profile is None or not prepared.plan.plan.devices:
        return
    timeline = timeline_of(
        prepared.plan.plan,
        prepared.profile,
        prepared.machines.cluster,
        plan_request_of(prepared.run, sums_of(prepared.run, prepared.graph), prepared.graph),
        num_batches=num_batches,
    )
    write_recorded(timeline, path)


VISIBLE = "CUDA_VISIBLE_DEVICES"

_USUAL_RESTARTS = 3

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


def start(
    prepared: PreparedRun,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    *,
    is_shown: bool,
    restarts: int | None = None,
) -> FinishedRun:
    """Run the processes of a prepared run to their end, then write what came of it.

    One that ends because a stage has become slow goes on with a new plan, once. One that fails goes on from
    its newest checkpoint, unless so many `restarts` in a row have reached no new one: then the failure is
    raised. By default there are `_USUAL_RESTARTS` if replicas may die, and none otherwise.
    """
    if restarts is None:
        restarts = _USUAL_RESTARTS if prepared.run.sync.is_coordinated else 0
    outcomes = _run_through(prepared, folder, checkpoint, is_shown=is_shown, restarts=restarts)
    if first_of(outcomes).reason == REPLAN:
        if chooses_batch(prepared.run):  # its ranks have, and the folder remembers
            prepared = replace(prepared, run=with_batch_of(prepared.run, folder.load_run()))
        prepared = replace(_replanned(prepared, first_of(outcomes)), initial=None)
        newest = newest_good(folder.checkpoints(prepared.run))
        write_prepared(prepared, folder, newest)
        outcomes = _run(prepared, folder, newest, is_shown=is_shown, may_replan=False)
    return finish(prepared, folder, outcomes)


def _run_through(
    prepared: PreparedRun, folder: RunFolder, checkpoint: Checkpoint | None, *, is_shown: bool, restarts: int
) -> list[Outcome]:
    """What the ranks of a run come to, after as many restarts as it takes and may take."""
    num_in_vain = 0
    while True:
        step, num_ledger_bytes = _step_of(checkpoint), _size_of(folder.ledger)
        try:
            return _run(prepared, folder, checkpoint, is_shown=is_shown, may_replan=True)
        except (BiremeError, RunFailed) as failure:
            # A user's mistake shows before anything is trained, and would only show again; so would a sample.
            is_mistake = isinstance(failure, BiremeError) and _size_of(folder.ledger) == num_ledger_bytes
            if is_mistake or isinstance(failure, SampleError):
                raise
            with suppress(BiremeError):  # if all checkpoints are damaged, the failure says more
                checkpoint = newest_good(folder.checkpoints(prepared.run))
            num_in_vain = 0 if _step_of(checkpoint) > step else num_in_vain
            if num_in_vain >= restarts:
                raise
            num_in_vain += 1
            count_start(folder, _step_of(checkpoint))
            why = failure.line if isinstance(failure, RankFailed) else str(failure)
            at = f"after step {_step_of(checkpoint)}" if checkpoint else "from its beginning"
            count = f"restart {num_in_vain} of at most {restarts} in a row without a new checkpoint"
            print(f"bireme: {why} The run continues {at} ({count}).", file=sys.stderr, flush=True)  # noqa: T201 (for people)


def _step_of(checkpoint: Checkpoint | None) -> int:
    return 0 if checkpoint is None else checkpoint.manifest.step


def _size_of(path: Path) -> int:
    """Of a file, in bytes; 0 if there is none. A ledger grows with every batch that counts."""
    return path.stat().st_size if path.is_file() else 0


def _run(
    prepared: PreparedRun,
    folder: RunFolder,
    checkpoint: Checkpoint | None,
    *,
    is_shown: bool,
    may_replan: bool,
) -> list[Outcome]:
    """What the ranks of a run come to."""
    plan = prepared.plan.plan
    write_predicted(prepared, folder.predicted_timeline, num_batches=RECORDED)
    words = first_words(prepared)
    begin = RunStart(
        folder.path,
        None if checkpoint is None else checkpoint.folder,
        prepared.machines.threads,
        is_shown,
        words,
        () if checkpoint is None else checkpoint.passed_over,
        may_replan,
        prepared.census,
    )
    with signals_passed_on(), _gpus_as_planned(prepared):
        if prepared.run.sync.mode != "allreduce":
            return run_replicas(prepared, folder, checkpoint, begin)
        return launch(
            train_rank,
            plan.num_ranks,
            begin,
            timeout_s=prepared.run.cluster.timeout_s,
            threads_per_process=prepared.machines.threads,
            backend="nccl" if prepared.machines.backend == "nccl" else "gloo",
            device=prepared.machines.device,
        )


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


def first_words(prepared: PreparedRun) -> dict[str, Any]:
    """What the log of a run begins with."""
    import torch

    from bireme import __version__

    plan, forecast = prepared.plan.plan, prepared.plan.forecast
    return {
        "version": __version__,
        "torch": torch.__version__,
        "schedule": plan.schedule,
        "num_stages": plan.num_stages,
        "width": plan.width,
        "devices": [name for row in plan.devices for name in row],
        "predicted_batch_s": None if forecast is None else forecast.batch_s,
        "learns": learns(prepared.run, prepared.data, prepared.graph).document(),
    }


@contextmanager
def _gpus_as_planned(prepared: PreparedRun) -> Iterator[None]:
    """Let the processes that are started inside count the GPUs in the order in which the plan names them."""
    before = os.environ.get(VISIBLE)
    wanted = visible_gpus(prepared.plan.plan, prepared.machines, before, num_cuda=num_accelerators())
    if wanted is not None:
        os.environ[VISIBLE] = wanted
    try:
        yield
    finally:
        if before is not None:
            os.environ[VISIBLE] = before
        else:
            os.environ.pop(VISIBLE, None)


@contextmanager
def signals_passed_on() -> Iterator[None]:
    """Pass signals to the ranks as a request to stop. The second interrupt ends everything.

    Processes that are started inside hold such requests back until they can take them, for this thread holds
    them back and they inherit that; another one is there to take them here.
    """
    interrupts = 0
    over = threading.Event()
    taker = threading.Thread(target=over.wait, name="bireme signals", daemon=True)
    taker.start()

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        if number == signal.SIGINT:
            interrupts += 1
            if interrupts > 1:
                raise KeyboardInterrupt
        if not signal_ranks(signal.SIGUSR1):  # there is nothing to save yet, or any more
            signal.signal(number, before[signal.Signals(number)])
            os.kill(os.getpid(), number)
            return
        print("bireme: stopping after this step and saving …", file=sys.stderr, flush=True)  # noqa: T201 (for people)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)
