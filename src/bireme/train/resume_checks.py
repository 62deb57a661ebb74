"""Resume checks: a run may continue only with the same model, at the same place in the same data.

A checkpoint says which batch comes next. That is the right one only if batches are what they were.
"""

from collections.abc import Callable

from pydantic import JsonValue

from bireme.codec.sum_words import parse_sum_codec
from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.model.graph_file import graph_hash
from bireme.train.base_weights import (
    BASE,
    BaseIdentity,
    base_of_checkpoint,
    check_same_base,
    load_base,
)
from bireme.train.checkpoint.checkpoint import Checkpoint
from bireme.train.data.prepare import RunData
from bireme.train.folder import RunFolder
from bireme.train.model import RunModel
from bireme.train.rates import rate_factor
from bireme.train.run_data import data_of
from bireme.train.run_file import RunFile
from bireme.train.same_data import (
    DataIdentity,
    check_same_data,
    data_identity,
    identity_from,
    load_identity,
)

__all__ = ["check_files_here", "check_finds_checkpoints", "check_rate", "check_same_run", "run_conditions"]

SAME_RATE = 0.01
"""Rates that differ by no more than this part of the higher one are not worth a word."""

BATCH_SIZE, NUM_SAMPLES, OPTIMIZER, DATA = "batch_size", "num_samples", "optimizer", "data"
SUM_CODEC, GRADIENT = "sum_codec", "gradient"


def run_conditions(
    run: RunFile, identity: DataIdentity, base: BaseIdentity | None = None
) -> dict[str, JsonValue]:
    """The conditions of the run that a checkpoint keeps, in addition to the seed and the batch's number."""
    found: dict[str, JsonValue] = {
        BATCH_SIZE: run.training.batch_size,
        NUM_SAMPLES: identity.num_samples,
        OPTIMIZER: run.training.optimizer,
        DATA: identity.plain(),
    }
    if base is not None:
        found[BASE] = base.plain()
    if run.training.gradient_form is not None:
        found[GRADIENT] = run.training.gradient
    return found if run.sync.codec == "none" else found | {SUM_CODEC: run.sync.codec}


def check_files_here(folder: RunFolder) -> None:
    """Make the data of a run ready on this machine, and refuse data or frozen weights other than rank 0's."""
    run, there = folder.load_run(), f"{folder.path} on rank 0's machine"
    base = load_base(folder.base)
    if base is not None:
        check_same_base(base, run, there)
    data, identity = data_of(run, RunModel.of(run, 1)), load_identity(folder.data)
    if identity is not None:
        check_same_data(identity, data_identity(run, data), data, there)


def check_finds_checkpoints(run: RunFile, folder: RunFolder) -> None:
    """Refuse a run that would look for its checkpoints in the wrong folder and find none."""
    if not folder.run_file.is_file():
        return
    before, now = folder.checkpoints(folder.load_run()), folder.checkpoints(run)
    if now != before:
        raise BiremeError(
            f"The checkpoints of {folder.path} are in {before}, but checkpoint.folder is {now.name}: the run "
            "would start again without them. Set checkpoint.folder back."
        )


def check_rate(run: RunFile, folder: RunFolder, step: int, tell: Callable[[str], None]) -> None:
    """Refuse to change the learning rate of a run that has done its steps, where only more are asked for.

    `tell` gets a sentence where a run on its way goes on with another rate than it would have had.
    """
    if not folder.run_file.is_file() or not step:
        return
    old, new = folder.load_run().training, run.training
    if (old.steps, old.schedule_steps) == (new.steps, new.schedule_steps) or new.steps <= step:
        return
    before, after = rate_factor(old)(min(step, old.steps - 1)), rate_factor(new)(step)
    if abs(after - before) <= SAME_RATE * max(before, after):
        return
    had, has = (f"{factor * new.learning_rate:.3g}" for factor in (before, after))
    asks = new.schedule_steps is not None
    if step < old.steps or asks:
        tell(
            f"With training.steps = {new.steps} instead of {old.steps}, the learning rate of the next "
            f"step is {has} and not {had}."
        )
        return
    raise BiremeError(
        f"The learning rate schedule of this run ended at step {old.steps}, at {had}. With training.steps = "
        f"{new.steps} alone the schedule would be stretched, and the rate would jump to {has}. Say what you "
        f"want: --set training.schedule_steps={old.num_schedule_steps} keeps the rate at {had}; with --set "
        "training.after_schedule=restart as well, the rate warms up and falls once more; "
        f"--set training.schedule_steps={new.steps} stretches the schedule."
    )


def check_same_run(
    checkpoint: Checkpoint,
    folder: RunFolder,
    run: RunFile,
    graph: Graph,
    data: RunData,
    identity: DataIdentity,
    tell: Callable[[str], None],
) -> None:
    """Refuse a checkpoint of another model, of other frozen weights or data, or of data in another order.

    `tell` gets a sentence where something cannot be known.
    """
    manifest, where = checkpoint.manifest, checkpoint.folder
    # That of a graph for one size of micro-batches is another one for every size.
    if graph.any_batch and manifest.graph_hash != graph_hash(graph):
        raise BiremeError(
            f"{where} is from another model than model.source = {run.model.source} with data.length = "
            f"{run.data.length}. Set them to what the run was trained with, or start a new run."
        )
    base = base_of_checkpoint(manifest)
    if base is not None:
        check_same_base(base, run, str(where))
    optimizer = manifest.extra.get(OPTIMIZER, run.training.optimizer)
    if optimizer != run.training.optimizer:
        raise BiremeError(
            f"{where} has the state of {optimizer}, but training.optimizer is {run.training.optimizer}. Set "
            "it back, or start a new run."
        )
    now = {"data.seed": run.data.seed, **_named(run_conditions(run, identity))}
    before = {"data.seed": manifest.seed, **_named(manifest.extra)}
    for name, value in now.items():
        if name in before and before[name] != value:
            raise BiremeError(
                f"{where} was written with {name} = {before[name]}, but now it is {value}, so samples would "
                "be missed or repeated. Set it back, or start a new run."
            )
    _tell_codec(str(manifest.extra.get(SUM_CODEC, "none")), run.sync.codec, tell)
    form = str(manifest.extra.get(GRADIENT, "whole"))
    if form != run.training.gradient:
        tell(
            f"Gradients were kept with training.gradient = {form} before, and with {run.training.gradient} "
            "now. Components of another rank start from scratch."
        )
    kept = manifest.extra.get(DATA)
    known = load_identity(folder.data) if kept is None else identity_from(kept, str(where))
    if known is None:
        doubt = (
            f"{folder.path} was started by a Bireme that kept no digest of the data: make sure that "
            f"{run.data.named} is what it was trained on."
        )
    else:
        doubt = check_same_data(known, identity, data, str(where))
    if doubt:
        tell(doubt)


def _tell_codec(before: str, now: str, tell: Callable[[str], None]) -> None:
    """Another codec for sums of gradients is allowed, and said."""
    if before == now:
        return
    more = ""
    if parse_sum_codec(before).has_feedback:
        keeps = parse_sum_codec(now).has_feedback
        more = f" What {before} has not sent yet " + ("is sent with it." if keeps else "is dropped.")
    tell(f"Sums of gradients went through sync.codec = {before} before and go through {now} now.{more}")


def _named(position: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """A position in the data in words that people know."""
    words = {BATCH_SIZE: "training.batch_size", NUM_SAMPLES: "the number of samples in data.source"}
    return {words[key]: value for key, value in position.items() if key in words}
