"""Tokenizers: bytes, and what a folder of transformers holds, give ids that decode to the text."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.train.data.tokenizer import ByteTokenizer, FolderTokenizer, load_tokenizer
from tests.support.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.slow


@given(st.text())
def test_bytes_decode_to_the_text_they_came_from(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_many([text])[0].tolist() == tokenizer.encode(text)


@given(st.lists(st.integers(-5, 100_000)))
def test_any_ids_decode_to_some_text(ids: list[int]) -> None:
    assert isinstance(ByteTokenizer().decode(ids), str)


def test_the_end_of_a_text_is_a_token_unless_the_model_has_no_room() -> None:
    assert load_tokenizer("bytes").end_of_text == 256
    assert load_tokenizer("bytes", model_vocabulary=300).num_tokens == 257
    small = load_tokenizer("bytes", model_vocabulary=256)
    assert (small.num_tokens, small.end_of_text) == (256, None)


def test_half_a_surrogate_pair_in_a_prompt_does_no_harm() -> None:
    assert ByteTokenizer().encode("a\ud800") == [97, 63]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_a_folder_of_transformers_is_read(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder)
    text = "def function(self):\n    return self\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_many([text, "self"])[0].tolist() == ids
    assert max(ids) < tokenizer.num_tokens
    assert tokenizer.end_of_text is not None
    assert tokenizer.end_of_text not in ids


def test_ids_beyond_the_vocabulary_are_left_out_of_text(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder)
    assert tokenizer.decode([*tokenizer.encode("self"), tokenizer.num_tokens + 7]) == "self"


def test_a_tokenizer_is_the_same_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    assert FolderTokenizer(folder).identity == FolderTokenizer(save_tokenizer(tmp_path)).identity


def test_auto_is_the_tokenizer_of_the_model_else_bytes(folder: Path, tmp_path: Path) -> None:
    assert isinstance(load_tokenizer("auto", model_folder=folder), FolderTokenizer)
    assert isinstance(load_tokenizer("auto", model_folder=tmp_path), ByteTokenizer)
    assert isinstance(load_tokenizer("auto"), ByteTokenizer)


def test_what_is_no_tokenizer_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(BiremeError, match="no tokenizer 'byte'"):
        load_tokenizer("byte")
    with pytest.raises(BiremeError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BiremeError, match="cannot be read"):
        load_tokenizer(str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(BiremeError, match=r"install bireme\[hf\]"):
        load_tokenizer(str(tmp_path))
