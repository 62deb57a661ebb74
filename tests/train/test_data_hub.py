"""Datasets of the datasets library: by folder, by file, by name, as streams, and without a network."""

import json
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bireme.errors import BiremeError
from bireme.train.data.documents import StreamSamples
from bireme.train.data.encoding import tokenized
from bireme.train.data.hub import SavedRows
from bireme.train.data.prepare import ModelSide, RunData, prepare_data
from bireme.train.data.source import open_source
from bireme.train.data.tokenizer import ByteTokenizer
from bireme.train.run_file.tables import Data
from tests.support.command import bireme
from tests.support.whole_batches import WholeBatches

pytestmark = pytest.mark.slow

datasets: Any = pytest.importorskip("datasets", reason="datasets is not installed")

TEXTS = [f"row {number:04}" for number in range(400)]


@pytest.fixture(autouse=True)
def own_cache_of_the_library(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as the Hub has it: a file for each split."""
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "train.jsonl").write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS))
    (hub / "test.jsonl").write_text(json.dumps({"id": 1, "text": "only test"}) + "\n")
    return hub


def documents(text: str, column: str | None = None) -> list[str]:
    source = open_source(text, text_column=column)
    assert isinstance(source, SavedRows)
    tokens = tokenized(source, ByteTokenizer())
    return ByteTokenizer().decode([10 if one == 256 else one for one in tokens.ids.tolist()]).splitlines()


def test_a_folder_and_its_splits_are_read(folder: Path) -> None:
    assert documents(f"hf:{folder}") == TEXTS
    assert documents(f"hf:{folder},split=test") == ["only test"]
    assert documents(f"hf:{folder},split=train[:3],column=text") == TEXTS[:3]


def test_a_single_file_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", "b"]}).to_parquet(str(tmp_path / "rows.parquet"))
    assert documents(f"hf:{tmp_path / 'rows.parquet'}") == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (",splitt=train", "Did you mean 'split'"),
        (",split", "not of the form key=value"),
        (",split=a,split=b", "twice"),
        (",streaming=yes", "must be true or false"),
        (",split=dev", "dev"),
        (",column=txt", "Did you mean 'text'"),
    ],
)
def test_what_a_source_cannot_mean_is_refused(options: str, wrong: str, folder: Path) -> None:
    with pytest.raises(BiremeError, match=wrong):
        open_source(f"hf:{folder}{options}")


def test_a_name_is_loaded_with_its_split_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load(path: str, **words: Any) -> Any:
        asked.update(words, path=path)
        return datasets.Dataset.from_dict({"text": ["from the hub"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert documents("hf:owner/name,config=en,split=train,revision=v1") == ["from the hub"]
    expected = {
        "path": "owner/name",
        "name": "en",
        "split": "train",
        "revision": "v1",
        "streaming": False,
    }
    assert asked == expected


def test_without_a_network_a_name_is_one_sentence_and_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bireme.train.data.hub.getproxies", dict)

    def unreachable(*_words: object, **_options: object) -> None:
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.chdir(tmp_path)
    result = bireme(capsys, "train", "--set", "data.source=hf:owner/nowhere")
    assert result.status == 2
    assert "owner/nowhere has not been loaded on this machine before" in result.err
    assert "the Hugging Face Hub cannot be reached" in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def streamed(folder: Path, **wishes: Any) -> RunData:
    source = f"hf:{folder / 'train.jsonl'},streaming=true"
    usual: dict[str, Any] = {"source": source, "length": 9, "packing": "none", "shuffle_buffer": 50}
    held_samples = wishes.pop("held_samples", 256)
    return prepare_data(Data(**usual | wishes), ModelSide({}), 4, held_samples=held_samples)


def rows(data: RunData, first: int = 0, count: int = 400) -> list[str]:
    """The texts of samples, one to each."""
    with WholeBatches(data.training, data.order(0), 1, first, count, prefetch=0) as batches:
        return [ByteTokenizer().decode(batch["input_ids"][0].tolist()) for batch in batches]


def test_a_stream_is_shuffled_within_its_buffer_and_always_alike(folder: Path) -> None:
    data = streamed(folder, evaluation_fraction=0.0)
    seen = rows(data, count=800)
    assert sorted(seen[:400]) == sorted(seen[400:]) == TEXTS
    assert seen[:400] != TEXTS
    assert seen[:400] != seen[400:], "every epoch has an order of its own"
    assert all(TEXTS.index(row) <= place + 50 for place, row in enumerate(seen[:400]))
    assert rows(streamed(folder, evaluation_fraction=0.0), count=20) == seen[:20]
    assert rows(streamed(folder, evaluation_fraction=0.0, seed=1), count=20) != seen[:20]
    assert rows(streamed(folder, evaluation_fraction=0.0, shuffle_buffer=0)) == TEXTS


def test_a_stream_goes_on_exactly_where_it_was_left(folder: Path) -> None:
    for packing in ("none", "documents", "stream"):
        wishes = {"packing": packing, "length": 40, "evaluation_fraction": 0.0}
        seen = rows(streamed(folder, **wishes), count=40)
        assert rows(streamed(folder, **wishes), first=25, count=15) == seen[25:], packing


def test_samples_of_a_stream_come_back_without_reading_it_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator assigns samples anew of a replica that died. Far ones are read from the start."""
    monkeypatch.setattr("bireme.train.data.documents._KEPT_TOKENS", 9 * 30)
    samples = streamed(folder, evaluation_fraction=0.0).training
    assert isinstance(samples, StreamSamples)
    seen = samples.take(range(100))["input_ids"]
    begin = Mock(wraps=samples._from_the_beginning)
    monkeypatch.setattr(samples, "_from_the_beginning", begin)
    assert torch.equal(samples.take([80, 99, 70])["input_ids"], seen[[80, 99, 70]])
    assert not begin.called
    assert torch.equal(samples.take([20, 60, 99])["input_ids"], seen[[20, 60, 99]])
    assert begin.call_count == 1


def test_the_beginning_of_a_stream_is_kept_apart_for_evaluation(folder: Path) -> None:
    data = streamed(folder, held_samples=64)
    assert data.evaluation is not None
    held = data.evaluation.take(range(len(data.evaluation)))["input_ids"]
    apart = {ByteTokenizer().decode(row.tolist()) for row in held}
    assert apart == set(TEXTS[:64])
    assert sorted(rows(data, count=336)) == TEXTS[64:]
    assert isinstance(data.training, StreamSamples)
    assert (data.num_tokens, data.is_text) == (None, True)
