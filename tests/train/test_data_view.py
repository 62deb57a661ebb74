"""`bireme data`: what is recognized and counted, the samples token by token, and the page about formats."""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bireme.report.data_table import DataView, print_data
from bireme.train.data.prepare import ModelSide, RowForm, prepare_data
from bireme.train.data.viewing import view_of
from bireme.train.run_file.tables import Data
from tests.support.command import bireme
from tests.support.tiny_llama import save_config
from tests.support.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
FORMATS = dict(re.findall(r"^\| `(\{.*\})` \| (.*) \|$", PAGE, re.MULTILINE))
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]


def seen(source: str, length: int = 64, num_shown: int = 3, **asked: Any) -> DataView:
    request = Data(source=source, length=length, **({"evaluation_fraction": 0.0} | asked))
    data = prepare_data(request, ModelSide({}), 1)
    return view_of(data, "bytes" if data.tokenizer else None, length, num_shown)


def learned(view: DataView) -> str:
    (source,) = view.sources
    return "".join(one.text for one in source.samples[0].tokens if one.learns)


def _saved(row: dict[str, Any], kind: str, folder: Path) -> str:
    """A file with this row."""
    if kind == "jsonl":
        (folder / "rows.jsonl").write_text(json.dumps(row))
        return str(folder / "rows.jsonl")
    datasets: Any = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([row])
    getattr(rows, f"to_{kind}")(str(folder / f"rows.{kind}"))
    return str(folder / f"rows.{kind}")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_every_format_of_the_page_is_read_as_the_page_says(kind: str, tmp_path: Path) -> None:
    assert len(FORMATS) == 7
    for number, (row, counted) in enumerate(FORMATS.items()):
        (folder := tmp_path / str(number)).mkdir()
        view = seen(_saved(json.loads(row), kind, folder), packing="none")
        # The first byte of a text is predicted from nothing.
        wanted = {"tokens 7 and 8": "78", "`Once upon a time<end>`": "nce upon a time<end>"}
        assert learned(view) == wanted.get(counted, counted.strip("`")), row


def test_the_page_shows_the_text_of_a_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(json.dumps({"messages": CHAT}))
    (text,) = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    view = seen("chats.jsonl")
    assert "".join(one.text for one in view.sources[0].samples[0].tokens) == text.strip()


def test_a_model_s_folder_gives_the_tokenizer_its_template_and_the_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tokenizer(tmp_path / "model")
    save_config(folder)
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": CHAT}) + "\n" + json.dumps({"messages": []})
    )
    words = ["data", str(tmp_path / "chats.jsonl"), "--model", str(folder)]
    found = bireme(capsys, *words, "--json").document
    assert (found["length"], found["tokenizer"].split()[0]) == (32, "TokenizersBackend")
    (source,) = found["sources"]
    assert source["written_by"] == RowForm.TEMPLATE
    tokens = source["samples"][0]["tokens"]
    assert "".join(one["text"] for one in tokens).startswith("[system]Be brief.<end>[user]2")
    assert "without text, line 2 of" in found["warnings"][0]
    run = tmp_path / "run.toml"
    run.write_text(f'[model]\nsource = "hf:{folder}"\n[data]\nsource = "{tmp_path}/chats.jsonl"\n')
    other = bireme(capsys, "data", str(run), "--set", "data.evaluation_fraction=0", "--json").document
    assert other["sources"][0]["samples"] == source["samples"]
    missing = bireme(capsys, "data", str(tmp_path / "none.jsonl"))
    assert (missing.status, missing.out) == (2, "")


def test_counts_are_those_of_the_samples(tmp_path: Path) -> None:
    rows = [{"prompt": "1" * size, "completion": "22"} for size in (2, 40, 5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    name = str(tmp_path / "rows.jsonl")
    (alone,) = seen(name, 20).sources
    assert (alone.num_documents, alone.num_samples, alone.num_cut_off) == (3, 3, 1)
    assert (alone.num_tokens, alone.num_targets, alone.num_padding) == (5 + 20 + 8, 6, 15 + 12)
    (packed,) = seen(name, 20, packing="documents").sources
    assert (packed.num_samples, packed.num_tokens, packed.num_cut_off) == (3, 5 + 43 + 8, 0)
    begun = [one for sample in packed.samples for one in sample.tokens if one.begins]
    assert len(begun) == 2, "two samples hold one document, and one holds two or three pieces"
    (everything,) = seen(name, 20, loss_on="all").sources
    assert (everything.num_targets, everything.loss_on) == (4 + 19 + 7, "all tokens")


def test_what_counts_is_seen_without_color_on_a_narrow_terminal(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "two | and two: ", "completion": "日本\nis 4"})
    )
    view = seen(str(tmp_path / "rows.jsonl"))
    written = StringIO()
    print_data(view, Console(file=written, width=24))
    lines = [line.rstrip() for line in written.getvalue().splitlines()]
    assert max(map(len, lines)) <= 24
    assert "\x1b" not in written.getvalue()
    begin = lines.index("read  two \\| and two:")
    assert lines[begin + 1 : begin + 3] == ["learn 日本\\nis 4<end>", "pad   37 tokens"]
    colored = StringIO()
    print_data(
        view, Console(file=colored, width=24, force_terminal=True, color_system="standard", no_color=False)
    )
    assert "\x1b[32m" in colored.getvalue()


def test_samples_of_a_function_and_of_a_stream_are_shown(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "import torch\n\n\n"
        "def make():\n    return [{'x': torch.zeros(3), 'y': torch.tensor(n)} for n in range(4)]\n"
    )
    (source,) = seen(f"{own}:make").sources
    assert source.samples[0].tensors == ("x: float32 [3]", "y: int64 []")
    pytest.importorskip("datasets")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": "one two"}) for _ in range(9)))
    view = seen(f"hf:{tmp_path}/rows.jsonl,streaming=true", 16, shuffle_buffer=0)
    (source,) = view.sources
    assert (source.num_samples, source.num_tokens) == (None, None)
    assert "".join(one.text for one in source.samples[0].tokens) == "one two<end>one two<end>"
