"""Evaluations: those of a run while it trains, and `bireme evaluate`, by one process or over a pipeline.

A model that fits on a device is evaluated in this process. One that does not, or for which several workers
are asked, goes through a pipeline of as many stages, on the devices of this machine.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from bireme.devices import ACCELERATOR, device_of_process, num_accelerators
from bireme.errors import BiremeError, Progress, tell
from bireme.files import scratch_folder
from bireme.model.graph import Graph
from bireme.model.graph_file import load_graph, save_graph
from bireme.model.units import units_of
from bireme.runtime.evaluation import Evaluation, ForwardPipeline, equal_cuts
from bireme.runtime.microbatches import Batch, Rows
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.world import World
from bireme.train.data.documents import DocumentSamples, StreamSamples
from bireme.train.data.loader import PartlyRead, RankBatches
from bireme.train.data.mixture import shares_of, sources_of
from bireme.train.data.placing import Order
from bireme.train.data.prepare import RunData, check_sizes
from bireme.train.data.samples import IGNORED, SampleRange, Samples
from bireme.train.data.tokenizer import Tokenizer
from bireme.train.data.viewing import sample_notes
from bireme.train.machines import machines_here
from bireme.train.model import RunModel
from bireme.train.rendezvous import Announcements
from bireme.train.run_data import data_of, tokenizer_name, with_length_of_data
from bireme.train.run_file import RunFile
from bireme.train.shared_model import ModelWork, launched, shared_world, use_device
from bireme.train.subject import (
    Subject,
    check_count,
    divided,
    num_bytes_of,
    num_gpus_for,
    places_of,
    room_on,
    sizes_of,
)

# What an evaluation takes of its data, and the figures that follow from its loss.
#
# Within a run it is the same few batches each time, from everywhere in the data. `bireme evaluate` takes all
# of the data too, with a smaller batch at the end.

_IDS, _LABELS = "input_ids", "labels"

_LARGEST_EXPONENT = 700.0
"""Of a loss whose perplexity is still a number."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What an evaluation found. `perplexity` and `tokens`, those that the loss is the mean of, are None where
    the model does not predict tokens; `bits_per_byte` also if the bytes of a token are unknown.
    """

    loss: float
    perplexity: float | None
    bits_per_byte: float | None
    tokens: int | None
    tokens_per_s: float | None


@dataclass(eq=False)
class EvaluationSet:
    """`num_batches` batches of samples in an order; with `with_rest` the samples that are left over too."""

    samples: Samples
    order: Order
    batch_size: int
    num_batches: int
    with_rest: bool = False
    num_workers: int = 0

    def __post_init__(self) -> None:
        end, num = self.num_batches * self.batch_size, len(self.samples)
        self._parts = [(self.samples, self.order, self.batch_size, self.num_batches, self.num_workers)]
        if self.with_rest and end < num:
            rest = SampleRange(self.samples, end, num)
            self._parts.append((rest, Order(len(rest), shuffled=False), len(rest), 1, 0))
        self._counts: dict[float, _Text | None] = {}

    @classmethod
    def of_run(cls, run: RunFile, samples: Samples, most_batches: int) -> "EvaluationSet":
        """What a run is evaluated on: the same samples every time, from everywhere in the data."""
        size = run.training.batch_size
        count = min(most_batches, len(samples) // size) or 1
        return cls(samples, Order(len(samples), run.data.seed), min(size, len(samples)), count)

    @classmethod
    def of_all(
        cls, samples: Samples, batch_size: int, most_batches: int | None, *, num_workers: int
    ) -> "EvaluationSet":
        """All samples as they come, or the first `most_batches` batches of them."""
        size = min(batch_size, len(samples))
        count = len(samples) // size
        is_all = most_batches is None or most_batches > count
        return cls(
            samples,
            Order(len(samples), shuffled=False),
            size,
            count if most_batches is None else min(count, most_batches),
            with_rest=is_all,
            num_workers=num_workers,
        )

    def __len__(self) -> int:
        """How many batches there are."""
        return self.num_batches + len(self._parts) - 1

    def batches(self, wanted: Callable[[int, int], tuple[Rows, ...]]) -> Iterator[PartlyRead]:
        """The batches, as far as a rank wants them."""
        for samples, order, size, count, workers in self._parts:
            with RankBatches(
                samples, order, size, 0, count, wanted=wanted, num_workers=workers, data="evaluation"
            ) as batches:
                yield from batches

    def figures(self, found: Evaluation, seconds: float, tokenizer: Tokenizer | None) -> Figures:
        """What follows from the loss over all of the batches."""
        sample = self.samples.take([0])
        ids, labels = sample.get(_IDS), sample.get(_LABELS)
        if ids is None or labels is None or ids.shape != labels.shape:  # the model predicts something else
            return Figures(found.loss, None, None, None, None)
        if found.weight not in self._counts:
            self._counts[found.weight] = self._count(found.weight, tokenizer)
        text = self._counts[found.weight]
        tokens = found.num_samples * int(ids.shape[1]) if text is None else text.tokens
        bits = None
        if text is not None and text.num_bytes:
            bits = found.loss * text.tokens / text.num_bytes / math.log(2)
        return _of_tokens(found.loss, bits, tokens, seconds)

    def _count(self, weight: float, tokenizer: Tokenizer | None) -> "_Text | None":
        """The text that the loss is the mean over, if its labels tell which it is.

        A model that predicts the next token passes over the first label of each sample, another one does not:
        the weight of the batches says which it was.
        """
        if not self.samples.is_quick:
            return None
        lengths = None if tokenizer is None else tokenizer.byte_lengths()
        of_ids = None if lengths is None else torch.from_numpy(lengths)
        counts = {begin: [0, 0] for begin in (1, 0)}
        taken = (
            samples.take(order.numbers(number * size, size).tolist(), (_LABELS,))
            for samples, order, size, count, _ in self._parts
            for number in range(count)
        )
        for batch in taken:
            labels = batch[_LABELS]
            for begin, sums in counts.items():
                counted = labels[:, begin:][labels[:, begin:] != IGNORED]
                sums[0] += len(counted)
                if of_ids is not None:
                    sums[1] += int(of_ids[counted.clamp(max=len(of_ids) - 1)].sum())
        for tokens, num_bytes in counts.values():
            if tokens == weight:
                return _Text(tokens, num_bytes)
        return None


def sets_of_run(run: RunFile, samples: Samples) -> dict[str, EvaluationSet]:
    """What a run is evaluated on, source by source, with as many batches in all as it asks for."""
    sources = sources_of(samples)
    most = max(1, run.training.evaluation_batches // len(sources))
    return {name: EvaluationSet.of_run(run, one, most) for name, one in sources.items()}


def combined(
    found: Mapping[str, Evaluation],
    sets: Mapping[str, EvaluationSet],
    shares: Mapping[str, float],
    *,
    seconds: float,
    tokenizer: Tokenizer | None,
) -> Figures:
    """The figures of several sources as one: losses by the shares that the sources have in training.

    The bytes of a mixture's tokens are not counted by source, so it has no bits per byte.
    """
    figures = {name: sets[name].figures(one, seconds, tokenizer) for name, one in found.items()}
    counted = {name: figures[name] for name, one in found.items() if one.weight}
    if len(found) == 1 or not counted:
        return next(iter(figures.values()))
    total = sum(shares[name] for name in counted)
    loss = math.fsum(one.loss * shares[name] / total for name, one in counted.items())
    if any(one.tokens is None for one in counted.values()):
        return Figures(loss, None, None, None, None)
    tokens = sum(one.tokens or 0 for one in counted.values())
    return _of_tokens(loss, None, tokens, seconds)


def _of_tokens(loss: float, bits: float | None, tokens: int, seconds: float) -> Figures:
    perplexity = math.inf if loss > _LARGEST_EXPONENT else math.exp(loss)
    return Figures(loss, perplexity, bits, tokens, tokens / seconds if seconds > 0 else None)


@dataclass(frozen=True, slots=True)
class _Text:
    """Tokens that a loss is the mean over, and the bytes of text that they stand for; 0 if unknown."""

    tokens: int
    num_bytes: int


# The evaluations of a run while it trains: all sets through the pipeline, and what came of the last time.


class RunEvaluations:
    """`figures` are those of the last evaluation, which was after `step` steps; None where it has no loss.

    `loss_through_codecs` is there where boundaries had codecs then. `step` is -1 before the first.
    """

    def __init__(self, run: RunFile, data: RunData) -> None:
        self.figures: Figures | None = None
        self.loss_through_codecs: float | None = None
        self.step = -1
        self._data = data
        self._sets = {} if data.evaluation is None else sets_of_run(run, data.evaluation)

    def evaluate(self, pipeline: Pipeline, step: int) -> dict[str, object]:
        """Evaluate after so many steps; gives what the log is told."""
        assert self._data.evaluation is not None, "who calls has asked"
        begin_s = perf_counter()
        shares = shares_of(self._data.evaluation)
        found = self._evaluations(pipeline)
        seconds = perf_counter() - begin_s
        figures = combined(found, self._sets, shares, seconds=seconds, tokenizer=self._data.tokenizer)
        more: dict[str, object] = {}
        if pipeline.codecs.held(max(step - 1, 0)).phases:
            coded = self._evaluations(pipeline, through_codecs=True)
            self.loss_through_codecs = combined(coded, self._sets, shares, seconds=0.0, tokenizer=None).loss
            more["loss_through_codecs"] = self.loss_through_codecs
        self.figures = figures if any(one.weight for one in found.values()) else None
        self.step = step
        if len(found) > 1:
            more["sources"] = {name: one.loss if one.weight else None for name, one in found.items()}
        num_samples = sum(one.num_samples for one in found.values())
        more["seconds"] = perf_counter() - begin_s
        return {"num_samples": num_samples, **asdict(figures), **more}

    def _evaluations(self, pipeline: Pipeline, *, through_codecs: bool = False) -> dict[str, Evaluation]:
        wanted = pipeline.cutter.wanted_to_evaluate
        return {
            name: pipeline.evaluate(one.batches(wanted), through_codecs=through_codecs)
            for name, one in self._sets.items()
        }


_WHOLE = ""
"""What data are called that are no mixture."""


def evaluate_with_others(
    text: str,
    sets: Sequence[str],
    data: str | None,
    most_batches: int | None,
    ask: Callable[..., Any],
) -> None:
    """Evaluate the model that `text` names in processes that torchrun or `bireme join` has started: each of
    them calls this, and rank 0 has `ask` show the document as "written".
    """
    with shared_world(text) as (world, files):

        def measure(job: _Job | None) -> _Measured:
            shared = files.share(job, _JOB)
            use_device(world, shared.run)
            return _measure(world, shared)

        if world.rank:
            measure(None)
            return
        subject = files.find(sets, tell)
        found = evaluate(
            subject,
            data,
            most_batches=most_batches,
            workers=world.size,
            progress=lambda _done, _what: None,
            measure=measure,
        )
        ask("written", found | {"device": world.device.type})


def evaluate(
    subject: Subject,
    data: str | None,
    *,
    most_batches: int | None,
    workers: int | None,
    progress: Progress,
    measure: "Callable[[_Job], _Measured] | None" = None,
) -> dict[str, Any]:
    """Evaluate a model on `data`, or a run on what it kept apart for that, as it does itself; the result as
    its document. `measure` runs it in processes that were started before.

    `most_batches` limits how much of the data is taken; 0 is all. `workers` are processes; if None as many as
    the weights need. In the document `tokens_given` and `samples_given` are those of all the data, None if
    they are unknown. Losses may be compared if their `tokenizer`, `length` and `loss_on` are equal; these are
    as in `learns`.
    """
    progress(0.0, "loading the model")
    job = _job(subject, data, most_batches, progress)
    model = RunModel.of(job.run, max(1, job.run.training.batch_size // subject.num_microbatches))
    held = _found(job, model, progress)
    samples = held.training
    progress(0.0, "capturing the model")
    graph = model.evaluation.graph() if subject.graph is None else load_graph(subject.graph)
    if not graph.any_batch and not job.is_as_in_run:
        # It takes batches of one size alone, and no sample is to be left over.
        most = min(len(samples), model.run.training.batch_size)
        size = next(size for size in range(most, 0, -1) if len(samples) % size == 0)
        graph, job = model.evaluation.graph(size), job.with_batch(size)
    model.check_loss(graph)
    check_sizes(samples, graph.inputs, "evaluation", is_text=held.is_text)
    subject.check(model, graph)
    num_stages = _num_stages(job.run, graph, workers)
    with scratch_folder() as scratch:
        path = Path(scratch) / "graph.json"
        save_graph(graph, path)
        job = replace(job, num_stages=num_stages, graph=path)
        if measure is not None:
            found, seconds = measure(replace(job, tokens=held.token_folders()))
        else:
            machines = machines_here(job.run.with_keys("cluster", source=None, workers=num_stages))
            job = replace(job, device=machines.device)
            if num_stages > 1:
                found, seconds = launched(_measure, machines, num_stages, job.run, job)[0]
            else:
                found, seconds = _measure(None, job, progress)
    if not any(one.weight for one in found.values()):
        raise BiremeError(f"Nothing in {job.data} counts for the loss, so there is none. Give other data.")
    shares = shares_of(samples) if job.is_as_in_run else {_WHOLE: 1.0}
    figures = combined(found, _sets(job, samples), shares, seconds=seconds, tokenizer=held.tokenizer)
    return {
        "model": subject.name,
        "step": subject.step,
        "data": job.data,
        **asdict(figures),
        "num_samples": sum(one.num_samples for one in found.values()),
        "seconds": seconds,
        "num_workers": num_stages,
        "device": job.device,
        "tokens_given": _num_tokens(samples),
        "samples_given": len(samples),
        "tokenizer": tokenizer_name(held.tokenizer),
        "length": job.run.data.length if held.is_text else None,
        "loss_on": held.loss_on,
        "warnings": list(sample_notes(samples)),
    }


def check_data(subject: Subject, data: str | None, most_batches: int | None, progress: Progress) -> None:
    """Refuse data that `evaluate` would refuse, before other machines are asked for."""
    job = _job(subject, data, most_batches, progress)
    _found(job, RunModel.of(job.run, 1), progress)


def _num_tokens(samples: Samples) -> int | None:
    """The tokens of all samples, without padding but with those that no sample has room for."""
    counts = [
        one.num_tokens_given for one in sources_of(samples).values() if isinstance(one, DocumentSamples)
    ]
    return sum(counts) if len(counts) == len(sources_of(samples)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job(ModelWork):
    """What each process is told: the model, the data of `run`, how it is divided.

    With `is_apart` the data are those that the run kept apart. All are taken, or `most_batches` batches; with
    `is_as_in_run` as many and in the same order as the run takes them itself.
    """

    data: str
    is_apart: bool
    is_as_in_run: bool
    most_batches: int | None
    num_stages: int = 1
    device: str = "cpu"

    def with_batch(self, size: int) -> "_Job":
        """The same with batches of `size` samples, which go through the model at once."""
        run = self.run.with_keys("training", batch_size=size)
        return replace(self, run=run, subject=replace(self.subject, num_microbatches=1))


_JOB = TypeAdapter(_Job)


def _job(subject: Subject, data: str | None, most_batches: int | None, progress: Progress) -> _Job:
    """Which data to take: all that is given, else what the run takes itself of the data that it held out."""
    run, asked = subject.run, subject.run.data
    if data is None and not subject.is_run:
        raise BiremeError(f"{subject.name} is a model without data. Name some to evaluate with: --data FILE.")
    is_apart = data is None
    if is_apart and most_batches:
        run = run.with_keys("training", evaluation_batches=most_batches)
    if not is_apart:
        other = {"source": data, "mixture": None, "evaluation_source": None, "evaluation_fraction": 0.0}
        run = run.with_keys("data", **other)
        run = run if subject.is_run else with_length_of_data(run, progress)
    own = asked.evaluation_source or f"the evaluation data of {asked.named}"
    as_in_run = is_apart and most_batches != 0
    return _Job(
        subject=subject,
        run=run,
        data=own if data is None else data,
        is_apart=is_apart,
        is_as_in_run=as_in_run,
        most_batches=most_batches or None,
    )


def _found(job: _Job, model: RunModel, progress: Progress | None = None) -> RunData:
    """The data, which the cache has from the second time on; `training` are the samples to evaluate with."""
    run = job.run
    if not job.is_apart:  # so that a single sample is enough
        run = run.with_keys("training", batch_size=1)
    what = "training" if job.is_apart else "evaluation"
    data = data_of(run, model, progress, what=what, keeps_rest=not job.is_as_in_run)
    samples = data.evaluation if job.is_apart else data.training
    if samples is None:
        raise BiremeError(f"{job.subject.name} held out no data for evaluation. Name some: --data FILE.")
    is_stream = any(isinstance(one, StreamSamples) for one in sources_of(samples).values())
    if job.most_batches is None and is_stream:
        raise BiremeError(
            f"{job.data} is a stream, which may have no end. Say how many batches to take of it, such as "
            "--batches 100."
        )
    return replace(data, training=samples)


def _sets(job: _Job, samples: Samples) -> dict[str, EvaluationSet]:
    """What to take of each source of a run's mixture; all else is one source."""
    if job.is_as_in_run:
        return sets_of_run(job.run, samples)
    everything = EvaluationSet.of_all(
        samples,
        job.run.training.batch_size,
        job.most_batches,
        num_workers=job.run.data.num_workers,
    )
    return {_WHOLE: everything}


def _num_stages(run: RunFile, graph: Graph, workers: int | None) -> int:
    """How many processes evaluate."""
    held = num_bytes_of(graph)
    needed = workers or num_gpus_for(run, held)
    if workers is None and needed > max(num_cuda := num_accelerators(), 1):
        room = num_cuda * min(room_on(device_of_process(ACCELERATOR, place)) for place in range(num_cuda))
        raise BiremeError(
            f"The weights take {held / 2**30:.1f} GiB, and the {num_cuda} GPUs here have room for "
            f"{room / 2**30:.1f} GiB of them. Use --set model.dtype=bfloat16 or --set cluster.device=cpu."
        )
    check_count(needed, len(units_of(graph)), "units")
    return needed


_Measured = tuple[dict[str, Evaluation], float]
"""The evaluation of each source, and the seconds of all."""


def _measure(world: World | None, job: _Job, progress: Progress | None = None) -> _Measured:
    """What every process does: make its part of the model, and run its part of all batches."""
    device = device_of_process(job.device, 0) if world is None else world.device
    assert job.graph is not None, "it was captured before"
    model, graph = RunModel.of(job.run, 1), load_graph(job.graph)
    sets, read = _sets(job, _found(job, model).training), job.subject.weights(model, graph)

    def weights(names: Sequence[str]) -> Mapping[str, Tensor]:
        found = read(names)
        if world is not None:  # only messages have a time limit: another rank may read for longer
            Announcements(world.store).gather("loaded", None, world.rank, world.size)
        return found

    pipeline = ForwardPipeline(
        graph,
        world,
        num_stages=job.num_stages,
        num_microbatches=max(job.subject.num_microbatches, job.num_stages),
        weights=weights,
        device=device,
        cuts=None if world is None else _cuts(graph, world),
    )
    try:
        begin_s = perf_counter()
        found: dict[str, Evaluation] = {}
        for name, taken in sets.items():
            batches: Iterable[Batch] = taken.batches(pipeline.cutter.wanted_to_evaluate)
            if progress is not None:
                batches = _told(batches, len(taken), progress)
            with torch.no_grad():
                found[name] = pipeline.evaluate(batches)
        return found, perf_counter() - begin_s
    finally:
        pipeline.close()


def _cuts(graph: Graph, world: World) -> tuple[int, ...]:
    """The cuts into equal parts if each has room on its machine, else those that the memory allows."""
    units, places = units_of(graph), places_of(world)
    sizes, cuts = sizes_of(graph, units), equal_cuts(graph, world.size)
    parts = [sum(sizes[begin:end]) for begin, end in pairwise((0, *cuts, len(sizes)))]
    has_room = all(part <= place.room for part, place in zip(parts, places, strict=True))
    return cuts if has_room else divided(sizes, places)


def _told(batches: Iterable[Batch], count: int, progress: Progress) -> Iterator[Batch]:
    """The same batches, with progress."""
    for number, batch in enumerate(batches):
        progress(number / count, "evaluating")
        yield batch
