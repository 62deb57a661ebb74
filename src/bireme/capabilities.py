"""The capabilities of Bireme: which keys of a run file switch each on, and which two exclude each other.

Only `refuse_excluded` refuses two capabilities together. Run files, plans and pipelines from Python all call
it. Capabilities of one axis are alternatives: a run has at most one of them, so two of them are not a pair.
docs/composition.md, `bireme capabilities` and tests/composition/ are made from this file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from bireme.errors import BiremeError, closest

Read = Callable[[str], Any]
"""Gives the value of a key of a run file, such as "plan.schedule"."""


@dataclass(frozen=True, slots=True)
class Capability:
    """One capability. `settings` are keys of a run file that switch it on, each as `--set` takes it.

    A run file uses it if `test` holds or, without one, if the first of these keys has this value. `excludes`
    gives for other capabilities the reason of principle why a run cannot have both.
    """

    name: str
    title: str
    axis: str
    settings: Mapping[str, str | int]
    test: Callable[[Read], bool] | None = None
    excludes: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The key that an error names."""
        return next(iter(self.settings))

    def is_used(self, read: Read) -> bool:
        """Whether a run file uses it."""
        return read(self.key) == self.settings[self.key] if self.test is None else self.test(read)


HOST, FOLDER, ROWS = "HOST", "TEXTS", "ROWS.txt"
"""In settings: the name of this machine, a folder of texts, and a file of rows. They differ by machine."""


def _is_set(key: str) -> Callable[[Read], bool]:
    return lambda read: read(key) not in (None, False)


def _is_other_than(key: str, *usual: object) -> Callable[[Read], bool]:
    return lambda read: read(key) not in usual


def _has_codec_between(read: Read) -> bool:
    return read("links.codec") not in (None, "none") or bool(read("links.boundaries"))


def _is_tied(read: Read) -> bool:
    # Without the word in its source, a plan finds out whether a model ties weights of two stages.
    source = str(read("model.source")).replace(" ", "")
    return source.startswith("gpt:") and "tied=true" in source and (read("plan.depth") or 1) > 1


def _streams(read: Read) -> bool:
    sources = [read("data.source"), *(one.source for one in read("data.mixture") or ())]
    return any("streaming=true" in str(one).replace(" ", "") for one in sources)


SCHEDULE, AGREEMENT = "schedule", "how replicas agree"

_SPLIT = (
    "Principal components of a gradient are made from the inputs and output gradients of a layer in one "
    "backward, and this schedule runs the two halves of a backward at different times."
)
_COMPILED = (
    "Principal components are made from the inputs and output gradients of each layer, and a compiled stage "
    "does not give them."
)
_TRIAL = (
    "A trial step takes gradients of one replica before any sum, and a replica that shares weights has only "
    "its own part of them."
)


def _schedule(name: str, title: str, **excludes: str) -> Capability:
    settings: dict[str, str | int] = {"plan.schedule": name, "plan.depth": 2, "cluster.workers": 4}
    return Capability(name, title, SCHEDULE, settings, excludes=excludes)


def _sums(read: Read) -> bool:
    # With one replica there is nobody to sum with, so the usual mode is in use only with more of them.
    return read("sync.mode") == "allreduce" and (read("plan.width") or 1) > 1


_TWO_STAGES: Mapping[str, str | int] = {"plan.depth": 2, "cluster.workers": 4}
_TWO_REPLICAS: Mapping[str, str | int] = {"plan.width": 2, "cluster.workers": 4}
_LORA: Mapping[str, str | int] = {
    "model.lora.rank": 8,
    "model.lora.targets": '["query_key_value"]',
    "model.lora.merge": "true",
}
_TIED = "gpt:layers=2,width=64,heads=2,vocab=257,context=128,tied=true"


def _mode(name: str, title: str, test: Callable[[Read], bool] | None = None, **more: int) -> Capability:
    settings = {"sync.mode": name, **_TWO_REPLICAS, **{f"sync.{key}": value for key, value in more.items()}}
    return Capability(name, title, AGREEMENT, settings, test)


_ALL = (
    _schedule("sequential", "One micro-batch at a time"),
    _schedule("gpipe", "GPipe: all forwards, then all backwards"),
    _schedule("1f1b", "1F1B"),
    _schedule("1f1b-sliced", "1F1B with the first micro-batches sliced in halves"),
    _schedule("interleaved", "Interleaved 1F1B: several stages on a rank"),
    _schedule("zb-h1", "ZB-H1: zero bubble, backward in halves", principal=_SPLIT),
    _schedule("zbv", "ZB-V: zero bubble, two stages on a rank", principal=_SPLIT),
    _schedule("2bw", "PipeDream-2BW: updates one batch late"),
    _schedule("2bw-fresh", "2BW with trial steps"),
    _mode("allreduce", "All-reduce of gradients in every batch", _sums),
    _mode("quorum", "Sums of gradients of the replicas that are ready; replicas may die"),
    _mode("groups", "Averages of weights in groups of replicas that are ready"),
    _mode("diloco", "DiLoCo: averages of what replicas learned", diloco_every=2),
    Capability(
        "boundary-codec",
        "Codec at stage boundaries",
        "codec at stage boundaries",
        {"links.codec": "int8", **_TWO_STAGES},
        _has_codec_between,
    ),
    Capability(
        "sum-codec",
        "Codec in sums over replicas",
        "codec in sums",
        {"sync.codec": "int4", **_TWO_REPLICAS},
        _is_other_than("sync.codec", "none"),
    ),
    Capability(
        "principal",
        "Gradients as principal components",
        "form of gradients",
        {"training.gradient": "principal:2"},
        _is_other_than("training.gradient", "whole"),
        {"compile": _COMPILED},
    ),
    Capability(
        "balance",
        "Shares of a batch that follow the speed of the replicas",
        "balance",
        {"balance.mode": "measured", **_TWO_REPLICAS},
    ),
    Capability(
        "shard-optimizer",
        "ZeRO-1: replicas share the optimizer",
        "what replicas share",
        {"memory.shard": "optimizer", **_TWO_REPLICAS},
    ),
    Capability(
        "shard-weights",
        "ZeRO-3: replicas share weights, gradients and the optimizer",
        "what replicas share",
        {"memory.shard": "weights", **_TWO_REPLICAS},
        excludes={"2bw-fresh": _TRIAL},
    ),
    Capability(
        "offloading",
        "Offloading to host memory and disk",
        "offloading",
        {"memory.device": "12MB"},
        _is_set("memory.device"),
    ),
    Capability(
        "copies",
        "Second copies of the state in another process, from which a run goes on",
        "second copies",
        {"memory.copies": 1},
    ),
    Capability("recompute", "Activation checkpointing", "activations", {"plan.recompute": "always"}),
    Capability(
        "compile",
        "Stages compiled by torch",
        "compilation",
        {"model.compile": "true"},
        _is_set("model.compile"),
    ),
    Capability(
        "bfloat16", "bfloat16 with float32 master weights", "number format", {"model.dtype": "bfloat16"}
    ),
    Capability("muon", "Muon", "optimizer", {"training.optimizer": "muon"}),
    Capability("lora", "LoRA adapter", "part of the model that learns", _LORA, _is_set("model.lora.rank")),
    Capability(
        "nf4",
        "Frozen weights in four bits (QLoRA)",
        "number format of frozen weights",
        {"model.frozen_dtype": "nf4", **_LORA},
    ),
    Capability(
        "tied", "Weights tied over stages", "tied weights", {"model.source": _TIED, **_TWO_STAGES}, _is_tied
    ),
    Capability(
        "private-data",
        "Samples that only one server reads",
        "private data",
        {"data.private": f'{{"{HOST}" = "stdlib"}}'},
        _is_set("data.private"),
    ),
    Capability(
        "mixture",
        "A weighted mixture of sources",
        "mixture",
        {"data.mixture": f'[{{source = "stdlib", weight = 3}}, {{source = "{FOLDER}"}}]'},
        _is_set("data.mixture"),
    ),
    Capability(
        "stream",
        "Data read as a stream",
        "stream",
        {"data.source": f"hf:{ROWS},streaming=true"},
        _streams,
    ),
)

CAPABILITIES: Mapping[str, Capability] = {one.name: one for one in _ALL}
"""All of them, by their names."""

# Pairs that only missing code excludes. Delete a line when its pair works.
_PARTS = "Gradients that replicas sum in parts are whole so far."

NOT_YET: Mapping[tuple[str, str], str] = {
    ("principal", "shard-optimizer"): _PARTS,
    ("principal", "shard-weights"): _PARTS,
}


def exclusion(one: str, other: str) -> str | None:
    """Why a run cannot have both; None if it can."""
    first, second = CAPABILITIES[one], CAPABILITIES[other]
    return (
        first.excludes.get(other)
        or second.excludes.get(one)
        or NOT_YET.get((one, other))
        or NOT_YET.get((other, one))
    )


def pairs(capabilities: Iterable[Capability]) -> Iterator[tuple[Capability, Capability]]:
    """Every two of these that are of different axes, once."""
    return ((one, other) for one, other in combinations(capabilities, 2) if one.axis != other.axis)


def settings_of(capabilities: Sequence[Capability]) -> dict[str, str | int]:
    """The keys of a run file that switch on all of these. A source beside a mixture becomes one of it, and
    replicas that share, but may die, are in two sites.
    """
    found = {key: value for one in capabilities for key, value in one.settings.items()}
    if "memory.shard" in found and found.get("sync.mode") in ("quorum", "groups", "diloco"):
        found |= {"sync.sites": 2, "plan.width": 4}
    if "data.mixture" in found and "data.source" in found:
        source = found.pop("data.source")
        found["data.mixture"] = f'[{{source = "stdlib", weight = 3}}, {{source = "{source}"}}]'
    return found


def used_by(read: Read) -> dict[str, str]:
    """The capabilities that a run file uses, each with words that name what asks for it."""
    return {one.name: _words(one.key, read(one.key)) for one in _ALL if one.is_used(read)}


def refuse_excluded(used: Mapping[str, str]) -> None:
    """Refuse two capabilities that exclude each other; `used` has words for what asks for each."""
    for (one, words), (other, more) in combinations(used.items(), 2):
        reason = exclusion(one, other)
        if reason is not None:
            raise BiremeError(f"{words}, and {more}. {reason} Leave out one of the two.")


def capability_named(name: str) -> Capability:
    """The capability of that name."""
    if name not in CAPABILITIES:
        raise BiremeError(f"There is no capability {name!r}. {closest(name, CAPABILITIES)}")
    return CAPABILITIES[name]


def _words(key: str, value: object) -> str:
    if isinstance(value, str):
        return f'{key} is "{value}"'
    return f"{key} is {value}" if isinstance(value, int) and not isinstance(value, bool) else f"{key} is set"
