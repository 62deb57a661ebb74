"""Conversations: only what the assistant says counts, whichever way its tokens are found."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bireme.errors import BiremeError
from bireme.train import finishing as text_sample
from bireme.train.data.documents import DocumentSamples
from bireme.train.data.encoding import AnswerRows, PlainHeadings, chat_form
from bireme.train.data.hub import SavedRows
from bireme.train.data.prepare import ModelSide, prepare_data
from bireme.train.data.source import open_source
from bireme.train.data.tokenizer import ByteTokenizer, FolderTokenizer
from bireme.train.data.viewing import data_notes
from bireme.train.run_file import load_run_file
from bireme.train.run_file.tables import Data
from tests.support.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.slow

PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
    "{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SPACED = PLAIN.replace("[{{ m.role }}]", "{{ m.role }}: ").replace("[assistant]", "assistant: ")
SHIFTING = "{{ messages | length }}" + PLAIN
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "self or value?"},
    {"role": "assistant", "content": "value"},
    {"role": "user", "content": "class?"},
    {"role": "assistant", "content": "return self.value"},
]


def tokenizer(folder: Path, template: str) -> FolderTokenizer:
    found = FolderTokenizer(save_tokenizer(folder))
    found.backend.chat_template = template
    return found


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_count_and_nothing_else(template: str, tmp_path: Path) -> None:
    made = tokenizer(tmp_path, template)
    row = chat_form(made).encode(CHAT, "row 0")
    whole = "".join(f"[{one['role']}]{one['content']}<end>" for one in CHAT)
    assert made.backend.decode(row.ids) == whole
    ends = np.flatnonzero(np.diff(row.counts.astype(int)))
    answers = [made.backend.decode(part) for part in np.split(row.ids, ends + 1)[1::2]]
    assert answers == ["value<end>", "return self.value<end>"]


def test_a_space_before_an_answer_may_be_in_its_first_token(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, SPACED)
    row = chat_form(made).encode(CHAT[:3], "row 0")
    assert made.backend.decode(row.ids[row.counts]) == " value<end>"


def test_a_template_that_rewrites_what_was_said_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match=r"row 7 .* message 3: .* in another way when more follows"):
        chat_form(tokenizer(tmp_path, SHIFTING)).encode(CHAT, "row 7")


def test_each_answer_of_a_conversation_counts_without_a_chat_template() -> None:
    made = ByteTokenizer()
    row = PlainHeadings(made).encode([{**CHAT[0], "role": "developer"}, *CHAT[1:]], "row 0")
    first = "Be brief.\n\n### Instruction:\nself or value?\n\n### Response:\n"
    second = "\n\n### Instruction:\nclass?\n\n### Response:\n"
    assert made.marked(row.ids.tolist()) == f"{first}value<end>{second}return self.value<end>"
    assert made.marked(row.ids[row.counts].tolist()) == "value<end>return self.value<end>"
    assert made.encode("### Instruction:\nclass?\n\n### Response:\n") == PlainHeadings(made).question(
        "class?"
    )
    with pytest.raises(BiremeError, match=r"In row 3 a message calls a tool, .* no chat template"):
        PlainHeadings(made).encode([{"role": "assistant", "tool_calls": []}], "row 3")


@pytest.mark.parametrize("template", [PLAIN, MARKED, None])
def test_an_answer_of_weight_zero_does_not_count(template: str | None, tmp_path: Path) -> None:
    made: Any = ByteTokenizer() if template is None else tokenizer(tmp_path, template)
    chat = [dict(one) for one in CHAT]
    chat[2]["weight"] = 0  # type: ignore[assignment]
    row = chat_form(made).encode(chat, "row 0")
    assert made.marked(row.ids[row.counts].tolist()) == "return self.value<end>"


def _encoded(folder: Path, made: Any, *rows: dict[str, Any]) -> list[Any]:
    (folder / "rows.jsonl").write_text("\n" + "\n".join(map(json.dumps, rows)))
    source = open_source(str(folder / "rows.jsonl"))
    assert isinstance(source, SavedRows)
    assert source.has_answers
    return list(AnswerRows(made, source).encoded(lambda _where: None))


def test_conversations_of_other_forms_are_those_of_messages(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, PLAIN)
    asked = [{"role": "user", "content": "self?\n\n1"}, {"role": "assistant", "content": "value"}]
    [wanted] = _encoded(tmp_path, made, {"messages": asked})
    shared = [{"from": "human", "value": "self?\n\n1"}, {"from": "gpt", "value": "value"}]
    for row in (
        {"conversations": shared},
        {"instruction": "self?", "output": "value", "input": "1", "text": "all of it"},
        {"instruction": "self?\n\n1", "output": "value"},
        {"prompt": asked[:1], "completion": asked[1:]},
        {"messages": [asked[0] | {"content": [{"type": "text", "text": "self?\n\n1"}]}, asked[1]]},
        {"messages": [asked[0] | {"role": "Human"}, asked[1]]},
    ):
        [found] = _encoded(tmp_path, made, row)
        assert found.ids.tolist() == wanted.ids.tolist(), row
        assert found.counts.tolist() == wanted.counts.tolist(), row


def test_answers_need_no_chat_template_if_they_follow_a_text(tmp_path: Path) -> None:
    made = ByteTokenizer()

    def answer(row: dict[str, Any]) -> tuple[str, str]:
        [found] = _encoded(tmp_path, made, row)
        assert found.ids[-1] == made.end_of_text, "the model learns where to stop"
        return made.decode(found.ids[~found.counts]), made.decode(found.ids[found.counts])

    assert answer({"prompt": "2 + 2 =", "completion": " 4"}) == ("2 + 2 =", " 4")
    begin = "### Instruction:\nAdd.\n\n"
    assert answer({"instruction": "Add.", "output": "4"}) == (f"{begin}### Response:\n", "4")
    given = {"instruction": "Add.", "input": "2, 2", "output": "4"}
    assert answer(given) == (f"{begin}### Input:\n2, 2\n\n### Response:\n", "4")


def test_rows_without_messages_at_the_beginning_are_left_out(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"messages": None}, {"messages": []}, {"messages": CHAT}]
    [found] = _encoded(tmp_path, ByteTokenizer(), *rows)
    assert found.counts.any()


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "a message is from 'narrator'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a message is not text"),
        ({"messages": [{"text": "a"}]}, "'messages' is not a list of messages"),
        ({"prompt": "a", "completion": 4}, "'completion' holds a int and not a text"),
    ],
)
def test_a_row_in_no_known_form_is_named(row: dict[str, Any], wrong: str, tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match=rf"In line 2 of .*rows\.jsonl .*{wrong}"):
        _encoded(tmp_path, tokenizer(tmp_path / "tokenizer", PLAIN), row)


def test_packing_is_suggested_if_samples_are_mostly_padding(tmp_path: Path) -> None:
    rows = [{"prompt": "1" * size, "completion": "2"} for size in (8, 10, 30)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    request = Data(source=str(tmp_path / "rows.jsonl"), length=100, evaluation_fraction=0.0)
    (note,) = data_notes(prepare_data(request, ModelSide({}), 1))
    assert note.startswith("82% of the samples of ")
    assert 'data.packing = "documents", which puts several into a sample, or data.length = 32' in note
    assert data_notes(prepare_data(request.model_copy(update={"length": 32}), ModelSide({}), 1)) == ()


class _Speaker(torch.nn.Module):
    """Writes these ids, whatever it is asked, and remembers the first question."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self.ids, self.asked = iter(ids), list[int]()

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        self.asked = self.asked or input_ids[0].tolist()
        scores = torch.full((1, 1, 400), -1e9)
        scores[0, 0, next(self.ids)] = 0.0
        return {"logits": scores}


class _NoWeights(dict[str, Any]):
    """Those of a model that has none."""

    num_bytes = 1


def test_the_closing_sample_answers_a_question_and_stops_at_the_end_of_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It continued "def ", past the end of the answer."""
    made = tokenizer(tmp_path / "tokenizer", PLAIN)
    made.backend.save_pretrained(str(tmp_path / "tokenizer"))
    chat = [{"role": "user", "content": "value?"}, {"role": "assistant", "content": "self"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": chat}))
    request = Data(
        source=str(tmp_path / "rows.jsonl"),
        tokenizer=str(tmp_path / "tokenizer"),
        length=80,
        evaluation_fraction=0.0,
    )
    data = prepare_data(request, ModelSide({}), 1)
    answer = made.encode("return")
    for prompt, question in (("", "value?"), ("class?", "class?")):
        speaker = _Speaker([*answer, *made.encode("<end>"), *answer])
        loaded = SimpleNamespace(model=speaker)
        monkeypatch.setattr(text_sample, "load_source", lambda *_, found=loaded, **__: found)
        run = load_run_file(None, [f"log.prompt={prompt}"] if prompt else [])
        weights: Any = _NoWeights()
        text = text_sample.written(run, weights, data)
        assert text == f"[user]{question}[assistant]return"
        assert made.backend.decode(speaker.asked) == f"[user]{question}<end>[assistant]"


class _OnlyLoss(torch.nn.Module):
    """Cannot predict without labels."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (input_ids - labels).float().mean()


def test_a_model_of_ones_own_that_needs_labels_writes_no_closing_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ended in a `TypeError` after its weights were saved."""
    (tmp_path / "text.txt").write_text("a text " * 100)
    data = prepare_data(Data(source=str(tmp_path / "text.txt"), length=20), ModelSide({}), 1)
    monkeypatch.setattr(text_sample, "load_source", lambda *_, **__: SimpleNamespace(model=_OnlyLoss()))
    run = load_run_file(None, ["model.source=mine.py:build"])
    weights: Any = _NoWeights()
    assert text_sample.written(run, weights, data) == ""


def test_each_conversation_is_a_sample_and_lost_answers_are_told(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    made: Any = tokenizer(tmp_path / "tokenizer", PLAIN)
    made.backend.save_pretrained(str(tmp_path / "tokenizer"))
    long = [{"role": "user", "content": "value " * 200}, {"role": "assistant", "content": "self"}]
    lines = [json.dumps({"messages": chat}) for chat in (CHAT, long, CHAT[:3], CHAT)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    request = Data(
        source=f"hf:{tmp_path}/chats.jsonl",
        tokenizer=str(tmp_path / "tokenizer"),
        length=80,
        evaluation_fraction=0.25,
    )
    data = prepare_data(request, ModelSide({}), 1)
    assert isinstance(data.training, DocumentSamples)
    assert data.evaluation is not None
    assert (len(data.training), len(data.evaluation)) == (3, 1)
    batch = data.training.take([0, 1, 2])
    counted = (batch["labels"] != -100).sum(1).tolist()
    assert counted[1] == 0
    assert counted[0] > counted[2] > 0
    kept = batch["labels"] != -100
    assert (batch["labels"][kept] == batch["input_ids"][kept]).all()
    assert data_notes(data) == (
        f"1 of 3 documents of {tmp_path}/chats.jsonl are longer than data.length = 80 and lose their ends.",
        f"1 of 3 samples of {tmp_path}/chats.jsonl hold no answer, or no other token that counts in the "
        "loss, and have weight zero. A larger data.length may leave fewer.",
    )
