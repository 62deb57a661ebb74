"""A function of the user's makes samples, and every way in which it does not is said in a sentence."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bireme.errors import BiremeError
from bireme.train.data.samples import SampleRange
from bireme.train.data.source import OwnSamples, own_samples


def write(folder: Path, code: str) -> str:
    (folder / "own.py").write_text(f"import torch\n{code}\n")
    return f"{folder / 'own.py'}:samples"


class Squares:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": torch.full((2,), float(number)), "y": number**2, "z": np.zeros(3, np.float32)}


def test_samples_are_stacked_by_name() -> None:
    batch = OwnSamples("squares", Squares()).take([3, 1])
    assert batch["x"].tolist() == [[3.0, 3.0], [1.0, 1.0]]
    assert batch["y"].tolist() == [9, 1]
    assert batch["z"].shape == (2, 3)


def test_a_file_in_a_folder_is_run_once_and_can_import_the_others(tmp_path: Path) -> None:
    (tmp_path / "own_neighbor_of_it.py").write_text("SIZE = 4\n")
    text = write(
        tmp_path,
        "from own_neighbor_of_it import SIZE\ndef samples():\n    return [{'x': torch.ones(2)}] * SIZE",
    )
    samples = own_samples(text)
    assert len(samples) == 4
    assert not samples.is_quick
    again = pickle.loads(pickle.dumps(samples))
    assert again.take([0])["x"].tolist() == [[1.0, 1.0]]
    part = pickle.loads(pickle.dumps(SampleRange(samples, 1, 3)))
    assert (len(part), part.is_quick) == (2, False)


def test_a_dict_of_tensors_is_a_set_of_samples(tmp_path: Path) -> None:
    text = write(
        tmp_path, "def samples():\n    return {'x': torch.arange(6).view(3, 2), 'y': torch.arange(3)}"
    )
    samples = own_samples(text)
    assert len(samples) == 3
    assert samples.take([2])["x"].tolist() == [[4, 5]]
    assert samples.take([2, 0])["y"].tolist() == [2, 0]


def test_a_function_of_a_module_is_found() -> None:
    with pytest.raises(BiremeError, match="collections:Counter returns a dict that is not a set of samples"):
        own_samples("collections:Counter")
    with pytest.raises(BiremeError, match="Did you mean 'Counter'"):
        own_samples("collections:Countr")
    with pytest.raises(BiremeError, match=r"no Python module nowhere.*file.py:function"):
        own_samples("nowhere.at_all:samples")


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        ("def samples():\n    return None", "returns nothing"),
        ("def samples():\n    return (x for x in [1])", "returns a generator.*cannot be shuffled"),
        ("def samples():\n    return []", "has no samples"),
        ("def samples():\n    return 'text'", "returns a str"),
        ("def samples():\n    return 1 / 0", "fails: ZeroDivisionError"),
        ("def samples():\n    return {'x': torch.ones(2), 'y': torch.ones(3)}", "not a set of samples"),
        ("def samples():\n    return {}", "not a set of samples"),
        ("samples = 3", "is a int, not a function"),
        ("def sample():\n    return []", "Did you mean 'sample'"),
        ("raise KeyError('x')", "cannot be imported: KeyError"),
        ("raise SystemExit(0)", "cannot be imported: SystemExit: 0"),
        ("def samples():\n    exit(3)", "fails: SystemExit: 3"),
    ],
)
def test_what_does_not_return_samples_is_refused(code: str, wrong: str, tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match=wrong):
        own_samples(write(tmp_path, code))


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(BiremeError, match=r"no file missing\.py"):
        own_samples("missing.py:samples")


@pytest.mark.parametrize(
    ("samples", "wrong"),
    [
        ([(torch.ones(2), 3)], "Sample 0 of data is a tuple"),
        ([None], "Sample 0 of data is nothing"),
        ([{}], "Sample 0 of data is a dict"),
        ([{"x": "text"}], "In sample 0 of data, x is a str"),
        ([{"x": np.array(["text"])}], "In sample 0 of data, x is a ndarray"),
        (
            [{"x": torch.ones(2)}, {"x": torch.ones(3)}],
            r"Samples 0 and 1 .* x float32 \[2\], and x float32 \[3\]",
        ),
        ([{"x": 1}, {"x": 1.0}], r"Samples 0 and 1 .* x int64 \[\], and x float32 \[\]"),
        ([{"x": 1}, {"y": 1}], "Samples 0 and 1"),
    ],
)
def test_a_sample_that_is_none_is_named(samples: list[Any], wrong: str) -> None:
    with pytest.raises(BiremeError, match=wrong):
        OwnSamples("data", samples).take(range(len(samples)))


def test_a_sample_that_fails_is_named() -> None:
    class Failing(Squares):
        def __getitem__(self, number: int) -> dict[str, Any]:
            return {"x": 1 / (number - 3)}

    with pytest.raises(BiremeError, match=re.escape("Sample 3 of data fails: ZeroDivisionError")) as caught:
        OwnSamples("data", Failing()).take([1, 2, 3])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
