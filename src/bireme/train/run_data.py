"""The data of a run: what its run file asks for, cut for its model, and its private samples."""

import hmac
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from bireme.cluster.cluster import Cluster
from bireme.documents import read_json
from bireme.errors import BiremeError, Progress, Tell, errors_of
from bireme.files import write_text_atomically
from bireme.model.graph import Graph
from bireme.model.units import units_of
from bireme.plan.plan import Plan, homes_of, servers_of_places
from bireme.profile.control import cache_folder
from bireme.runtime.microbatches import apportioned
from bireme.train.data.documents import StreamSamples
from bireme.train.data.mixture import (
    ELSEWHERE,
    MixedSamples,
    ReadableOrder,
    ReadableSamples,
    order_of,
    sources_of,
)
from bireme.train.data.placing import Numbers, Placing, SampleOrder, Stock
from bireme.train.data.prepare import (
    ModelSide,
    RunData,
    check_sizes,
    is_repeatable,
    longest_row,
    prepare_data,
    samples_digest,
    vocabulary_of,
)
from bireme.train.data.samples import Samples
from bireme.train.data.tokenizer import FolderTokenizer, Tokenizer
from bireme.train.model import RunModel
from bireme.train.run_file import RunFile
from bireme.train.run_file.defaults import default_length, folder_of, model_config


def learns(run: RunFile, data: RunData, graph: Graph) -> dict[str, Any]:
    """What a prepared run learns from, and how much of the model learns, in the words of JSON. `graph` is its
    model's in training.

    Unknown numbers are None, such as the samples of a stream; so are the epochs of a mixture, whose
    sources have different ones. `tokenizer` is equal for equal tokenizers, so that losses per token may be
    compared if it is equal; it is None, as `length` is, if the samples are not made of tokens.
    """
    sizes = {state.name: (math.prod(state.unpacked.shape), state.trainable) for state in graph.parameters}
    num_samples = _num_samples(data.training)
    is_mixture = isinstance(data.training, MixedSamples)
    trained = run.training.steps * run.training.batch_size
    return {
        "sources": [one.source for one in run.data.mixture or ()] or [run.data.named],
        "num_files": data.num_files,
        "num_tokens": data.num_tokens,
        "num_samples": num_samples,
        "num_evaluation_samples": None if data.evaluation is None else _num_samples(data.evaluation),
        "steps": run.training.steps,
        "epochs": None if is_mixture or not num_samples else trained / num_samples,
        "num_parameters": sum(size for size, _ in sizes.values()),
        "num_learning_parameters": sum(size for size, is_learning in sizes.values() if is_learning),
        "tokenizer": tokenizer_name(data.tokenizer),
        "length": run.data.length if data.is_text else None,
        "loss_on": data.loss_on,
        "dtype": run.model.dtype,
        "learning_rate": run.training.learning_rate,
    }


def tokenizer_name(tokenizer: Tokenizer | None) -> str | None:
    """Such as `bytes`, or the class of a tokenizer with its size and the first digits of its digest."""
    if not isinstance(tokenizer, FolderTokenizer):
        return None if tokenizer is None else "bytes"
    digest = tokenizer.identity.split()[-1]
    return f"{type(tokenizer.backend).__name__} of {tokenizer.num_tokens:,} tokens, {digest[:8]}"


def _num_samples(samples: Samples) -> int | None:
    every = sources_of(samples).values()
    return None if any(isinstance(one, StreamSamples) for one in every) else len(samples)


def with_length_of_data(run: RunFile, progress: Progress | None = None) -> RunFile:
    """The run with samples as long as the longest row with answers, up to the model's context and
    `LONGEST_ROW`, unless `data.length` was given.
    """
    data, folder = run.data, folder_of(run.model.source)
    if folder is None or "length" in data.model_fields_set or data.packing not in (None, "none"):
        return run
    most = default_length(model_config(folder), LONGEST_ROW)
    longest = None if most is None else longest_row(data, ModelSide({}, None, folder), progress)
    if most is None or longest is None:
        return run
    length = min(most, max(_STEP, -(-longest // _STEP) * _STEP))
    return run.with_keys("data", length=length)


LONGEST_ROW, _STEP = 2048, 8
"""Most tokens of a sample that follows from the data, and the multiple that a length is rounded up to."""


def counted(run: RunFile, data: RunData) -> RunFile:
    """The run with the steps of its epochs over these data."""
    if run.training.epochs is None:
        return run
    num_samples = _num_samples(data.training)
    if num_samples is None:
        raise BiremeError(
            f"training.epochs is {run.training.epochs:g}, but {run.data.named} is a stream, whose end is not "
            "known. Set training.steps instead."
        )
    return run.counted(num_samples)


def completed(run: RunFile) -> RunFile:
    """The run with all that follows from its data, for machines that are only sent a run file."""
    with suppress(BiremeError):  # a machine that only coordinates may have no data
        run = with_length_of_data(run)
    return run if run.training.epochs is None else counted(run, data_of(run, RunModel.of(run, 1)))


def data_of(
    run: RunFile,
    model: RunModel | None,
    progress: Progress | None = None,
    *,
    what: str = "training",
    keeps_rest: bool = False,
) -> RunData:
    """The samples of a run; the first time may take long, and later the cache has them.

    `what` and `keeps_rest` are as for `prepare_data`. Without a model nothing is checked against it.
    """
    return prepare_data(
        run.data,
        ModelSide({}) if model is None else _side(model),
        run.training.batch_size,
        progress,
        what=what,
        held_samples=run.training.batch_size * run.training.evaluation_batches,
        keeps_rest=keeps_rest,
    )


def private_samples_of(run: RunFile, model: RunModel, server: str) -> Samples:
    """The private samples of a server, for its own processes alone to read.

    They are cut like the public ones. All of them are for training.
    """
    source, key = (run.data.private or {})[server], f"data.private.{server}"
    own = {"source": source, "mixture": None, "evaluation_fraction": 0.0, "evaluation_source": None}
    alone = run.data.model_copy(update=own)
    with errors_of(f"{key} = {source!r}"):
        found = prepare_data(alone, _side(model), 1, what=key).training
    if isinstance(found, StreamSamples):
        raise BiremeError(
            f"{key} is a stream, whose number of samples is not known. Download it, or leave out "
            "streaming=true."
        )
    return found


def _side(model: RunModel) -> ModelSide:
    source = model.source
    vocabulary = vocabulary_of(source.model)
    return ModelSide(source.example_inputs, vocabulary, folder_of(source.text), model.reads_weights)


# The census of private data: what the processes of a run learn of the samples that only one server may read.
#
# That is how many samples a server holds, and a fingerprint by which the owner knows its own data again. The
# key of fingerprints lies in the owner's cache, so no other server can try rows against one.


@dataclass(frozen=True, slots=True)
class PrivateHolding:
    """The private samples of a server: how many, and their fingerprint under the key of that name."""

    num_samples: int
    fingerprint: str
    key: str


Census = Mapping[str, PrivateHolding]
"""What each server with private samples holds."""


class _Document(BaseModel):
    """The file of a census."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1]
    servers: dict[str, PrivateHolding]


def census_of(run: RunFile, model: RunModel, graph: Graph, data: RunData, servers: Iterable[str]) -> Census:
    """What some servers hold, whose processes are on this machine. Refuses what cannot be trained on."""
    found = {}
    for server in servers:
        samples = private_samples_of(run, model, server)
        check_sizes(samples, graph.inputs, f"data.private.{server}", is_text=data.is_text)
        found[server] = _holding(samples)
    return found


def _holding(samples: Samples) -> PrivateHolding:
    key, digest = _own_key(), samples_digest(samples)
    if not samples.is_quick and not is_repeatable(samples, digest):
        digest = "draws numbers of its own each time"
    fingerprint = hmac.digest(key.encode(), digest.encode(), "sha256").hex()
    return PrivateHolding(len(samples), fingerprint, sha256(key.encode()).hexdigest()[:12])


def _own_key() -> str:
    """The key of this machine's fingerprints, made when there is none; its owner alone can read it."""
    path, key = cache_folder() / "private.key", token_hex(32)
    with suppress(OSError):  # then the data are not known again, and nothing else is lost
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, made = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(handle, "w") as file:
                file.write(key)
            with suppress(FileExistsError):  # another run was first
                os.link(made, path)
            Path(made).unlink()
        return path.read_text(encoding="ascii")
    return key


def plain_census(census: Census) -> dict[str, Any]:
    """In the words of JSON."""
    return {server: asdict(holding) for server, holding in census.items()}


def census_from(plain: Mapping[str, Any]) -> Census:
    """What `plain_census` has made."""
    return {server: PrivateHolding(**holding) for server, holding in plain.items()}


def write_census(path: Path, census: Census) -> None:
    """Keep it in a run's folder, where there is any."""
    if census:
        document = {"format": 1, "servers": plain_census(census)}
        write_text_atomically(path, json.dumps(document, indent=1) + "\n")


def load_census(path: Path) -> Census:
    """The census in a run's folder; an empty one if the folder has none."""
    return read_json(path, _Document).servers if path.is_file() else {}


def check_same_census(before: Census, now: Census, where: str, tell: Tell) -> None:
    """Refuse other private data than those before; `tell` gets a sentence where that cannot be known."""
    for server in sorted({*before, *now}):
        old, new = before.get(server), now.get(server)
        had, has = (0 if one is None else one.num_samples for one in (old, new))
        is_known = old is not None and new is not None and old.key == new.key
        if had != has or (is_known and old != new):
            raise BiremeError(
                f"{where} was trained with {had} private samples of {server}, and now it has "
                f"{has if had != has else 'as many others'}. Put the data back, or begin a new run."
            )
        if not is_known:
            tell(
                f"{server} has lost the key of its fingerprints, so whether its private samples are the same "
                "is not known."
            )


# What one process of a run with private data reads: public samples, and those of its own server.


def readers_of(graph: Graph) -> tuple[int, ...]:
    """The units that read inputs of the model, which must be where private samples are."""
    return tuple(unit.index for unit in units_of(graph) if unit.inputs)


@dataclass(frozen=True, slots=True)
class ReadableData:
    """The samples that this process may read, and where all samples are placed.

    `public` is the order of the public samples. `owners` are the servers with private samples, `homes` the
    place in it of each replica's home, and `own` that of this process's server; None where nothing private is
    there. `planned` are the rows of a batch that the plan gives each replica.
    """

    samples: Samples
    public: SampleOrder
    stock: Stock
    seed: int
    owners: tuple[str, ...]
    homes: tuple[int | None, ...]
    own: int | None
    planned: tuple[int, ...]

    def order(self, rows: Callable[[int], Sequence[int]]) -> ReadableOrder:
        """The order of the run, where `rows(step)` are those that each replica has of a batch."""
        return ReadableOrder(
            self.stock, self.seed, self.homes, self.planned, rows, own=self.own, public=self.public
        )

    def added(self, replica: int) -> Callable[[int], Numbers]:
        """The private samples that a replica adds to the public ones of its batches, by the batch's number.

        The replicas of one home divide its samples of each batch.
        """
        home = self.homes[replica]
        if home is None:
            return lambda _batch: np.empty(0, np.int64)
        alike = [number for number, one in enumerate(self.homes) if one == home]
        place, turns = alike.index(replica), self._placing.turns[home]

        def numbers(batch: int) -> Numbers:
            count = turns.count(batch)
            begin, end = (count * one // len(alike) for one in (place, place + 1))
            if self.own != home:
                return np.full(end - begin, ELSEWHERE, np.int64)
            return ELSEWHERE - 1 - turns.numbers(batch, begin, end)

        return numbers

    @property
    def placement(self) -> dict[str, Any]:
        """What an epoch takes and leaves, as planned, for JSON."""
        epoch = self._placing.epoch
        return {
            "steps_per_epoch": self.stock.steps_per_epoch,
            "private_taken": dict(zip(self.owners, epoch.own, strict=True)),
            "private_left_out": dict(zip(self.owners, epoch.own_left_out, strict=True)),
            "public_taken": min(epoch.public, self.stock.num_public),
            "public_left_out": epoch.public_left_out,
            "public_repeated": epoch.public_repeated,
        }

    @property
    def sentence(self) -> str:
        """The same for people."""
        epoch, stock = self._placing.epoch, self.stock
        own = ", ".join(
            f"{taken} of {there} private samples of {server}"
            for server, taken, there in zip(self.owners, epoch.own, stock.num_private, strict=True)
        )
        repeated = f", {epoch.public_repeated} more than once" if epoch.public_repeated else ""
        if stock.is_added:
            return (
                f"Each step has {stock.batch_size} public samples and private ones beside them. An epoch has "
                f"{stock.steps_per_epoch} steps and takes {own}."
            )
        public = f"{min(epoch.public, stock.num_public)} of {stock.num_public} public ones{repeated}"
        return f"An epoch has {stock.steps_per_epoch} steps and takes {own}, and {public}."

    @property
    def _placing(self) -> Placing:
        return self.order(lambda _step: self.planned).placing


def stock_of(run: RunFile, public: Samples, census: Census) -> Stock:
    """The samples of a run. If public ones are a stream, an epoch is the whole run.

    A coordinator assigns public samples alone, so private ones come beside them.
    """
    private = tuple(census[name].num_samples for name in sorted(census))
    size, is_added = run.training.batch_size, run.sync.is_coordinated
    is_stream = any(isinstance(one, StreamSamples) for one in sources_of(public).values())
    left = run.training.steps * size - (0 if is_added else sum(private))
    return Stock(max(left, 1) if is_stream else len(public), private, size, is_added)


def readable_data(
    run: RunFile,
    model: RunModel,
    graph: Graph,
    public: Samples,
    census: Census,
    plan: Plan,
    cluster: Cluster,
    place: int,
) -> ReadableData:
    """What the process at a place of the plan reads. It opens the private data of its own server alone."""
    owners = tuple(sorted(census))
    server = servers_of_places(plan, cluster)[place]
    own = private_samples_of(run, model, server) if server in census else None
    return ReadableData(
        ReadableSamples(public, own, server),
        order_of(public, run.data.seed),
        stock_of(run, public, census),
        run.data.seed,
        owners,
        _homes(graph, census, plan, cluster),
        owners.index(server) if server in census else None,
        _planned_rows(run, plan),
    )


def most_added(
    run: RunFile, graph: Graph, public: Samples, census: Census, plan: Plan, cluster: Cluster
) -> tuple[int, ...]:
    """The most private samples that each replica adds to a batch of public ones."""
    homes, planned = _homes(graph, census, plan, cluster), _planned_rows(run, plan)
    rows = [
        sum(one for one, home in zip(planned, homes, strict=True) if home == owner)
        for owner in range(len(census))
    ]
    turns = Placing(stock_of(run, public, census), run.data.seed, tuple(rows)).turns
    most = [-(-one.window // one.steps) for one in turns]
    return tuple(0 if home is None else -(-most[home] // homes.count(home)) for home in homes)


def _homes(graph: Graph, census: Census, plan: Plan, cluster: Cluster) -> tuple[int | None, ...]:
    """The place of each replica's home among the servers with private samples."""
    owners = sorted(census)
    homes = homes_of(plan, cluster, readers_of(graph))
    return tuple(owners.index(home) if home is not None and home in census else None for home in homes)


def _planned_rows(run: RunFile, plan: Plan) -> tuple[int, ...]:
    """The rows of a batch that the plan gives each replica."""
    m = plan.num_microbatches
    shares = plan.micro_batch_sizes or (1,) * plan.width
    rows = apportioned(run.training.batch_size, [share for share in shares for _ in range(m)])
    return tuple(sum(rows[first : first + m]) for first in range(0, len(rows), m))
