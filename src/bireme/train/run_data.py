"""The data of a run: what its run file asks for, cut for its model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bireme.errors import BiremeError
from bireme.train.data.checks import vocabulary_of
from bireme.train.data.prepare import DataRequest, ModelSide, RunData, prepare_data
from bireme.train.data.samples import Samples
from bireme.train.data.stream import StreamSamples
from bireme.train.model import RunModel
from bireme.train.run_file import RunFile

__all__ = ["data_of", "private_samples_of"]

Progress = Callable[[float, str], None]


def data_of(
    run: RunFile, model: RunModel, progress: Progress | None = None, *, what: str = "training"
) -> RunData:
    """The samples of a run; the first time may take long, and later the cache has them.

    `what` says what the data of `data.source` are for.
    """
    return prepare_data(_request(run), _side(model), run.training.batch_size, progress, what=what)


def private_samples_of(run: RunFile, model: RunModel, server: str) -> Samples:
    """The private samples of a server, for its own processes alone to read.

    They are cut like the public ones. All of them are for training.
    """
    source = (run.data.private or {})[server]
    key = f"data.private.{server}"
    alone = replace(_request(run), source=source, evaluation_fraction=0.0, evaluation_source=None)
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


def _request(run: RunFile) -> DataRequest:
    asked = run.data
    return DataRequest(
        source=asked.source or "",
        mixture=tuple((one.source, one.weight) for one in asked.mixture or ()),
        tokenizer=asked.tokenizer,
        length=asked.length,
        evaluation_fraction=asked.evaluation_fraction or 0.0,
        evaluation_source=asked.evaluation_source,
        text_column=asked.text_column,
        pattern=asked.pattern,
        dtype=asked.dtype,
        packing=asked.packing,
        evaluation_samples=run.training.batch_size * run.training.evaluation_batches,
        seed=asked.seed,
        shuffle_buffer=asked.shuffle_buffer,
    )


def _side(model: RunModel) -> ModelSide:
    source = model.source
    folder = Path(source.text.partition(":")[2]) if source.text.startswith("hf:") else None
    return ModelSide(source.example_inputs, vocabulary_of(source.model), folder)
