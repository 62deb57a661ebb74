"""The base of a run that trains a part of a model: the folder that its frozen weights are read from.

Checkpoints of such a run leave out what the base holds and nothing changes, and keep a digest of the base
instead. Weights that are made from a seed lie in no folder: they are in the checkpoints of their run.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from pydantic import JsonValue
from torch import Tensor

from bireme.bounds import Bytes
from bireme.documents import as_dataclass, read_dataclass
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.model.graph import Graph
from bireme.model.part import WHOLE
from bireme.model.weights import METADATA, open_weights, weight_files
from bireme.train.checkpoint.disk import digest_of
from bireme.train.checkpoint.manifest import Manifest
from bireme.train.model import RunModel
from bireme.train.run_file import RunFile

BASE = "base"
"""Where the manifest of a checkpoint says which base it belongs to."""

_FORMAT = 1

_MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """What tells a base from others: the bytes of its files, and a digest of all of them.

    `source` is the model's source when the run began, for people.
    """

    source: str
    num_bytes: Bytes
    sha256: str

    def plain(self) -> dict[str, JsonValue]:
        """As JSON has it."""
        return {"format": _FORMAT, **asdict(self)}


def has_base(run: RunFile) -> bool:
    """Whether the checkpoints of a new run leave out frozen weights, which its base holds."""
    return _base_folder(run) is not None


def base_identity(run: RunFile) -> BaseIdentity | None:
    """The identity of a run's base, for which all its files are read; None if the run has no base."""
    folder = _base_folder(run)
    if folder is None:
        return None
    files = weight_files(folder)
    with ThreadPoolExecutor(_MOST_THREADS) as threads:
        digests = list(threads.map(digest_of, files))
    words = sha256()
    for file, digest in zip(files, digests, strict=True):
        words.update(f"{file.name} {digest.sha256}\n".encode())
    num_bytes = sum(digest.num_bytes for digest in digests)
    return BaseIdentity(run.model.weights or run.model.source, num_bytes, words.hexdigest())


def _base_folder(run: RunFile) -> Path | None:
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
        return
    write_text_atomically(path, json.dumps(identity.plain(), indent=1) + "\n")


def load_base(path: Path) -> BaseIdentity | None:
    """What a run's folder keeps; None where checkpoints hold all weights."""
    return read_dataclass(path, BaseIdentity, number=_FORMAT) if path.is_file() else None


def base_of_checkpoint(manifest: Manifest) -> BaseIdentity | None:
    """The base that a checkpoint needs; None if it holds all weights."""
    kept = manifest.extra.get(BASE)
    if not isinstance(kept, dict):
        return None
    return as_dataclass(kept, BaseIdentity, number=_FORMAT, source=f"{BASE} of the checkpoint")


def check_same_base(before: BaseIdentity, run: RunFile, where: str) -> None:
    """Refuse a run whose frozen weights are not those `before`; `where` is what needs them."""
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


class BaseWeights:
    """Reads frozen weights of a checkpoint from its base, one by one, in the dtype that the graph has.

    The base is checked and opened when the first is read. Use it as a context.
    """

    def __init__(self, run: RunFile, graph: Graph, identity: BaseIdentity, where: str) -> None:
        self._run, self._graph, self._identity, self._where = run, graph, identity, where
        self._stack = ExitStack()
        self._model: RunModel | None = None

    def __enter__(self) -> "BaseWeights":
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def __getitem__(self, name: str) -> Tensor:
        if self._model is None:
            self._model = self._open()
        adapter = self._model.source.adapter
        return self._read(name if adapter is None else adapter.base_names[name])

    def _open(self) -> RunModel:
        check_same_base(self._identity, self._run, self._where)
        model = RunModel.of(self._run, 1)
        folder = _base_folder(self._run)
        assert folder is not None
        graph = model.source.base_graph(self._graph)
        self._read = self._stack.enter_context(open_weights(graph, folder, model=model.source.base))
        return model
