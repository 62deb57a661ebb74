"""What `bireme evaluate` and `bireme generate` take: a run, or a folder with a model, and its parts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from bireme.bounds import counted
from bireme.cluster.machine import available_bytes
from bireme.devices import ACCELERATOR, device_of_process, num_accelerators, properties_of
from bireme.documents import toml_value
from bireme.errors import BiremeError, Tell
from bireme.model.decoder import Decoder, DecoderLayers
from bireme.model.graph import Graph, Reference, Value, evaluate
from bireme.model.sources import load_source
from bireme.model.stage import StageFunction
from bireme.model.units import Unit, units_of
from bireme.model.weights import Weights, check_weights
from bireme.plan.plan_file import load_plan
from bireme.runtime.message_format import TensorSpec
from bireme.runtime.token_line import SCORES, ModelPart, Tensors
from bireme.runtime.world import World
from bireme.train.checkpoint.checkpoint import Checkpoint, Holders, newest_good, open_checkpoint
from bireme.train.folder import ABOUT, RunFolder, exported_length, exported_step
from bireme.train.model import RunModel, folder_weights, with_rest
from bireme.train.rendezvous import Announcements
from bireme.train.resume_checks import base_of_checkpoint, check_same_base
from bireme.train.run_file import RunFile, load_run_file

# The parts of a model that writes: some layers of a decoder with a cache, or some units of a captured graph.
#
# Weights that have room in the memory of a process stay there, the others are read whenever they are needed.


_FILLED = 0.8
"""Share of the free memory that weights may take, so that there is room for what goes through them."""

IDS = "input_ids"
_LOGITS, _HIDDEN = "logits", "hidden"

_READ_BYTES, _NUM_TRIES = 2**27, 3
_DISK_SLOWNESS = 20
"""Memory is about so many times as fast as a disk."""


def room_on(device: torch.device) -> float:
    """The bytes that weights may take on a device."""
    return _FILLED * (available_bytes() if device.type == "cpu" else properties_of(device).memory_bytes)


def num_bytes_of(states: Graph) -> int:
    """The bytes of all weights of a model."""
    return sum(state.num_bytes for state in (*states.parameters, *states.buffers))


def num_gpus_for(run: RunFile, num_bytes: int) -> int:
    """How many GPUs like those of this machine have room for so many bytes of weights; 1 if the run computes
    on CPUs.
    """
    if not (num := num_accelerators()) or run.cluster.device == "cpu":
        return 1
    room = min(room_on(device_of_process(ACCELERATOR, place)) for place in range(num))
    return max(1, -int(-num_bytes // room))


def check_count(count: int, num_parts: int, what: str) -> None:
    """Refuse more processes than a model has parts."""
    if count > num_parts:
        raise BiremeError(
            f"The model has {num_parts} {what}, which are too few for {count} processes: each needs one. Ask "
            "for fewer."
        )


@dataclass(frozen=True, slots=True)
class PartPlace:
    """The process of a part: the bytes that weights may take there, and how fast they are read."""

    room: float
    bytes_per_s: float = 1.0


def reading_speed(device: torch.device) -> float:
    """The bytes per second that a sum of numbers reads, in the best of a few tries."""
    numbers, best_s = torch.ones(_READ_BYTES // 4, device=device), inf
    for _ in range(_NUM_TRIES):
        begin_s = perf_counter()
        float(numbers.sum())
        best_s = min(best_s, perf_counter() - begin_s)
    return _READ_BYTES / best_s


def places_of(world: World) -> list[PartPlace]:
    """The places of all ranks. Processes of one machine have equal speeds."""
    sharing = 1 if world.device.type == "cpu" else num_accelerators()
    own = room_on(world.device) / max(1.0, world.num_local / sharing)
    speed = reading_speed(world.device) if world.num_local < world.size else 1.0
    found = Announcements(world.store).gather("place", (own, speed), world.rank, world.size)
    return [PartPlace(*one) for one in found]


@dataclass(frozen=True, slots=True)
class DividedModel:
    """A model in parts: a decoder with a cache, else a captured graph. `states` are the decoder's, or the
    graph. The model is called `name` in errors, and reads at most `context` tokens.
    """

    name: str
    states: Graph
    decoder: Decoder | None
    context: int

    def sizes(self) -> list[int]:
        """The bytes of the weights of each layer or unit."""
        if self.decoder is not None:
            return self.decoder.sizes(self.states)
        return sizes_of(self.states, _units(self.states, self.name))

    def part(
        self,
        weights: Weights,
        device: torch.device,
        places: Sequence[PartPlace],
        rank: int = 0,
        cuts: Sequence[int] | None = None,
    ) -> "DecoderPart | CapturedPart":
        """The part of a rank, with its weights. `places` are those of all ranks; without `cuts` they divide
        the model.
        """
        sizes = self.sizes()
        cuts = divided(sizes, places) if cuts is None else cuts
        own = range(*list(pairwise([0, *cuts, len(sizes)]))[rank])
        kind = CapturedPart if self.decoder is None else DecoderPart
        return kind(self, own, weights, device, places[rank].room)


def sizes_of(states: Graph, units: Sequence[Unit]) -> list[int]:
    """The bytes of the weights of each unit."""
    held = {state.name: state.num_bytes for state in (*states.parameters, *states.buffers)}
    return [sum(held[one] for one in (*unit.parameters, *unit.buffers)) for unit in units]


def divided(sizes: Sequence[int], places: Sequence[PartPlace]) -> tuple[int, ...]:
    """Where each part but the first begins, so that a token is through all parts soonest: one after the other
    reads its weights, those without room from a disk. Places of equal speed get equal parts if they can.
    """
    so_far = [0, *accumulate(sizes)]
    # For each end of the parts so far: the seconds of all of them and of the slowest one, and where they end.
    ways: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for place in places:
        more: dict[int, list[tuple[float, float, tuple[int, ...]]]] = {}
        for begin, (total_s, most_s, ends) in ways.items():
            for end in range(begin + 1, len(so_far)):
                held = so_far[end] - so_far[begin]
                own_s = (held + _DISK_SLOWNESS * max(held - place.room, 0)) / place.bytes_per_s
                more.setdefault(end, []).append((total_s + own_s, max(most_s, own_s), (*ends, end)))
        ways = {end: min(found) for end, found in more.items()}
    return ways[len(sizes)][2][:-1]


class DecoderPart(ModelPart):
    """Some layers of a decoder of transformers."""

    has_cache = True

    def __init__(
        self, model: DividedModel, own: range, weights: Weights, device: torch.device, room: float
    ) -> None:
        assert model.decoder is not None, "else the model is captured"
        self.context, self.device = model.context, device
        self._list = model.decoder.layers
        self._layers = DecoderLayers(model.decoder, own, model.states, weights, device=device, room=room)
        self.how = "with a cache of keys and values"
        if self._layers.num_read:
            self.how += f", {counted(self._layers.num_read, 'layer')} read for each token"

    def run(self, ids: Sequence[int], count: int, received: Tensors) -> Tensors:
        """Run the new tokens."""
        fresh = torch.tensor([ids[-count:]], device=self.device)
        made = self._layers(fresh, received.get(_HIDDEN), begins=count == len(ids))
        return {SCORES if made.ndim == 1 else _HIDDEN: made}

    def receives(self, count: int) -> tuple[TensorSpec, ...]:
        """The hidden state of the new tokens."""
        assert self._list is not None, "a decoder without a list of layers is whole"
        return (TensorSpec(_HIDDEN, (1, count, self._list.width), self._list.dtype),)

    sends = receives


class CapturedPart(ModelPart):
    """Some units of a graph, each a stage of its own, without gradients and without a cache."""

    def __init__(
        self, model: DividedModel, own: range, weights: Weights, device: torch.device, room: float
    ) -> None:
        graph = model.states
        self.context, self.device = _length_of(graph), device
        self._output = _logits_of(graph, model.name)
        self._weights = weights
        self._inputs = [value.name for value in graph.inputs]
        self._values = graph.values
        states = {state.name: state for state in (*graph.parameters, *graph.buffers)}
        self._dtypes = {name: getattr(torch, state.dtype) for name, state in states.items()}
        units = _units(graph, model.name)[own.start : own.stop]
        self._functions = [StageFunction(graph, [unit], outputs=(self._output,)) for unit in units]
        self._kept: list[Mapping[str, Tensor] | None] = []
        for function in self._functions:
            room -= sum(states[name].num_bytes for name in (*function.parameters, *function.buffers))
            self._kept.append(self._read(function) if room >= 0 else None)
        num_read = sum(one is None for one in self._kept)
        self.how = "without a cache, so that each token takes all tokens before it again"
        if num_read:
            self.how += f", {counted(num_read, 'unit')} read for each token"

    @torch.no_grad()
    def run(self, ids: Sequence[int], count: int, received: Tensors) -> Tensors:
        """Run all tokens. Attention is causal, so the padding after them is not seen."""
        given = torch.zeros((1, self.context), dtype=torch.int64, device=self.device)
        given[0, : len(ids)] = torch.tensor(list(ids))
        values = {**dict.fromkeys(self._inputs, given), **received}
        for function, kept in zip(self._functions, self._kept, strict=True):
            weights = self._read(function) if kept is None else kept
            values |= function(weights, weights, values, device=self.device)
        if self._output in values:
            return {SCORES: values[self._output][0, len(ids) - 1]}
        return {name: values[name] for name in self._functions[-1].sends}

    def receives(self, count: int) -> tuple[TensorSpec, ...]:
        """The values that the first unit receives, for all places of a text."""
        return self._specs(self._functions[0].receives)

    def sends(self, count: int) -> tuple[TensorSpec, ...]:
        """The values that the last unit sends."""
        return self._specs(self._functions[-1].sends)

    def _specs(self, names: Sequence[str]) -> tuple[TensorSpec, ...]:
        found = [self._values[name] for name in names]
        shapes = [tuple(evaluate(length, 1) for length in value.shape) for value in found]
        return tuple(
            TensorSpec(value.name, shape, getattr(torch, value.dtype))
            for value, shape in zip(found, shapes, strict=True)
        )

    def _read(self, function: StageFunction) -> dict[str, Tensor]:
        found = self._weights((*function.parameters, *function.buffers))
        return {name: one.to(self.device, self._dtypes[name]) for name, one in found.items()}


def _length_of(graph: Graph) -> int:
    """The tokens that a graph reads."""
    ids = next(value for value in graph.inputs if value.name == IDS)
    return evaluate(ids.shape[1], 1)


def _units(graph: Graph, name: str) -> tuple[Unit, ...]:
    """The units of a graph up to the one that makes the scores."""
    output = next(one for one in graph.outputs if one.name == _logits_of(graph, name))
    assert isinstance(output.value, Reference)
    place, units = graph.made_by[output.value.name], units_of(graph)
    return units[: 1 + max(unit.index for unit in units if place in unit.operators)]


def _logits_of(graph: Graph, name: str) -> str:
    """The output with a score for each place and token."""
    values: dict[str, Value] = graph.values
    for output in sorted(graph.outputs, key=lambda one: one.name != _LOGITS):
        value = values.get(output.value.name) if isinstance(output.value, Reference) else None
        if value is not None and len(value.shape) == 3 and value.shape[1] == _length_of(graph):
            return output.name
    raise BiremeError(
        f"{name} holds a model that returns no scores for the next token. Let its forward return them as "
        "`logits`, beside its loss."
    )


# A run at its last checkpoint, or a folder with a model: either becomes a run file that makes the model, and
# the place where its weights are.


_BATCH_SIZE = 8


@dataclass(frozen=True, slots=True)
class Subject:
    """A model with its weights: those of `checkpoint` or in `folder`, or else those that its source has.

    `run` makes the model, and says which data were kept apart to evaluate it with if `is_run`. `graph` is
    where its graph for evaluation is, if that was captured before. A batch goes through in
    `num_microbatches` parts. `step` is that of the weights, where it is known. The `holders` have the files
    of a checkpoint that are not here.
    """

    name: str
    run: RunFile
    step: int | None = None
    checkpoint: Path | None = None
    folder: Path | None = None
    graph: Path | None = None
    num_microbatches: int = 1
    is_run: bool = False
    holders: Holders = field(default_factory=dict)

    def weights(self, model: RunModel, graph: Graph) -> Weights:
        """Reads parameters and buffers by name; those that no file holds are initialized."""
        if self.checkpoint is not None:
            checkpoint = replace(open_checkpoint(self.checkpoint), holders=self.holders)
            return _of_checkpoint(checkpoint, model.weights(graph))
        if self.folder is not None:
            return folder_weights(graph, self.folder, model.source.model, model.weights(graph))
        return model.weights(graph)

    def check(self, model: RunModel, graph: Graph) -> None:
        """Refuse weights that are not those of the model, or not there."""
        if self.folder is not None:
            check_weights(graph, self.folder, model=model.source.model)
        elif self.checkpoint is not None:
            base = base_of_checkpoint(open_checkpoint(self.checkpoint).manifest)
            if base is not None:
                check_same_base(base, self.run, str(self.checkpoint))
        elif model.source.folder is None:
            raise BiremeError(
                f"{self.name} holds a model without weights: there are no safetensors next to its "
                "config.json."
            )
        else:
            model.check_weights(graph)


def subject_of(text: str, sets: Sequence[str], tell: Tell) -> Subject:
    """The run or the model that `text` names; `sets` change keys of its run file.

    `tell` is told of checkpoints that are damaged.
    """
    path = Path(text.removeprefix("hf:")).expanduser()
    if not path.is_dir():
        raise BiremeError(
            f"{path} is not a folder. Name the folder of a run, of a model that a run has exported, or of "
            "a transformers model. Nothing is downloaded."
        )
    if RunFolder(path).run_file.is_file():
        return _of_run(RunFolder.of(path), sets, tell)
    if (path / "config.json").is_file():
        run = _run_of(f"hf:{path.resolve()}", exported_length(path), sets)
        return Subject(str(path), run, step=exported_step(path))
    if (path / "adapter_config.json").is_file():
        raise BiremeError(
            f"{path} holds an adapter without the model that it belongs to. Name the folder of its run, or "
            "let `bireme merge RUN --to FOLDER` write the whole model, and name that."
        )
    if (path / ABOUT).is_file():
        source = _exported_source(path / ABOUT)
        run = _run_of(source, exported_length(path) or _length_of_source(source), sets)
        return Subject(str(path), run, exported_step(path), folder=path.resolve())
    raise BiremeError(
        f"{path} is neither the folder of a run nor that of a model: it has no run.toml, no config.json and "
        f"no {ABOUT}. Name one that `bireme train` made, or a folder that transformers can load."
    )


def _of_run(folder: RunFolder, sets: Sequence[str], tell: Tell) -> Subject:
    before = load_run_file(folder.run_file)
    run = load_run_file(folder.run_file, sets)
    changed = (run.model, run.data.length) != (before.model, before.data.length)
    plan = load_plan(folder.plan).plan
    exported = exported_step(folder.model)
    try:
        checkpoint = newest_good(folder.checkpoints(run), on_bad=tell)
    except BiremeError:
        if exported is None:
            raise
        checkpoint = None
    if checkpoint is None and exported is None:
        raise BiremeError(
            f"{folder.path} has no checkpoint and no exported model yet, so there are no weights to evaluate."
            " Let the run continue until it has saved one."
        )
    kept = checkpoint is not None and (exported is None or checkpoint.manifest.step >= exported)
    return Subject(
        str(folder.path),
        run,
        step=checkpoint.manifest.step if checkpoint is not None and kept else exported,
        checkpoint=checkpoint.folder if checkpoint is not None and kept else None,
        folder=None if kept else folder.model.resolve(),
        graph=None if changed else folder.evaluation_graph,
        num_microbatches=plan.width * plan.num_microbatches,
        is_run=True,
        holders={} if checkpoint is None else checkpoint.holders,
    )


def _run_of(source: str, length: int | None, sets: Sequence[str]) -> RunFile:
    """The run file that makes a model of a folder, as far as `sets` do not change it; without a length the
    samples are as long as those of a run that trains the model.
    """
    own = {"model.source": source, "data.length": length, "training.batch_size": _BATCH_SIZE}
    given = [f"{key}={toml_value(value)}" for key, value in own.items() if value is not None]
    return load_run_file(None, [*given, *sets])


def _exported_source(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["model"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BiremeError(f"{path} does not say which model this is. Export the model again.") from error


def _length_of_source(source: str) -> int:
    """The tokens of the samples that a model was made for; the usual number where it takes no tokens."""
    ids = load_source(source).example_inputs.get("input_ids")
    return RunFile().data.length if ids is None or ids.ndim < 2 else int(ids.shape[1])


def _of_checkpoint(checkpoint: Checkpoint, otherwise: Weights) -> Weights:
    saved = checkpoint.snapshot().tensors

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        keys = ((name, f"{part}/{name}") for name in names for part in ("weights", "buffers"))
        return {name: saved[key] for name, key in keys if key in saved}

    return with_rest(read, otherwise)
