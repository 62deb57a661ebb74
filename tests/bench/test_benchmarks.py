"""Every benchmark keeps the same contract: how it is started, what it can be asked, what it prints."""

import ast
import json
import runpy
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.common.command import Findings, Section, benchmark
from benchmarks.common.verdicts import Spread, at_least, at_most, exactly
from bireme.errors import BiremeError

FOLDER = Path(__file__).parents[2] / "benchmarks"
BENCHMARKS = sorted(FOLDER.glob("*.py"))
CHEAP = ("search", "partition")


def run_main(monkeypatch: pytest.MonkeyPatch, path: Path, *words: str) -> int:
    """`python benchmarks/NAME.py WORDS…` inside this process, where torch is loaded already."""
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_every_benchmark_has_the_options_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path
) -> None:
    assert run_main(monkeypatch, path, "--help") == 0
    text = capsys.readouterr().out
    assert "--quick" in text
    assert "--json" in text


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_finds_its_parts_wherever_it_is_called(path: Path) -> None:
    """Tests have the project's root in their path, a script that is called by its path has not."""
    before, own, _ = path.read_text().partition("\nfrom benchmarks.")
    assert not own or "\nsys.path.insert(0, str(Path(__file__).resolve().parent.parent))\n" in before


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_needs_nothing_that_only_tests_have(path: Path) -> None:
    """One imported the tests' helpers, and so ran as a module from the root alone."""
    roots = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add((node.module or "").partition(".")[0])
    assert not roots & {"tests", "pytest", "hypothesis"}


def test_all_of_them_are_in_the_makefile_and_in_the_documents() -> None:
    root = FOLDER.parent
    told = "\n".join(path.read_text() for path in (root / "docs").glob("*.md"))
    for path in BENCHMARKS:
        assert f"python benchmarks/{path.name}" in told
        assert f"benchmarks/{path.name}" in (root / "Makefile").read_text()


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", CHEAP)
def test_a_smoke_run_prints_one_document_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    path = str(FOLDER / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [path, "--quick", "--json"])
    runpy.run_path(path, run_name="__main__")
    document = json.loads(capfd.readouterr().out)
    assert document["rows"]
    assert document["verdicts"]
    for verdict in document["verdicts"]:
        assert verdict.keys() == {"name", "limit", "value", "ok"}
        assert isinstance(verdict["name"], str)
        assert isinstance(verdict["ok"], bool)


# --- what they share ---------------------------------------------------------------------------------------


def findings(_asked: Namespace) -> Findings:
    sys.stdout.write("a solver says something\n")
    subprocess.run([sys.executable, "-c", "print('and a process too')"], check=True)
    row = {"name": "one", "seconds": Spread(2.0, 1.0, 3.0), "bytes": 4096, "share": None}
    verdicts = [at_most("seconds", 2.0, 1.5), at_least("speed", 2.0, 1.5), exactly("bytes", 4096, 4096)]
    return Findings([Section("A title", [row])], verdicts)


def test_what_is_printed_on_the_way_is_not_in_the_document(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["it", "--json"])
    benchmark("What it is.", findings, quick="less")
    out, err = capfd.readouterr()
    assert json.loads(out) == {
        "rows": [
            {
                "name": "one",
                "seconds": {"median": 2.0, "least": 1.0, "greatest": 3.0},
                "bytes": 4096,
                "share": None,
            }
        ],
        "verdicts": [
            {"name": "seconds", "limit": 1.5, "value": 2.0, "ok": False},
            {"name": "speed", "limit": 1.5, "value": 2.0, "ok": True},
            {"name": "bytes", "limit": 4096, "value": 4096, "ok": True},
        ],
    }
    assert "a solver says something" in err
    assert "and a process too" in err


def test_tables_and_verdicts_are_for_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["it"])
    benchmark("What it is.", findings, quick="less")
    out = capsys.readouterr().out
    assert "A title" in out
    assert "2 (1 to 3)" in out
    assert "4,096" in out
    assert "✗ seconds: 2 (at most 1.5)" in out
    assert "✓ bytes: 4,096 (exactly 4,096)" in out


def test_rows_of_several_tables_say_which_they_are_of() -> None:
    both = Findings([Section("first", [{"a": 1}]), Section("second", [{"b": 2}])], [])
    assert both.document()["rows"] == [{"section": "first", "a": 1}, {"section": "second", "b": 2}]


def test_a_value_that_is_no_number_keeps_no_promise() -> None:
    assert not at_most("x", float("nan"), 1.0).ok
    assert not at_least("x", float("nan"), 1.0).ok


def test_what_cannot_be_measured_here_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_asked: Namespace) -> Findings:
        raise BiremeError("There is no device to measure on. Attach one.")

    monkeypatch.setattr(sys, "argv", ["it", "--json"])
    with pytest.raises(SystemExit) as end:
        benchmark("What it is.", refuse, quick="less")
    assert end.value.code == 2
    assert capsys.readouterr().err == "There is no device to measure on. Attach one.\n"
