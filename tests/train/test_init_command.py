"""`bireme init` writes a file to begin with, and never writes over one unasked."""

from pathlib import Path

import pytest

from bireme.train.run_file import RunFile, commented_toml, load_run_file
from tests.support.command import bireme

Capture = pytest.CaptureFixture[str]


def test_the_file_that_is_written_is_the_demonstration(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    result = bireme(capsys, "init", str(path))
    assert result.status == 0, result.err
    assert path.read_text(encoding="utf-8") == commented_toml()
    assert load_run_file(path) == RunFile()


def test_without_a_path_it_is_run_toml_and_what_to_do_next_is_said(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = bireme(capsys, "init")
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
    assert "bireme train run.toml" in result.out
    assert "--set training.steps=1000" in result.out


def test_a_file_that_is_there_is_left_alone(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("mine")
    result = bireme(capsys, "init", str(path))
    assert result.status == 2
    assert result.err == (
        f"bireme: {path} already exists. Name another file, or overwrite it with --force.\n"
    )
    assert path.read_text() == "mine"


def test_force_writes_over_it(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("mine")
    assert bireme(capsys, "init", str(path), "--force").status == 0
    assert load_run_file(path) == RunFile()


def test_json_says_where_the_file_is_and_what_to_run(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "my run.toml"
    expected = {"path": str(path), "replaced": False, "next": f"bireme train '{path}'"}
    assert bireme(capsys, "init", str(path), "--json").document == expected
    assert bireme(capsys, "init", str(path), "--json", "--force").document == expected | {"replaced": True}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("nowhere/run.toml", "there is no folder"), ("run.yaml", "Name it run.toml.")],
)
def test_a_path_that_cannot_be_one_is_refused(
    capsys: Capture, tmp_path: Path, name: str, sentence: str
) -> None:
    result = bireme(capsys, "init", str(tmp_path / name))
    assert result.status == 2
    assert sentence in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_not_written_over_even_by_force(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "run.toml"
    folder.mkdir()
    result = bireme(capsys, "init", str(folder), "--force")
    assert result.status == 2
    assert "it is a folder" in result.err
