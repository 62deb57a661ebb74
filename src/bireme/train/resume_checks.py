"""Resume checks: a run may continue only with the same model, at the same place in the same data.

A checkpoint says which batch comes next. That is the right one only if batches are what they were.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from bireme.codec.sum_description import parse_sum_codec
from bireme.documents import read_json_lines, read_json_object
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.model.graph import Graph
from bireme.model.graph_file import graph_hash
from bireme.sync.coordinator.messages import SamplePlaces
from bireme.sync.coordinator.samples import in_force, united
from bireme.train.base_weights import (
    BASE,
    BaseIdentity,
    base_of_checkpoint,
    check_same_base,
    load_base,
)
from bireme.train.checkpoint.checkpoint import Checkpoint
from bireme.train.data.prepare import RunData, is_repeatable, samples_digest
from bireme.train.folder import RunFolder
from bireme.train.model import RunModel
from bireme.train.rates import rate_factor
from bireme.train.run_data import data_of
from bireme.train.run_file import RunFile

# Which data a run learns from, kept in its folder and its checkpoints, and whether they are there again.
#
# A checkpoint says which samples come next by their numbers alone. So other data, of the same name and the
# same size too, would be trained on without a word.


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class DataIdentity:
    """What tells data from others: how much there is, and a digest of what the samples hold.

    `source` is where they were, for people. `evaluation_sha256` is None where the samples to evaluate with
    are a part of the same source, whose digest covers them.
    """

    source: str
    num_samples: int
    num_tokens: int | None
    sha256: str
    evaluation_sha256: str | None
    format: Literal[1] = Field(default=1)

    def plain(self) -> dict[str, JsonValue]:
        """As JSON has it."""
        return asdict(self)

    def __str__(self) -> str:
        tokens = "" if self.num_tokens is None else f" of {self.num_tokens} tokens in all"
        return f"{self.num_samples} samples{tokens}, whose SHA-256 begins with {self.sha256[:12]}"


_READER = TypeAdapter(DataIdentity)


def data_identity(run: RunFile, data: RunData) -> DataIdentity:
    """The identity of a run's data."""
    apart = None if run.data.evaluation_source is None else data.evaluation
    return DataIdentity(
        source=run.data.named,
        num_samples=len(data.training),
        num_tokens=data.num_tokens,
        sha256=samples_digest(data.training),
        evaluation_sha256=None if apart is None else samples_digest(apart),
    )


def write_identity(path: Path, identity: DataIdentity) -> None:
    """Keep it in a run's folder."""
    write_text_atomically(path, _READER.dump_json(identity, indent=1).decode() + "\n")


def load_identity(path: Path) -> DataIdentity | None:
    """What a run's folder keeps; None where an older version of Bireme began the run."""
    return _identity_from(read_json_object(path), str(path)) if path.is_file() else None


def _identity_from(kept: object, origin: str) -> DataIdentity:
    """What was kept as JSON; `origin` is where, for an error."""
    try:
        return _READER.validate_python(kept)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BiremeError(
            f"{origin} does not say which data the run was trained on: {place}: {first['msg']}."
        ) from None


def check_same_data(before: DataIdentity, now: DataIdentity, data: RunData, where: str) -> str:
    """Refuse other data than those `before`; a sentence for people where something else is to be said.

    `where` is what was made from the data before. Samples that draw numbers of their own each time cannot be
    compared, and are taken for the same.
    """
    if now.sha256 != before.sha256 and is_repeatable(data.training, now.sha256):
        raise BiremeError(
            f"{where} was trained on other data than {now.source} holds now: it had {before} (then in "
            f"{before.source}), and now there are {now}. Put the data back, or set data.source to where they "
            "are; to train on other data, begin a new run."
        )
    if now.evaluation_sha256 != before.evaluation_sha256 and now.sha256 == before.sha256:
        return "The samples to evaluate with are not what they were: evaluations before and after differ."
    return ""


# The samples before a step that a run has left to train, by the ledger of its coordinator.


def left_at(ledger: Path, step: int, batch_size: int) -> tuple[int, tuple[SamplePlaces, ...]]:
    """The first sample that nobody was given before a step, and those before it that do not count yet."""
    fresh, waiting = step * batch_size, tuple[SamplePlaces, ...]()
    records = read_json_lines(ledger, start="start").records if ledger.exists() else {}
    averages = False
    for record in in_force(records).values():
        if record.get("kind") == "start":
            averages = "mode" in record
        if averages:  # each line is of one replica's batch, and all that was dealt before a meeting counts
            if record["fresh"] <= step * batch_size:
                fresh, waiting = step * batch_size, _before(record, step * batch_size)
        elif record.get("kind") == "round" and record.get("batch") == step - 1:
            fresh, waiting = record["fresh"], tuple(SamplePlaces(*pair) for pair in record["open"])
    return fresh, waiting


def _before(record: dict[str, Any], end: int) -> tuple[SamplePlaces, ...]:
    """The places below `end` that do not count after a line."""
    return united(
        (
            *(SamplePlaces(*pair) for pair in record["open"]),
            *((SamplePlaces(record["fresh"], end),) if record["fresh"] < end else ()),
        )
    )


def check_none_left(run: RunFile, folder: RunFolder, step: int) -> None:
    """Refuse to go on without a coordinator where only that knows which samples are left before a step."""
    if run.sync.mode != "allreduce":
        return
    end = step * run.training.batch_size
    fresh, waiting = left_at(folder.ledger, step, run.training.batch_size)
    num_left = max(end - fresh, 0) + sum(max(min(one.end, end) - one.begin, 0) for one in waiting)
    if num_left:
        raise BiremeError(
            f'sync.mode is "{run.sync.mode}", which continues with sample {end} of the run, but {num_left} '
            "samples before it were dealt to replicas that died and are not trained. Set sync.mode to "
            '"quorum", which trains them first.'
        )


_SAME_RATE = 0.01
"""Rates that differ by no more than this part of the higher one are not worth a word."""

_BATCH_SIZE, _NUM_SAMPLES, _OPTIMIZER, _DATA = "batch_size", "num_samples", "optimizer", "data"
_SUM_CODEC, GRADIENT = "sum_codec", "gradient"


def run_conditions(
    run: RunFile, identity: DataIdentity, base: BaseIdentity | None = None
) -> dict[str, JsonValue]:
    """The conditions of the run that a checkpoint keeps, in addition to the seed and the batch's number."""
    found: dict[str, JsonValue] = {
        _BATCH_SIZE: run.training.batch_size,
        _NUM_SAMPLES: identity.num_samples,
        _OPTIMIZER: run.training.optimizer,
        _DATA: identity.plain(),
    }
    if base is not None:
        found[BASE] = base.plain()
    if run.training.gradient_form is not None:
        found[GRADIENT] = run.training.gradient
    return found if run.sync.codec == "none" else found | {_SUM_CODEC: run.sync.codec}


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
    if abs(after - before) <= _SAME_RATE * max(before, after):
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
    _check_same_part(folder.load_run(), run, where)
    base = base_of_checkpoint(manifest)
    if base is not None:
        check_same_base(base, run, str(where))
    optimizer = manifest.extra.get(_OPTIMIZER, run.training.optimizer)
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
    _tell_codec(str(manifest.extra.get(_SUM_CODEC, "none")), run.sync.codec, tell)
    form = str(manifest.extra.get(GRADIENT, "whole"))
    if form != run.training.gradient:
        tell(
            f"Gradients were kept with training.gradient = {form} before, and with {run.training.gradient} "
            "now. Components of another rank start from scratch."
        )
    kept = manifest.extra.get(_DATA)
    known = load_identity(folder.data) if kept is None else _identity_from(kept, str(where))
    if known is None:
        doubt = (
            f"{folder.path} was started by a Bireme that kept no digest of the data: make sure that "
            f"{run.data.named} is what it was trained on."
        )
    else:
        doubt = check_same_data(known, identity, data, str(where))
    if doubt:
        tell(doubt)


def _check_same_part(before: RunFile, now: RunFile, where: Path) -> None:
    """Refuse another trained part or another format of frozen weights: the run's folder keeps its graph."""
    if (before.model.part, before.model.frozen_dtype) != (now.model.part, now.model.frozen_dtype):
        raise BiremeError(
            f"{where} has the state of another part of the model, or frozen weights in another format: set "
            "model.train, model.freeze, model.lora and model.frozen_dtype back to the values in "
            "the run.toml of the run, or start a new run."
        )


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
    words = {_BATCH_SIZE: "training.batch_size", _NUM_SAMPLES: "the number of samples in data.source"}
    return {words[key]: value for key, value in position.items() if key in words}
