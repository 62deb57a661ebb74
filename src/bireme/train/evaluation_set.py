"""What an evaluation takes of its data, and the figures that follow from its loss.

Within a run it is the same few batches each time, from everywhere in the data. `bireme evaluate` takes all of
the data too, with a smaller batch at the end.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from time import perf_counter

import torch

from bireme.runtime.evaluation import Evaluation
from bireme.runtime.microbatches import Rows
from bireme.runtime.pipeline import Pipeline
from bireme.train.data.loader import PartlyRead, RankBatches
from bireme.train.data.mixture import shares_of, sources_of
from bireme.train.data.placing import Order
from bireme.train.data.prepare import RunData
from bireme.train.data.samples import IGNORED, SampleRange, Samples
from bireme.train.data.tokenizer import Tokenizer
from bireme.train.run_file import RunFile

_IDS, _LABELS = "input_ids", "labels"

_LARGEST_EXPONENT = 700.0
"""Of a loss whose perplexity is still a number."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What an evaluation found. `perplexity` and `tokens`, those that the loss is the mean of, are None where
    the model does not predict tokens; `bits_per_byte` also where nobody knows the bytes of a token.
    """

    loss: float
    perplexity: float | None
    bits_per_byte: float | None
    tokens: int | None
    tokens_per_s: float | None


class EvaluationSet:
    """`num_batches` batches of samples in an order; with `with_rest` the samples that are left over too."""

    def __init__(
        self,
        samples: Samples,
        order: Order,
        batch_size: int,
        num_batches: int,
        *,
        with_rest: bool = False,
        num_workers: int = 0,
    ) -> None:
        self._samples, self._order = samples, order
        self._batch_size, self._num_batches = batch_size, num_batches
        self._num_workers = num_workers
        end = num_batches * batch_size
        self._rest = SampleRange(samples, end, len(samples)) if with_rest and end < len(samples) else None
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
        return self._num_batches + (self._rest is not None)

    def batches(self, wanted: Callable[[int, int], tuple[Rows, ...]]) -> Iterator[PartlyRead]:
        """The batches, as far as a rank wants them."""
        with RankBatches(
            self._samples,
            self._order,
            self._batch_size,
            0,
            self._num_batches,
            wanted=wanted,
            num_workers=self._num_workers,
            data="evaluation",
        ) as batches:
            yield from batches
        if self._rest is not None:
            order = Order(len(self._rest), shuffled=False)
            with RankBatches(
                self._rest, order, len(self._rest), 0, 1, wanted=wanted, data="evaluation"
            ) as batches:
                yield from batches

    def figures(self, found: Evaluation, seconds: float, tokenizer: Tokenizer | None) -> Figures:
        """What follows from the loss over all of the batches."""
        if not self._is_text():
            return Figures(found.loss, None, None, None, None)
        if found.weight not in self._counts:
            self._counts[found.weight] = self._count(found.weight, tokenizer)
        text = self._counts[found.weight]
        tokens = found.num_samples * self._length() if text is None else text.tokens
        bits = None
        if text is not None and text.num_bytes:
            bits = found.loss * text.tokens / text.num_bytes / math.log(2)
        return Figures(
            found.loss, _perplexity(found.loss), bits, tokens, tokens / seconds if seconds > 0 else None
        )

    def _is_text(self) -> bool:
        """Whether the model predicts the tokens that it reads."""
        sample = self._samples.take([0])
        ids, labels = sample.get(_IDS), sample.get(_LABELS)
        return ids is not None and labels is not None and ids.shape == labels.shape

    def _length(self) -> int:
        return int(self._samples.take([0], (_IDS,))[_IDS].shape[1])

    def _count(self, weight: float, tokenizer: Tokenizer | None) -> "_Text | None":
        """The text that the loss is the mean over, if its labels tell which it is.

        A model that predicts the next token passes over the first label of each sample, another one does not:
        the weight of the batches says which it was.
        """
        if not self._samples.is_quick:
            return None
        lengths = None if tokenizer is None else tokenizer.byte_lengths()
        of_ids = None if lengths is None else torch.from_numpy(lengths)
        counts = {begin: [0, 0] for begin in (1, 0)}
        for samples, numbers in self._taken():
            labels = samples.take(numbers, (_LABELS,))[_LABELS]
            for begin, sums in counts.items():
                counted = labels[:, begin:][labels[:, begin:] != IGNORED]
                sums[0] += len(counted)
                if of_ids is not None:
                    sums[1] += int(of_ids[counted.clamp(max=len(of_ids) - 1)].sum())
        for tokens, num_bytes in counts.values():
            if tokens == weight:
                return _Text(tokens, num_bytes)
        return None

    def _taken(self) -> Iterator[tuple[Samples, list[int]]]:
        """The numbers of all samples, batch by batch."""
        for number in range(self._num_batches):
            yield self._samples, [int(one) for one in self._order.batch(number, self._batch_size)]
        if self._rest is not None:
            yield self._rest, list(range(len(self._rest)))


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
    return Figures(loss, _perplexity(loss), None, tokens, tokens / seconds if seconds > 0 else None)


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf


@dataclass(frozen=True, slots=True)
class _Text:
    """Tokens that a loss is the mean over, and the bytes of text that they stand for; 0 if nobody knows."""

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

    @property
    def has_data(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self._data.evaluation is not None

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
