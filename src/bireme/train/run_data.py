"""The data of a run: what its run file asks for, cut for its model, and what there is to say about it."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bireme.errors import BiremeError
from bireme.model.graph import Graph
from bireme.train.data.documents import StreamSamples
from bireme.train.data.mixture import MixedSamples, sources_of
from bireme.train.data.prepare import (
    ModelSide,
    RunData,
    longest_row,
    prepare_data,
    vocabulary_of,
)
from bireme.train.data.samples import Samples
from bireme.train.data.tokenizer import FolderTokenizer, Tokenizer
from bireme.train.model import RunModel
from bireme.train.run_file import RunFile
from bireme.train.run_file.defaults import default_length, folder_of, model_config

Progress = Callable[[float, str], None]


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
    try:
        found = prepare_data(alone, _side(model), 1, what=key).training
    except BiremeError as error:
        raise BiremeError(f"{key} = {source!r}: {error}") from None
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
