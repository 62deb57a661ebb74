"""Where data comes from, in one notation for the run file and the command line.

`stdlib` are the sources of Python's standard library; a path is a text file, a file of rows (.jsonl, .json,
.parquet, .csv), a folder of either, a folder that the `datasets` library saved, or an array of token ids
(.npy, .bin); `hf:NAME,split=…` and `hf:FOLDER` are whatever that library loads; `file.py:function` is a
function of the user's. What a source names must be there when it is opened; its text is read later.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bireme.bounds import counted
from bireme.errors import BiremeError
from bireme.model.own_model import seed_generators
from bireme.train.data.hub import SavedRows, ending, is_hub, is_saved_folder, library_rows, rows_of_json_lines
from bireme.train.data.samples import Batch, Names, Seeds, Tokens, load_tokens, only
from bireme.train.data.text_files import TextFiles, one_file, python_sources, text_folder
from bireme.user_code import names_function, reason_of, user_function

# Samples from a function of the user's: `package.module:function`, or `file.py:function`.
#
# The function takes nothing and returns a dataset: with a length, and for each number below it a dict of
# tensors by the names of the model's inputs; or one dict of tensors whose first axis is the samples. Every
# process calls it for itself, so it must make the same dataset each time.

_LAYOUT = (
    "It must return a dataset with a length whose items are dicts of tensors, named like the "
    "model's inputs, or one dict of tensors whose first axis is the samples."
)


def own_samples(text: str) -> "OwnSamples":
    """The samples that a function makes; `text` names it."""
    function = user_function(text, "a dataset")
    try:
        dataset = function()
    except BiremeError:
        raise
    except (Exception, SystemExit) as error:  # a script's main() may leave Python
        raise BiremeError(f"The data function {text} fails: {reason_of(error)}.") from error
    return OwnSamples(text, dataset, is_remade=True)


class OwnSamples:
    """A dataset of the user's, checked sample by sample.

    `origin` is what to call it in a message. With `is_remade` another process gets it by calling the function
    that `origin` names; else it is pickled.
    """

    is_quick = False

    def __init__(self, origin: str, dataset: Any, *, is_remade: bool = False) -> None:
        self._origin = origin
        self._is_remade = is_remade
        self._dataset = _Rows(origin, dataset) if isinstance(dataset, Mapping) else dataset
        self._length = _length_of(origin, self._dataset)

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        if self._is_remade:
            return own_samples, (self._origin,)
        return OwnSamples, (self._origin, self._dataset)

    @property
    def is_columnar(self) -> bool:
        """Tensors that are there can be had one by one; a sample that is made is made whole."""
        return isinstance(self._dataset, _Rows)

    def take(self, numbers: Sequence[int], names: Names = None, seeds: Seeds = None) -> Batch:
        """The samples of these numbers, stacked."""
        if isinstance(self._dataset, _Rows):
            rows = [int(number) for number in numbers]
            return {name: column[rows] for name, column in only(self._dataset.columns, names).items()}
        samples = []
        for place, number in enumerate(numbers):
            if seeds is not None:
                seed_generators(seeds[place])
            samples.append(self._sample(int(number)))
        first = _kinds(samples[0])
        for number, sample in zip(numbers, samples, strict=True):
            if _kinds(sample) != first:
                raise BiremeError(
                    f"Samples {numbers[0]} and {number} of {self._origin} cannot be in one batch: "
                    f"{_shown(samples[0])}, and {_shown(sample)}. Give all the same names, cut or pad "
                    "them to the same sizes, and convert them to one type."
                )
        chosen = only(samples[0], names)
        return {name: torch.stack([sample[name] for sample in samples]) for name in chosen}

    def _sample(self, number: int) -> Batch:
        try:
            sample = self._dataset[number]
        except Exception as error:
            raise BiremeError(f"Sample {number} of {self._origin} fails: {reason_of(error)}.") from error
        if not isinstance(sample, Mapping) or not sample or not all(isinstance(name, str) for name in sample):
            kind = "nothing" if sample is None else f"a {type(sample).__name__}"
            raise BiremeError(
                f"Sample {number} of {self._origin} is {kind}. A sample is a dict of tensors by the names of "
                'the model\'s inputs, such as {"pixel_values": image, "labels": label}.'
            )
        return {name: self._tensor(value, name, number) for name, value in sample.items()}

    def _tensor(self, value: object, name: str, number: int) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach()
        if isinstance(value, bool | int | float | np.ndarray | np.generic):
            try:
                return torch.as_tensor(value)
            except TypeError:  # an array of a type that torch does not have
                pass
        raise BiremeError(
            f"In sample {number} of {self._origin}, {name} is a {type(value).__name__}. It must be a "
            "tensor, an array or a number."
        )


class _Rows:
    """Tensors whose first axis is the samples, as a dataset."""

    def __init__(self, origin: str, columns: Mapping[Any, Any]) -> None:
        fitting = columns and all(
            isinstance(name, str) and isinstance(column, Tensor | np.ndarray) and column.ndim
            for name, column in columns.items()
        )
        if not fitting or len({len(column) for column in columns.values()}) != 1:
            raise BiremeError(
                f"{origin} returns a dict that is not a set of samples: its values must be tensors whose "
                "first axes have the same length."
            )
        self.columns = {name: torch.as_tensor(column).detach() for name, column in columns.items()}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, number: int) -> Batch:
        return {name: column[number] for name, column in self.columns.items()}


def _length_of(origin: str, dataset: Any) -> int:
    if (
        not hasattr(dataset, "__getitem__")
        or not hasattr(dataset, "__len__")
        or isinstance(dataset, str | bytes)
    ):
        kind = "nothing" if dataset is None else f"a {type(dataset).__name__}"
        endless = " An iterator cannot be shuffled or resumed." if isinstance(dataset, Iterator) else ""
        raise BiremeError(f"{origin} returns {kind}. {_LAYOUT}{endless}")
    try:
        length = len(dataset)
    except Exception as error:
        raise BiremeError(f"The length of the dataset of {origin} is unknown: {reason_of(error)}.") from error
    if not length:
        raise BiremeError(f"The dataset of {origin} has no samples, so there is nothing to train on.")
    return length


def _kinds(sample: Batch) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in sample.items()}


def _shown(sample: Batch) -> str:
    kinds = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in sample.items()}
    return ", ".join(f"{name} {kinds[name]} {list(tensor.shape)}" for name, tensor in sample.items())


_NOTATIONS = (
    "stdlib",
    "book.txt",
    "rows.jsonl",
    "FOLDER",
    "tokens.npy",
    "tokens.bin",
    "hf:owner/name,split=train",
    "hf:FOLDER",
    "package.module:function",
    "file.py:function",
)
"""How a source can be named, by example."""

Source = TextFiles | SavedRows | Tokens | OwnSamples

_ARRAYS = (".npy", ".bin")

_LINES = ".jsonl"
_ROWS = (_LINES, ".json", ".parquet", ".csv")
_NEVER_TEXT = (_LINES, ".parquet")
"""Files of rows that are never meant as text; the others may lie among texts."""


def open_source(
    text: str, *, pattern: str = "*", text_column: str | None = None, dtype: str = "uint16"
) -> Source:
    """What `text` names.

    `pattern` chooses the files in a folder, `text_column` is where a dataset has its text unless its source
    says so itself, `dtype` the type of the numbers in a .bin file.
    """
    path = Path(text).expanduser()
    if text == "stdlib":
        return python_sources()
    if is_hub(text):
        return library_rows(text, text_column)
    if names_function(text):
        return own_samples(text)
    if path.is_dir():
        return (
            library_rows(text, text_column) if is_saved_folder(path) else _folder(path, pattern, text_column)
        )
    if not path.exists():
        raise BiremeError(
            f"There is no file or folder {text!r} to take data from. A source is one of: "
            f"{', '.join(_NOTATIONS)}."
        )
    if path.suffix == _LINES:
        return rows_of_json_lines(path, text_column)
    if ending(path) in _ROWS:
        return library_rows(text, text_column)
    return load_tokens(path, dtype) if path.suffix in _ARRAYS else one_file(path)


def _folder(folder: Path, pattern: str, text_column: str | None) -> Source:
    """The files of a folder that match the pattern: texts, or files of rows of one kind."""
    found = text_folder(folder, pattern)
    paths = [file.path for file in found.files]
    rows = [path for path in paths if ending(path) in _ROWS]
    if len(rows) < len(paths):
        wrong = [path for path in rows if ending(path) in _NEVER_TEXT]
        if not wrong:
            return found
        raise BiremeError(
            f"The folder {folder} holds rows in {counted(len(wrong), 'file')}, such as {wrong[0].name}, "
            f"among {counted(len(paths) - len(wrong), 'other file')}. Say which to read with data.pattern, "
            f'such as "*{wrong[0].suffix}" or "*.txt".'
        )
    kinds = sorted({ending(path) for path in rows})
    if len(kinds) > 1:
        raise BiremeError(
            f"The folder {folder} holds files of rows of several kinds: {', '.join(kinds)}. Say which to "
            f'read with data.pattern, such as "*{kinds[0]}".'
        )
    if len(rows) == 1 and rows[0].suffix == _LINES:
        return rows_of_json_lines(rows[0], text_column)
    # The library knows the splits of a whole folder by the names of its files.
    return library_rows(str(folder), text_column, () if pattern == "*" else paths)
