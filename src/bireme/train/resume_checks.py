"""Resume checks: a run may continue only with the same model, at the same place in the same data.

A checkpoint lists which batch comes next. That is the right one only if batches are what they were. So the
folder of a run and its checkpoints keep the identity of the data, and of frozen weights that lie elsewhere.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from pydantic import JsonValue
from torch import Tensor

from bireme.bounds import Bytes
from bireme.codec.sum_description import parse_sum_codec
from bireme.documents import as_dataclass, read_dataclass, read_json_lines
from bireme.errors import BiremeError, Tell
from bireme.files import write_text_atomically
from bireme.model.graph import Graph
from bireme.model.graph_file import graph_hash
from bireme.model.part import WHOLE
from bireme.model.shapes import METADATA
from bireme.model.weights import open_weights, weight_files
from bireme.pieces import partial_files
from bireme.sync.coordinator.messages import SamplePlaces
from bireme.sync.coordinator.samples import in_force, united
from bireme.train.checkpoint.checkpoint import Checkpoint
from bireme.train.checkpoint.disk import digest_of
from bireme.train.checkpoint.manifest import Manifest
from bireme.train.data.prepare import RunData, is_repeatable, samples_digest
from bireme.train.fetched import bring
from bireme.train.folder import RunFolder
from bireme.train.model import RunModel
from bireme.train.run_data import data_of
from bireme.train.run_file import RunFile
from bireme.train.run_file.tables import rate_factor

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class _Identity:
    """What tells data or weights from others. It is kept as JSON."""

    def plain(self) -> dict[str, JsonValue]:
        """As JSON has it."""
        return {"format": _FORMAT, **asdict(self)}


_Kept = TypeVar("_Kept", bound=_Identity)


def write_identity(path: Path, identity: _Identity) -> None:
    """Keep an identity in a run's folder."""
    write_text_atomically(path, json.dumps(identity.plain(), indent=1) + "\n")


def _loaded(path: Path, kind: type[_Kept]) -> _Kept | None:
    return read_dataclass(path, kind, number=_FORMAT) if path.is_file() else None


# The base of a run that trains a part of a model: the folder that its frozen weights are read from.
#
# Checkpoints of such a run leave out what the base holds and nothing changes, and keep a digest of the base
# instead. Weights that are made from a seed lie in no folder: they are in the checkpoints of their run.

BASE = "base"
"""Where the manifest of a checkpoint says which base it belongs to."""

_MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class BaseIdentity(_Identity):
    """What tells a base from others: the bytes of its files, and a digest of all of them.

    `source` is the model's source when the run began, for people.
    """

    source: str
    num_bytes: Bytes
    sha256: str


def base_identity(run: RunFile) -> BaseIdentity | None:
    """The identity of a run's base, for which all its files are read; None if the run has no base."""
    folder = base_folder(run)
    if folder is None:
        return None
    files = weight_files(folder)
    for file in files:
        bring(file)
    with ThreadPoolExecutor(_MOST_THREADS) as threads:
        digests = list(threads.map(digest_of, files))
    words = sha256()
    for file, digest in zip(files, digests, strict=True):
        words.update(f"{file.name} {digest.sha256}\n".encode())
    num_bytes = sum(digest.num_bytes for digest in digests)
    return BaseIdentity(run.model.weights or run.model.source, num_bytes, words.hexdigest())


def base_folder(run: RunFile) -> Path | None:
    """The folder with the weights that a run begins with, if it trains only a part of them."""
    kind, _, rest = run.model.source.partition(":")
    given = run.model.weights or (rest if kind == "hf" else None)
    if given is None or run.model.from_scratch or run.model.part == WHOLE:
        return None
    patterns = "*.safetensors", METADATA
    return Path(given) if any(any(Path(given).glob(pattern)) for pattern in patterns) else None


def names_in_base(graph: Graph) -> frozenset[str]:
    """The parameters and buffers that stay as the base has them."""
    changed = {name for operator in graph.operators for name in operator.mutates}
    return frozenset(
        state.name
        for state in (*graph.parameters, *graph.buffers)
        if state.persistent and not state.trainable and state.name not in changed
    )


def keep_base(path: Path, run: RunFile, resumed_from: Manifest | None) -> None:
    """Write down in a run's folder which base its checkpoints need; nothing if they hold all weights.

    One that resumes from a checkpoint that holds all goes on so: the base may have changed since.
    """
    identity = base_identity(run) if resumed_from is None else base_of_checkpoint(resumed_from)
    if identity is None:
        path.unlink(missing_ok=True)
    else:
        write_identity(path, identity)


def load_base(path: Path) -> BaseIdentity | None:
    """What a run's folder keeps; None where checkpoints hold all weights."""
    return _loaded(path, BaseIdentity)


def base_of_checkpoint(manifest: Manifest) -> BaseIdentity | None:
    """The base that a checkpoint needs; None if it holds all weights."""
    kept = manifest.extra.get(BASE)
    if not isinstance(kept, dict):
        return None
    return as_dataclass(kept, BaseIdentity, number=_FORMAT, source=f"{BASE} of the checkpoint")


def check_same_base(before: BaseIdentity, run: RunFile, where: str) -> None:
    """Refuse a run whose frozen weights are not those `before`; `where` is what needs them. Weights of which
    this machine has fetched some pieces have been checked on the machine that they come from.
    """
    folder = base_folder(run)
    if folder is not None and any(partial_files(folder)):
        return
    now = base_identity(run)
    key = "model.source" if run.model.weights is None else "model.weights"
    there = run.model.weights or run.model.source
    remedy = (
        f"Put the folder back, or set {key} to where it is now; to train on other weights, begin a new run."
    )
    if now is None:
        raise BiremeError(
            f"{where} needs the frozen weights of {before.source}, but {key} = {there} has no safetensors to "
            f"read them from. {remedy}"
        )
    if now.sha256 != before.sha256:
        raise BiremeError(
            f"{where} needs the frozen weights of {before.source}, but {there} holds others now: "
            f"the SHA-256 of its files begins with {now.sha256[:12]}, and was {before.sha256[:12]}. {remedy}"
        )


class BaseWeights(ExitStack):
    """Reads frozen weights of a checkpoint from its base, one by one, in the dtype that the graph has.

    The base is checked and opened when the first is read. Use it as a context.
    """

    def __init__(self, run: RunFile, graph: Graph, identity: BaseIdentity, where: str) -> None:
        super().__init__()
        self._run, self._graph, self._identity, self._where = run, graph, identity, where
        self._model: RunModel | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._model is None:
            self._model = self._open()
        adapter = self._model.source.adapter
        return self._read(name if adapter is None else adapter.base_names[name])

    def _open(self) -> RunModel:
        check_same_base(self._identity, self._run, self._where)
        model = RunModel.of(self._run, 1)
        folder = base_folder(self._run)
        assert folder is not None
        graph = model.source.base_graph(self._graph)
        for file in weight_files(folder):
            bring(file)
        self._read = self.enter_context(open_weights(graph, folder, model=model.source.base))
        return model


# Which data a run learns from, kept in its folder and its checkpoints, and whether they are there again.
#
# A checkpoint says which samples come next by their numbers alone. So other data, of the same name and the
# same size too, would be trained on without a word.


@dataclass(frozen=True, slots=True)
class DataIdentity(_Identity):
    """What tells data from others: how much there is, and a digest of what the samples hold.

    `source` is where they were, for people. `evaluation_sha256` is None where the samples to evaluate with
    are a part of the same source, whose digest covers them.
    """

    source: str
    num_samples: int
    num_tokens: int | None
    sha256: str
    evaluation_sha256: str | None

    def __str__(self) -> str:
        tokens = "" if self.num_tokens is None else f" of {self.num_tokens} tokens in all"
        return f"{self.num_samples} samples{tokens}, whose SHA-256 begins with {self.sha256[:12]}"


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


def data_files(run: RunFile) -> list[Path]:
    """The files and folders that the public samples of a run are read from."""
    data = run.data
    sources = (data.source, data.evaluation_source, *(one.source for one in data.mixture or ()))
    return [Path(one) for one in sources if one is not None and Path(one).is_absolute()]


def load_identity(path: Path) -> DataIdentity | None:
    """The identity in a run's folder; None where an older version of Bireme began the run."""
    return _loaded(path, DataIdentity)


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
    """The first sample that no replica was given before a step, and those before it that do not count yet."""
    fresh, waiting = step * batch_size, tuple[SamplePlaces, ...]()
    records = read_json_lines(ledger, start="start").records if ledger.exists() else {}
    averages = False
    for record in in_force(records).values():
        if record.get("kind") == "start":
            averages = "mode" in record
        if averages:  # each line is of one replica's batch, and all that was assigned before a meeting counts
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
            "samples before it were assigned to replicas that died and are not trained. Set sync.mode to "
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
    is_partial = any(any(partial_files(path)) for path in data_files(run))  # so it comes from rank 0's
    if identity is not None and not is_partial:
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


def check_rate(run: RunFile, folder: RunFolder, step: int, tell: Tell) -> None:
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
    tell: Tell,
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
    begun = folder.load_run().model  # whose graph the folder keeps
    if (begun.part, begun.frozen_dtype) != (run.model.part, run.model.frozen_dtype):
        raise BiremeError(
            f"{where} has the state of another part of the model, or frozen weights in another format: set "
            "model.train, model.freeze, model.lora and model.frozen_dtype back to the values in "
            "the run.toml of the run, or start a new run."
        )
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
    old, new = str(manifest.extra.get(_SUM_CODEC, "none")), run.sync.codec
    if old != new:
        more = ""
        if parse_sum_codec(old).has_feedback:
            keeps = parse_sum_codec(new).has_feedback
            more = f" What {old} has not sent yet " + ("is sent with it." if keeps else "is dropped.")
        tell(f"Sums of gradients went through sync.codec = {old} before and go through {new} now.{more}")
    form = str(manifest.extra.get(GRADIENT, "whole"))
    if form != run.training.gradient:
        tell(
            f"Gradients were kept with training.gradient = {form} before, and with {run.training.gradient} "
            "now. Components of another rank start from scratch."
        )
    kept = manifest.extra.get(_DATA)
    known = load_identity(folder.data)
    if isinstance(kept, dict):
        known = as_dataclass(kept, DataIdentity, number=_FORMAT, source=f"{_DATA} of {where}")
    if known is None:
        doubt = (
            f"{folder.path} was started by a Bireme that kept no digest of the data: make sure that "
            f"{run.data.named} is what it was trained on."
        )
    else:
        doubt = check_same_data(known, identity, data, str(where))
    if doubt:
        tell(doubt)


def _named(position: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """A position in the data in words that people know."""
    words = {_BATCH_SIZE: "training.batch_size", _NUM_SAMPLES: "the number of samples in data.source"}
    return {words[key]: value for key, value in position.items() if key in words}
