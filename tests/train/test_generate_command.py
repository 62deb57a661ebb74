"""`bireme generate`: the tokens of transformers' own `generate`, in one process or in several."""

import os
import signal
import threading
import time
from functools import partial
from io import FileIO, StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from bireme.errors import BiremeError
from bireme.model.capture import capture
from bireme.model.decoder import decoder_of, state_graph
from bireme.model.sources import load_source
from bireme.model.units import units_of
from bireme.model.weights import materialize
from bireme.runtime.token_line import SCORES, ModelPart, TokenLine, continued
from bireme.train import generating
from bireme.train.data.tokenizer import load_tokenizer
from bireme.train.generating import Choice, Generated, Terminal, WritingStyle, writer_of
from bireme.train.model import RunModel
from bireme.train.subject import (
    CapturedPart,
    DecoderPart,
    DividedModel,
    PartPlace,
    divided,
    reading_speed,
    subject_of,
)
from tests.support.command import bireme
from tests.support.copies import Copy
from tests.support.extent import TRY_ALL
from tests.support.graphs import captured_once
from tests.support.patience import patience_s
from tests.support.thread_transport import ThreadFabric
from tests.support.tiny_llama import greedy, save_llama
from tests.support.tiny_tokenizer import save_tokenizer
from tests.support.together import run_threads
from tests.support.torchrun_runs import torchrun_train
from tests.support.training import GPT, Running, running

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
PROMPT, COUNT = "def function(self", 12
ENDLESS = 0.02
"""The spread of weights with which a model does not end its text."""
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def llama(folder: Path, spread: float = 0.4) -> Path:
    return save_tokenizer(save_llama(folder, max_position_embeddings=64, initializer_range=spread))


@pytest.mark.parametrize("room", [None, 0])
def test_a_folder_writes_what_transformers_writes(
    room: int | None, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its layers in memory; with layers that are read again for each token."""
    folder = llama(tmp_path / "llama")
    if room is not None:
        for module in ("generating", "subject"):
            monkeypatch.setattr(f"bireme.train.{module}.room_on", lambda _device: room)
    words = ["generate", str(folder), PROMPT, "--tokens", str(COUNT), "--temperature", "0"]
    found = bireme(capsys, *words, "--json").document
    assert found["ids"] == greedy(folder, PROMPT, COUNT)
    assert (found["num_processes"], found["device"], found["ended"]) == (1, "cpu", False)
    assert 0 < found["first_s"] < found["seconds"]
    how = "1 process with a cache of keys and values"
    assert found["by"] == (how if room is None else f"{how}, 2 layers read for each token")
    monkeypatch.setattr("sys.stdin", StringIO(f"{PROMPT}\n"))
    shown = bireme(capsys, *words[:2], "-", *words[3:])
    assert shown.out == f"{PROMPT}{found['text']}\n"
    assert "12 tokens, the first one after " in shown.err
    assert f" tokens/s; {found['by']}, on cpu" in shown.err
    # A model that needs several GPUs has several processes.
    monkeypatch.setattr(generating, "num_gpus_for", lambda _run, _num_bytes: 2)
    monkeypatch.setattr(generating, "num_accelerators", lambda: 2)
    result = bireme(capsys, "generate", str(folder))
    assert (result.status, "Several processes read no prompts" in result.err) == (2, True)


class Said:
    """Answers with prompts, and keeps the texts."""

    def __init__(self, prompts: list[str]) -> None:
        self._left, self.pieces, self.found = [*prompts], list[str](), list[Generated]()

    def __call__(self, what: str, told: Any = None) -> str | None:
        if what == "written":
            self.found.append(told)
            del self._left[0]
        if what == "piece":
            self.pieces.append(told)
        return self._left[0] if self._left else None


def test_a_line_that_is_typed_for_processes_that_were_killed_goes_to_those_after_them() -> None:
    """Both threads read standard input: the first one got the line, and its process was gone."""
    out, into = os.pipe()
    terminal, found = Terminal([], is_chat=False, as_json=True, _input=FileIO(out)), list[str | None]()
    threads = [threading.Thread(target=lambda: found.append(terminal("prompt"))) for _ in range(2)]
    for one in threads:
        one.start()
    os.write(into, b"typed\n")
    os.close(into)
    for one in threads:
        one.join(patience_s())
    assert found == ["typed", "typed"]


def generating_by(folder: Path, *words: str) -> Any:
    """`bireme generate` by two processes, greedily, in the background."""
    return running(folder, "generate", str(folder), PROMPT, "--temperature", "0", "--workers", "2", *words)


def wait_for_text(process: Running, text: str) -> None:
    assert isinstance(process.process, Copy)
    out, end_s = process.process.out, time.monotonic() + patience_s()
    while len(out.read_text()) < len(text):
        assert time.monotonic() < end_s, process.said
        assert process.process.poll() is None, process.said
        time.sleep(0.02)
    assert out.read_text().startswith(text)


def test_two_processes_write_what_one_writes_until_one_of_them_dies(tmp_path: Path) -> None:
    folder = llama(tmp_path / "llama", ENDLESS)
    text = load_tokenizer("auto", model_folder=folder, model_vocabulary=300).decode(
        greedy(folder, PROMPT, COUNT)
    )
    with generating_by(folder, "--tokens", "1000000") as process:
        wait_for_text(process, f"{PROMPT}{text}")
        os.kill(process.ranks[1], signal.SIGKILL)
        ended = process.ended()
    assert ended.status == 1
    assert ended.err.strip().startswith("bireme: Rank 1 failed: its process was killed by signal 9 (SIGKILL)")
    assert len(ended.err.strip().splitlines()) == 1


@pytest.mark.skipif(not TRY_ALL, reason="the test before asks most of it")
def test_an_interrupt_leaves_no_process_and_torchrun_starts_them_too(tmp_path: Path, capsys: Capture) -> None:
    folder = llama(tmp_path / "llama", ENDLESS)
    with generating_by(folder, "--tokens", "1000000") as process:
        wait_for_text(process, PROMPT)
        os.kill(process.process.pid, signal.SIGINT)
        ended = process.ended()
    assert (ended.status, ended.err.strip()) == (130, "")
    words = [str(folder), PROMPT, "--temperature", "0", "--tokens", str(COUNT), "--json"]
    with torchrun_train(folder, *words, verb="generate") as started:
        found = started.ended().document
    assert found["ids"] == greedy(folder, PROMPT, COUNT)
    assert found["num_processes"] == 2
    result = bireme(capsys, "generate", str(folder), PROMPT, "--workers", "3")
    assert result.status == 2
    assert "The model has 2 layers, which are too few for 3 processes" in result.err


def test_parts_of_a_captured_model_write_on_when_the_context_is_full() -> None:
    source = load_source(GPT, batch=4)
    make = partial(capture, source.model, source.example_inputs, training=False)
    graph = captured_once(f"evaluation of {GPT}", make, is_kept=True)
    made = materialize(source.model, [one.name for one in graph.parameters], seed=3, dtype=torch.float32)
    whole: Any = load_source(GPT, device="cpu", training=False).model
    whole.load_state_dict(made, strict=False)
    model = DividedModel(GPT, graph, None, 32)

    class Whole(ModelPart):
        context = 32

        def run(self, ids: Any, count: int, received: Any) -> Any:
            return {SCORES: whole(input_ids=torch.tensor([ids]))["logits"][0, -1]}

    def writes(part: ModelPart, temperature: float, line: TokenLine | None = None) -> list[int]:
        style = WritingStyle(40, temperature, seed=5, top_p=0.9)
        with torch.no_grad():
            return list(continued(part, [7, 8], Choice(style, 256, frozenset()), 40, line))

    def part(rank: int, size: int, room: float) -> DecoderPart | CapturedPart:
        weights = lambda names: {name: made[name] for name in names}  # noqa: E731
        return model.part(weights, torch.device("cpu"), [PartPlace(room)] * size, rank)

    def in_a_line(fabric: ThreadFabric, temperature: float, rank: int) -> list[int]:
        line = TokenLine(fabric.of(rank), torch.device("cpu"))
        return writes(part(rank, 3, 20_000), temperature, line)

    for temperature in (0.0, 1.0):
        wanted = writes(Whole(), temperature)
        assert len(wanted) == 40
        assert writes(part(0, 1, 1e9), temperature) == wanted
        assert run_threads(3, partial(in_a_line, ThreadFabric(3), temperature))[0] == wanted
    assert part(0, 1, 20_000).how.endswith(", 5 units read for each token")


def test_a_model_is_divided_so_that_a_token_is_through_all_parts_soonest() -> None:
    sizes = [4, 1, 1, 1, 1, 4]
    for rooms, speeds, cuts in (
        ([9, 9], [1, 1], (3,)),
        ([4, 100], [1, 1], (1,)),
        ([100, 4], [1, 1], (5,)),
        ([100, 100], [2, 1], (5,)),
        ([100, 100], [1, 2], (1,)),
        ([7, 100], [2, 1], (4,)),
        ([100, 100, 100], [1, 1, 1], (1, 5)),
        ([5, 3, 3], [1, 1, 1], (2, 5)),
        ([0, 0, 100], [1, 1, 1], (1, 2)),
    ):
        assert divided(sizes, [*map(PartPlace, rooms, speeds)]) == cuts, (rooms, speeds)
    assert reading_speed(torch.device("cpu")) > 0


def test_the_likeliest_tokens_are_drawn_that_have_the_probability_together() -> None:
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    for top_p, wanted in ((0.0, {0}), (0.5, {0}), (0.7, {0, 1}), (1.0, {0, 1, 2, 3})):
        choice = Choice(WritingStyle(1, 1.0, 0, top_p=top_p), 4, frozenset())
        assert {choice(scores.clone()) for _ in range(200)} == wanted


@torch.no_grad()
def test_an_adapter_on_four_bits_scores_as_the_captured_model(tmp_path: Path) -> None:
    folder = save_tokenizer(save_llama(tmp_path / "llama", num_hidden_layers=3))
    sets = ("model.lora.rank=4", "model.lora.use_dora=true", "model.frozen_dtype=nf4", "data.length=8")
    subject = subject_of(str(folder), sets, lambda _text: None)
    model = RunModel.of(subject.run, 1)
    name = f"evaluation of a Llama of 3 layers with {sets}"
    graph = captured_once(name, lambda: model.evaluation.graph(1), is_kept=True)
    decoder = decoder_of(model.source.model)
    assert decoder is not None
    states = state_graph(model.source.model, graph)
    assert any(state.packed for state in states.parameters)
    starts = [unit.index for unit in units_of(graph) if unit.name.endswith("self_attn")]
    cuts = [starts[1], starts[1] + 1, starts[2]]  # the second lies within a layer
    assert [decoder.cuts(graph, (cut,)) for cut in cuts] == [(1,), (2,), (2,)]
    assert decoder.cuts(graph, (1, len(units_of(graph)) - 1)) == (1, 2)
    weights, cpu, ids = model.weights(graph), torch.device("cpu"), [7, 3, 9, 1, 2, 8, 4, 6]
    wanted = (
        DividedModel("model", graph, None, 8).part(weights, cpu, [PartPlace(1e9)]).run(ids, 8, {})[SCORES]
    )
    layers = DividedModel("model", states, decoder, 64).part(weights, cpu, [PartPlace(1e9)])
    torch.testing.assert_close(layers.run(ids, 8, {})[SCORES], wanted)


def test_a_chat_is_asked_by_the_template_and_ends_with_the_answer(tmp_path: Path) -> None:
    folder = llama(tmp_path / "llama")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    subject = subject_of(str(folder), (), lambda _text: None)
    style = WritingStyle(5, 0.0, 0, is_chat=True)
    writer = writer_of(subject, style, ["value?"], lambda _done, _what: None)
    said = Said(["value?", "other"])
    writer.write(said)
    assert [one.prompt for one in said.found] == ["value?", "other"]
    assert "".join(said.pieces) == "".join(one.text for one in said.found)
    first, ends = generating._first(subject, writer.model, writer.tokenizer, style, "value?")
    assert writer.tokenizer.marked(first) == "[user]value?<end>[assistant]"
    assert writer.tokenizer.encode("<end>")[0] in ends
    assert said.found[0].num_prompt_tokens == len(first)
    drawn = list[tuple[int, ...]]()
    for seed in (1, 1, 2):
        said = Said(["a"])
        writer_of(subject, WritingStyle(9, 2.0, seed), ["a"], lambda _d, _w: None).write(said)
        drawn.append(said.found[0].ids)
    same, again, other = drawn
    assert same == again != other


def test_a_model_that_does_not_continue_text_is_refused(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    subject = subject_of(str(tmp_path), (), lambda _text: None)
    with pytest.raises(BiremeError, match="BertForMaskedLM, which does not continue a text"):
        writer_of(subject, WritingStyle(1, 0.0, 0), ["a"], lambda _done, _what: None)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    """A token that the model does not know ended in a traceback."""
    subject = subject_of(
        str(save_llama(tmp_path, vocab_size=50)), ["data.tokenizer=bytes"], lambda _text: None
    )
    with pytest.raises(BiremeError, match="The tokenizer has 257 tokens but the model 50"):
        writer_of(subject, WritingStyle(1, 0.0, 0), ["a"], lambda _done, _what: None)


def test_a_prompt_with_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    """It ended in an index error: a model may lack an added token that ordinary text does not have."""
    transformers: Any = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(save_tokenizer(tmp_path))
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path)
    save_llama(tmp_path, vocab_size=(num_tokens := len(tokenizer) - 1))
    subject = subject_of(str(tmp_path), [], lambda _: None)
    refused = f"The prompt has '<image>', token {num_tokens} .* the model has only {num_tokens} tokens"
    with pytest.raises(BiremeError, match=refused):
        writer_of(subject, WritingStyle(1, 0.0, 0), ["def <image>"], lambda _done, _what: None)


def test_the_folder_of_an_adapter_alone_is_refused(tmp_path: Path, capsys: Capture) -> None:
    """It was said to lack weights, and a run with an adapter ends with the name of this folder."""
    for name in ("adapter_config.json", "bireme.json"):
        (tmp_path / name).write_text('{"model": "hf:base"}')
    result = bireme(capsys, "generate", str(tmp_path), "a")
    assert result.status == 2
    assert "holds an adapter without the model that it belongs to. Name the folder of its run" in result.err
