"""The data of a run: what its run file asks for, cut for its model."""

from collections.abc import Callable
from pathlib import Path

from bireme.train.data.checks import vocabulary_of
from bireme.train.data.prepare import DataRequest, ModelSide, RunData, prepare_data
from bireme.train.model import RunModel
from bireme.train.run_file import RunFile

__all__ = ["data_of"]

Progress = Callable[[float, str], None]


def data_of(
    run: RunFile, model: RunModel, progress: Progress | None = None, *, what: str = "training"
) -> RunData:
    """The samples of a run; the first time may take long, and later the cache has them.

    `what` says what the data of `data.source` are for.
    """
    asked = run.data
    request = DataRequest(
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
    source = model.source
    folder = Path(source.text.partition(":")[2]) if source.text.startswith("hf:") else None
    side = ModelSide(source.example_inputs, vocabulary_of(source.model), folder)
    return prepare_data(request, side, run.training.batch_size, progress, what=what)
