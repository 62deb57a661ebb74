"""What the documents say is so: commands run, code runs, pictures and keys are those of the program."""

import re
from pathlib import Path

import pytest

from bireme.schedule.catalogue import generate
from bireme.schedule.grid import ascii_picture
from bireme.simulate.costs import CostsFile
from tests.schedule.test_pictures import PICTURED
from tests.support.command import bireme, with_sets
from tests.support.prose import num_words, pages
from tests.support.ranks import run_script

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "tests" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(document: Path, language: str = "") -> list[str]:
    """The fenced blocks of a document in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_readme_s_python_runs() -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    exec(compile(code, "README.md", "exec"), {})


def test_the_codecs_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run can use the page's own codec, too."""
    found = blocks(ROOT / "docs" / "own-codecs.md", "python")
    assert len(found) == 5
    for code in found:
        if "self.narrow" not in code:  # two lines of a user's model
            exec(compile(code, "own-codecs.md", "exec"), {"__name__": "own-codecs.md"})
    own = next(code for code in found if "my_codecs.py" in code)
    (tmp_path / "my_codecs.py").write_text(own)
    monkeypatch.syspath_prepend(tmp_path)
    from bireme.codec import codec_of, parse_codec

    assert codec_of(parse_codec("my_codecs:Zipped"))


@pytest.mark.slow
def test_the_engine_s_example_trains_as_a_script(tmp_path: Path) -> None:
    code = blocks(ROOT / "docs" / "engine.md", "python")[0]
    done = run_script(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "batch 79: loss " in done.stdout
    assert "14 tensors to save" in done.stdout
    assert "assert loss < " in code, "the script checks that it learns"


@pytest.mark.parametrize("name", PICTURED)
def test_every_schedule_is_explained_under_its_picture(name: str) -> None:
    text = (ROOT / "docs" / "schedules.md").read_text()
    section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert ascii_picture(PICTURED[name]) in section


def test_stages_of_unequal_width_are_drawn_as_they_run() -> None:
    text = (ROOT / "docs" / "schedules.md").read_text()
    program = generate("1f1b", num_stages=2, num_microbatches=6, shares=((3, 3), (6,)))
    assert f"\n{ascii_picture(program)}\n" in text.split("\n## Stages of unequal width\n")[1]


def test_every_test_that_a_document_names_is_there() -> None:
    pages = [one for one in DOCUMENTS if one.name != "other-programs.md"]  # whose keys may begin so
    named = {one for page in pages for one in re.findall(r"`(test_\w+)`", page.read_text())}
    there = {
        one
        for path in (ROOT / "tests").rglob("*.py")
        for one in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert named
    assert named <= there, named - there


def test_the_messages_of_the_troubleshooting_page_are_in_the_code() -> None:
    """A message is in backticks in the first column of a table; … stands for what differs."""
    text = "".join(file.read_text() for file in sorted((ROOT / "src").rglob("*.py")))
    code = re.sub(r'[\'"]\s*\n\s*f?[\'"]', "", text)  # literals that go on in the next line
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [
        one for cell in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for one in cell.split("`")[1::2]
    ]
    parts = [part.strip() for message in quoted for part in re.split(r"…|: ", message)]
    assert len(quoted) > 20
    assert [part for part in parts if part not in code] == []


def test_every_key_of_the_costs_file_is_explained() -> None:
    text = (ROOT / "docs" / "costs.md").read_text()
    assert [key for key in CostsFile.model_fields if f"`{key}`" not in text and key != "format"] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_between_files_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text())
    assert [target for target in targets if not (document.parent / target).exists()] == []
    if document.parent.name == "docs":
        assert [one for one in targets if one.startswith("..")] == [], "the site has the pages of docs alone"


def heading_ids(document: Path) -> set[str]:
    """Ids of the headings of a document, as sites make them from the titles."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        name = re.sub(r"[^\w -]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()).replace(
            " ", "-"
        )
        found.add(f"{name}-{sum(one.startswith(name) for one in found)}" if name in found else name)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_into_files_lead_to_a_heading(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]*\.md|)#([^)]+)\)", document.read_text())
    wrong = [
        f"{target}#{name}"
        for target, name in links
        if name not in heading_ids(document.parent / target if target else document)
    ]
    assert wrong == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    named = re.findall(r"([\w-]+\.md)\b", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1])
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_pages_keep_within_their_words() -> None:
    """If this fails, say it in fewer words, or on another page: `python -m tests.support.prose` counts."""
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    words = {page.relative_to(ROOT).as_posix(): num_words(page.read_text()) for page in pages()}
    found = re.findall(r"^  - (\w+):\n((?:      - .*\n)+)", nav, flags=re.MULTILINE)
    parts = {
        title: {name: words.get(f"docs/{name}", 0) for name in re.findall(r"([\w-]+\.md)\n", names)}
        for title, names in found
    }
    assert {name: count for name, count in parts["Guides"].items() if count > 800} == {}
    assert sum(parts["Explanations"].values()) <= 10_000
    assert sum(words.values()) - sum(parts["Figures"].values()) <= 45_000


@pytest.mark.parametrize("name", ["1f1b", "2bw"])
def test_the_readme_s_pictures_are_what_the_program_draws(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    """Made by the command in this test."""
    keys = f"plan.schedule={name} plan.depth=4 plan.microbatches=8"
    words = with_sets(f"simulate {keys} --batches 4 --forward-s 0.01 --backward-s 0.02".split())
    fresh = tmp_path / "fresh.svg"
    assert bireme(capsys, *words, "--picture", str(fresh)).status == 0
    assert fresh.read_text() == (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
