"""`bireme generate`: the tokens of transformers' own `generate`, whether a model fits the memory or not."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bireme.errors import BiremeError
from bireme.model.capture import capture
from bireme.model.sources import load_source
from bireme.model.weights import materialize
from bireme.train import generating
from bireme.train.generating import TextRequest, continued, writer_of
from bireme.train.subject import Subject, subject_of
from tests.support.command import bireme
from tests.support.graphs import captured_once
from tests.support.tiny_llama import greedy, save_llama
from tests.support.tiny_tokenizer import save_tokenizer
from tests.support.training import GPT

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
PROMPT, COUNT = "def function(self", 12
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def llama(folder: Path) -> Path:
    return save_tokenizer(save_llama(folder, max_position_embeddings=64, initializer_range=0.4))


@pytest.mark.parametrize("room", [None, 20_000, 0])
def test_a_folder_writes_what_transformers_writes(
    room: int | None, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory with the cache; as stages of which some stay in memory; as stages that are all read again."""
    folder = llama(tmp_path / "llama")
    if room is not None:
        monkeypatch.setattr(generating, "_room", lambda _device: room)
    words = ["generate", str(folder), PROMPT, "--tokens", str(COUNT), "--temperature", "0"]
    found = bireme(capsys, *words, "--json").document
    assert found["ids"] == greedy(folder, PROMPT, COUNT)
    assert ("transformers" in found["by"]) == (room is None)
    assert ("read for each token" in found["by"]) == (room is not None)
    shown = bireme(capsys, *words)
    assert shown.out == f"{PROMPT}{found['text']}\n"
    assert "12 tokens, " in shown.err


def test_stages_write_on_when_the_context_is_full() -> None:
    source = load_source(GPT, batch=4)
    make = partial(capture, source.model, source.example_inputs, training=False)
    graph = captured_once(f"evaluation of {GPT}", make, is_kept=True)
    made = materialize(source.model, [one.name for one in graph.parameters], seed=3, dtype=torch.float32)
    stages = generating._Stages(
        graph, lambda names: {name: made[name] for name in names}, torch.device("cpu"), GPT
    )
    whole: Any = load_source(GPT, device="cpu", training=False).model
    whole.load_state_dict(made, strict=False)

    def predict(ids: Any) -> torch.Tensor:
        scores: torch.Tensor = whole(input_ids=torch.tensor([ids]))["logits"][0, -1]
        return scores

    for temperature in (0.0, 1.0):
        asked = TextRequest("", 40, temperature, seed=5)
        words: dict[str, Any] = {"context": 32, "num_tokens": 256, "ends": frozenset[int]()}
        with torch.no_grad():
            wanted = list(continued(predict, [7, 8], asked, **words))
        assert list(continued(stages, [7, 8], asked, **words)) == wanted
        assert len(wanted) == 40


def test_a_chat_is_asked_by_the_template_and_ends_with_the_answer(tmp_path: Path) -> None:
    folder = llama(tmp_path / "llama")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    subject = subject_of(str(folder), (), lambda _text: None)
    asked = TextRequest("value?", 5, 0.0, 0, is_chat=True)
    writer = writer_of(subject, asked, lambda _done, _what: None)
    assert writer.tokenizer.marked(writer.first) == "[user]value?<end>[assistant]"
    assert writer.tokenizer.encode("<end>")[0] in writer.ends
    pieces: list[str] = []
    found = writer.write(pieces.append)
    assert "".join(pieces) == found.text
    assert found.num_prompt_tokens == len(writer.first)
    drawn = [writer_of(subject, TextRequest("a", 9, 2.0, seed), lambda _d, _w: None) for seed in (1, 1, 2)]
    same, again, other = (one.write(lambda _text: None).ids for one in drawn)
    assert same == again != other


def test_a_run_that_has_exported_its_newest_weights_writes_with_them(tmp_path: Path) -> None:
    folder = llama(tmp_path / "run" / "model")
    run = subject_of(str(folder), (), lambda _text: None).run
    for step, wanted in ((4, folder), (6, None)):
        (folder / "bireme.json").write_text(json.dumps({"step": 4}))
        subject = Subject(str(tmp_path / "run"), run, step=step, is_run=True)
        assert generating._folder_of(subject) == wanted
    whole = Subject(str(folder), run)
    assert generating._folder_of(whole) == folder
    (folder / "model.safetensors").unlink()
    assert generating._folder_of(whole) is None


def test_a_model_that_does_not_continue_text_is_refused(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    subject = subject_of(str(tmp_path), (), lambda _text: None)
    with pytest.raises(BiremeError, match="BertForMaskedLM, which does not continue a text"):
        writer_of(subject, TextRequest("a", 1, 0.0, 0), lambda _done, _what: None)


def test_the_folder_of_an_adapter_alone_is_refused(tmp_path: Path, capsys: Capture) -> None:
    """It was said to lack weights, and a run with an adapter ends with the name of this folder."""
    for name in ("adapter_config.json", "bireme.json"):
        (tmp_path / name).write_text('{"model": "hf:base"}')
    result = bireme(capsys, "generate", str(tmp_path), "a")
    assert result.status == 2
    assert "holds an adapter without the model that it belongs to. Name the folder of its run" in result.err
