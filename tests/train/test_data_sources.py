"""Sources: what a run can take its data from, and what it says where there is none."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bireme.errors import BiremeError
from bireme.train.data import text_files
from bireme.train.data.hub import SavedRows
from bireme.train.data.prepare import ModelSide, prepare_data
from bireme.train.data.samples import Tokens, load_tokens
from bireme.train.data.source import OwnSamples, open_source
from bireme.train.data.text_files import TextFiles, one_file, python_sources, text_folder
from bireme.train.data.viewing import data_notes
from bireme.train.run_file.tables import Data
from bireme.user_code import names_function


def texts_of(source: TextFiles) -> list[str]:
    """The text of each document."""
    found = [""]
    for passage in source.passages(lambda name: None):
        found[-1] += passage.text
        if passage.ends_document:
            found.append("")
    return found[:-1]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def names_of(source: TextFiles) -> list[str]:
    return [file.path.name for file in source.files]


def test_a_folder_is_read_sorted_and_all_the_way_down(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": "2", "a/z.txt": "1", "c/d/e.txt": "3", "c/d/f.md": "4"})
    assert texts_of(text_folder(tmp_path)) == ["1", "2", "3", "4"]


def test_a_pattern_is_for_names_and_with_a_slash_for_paths(tmp_path: Path) -> None:
    write(tmp_path, {"b.txt": "", "a/z.txt": "", "a/z.md": "", "c/d/e.txt": ""})
    assert names_of(text_folder(tmp_path, "*.txt")) == ["z.txt", "b.txt", "e.txt"]
    assert names_of(text_folder(tmp_path, "**/*.txt")) == ["z.txt", "b.txt", "e.txt"]
    assert names_of(text_folder(tmp_path, "a/*")) == ["z.md", "z.txt"]


def test_hidden_files_and_folders_are_skipped_and_counted(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "", ".b.txt": "", ".git/c.txt": ""})
    source = text_folder(tmp_path)
    assert names_of(source) == ["a.txt"]
    assert len(source.skipped) == 2


def test_a_link_to_nothing_is_skipped_and_one_in_a_circle_ends(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": ""})
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "gone.txt")
    (tmp_path / "circle").symlink_to(tmp_path)
    source = text_folder(tmp_path)
    assert names_of(source) == ["a.txt"]
    assert source.skipped == (str(tmp_path / "nowhere.txt"),)


def test_a_file_in_a_folder_that_is_no_text_is_skipped_while_reading(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "text"})
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xfd")
    (tmp_path / "c.txt").write_bytes(b"a\0b")
    (tmp_path / "d.txt").write_bytes("\ufeffmarked".encode())
    skipped: list[str] = []
    texts = [passage.text for passage in text_folder(tmp_path).passages(skipped.append)]
    assert texts == ["text", "marked"]
    assert [Path(name).name for name in skipped] == ["b.txt", "c.txt"]


def test_a_file_that_was_named_must_be_text(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    path.write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(BiremeError, match=r"b.txt cannot be read as UTF-8"):
        texts_of(one_file(path))


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 7, 64])
def test_a_long_file_comes_in_passages_that_make_up_its_text(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "PIECE_BYTES", piece)
    text = "Größe: 12 €\n\nzweite Zeile, lang\n" * 5 + "ohnezwischenraumundende𝄞" * 3
    path = tmp_path / "a.txt"
    path.write_text(text)
    passages = list(one_file(path).passages(lambda name: None))
    assert "".join(passage.text for passage in passages) == text
    assert sum(passage.size for passage in passages) == path.stat().st_size
    assert [passage.ends_document for passage in passages] == [False] * (len(passages) - 1) + [True]


def test_passages_end_with_a_line_where_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "PIECE_BYTES", 16)
    path = tmp_path / "a.txt"
    path.write_text("one line\nanother line\nlast")
    passages = [passage.text for passage in one_file(path).passages(lambda name: None)]
    assert passages == ["one line\n", "another line\nlast"]


def test_bad_bytes_far_into_a_file_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "PIECE_BYTES", 4)
    path = tmp_path / "a.txt"
    path.write_bytes(b"abcdef\xffg")
    assert texts_of(one_file(path)) == ["abcdef\ufffdg"]
    replaced: list[str] = []
    list(one_file(path).passages(lambda _path: None, replaced.append))
    assert replaced == [str(path)]


def test_the_standard_library_is_always_the_same_and_has_no_tests() -> None:
    source = python_sources()
    assert source == python_sources()
    assert 1_000_000 < source.size <= 20_000_000
    assert not {"test", "tests", "site-packages"} & {
        part for file in source.files for part in file.path.parts[-3:]
    }
    assert names_of(source) != sorted(names_of(source))


def test_the_standard_library_is_capped() -> None:
    source = python_sources(most_bytes=300_000)
    assert 200_000 < source.size <= 300_000


def test_a_changed_file_gives_another_identity(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = one_file(path).identity
    assert before == one_file(path).identity
    os.utime(path, ns=(1, 1))
    assert before != one_file(path).identity


def test_arrays_of_ids_are_mapped(tmp_path: Path) -> None:
    ids = np.arange(100, dtype=np.uint16)
    np.save(tmp_path / "a.npy", ids)
    ids.tofile(tmp_path / "b.bin")
    ids.astype(np.uint32).tofile(tmp_path / "c.bin")
    for tokens in (
        open_source(str(tmp_path / "a.npy")),
        open_source(str(tmp_path / "b.bin")),
        open_source(str(tmp_path / "c.bin"), dtype="uint32"),
    ):
        assert isinstance(tokens, Tokens)
        assert isinstance(tokens.ids, np.memmap)
        assert tokens.ids.tolist() == list(range(100))
        assert tokens.largest_id() == 99


def test_the_largest_id_of_a_long_array_is_found_in_its_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bireme.train.data.samples.CHECKED_AT_ONCE", 10)
    monkeypatch.setattr("bireme.train.data.samples.MOST_CHECKED", 20)
    assert Tokens("", np.arange(95, dtype=np.uint16)).largest_id() == 94


@pytest.mark.parametrize(
    ("array", "wrong"),
    [
        (np.zeros(4, np.float32), "float32"),
        (np.zeros((2, 2), np.int64), r"shape \[2, 2\]"),
        (np.zeros(0, np.int64), "no tokens"),
        (np.array([3, -1]), "negative"),
    ],
)
def test_an_array_that_is_no_row_of_ids_is_refused(array: NDArray[Any], wrong: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(BiremeError, match=wrong):
        load_tokens(tmp_path / "a.npy")


def test_a_negative_id_is_found_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bireme.train.data.samples.CHECKED_AT_ONCE", 10)
    np.save(tmp_path / "a.npy", np.array([3] * 25 + [-7, 3]))
    with pytest.raises(BiremeError, match="negative id -7"):
        load_tokens(tmp_path / "a.npy")


def test_what_can_be_read_only_once_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BiremeError, match="is not an ordinary file, and every process"):
        open_source(str(tmp_path / "pipe"))


def test_a_bin_file_of_another_type_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"123456")
    with pytest.raises(BiremeError, match="not a whole number of uint32"):
        load_tokens(path, "uint32")
    path.write_bytes(b"")
    with pytest.raises(BiremeError, match="no tokens"):
        load_tokens(path)
    (tmp_path / "a.npy").write_bytes(b"junk")
    with pytest.raises(BiremeError, match="cannot be read"):
        load_tokens(tmp_path / "a.npy")


def test_a_source_is_what_it_looks_like(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "text", "own.py": "def samples():\n    return [{'x': 1.0}]\n"})
    assert isinstance(open_source("stdlib"), TextFiles)
    assert isinstance(open_source(str(tmp_path)), TextFiles)
    assert isinstance(open_source(str(tmp_path / "a.txt")), TextFiles)
    assert isinstance(open_source(f"{tmp_path}/own.py:samples"), OwnSamples)
    assert isinstance(open_source(f"{tmp_path}/own.py"), TextFiles)


def test_functions_are_told_from_files(tmp_path: Path) -> None:
    assert names_function("package.module:function")
    assert names_function("python:package.module:function")
    assert names_function("some folder/file.py:function")
    assert not names_function("stdlib")
    assert not names_function("C:\\texts")
    odd = tmp_path / "odd.py:name"
    odd.write_text("")
    assert not names_function(str(odd))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match=r"no file or folder 'missing.txt'.*stdlib"):
        open_source("missing.txt")
    with pytest.raises(BiremeError, match="no files that match"):
        text_folder(tmp_path)
    with pytest.raises(BiremeError, match="no folder"):
        text_folder(tmp_path / "missing")


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_skipped(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "", "b.txt": "", "c/d.txt": ""})
    (tmp_path / "b.txt").chmod(0)
    (tmp_path / "c").chmod(0)
    try:
        source = text_folder(tmp_path)
    finally:
        (tmp_path / "c").chmod(0o700)
    assert names_of(source) == ["a.txt"]
    assert len(source.skipped) == 2


def test_a_file_that_goes_away_before_it_is_read_is_an_error_and_not_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "one", "b.txt": "two"})
    source = text_folder(tmp_path)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(BiremeError, match=r"b\.txt could not be read"):
        texts_of(source)


# --- files of rows ------------------------------------------------------------------------------------------


def test_a_file_of_json_lines_is_read_as_rows_and_not_as_text(tmp_path: Path) -> None:
    """It was trained on as raw text, with its braces and quotes, unless hf: was before it."""
    write(tmp_path, {"rows.jsonl": '{"id": 1, "text": "one"}\n\n{"text": "two"}\n{"id": 3}\n'})
    for source in (open_source(str(tmp_path / "rows.jsonl")), open_source(str(tmp_path))):
        assert isinstance(source, SavedRows)
        skipped: list[str] = []
        assert [passage.text for passage in source.passages(skipped.append)] == ["one", "two"]
        assert (source.size, source.num_files, len(skipped)) == (3, 1, 1)


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ('{"text": "a"}\n{"text": \n', r"rows\.jsonl, line 2, is not JSON: Expecting value"),
        ('{"text": "a"}\n\n["b"]\n', r"rows\.jsonl, line 3, holds a list and not a JSON object"),
        ("", r"rows\.jsonl has no rows"),
        ('{"a": "a", "b": "b"}\n', "has the columns a, b; none is named input_ids or text or messages"),
    ],
)
def test_a_wrong_line_of_json_is_named(lines: str, wrong: str, tmp_path: Path) -> None:
    write(tmp_path, {"rows.jsonl": lines})
    with pytest.raises(BiremeError, match=wrong):
        prepare_data(Data(source=str(tmp_path / "rows.jsonl"), length=8), ModelSide({}), 1)


def test_rows_among_texts_are_not_taken_for_text(tmp_path: Path) -> None:
    write(tmp_path, {"train.jsonl": '{"text": "one"}\n', "README.md": "two", "settings.json": "{}"})
    with pytest.raises(
        BiremeError, match=r'rows in 1 file, such as train\.jsonl, among 2 other files.* "\*\.jsonl"'
    ):
        open_source(str(tmp_path))
    chosen = open_source(str(tmp_path), pattern="*.jsonl")
    assert isinstance(chosen, SavedRows)
    (tmp_path / "train.jsonl").unlink()
    texts = open_source(str(tmp_path))
    assert isinstance(texts, TextFiles)
    assert names_of(texts) == ["README.md", "settings.json"]


def test_rows_that_only_the_library_reads_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    write(tmp_path, {"rows.csv": "text\none\n"})
    for text in (tmp_path, tmp_path / "rows.csv"):
        with pytest.raises(BiremeError, match=r"install bireme\[hf\]"):
            open_source(str(text))


def test_files_that_are_not_utf_8_are_named_in_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    """Bytes far into a file that are not UTF-8 were once replaced without a word."""
    del own_cache
    monkeypatch.setattr(text_files, "PIECE_BYTES", 64)
    write(tmp_path, {"a.txt": "text\n" * 40})
    (tmp_path / "f.txt").write_bytes(b"text\n" * 20 + b"caf\xe9\n" + "\ufffd".encode())
    for name in ("b.txt", "c.txt", "d.txt", "e.txt"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    warning = (
        f"Left out of {tmp_path}: 4 files that are not text in UTF-8, {tmp_path}/b.txt, {tmp_path}/c.txt, "
        f"{tmp_path}/d.txt and 1 more. Replaced by U+FFFD in 1 file of {tmp_path}: bytes that are not UTF-8, "
        f"in {tmp_path}/f.txt. Convert them to UTF-8, or choose the files to read with data.pattern."
    )
    for _ in range(2):  # the second time from the cache
        data = prepare_data(Data(source=str(tmp_path), length=8, evaluation_fraction=0.0), ModelSide({}), 1)
        assert data_notes(data) == (warning,)
    assert (data.num_files, data.loss_on) == (6, "all tokens")
