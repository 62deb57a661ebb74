"""What a run asks for becomes samples that its model takes, or one sentence before anything starts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bireme.errors import BiremeError
from bireme.model.sources import load_source
from bireme.train.data.placing import Order
from bireme.train.data.prepare import ModelSide, prepare_data, vocabulary_of
from bireme.train.data.tokenizer import ByteTokenizer, FolderTokenizer
from bireme.train.run_file.tables import Data
from tests.support.tiny_tokenizer import save_tokenizer
from tests.support.whole_batches import WholeBatches


def model_side(vocab: int = 257, folder: Path | None = None) -> ModelSide:
    source = load_source(f"gpt:layers=1,width=8,heads=1,vocab={vocab},context=16")
    return ModelSide(source.example_inputs, vocabulary_of(source.model), folder)


def request(folder: Path, **wishes: Any) -> Data:
    (folder / "texts").mkdir(exist_ok=True)
    (folder / "texts" / "a.txt").write_text("some text\n" * 40)
    return Data(**{"source": str(folder / "texts"), "length": 8, **wishes})


def test_text_becomes_samples_that_the_built_in_model_learns_from(tmp_path: Path) -> None:
    data = prepare_data(request(tmp_path), model_side(), 4)
    assert isinstance(data.tokenizer, ByteTokenizer)
    assert data.evaluation is not None
    assert (data.num_tokens, data.num_documents, data.num_skipped) == (401, 1, 0)
    model = load_source("gpt:layers=1,width=8,heads=1,vocab=257,context=16", device="cpu").model
    [batch] = WholeBatches(data.training, Order(len(data.training)), 4, num_batches=1)
    assert torch.isfinite(model(**batch)["loss"])


def test_a_model_of_256_tokens_gets_bytes_without_an_end(tmp_path: Path) -> None:
    assert prepare_data(request(tmp_path), model_side(256), 4).num_tokens == 400


@pytest.mark.slow
def test_the_tokenizer_of_the_model_is_used(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    data = prepare_data(request(tmp_path), model_side(400, tmp_path), 4)
    assert isinstance(data.tokenizer, FolderTokenizer)


@pytest.mark.slow
def test_a_model_may_lack_an_added_token_that_no_text_has(tmp_path: Path) -> None:
    """As a small Gemma lacks the token of images: its own tokenizer was refused."""
    transformers: Any = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(save_tokenizer(tmp_path))
    num_tokens = len(tokenizer)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    side = model_side(num_tokens, tmp_path)
    assert len(prepare_data(request(tmp_path), side, 4).training)
    (tmp_path / "image.txt").write_text("some <image>\n" * 40)
    with pytest.raises(BiremeError, match=f"token id {num_tokens}, but the model has {num_tokens} tokens"):
        prepare_data(request(tmp_path, source=str(tmp_path / "image.txt")), side, 4)


def test_an_evaluation_source_leaves_all_of_the_other_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("other text\n" * 20)
    wishes = request(tmp_path, evaluation_source=str(tmp_path / "held.txt"))
    data = prepare_data(wishes, model_side(), 4)
    assert data.evaluation is not None
    assert (len(data.training), len(data.evaluation)) == (401 // 8, 221 // 8)


def test_a_function_gives_training_and_evaluation_samples(tmp_path: Path) -> None:
    made = "{'x': torch.ones(10, 3), 'y': torch.ones(10).long()}"
    (tmp_path / "own.py").write_text(f"import torch\ndef some():\n    return {made}\n")
    side = ModelSide({"x": torch.ones(1, 5), "y": torch.ones(1, dtype=torch.long)})
    data = prepare_data(Data(source=f"{tmp_path}/own.py:some", evaluation_fraction=0.2), side, 2)
    assert data.evaluation is not None
    assert (len(data.training), len(data.evaluation)) == (8, 2)
    assert (data.tokenizer, data.num_tokens) == (None, None)


@pytest.mark.parametrize("tokenizer", ["auto", "bytes"])
def test_ids_that_somebody_made_are_not_taken_for_bytes(tokenizer: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(200, dtype=np.uint16))
    data = prepare_data(Data(source=str(tmp_path / "a.npy"), tokenizer=tokenizer, length=8), model_side(), 1)
    assert data.tokenizer is None
    assert data.num_tokens == 200


@pytest.mark.parametrize(
    ("wishes", "vocab", "batch", "wrong"),
    [
        ({"source": "missing"}, 257, 4, "no file or folder 'missing'"),
        ({"pattern": "*.md"}, 257, 4, "no files that match"),
        ({}, 257, 400, "too few for a sample of 8 to train on and 400 to evaluate"),
        ({"evaluation_fraction": 0.0}, 257, 400, "training has 50 samples, but a batch needs 400"),
        ({}, 257, 30, "training has 20 samples, but a batch needs 30"),
        ({"tokenizer": "bytes"}, 100, 4, "tokenizer has 257 tokens but the model 100"),
    ],
)
def test_what_cannot_work_is_refused(
    wishes: dict[str, object], vocab: int, batch: int, wrong: str, tmp_path: Path
) -> None:
    with pytest.raises(BiremeError, match=wrong):
        prepare_data(request(tmp_path, **wishes), model_side(vocab), batch)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(300, dtype=np.uint16))
    with pytest.raises(BiremeError, match="token id 299, but the model has 257"):
        prepare_data(Data(source=str(tmp_path / "a.npy"), length=8), model_side(), 1)


@pytest.mark.parametrize(
    ("made", "wrong"),
    [
        ("{'x': torch.ones(9, 3)}", "lack y: they hold x, but the model takes x, y"),
        ("{'x': torch.ones(9, 3), 'y': torch.ones(9)}", "y is float32, but the model takes int64"),
        ("{'x': torch.ones(9), 'y': torch.ones(9).long()}", r"x is of shape \[\], and the model takes \[5\]"),
    ],
)
def test_samples_that_the_model_does_not_take_are_refused(made: str, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(f"import torch\ndef some():\n    return {made}\n")
    side = ModelSide({"x": torch.ones(1, 5), "y": torch.ones(1, dtype=torch.long)})
    with pytest.raises(BiremeError, match=wrong):
        prepare_data(Data(source=f"{tmp_path}/own.py:some", evaluation_fraction=0.0), side, 2)


@pytest.mark.slow
def test_a_model_of_transformers_tells_its_vocabulary() -> None:
    class Config:
        vocab_size = 30

    model = torch.nn.Identity()
    assert vocabulary_of(model) is None
    model.config = Config()  # type: ignore[assignment]  # as transformers' models have one
    assert vocabulary_of(model) == 30
