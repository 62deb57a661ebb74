"""Text becomes tokens once, whole or not at all, and is found again until something changes."""

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from bireme.errors import BiremeError
from bireme.train.data import encoding
from bireme.train.data.encoding import tokenized
from bireme.train.data.text_files import TextFiles, one_file, text_folder
from bireme.train.data.tokenizer import ByteTokenizer, FolderTokenizer
from tests.support.extent import examples
from tests.support.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.slow

BYTES = ByteTokenizer()


def folder_of(folder: Path, texts: list[str]) -> TextFiles:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03}.txt").write_text(text, newline="")
    return text_folder(folder)


@examples(20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(st.characters(exclude_characters="\0\ufeff", codec="utf-8")), min_size=1))
def test_tokens_are_the_documents_with_an_end_after_each(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    texts.append("never empty")
    tokens = tokenized(folder_of(tmp_path_factory.mktemp("texts"), texts), BYTES)
    written = [text for text in texts if text]
    assert tokens.ids.tolist() == [number for text in written for number in (*text.encode(), 256)]
    assert tokens.document_ends is not None
    assert tokens.document_ends.tolist() == np.cumsum([len(text.encode()) + 1 for text in written]).tolist()


def test_a_second_run_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder_of(tmp_path, ["one", "two"])
    first = tokenized(source, BYTES)
    monkeypatch.setattr(TextFiles, "passages", None)
    again = tokenized(source, BYTES)
    assert isinstance(again.ids, np.memmap)
    assert again.ids.tolist() == first.ids.tolist()


def test_another_tokenizer_or_a_changed_file_makes_new_tokens(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "texts", ["one", "two"])
    assert len(tokenized(source, BYTES)) == 8
    assert len(tokenized(source, ByteTokenizer(has_end_of_text=False))) == 6
    assert len(tokenized(folder_of(tmp_path / "texts", ["one", "three"]), BYTES)) == 10


def test_tokens_that_are_not_all_there_are_made_again(tmp_path: Path, own_cache: Path) -> None:
    source = folder_of(tmp_path, ["one", "two"])
    whole = tokenized(source, BYTES).ids.tolist()
    for name in ("tokens.bin", "ends.bin", "corpus.json"):
        [file] = own_cache.glob(f"tokens/*/{name}")
        file.write_bytes(file.read_bytes()[:-2])
        assert tokenized(source, BYTES).ids.tolist() == whole
        file.unlink()
        assert tokenized(source, BYTES).ids.tolist() == whole


def test_an_interrupted_run_leaves_nothing_that_looks_whole(tmp_path: Path, own_cache: Path) -> None:
    source = folder_of(tmp_path, ["one", "two"])

    def interrupt(done: float, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenized(source, BYTES, interrupt)
    assert [path.name for path in own_cache.glob("tokens/*/*")] == ["lock"]
    assert len(tokenized(source, BYTES)) == 8


def test_what_is_no_text_is_counted_and_remembered(tmp_path: Path) -> None:
    folder_of(tmp_path, ["one"])
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / ".hidden").write_text("")
    for _ in range(2):
        assert tokenized(text_folder(tmp_path), BYTES).num_skipped == 2


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match="has no text in it"):
        tokenized(folder_of(tmp_path / "empty", [""]), BYTES)
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "a").write_bytes(b"\0")
    with pytest.raises(BiremeError, match=r"Skipped because they are not text: 1, such as .*/a"):
        tokenized(text_folder(tmp_path / "binary"), BYTES)


def test_a_cache_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BIREME_CACHE", str(tmp_path / "file"))
    with pytest.raises(BiremeError, match="BIREME_CACHE"):
        tokenized(folder_of(tmp_path / "texts", ["one"]), BYTES)


def test_progress_goes_up_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MOST_PASSAGES", 2)
    seen: list[float] = []
    tokenized(folder_of(tmp_path, ["one", "two", "three"]), BYTES, lambda done, what: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_several_that_want_the_same_tokens_make_them_once(tmp_path: Path) -> None:
    source = folder_of(tmp_path, ["one", "two"])
    made: list[str] = []
    found: list[list[int]] = []

    def want() -> None:
        tokens = tokenized(source, BYTES, lambda done, what: made.append(what))
        found.append(tokens.ids.tolist())

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(made) == 2  # documents


def test_a_tokenizer_of_transformers_gives_what_it_gives_for_whole_documents(tmp_path: Path) -> None:
    tokenizer = FolderTokenizer(save_tokenizer(tmp_path / "tokenizer"))
    texts = ["def value(self):\n    return 1\n", "class Sample:\n    pass\n"]
    tokens = tokenized(folder_of(tmp_path / "texts", texts), tokenizer)
    whole = [number for text in texts for number in (*tokenizer.encode(text), tokenizer.end_of_text)]
    assert tokens.ids.tolist() == whole


def test_a_long_document_gets_one_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bireme.train.data.text_files.PIECE_BYTES", 8)
    path = tmp_path / "a.txt"
    path.write_text("one line\nanother\n" * 4)
    tokens = tokenized(one_file(path), BYTES)
    assert tokens.ids.tolist() == [*path.read_bytes(), 256]
    assert tokens.ids.dtype == np.uint16
