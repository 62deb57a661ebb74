"""Conversations: only what the assistant says counts, whichever way its tokens are found."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bireme.errors import BiremeError
from bireme.train.data.chat import ChatTemplate
from bireme.train.data.documents import DocumentSamples
from bireme.train.data.notes import data_notes
from bireme.train.data.prepare import DataRequest, ModelSide, prepare_data
from bireme.train.data.tokenizer import ByteTokenizer, FolderTokenizer
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
    row = ChatTemplate(made, "chats").encode(CHAT, "row 0")
    whole = "".join(f"[{one['role']}]{one['content']}<end>" for one in CHAT)
    assert made.backend.decode(row.ids) == whole
    ends = np.flatnonzero(np.diff(row.counts.astype(int)))
    answers = [made.backend.decode(part) for part in np.split(row.ids, ends + 1)[1::2]]
    assert answers == ["value<end>", "return self.value<end>"]


def test_a_template_that_rewrites_what_was_said_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BiremeError, match=r"row 7 .* message 3: .* in another way when more follows"):
        ChatTemplate(tokenizer(tmp_path, SHIFTING), "chats").encode(CHAT, "row 7")


def test_bytes_have_no_chat_template() -> None:
    with pytest.raises(BiremeError, match=r"no chat template .* Set data\.tokenizer"):
        ChatTemplate(ByteTokenizer(), "chats")


def test_each_conversation_is_a_sample_and_lost_answers_are_told(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    made: Any = tokenizer(tmp_path / "tokenizer", PLAIN)
    made.backend.save_pretrained(str(tmp_path / "tokenizer"))
    long = [{"role": "user", "content": "value " * 200}, {"role": "assistant", "content": "self"}]
    lines = [json.dumps({"messages": chat}) for chat in (CHAT, long, CHAT[:3], CHAT)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    request = DataRequest(
        f"hf:{tmp_path}/chats.jsonl", str(tmp_path / "tokenizer"), length=80, evaluation_fraction=0.25
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
