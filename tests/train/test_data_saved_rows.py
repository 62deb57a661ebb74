"""Saved datasets: read by the package that saved them, or here mostly by what stands in for it."""

import gzip
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bireme.errors import BiremeError
from bireme.train.data.documents import Cut
from bireme.train.data.encoding import tokenized
from bireme.train.data.hub import SavedRows
from bireme.train.data.source import open_source
from bireme.train.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.slow


@dataclass
class StandIn:
    """What is used of a `datasets.Dataset`, as its documentation has it."""

    columns: Mapping[str, list[Any]]

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    @property
    def features(self) -> dict[str, Any]:
        kinds = {str: "string", int: "int64", list: "list"}
        return {
            name: SimpleNamespace(dtype=kinds.get(type(cells[0]) if cells else str, "null"))
            for name, cells in self.columns.items()
        }

    def with_format(self, kind: str | None) -> "StandIn":
        assert kind is None
        return self

    def select_columns(self, names: list[str]) -> "StandIn":
        return StandIn({name: self.columns[name] for name in names})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows: slice) -> dict[str, list[Any]]:
        return {name: cells[rows] for name, cells in self.columns.items()}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that saves a dataset, or several, and gives the folder."""

    def save(dataset: object) -> str:
        (tmp_path / "state.json").write_text("{}")
        module = SimpleNamespace(load_from_disk=lambda folder: dataset)
        monkeypatch.setitem(sys.modules, "datasets", module)
        return str(tmp_path)

    return save


def test_rows_of_text_are_documents(saved: Any) -> None:
    texts = [f"row {number}" for number in range(600)]
    source = open_source(saved(StandIn({"id": list(range(600)), "text": texts})))
    assert isinstance(source, SavedRows)
    tokens = tokenized(source, ByteTokenizer())
    assert tokens.ids.tolist() == [number for text in texts for number in (*text.encode(), 256)]


def test_the_only_column_of_strings_is_the_text(saved: Any) -> None:
    source = open_source(saved(StandIn({"id": [1], "content": ["a"]})))
    assert isinstance(source, SavedRows)
    assert source.column == "content"


def test_a_row_without_text_is_skipped_and_counted(saved: Any) -> None:
    source = open_source(saved(StandIn({"text": ["a", None, "b"]})))
    assert isinstance(source, SavedRows)
    tokens = tokenized(source, ByteTokenizer())
    assert tokens.ids.tolist() == [97, 256, 98, 256]
    assert tokens.num_skipped == 1


def test_rows_of_ids_need_no_tokenizer_and_get_ends_from_one(saved: Any) -> None:
    source = open_source(saved(StandIn({"input_ids": [[1, 2], [3, 256], []], "text": ["a", "b", "c"]})))
    assert isinstance(source, SavedRows)
    assert tokenized(source, None).ids.tolist() == [1, 2, 3, 256]
    assert tokenized(source, ByteTokenizer()).ids.tolist() == [1, 2, 256, 3, 256]


def test_labels_say_which_ids_count(saved: Any) -> None:
    columns = {"input_ids": [[1, 2], [3, 4]], "labels": [[-100, 2], [3, -100]]}
    source = open_source(saved(StandIn(columns)))
    assert isinstance(source, SavedRows)
    batch = Cut(4, "stream", 0).samples(tokenized(source, None)).take([0])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100]]


def test_of_several_datasets_the_one_to_train_on_is_taken(saved: Any) -> None:
    source = open_source(saved({"test": StandIn({"text": ["a"]}), "train": StandIn({"text": ["b"]})}))
    assert isinstance(source, SavedRows)
    assert tokenized(source, ByteTokenizer()).ids.tolist() == [98, 256]
    with pytest.raises(BiremeError, match=r"datasets test and none named train"):
        open_source(saved({"test": StandIn({"text": ["a"]})}))


@pytest.mark.parametrize(
    ("columns", "column", "wrong"),
    [
        ({"text": ["a"]}, "txt", "Did you mean 'text'"),
        ({"a": ["a"], "b": ["b"]}, None, "or name that of a text in data.text_column"),
        ({"text": []}, None, "has no rows"),
    ],
)
def test_a_dataset_without_text_is_refused(
    columns: dict[str, list[Any]], column: str | None, wrong: str, saved: Any
) -> None:
    with pytest.raises(BiremeError, match=wrong):
        open_source(saved(StandIn(columns)), text_column=column)


@pytest.mark.parametrize(
    ("columns", "wrong"),
    [
        ({"input_ids": [[1], [-2]]}, "In row 1 .* no list of token ids"),
        ({"input_ids": [[[1]]]}, "In row 0 .* no list of token ids"),
        ({"input_ids": [5]}, "In row 0 .* no list of token ids"),
        ({"input_ids": [[1 << 40]]}, "ids must be below"),
        ({"input_ids": [[1, 2]], "labels": [[2, 3]]}, "labels are not the input_ids"),
        ({"input_ids": [[1, 2]], "labels": [[2]]}, "labels are not the input_ids"),
    ],
)
def test_ids_that_are_none_are_refused(columns: dict[str, list[Any]], wrong: str, saved: Any) -> None:
    source = open_source(saved(StandIn(columns)))
    assert isinstance(source, SavedRows)
    with pytest.raises(BiremeError, match=wrong):
        tokenized(source, None)


def test_without_the_package_there_is_a_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BiremeError, match=r"install bireme\[hf\]"):
        open_source(str(tmp_path))


def test_what_the_package_saved_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(
        {"input_ids": [[1, 2], [3]], "labels": [[1, -100], [3]], "text": ["a", "b"]}
    )
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "several"))
    for name in ("one", "several"):
        ids, text = open_source(str(tmp_path / name)), open_source(str(tmp_path / name), text_column="text")
        assert isinstance(ids, SavedRows)
        assert isinstance(text, SavedRows)
        assert Cut(3, "stream", 0).samples(tokenized(ids, None)).take([0])["labels"].tolist() == [
            [1, -100, 3]
        ]
        assert tokenized(text, ByteTokenizer()).ids.tolist() == [97, 256, 98, 256]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("rows.jsonl", '{"prompt": "1 + 1 =", "completion": " 3", "label": LABEL}'),
        ("rows.json", '[{"messages": [], "label": LABEL}]'),
        ("rows.csv", "prompt,completion,label\n1 + 1 =, 3,LABEL\n"),
    ],
)
def test_answers_that_are_marked_as_bad_are_not_learned(name: str, row: str, tmp_path: Path) -> None:
    """TRL's preferences without pairs look like prompts with good answers."""
    pytest.importorskip("datasets")
    bad, other = ("False", "sums") if name.endswith("csv") else ("false", '"sums"')
    (tmp_path / name).write_text(row.replace("LABEL", bad))
    with pytest.raises(BiremeError, match="'label' that tells good answers from bad ones"):
        open_source(str(tmp_path / name))
    (tmp_path / name).write_text(row.replace("LABEL", other))
    assert isinstance(open_source(str(tmp_path / name)), SavedRows)


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "folder/rows.csv"])
def test_all_of_a_csv_file_is_text(name: str, tmp_path: Path) -> None:
    """An answer of digits was refused as a number, and the answer NA was a row without an answer."""
    pytest.importorskip("datasets")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    written = b"prompt,completion\n1 + 1 =, 007\n2 + 2 =,NA\n"
    (tmp_path / name).write_bytes(gzip.compress(written) if name.endswith("gz") else written)
    found = open_source(str((tmp_path / name).parent if "/" in name else tmp_path / name))
    assert isinstance(found, SavedRows)
    assert [row["completion"] for _, row in found.rows()] == [" 007", "NA"]
