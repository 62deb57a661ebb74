"""`bireme evaluate`: the numbers of a run's own evaluation, and of any model in a folder, by any workers."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from bireme.model.capture import capture
from bireme.model.graph import Graph
from bireme.model.sources import load_source
from bireme.model.units import units_of
from bireme.model.weights import materialize
from bireme.runtime.evaluation import ForwardPipeline, equal_cuts
from bireme.train import evaluating
from bireme.train.data.tokenizer import FolderTokenizer, byte_lengths
from bireme.train.subject import PartPlace, sizes_of
from tests.support.command import Result, bireme
from tests.support.graphs import captured_once
from tests.support.thread_transport import ThreadFabric, ThreadRank
from tests.support.tiny_tokenizer import TEXT as TOKENIZED
from tests.support.tiny_tokenizer import save_tokenizer
from tests.support.together import run_threads
from tests.support.training import GPT, metrics, settings, write_run

pytestmark = pytest.mark.slow

LENGTH = 32
HELD = "".join(f"def held_{n}(value):\n    return {n * n}\n\n" for n in range(40))[: 16 * LENGTH - 1]
"""With the end of the text just two batches of eight samples."""

Capture = pytest.CaptureFixture[str]


# --- a run ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_evaluate_repeats_the_last_evaluation_of_a_run_however_its_weights_are_kept(
    tmp_path: Path, capsys: Capture
) -> None:
    held = tmp_path / "held.py"
    held.write_text(HELD)
    path, run = write_run(tmp_path), tmp_path / "runs" / "run"
    words = ["--steps", "4", *settings(data__evaluation_source=held), "--json"]
    document = bireme(capsys, "train", str(path), *words).document
    figures = {name: document[f"eval_{name}"] for name in ("loss", "perplexity", "bits_per_byte")}
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    (line,) = metrics(run, "evaluation")
    assert {name: line[name] for name in figures} == figures

    def evaluated(*words: str) -> dict[str, Any]:
        result = bireme(capsys, "evaluate", *words, "--json")
        assert result.status == 0, result.err
        return result.document

    same = pytest.approx(figures, rel=1e-6)
    for words in (
        [str(run)],
        [str(run), "--data", str(held), "--workers", "2"],
        [str(run / "model"), "--data", str(held)],
    ):
        found = evaluated(*words)
        assert {name: found[name] for name in figures} == same, words
        assert (found["step"], found["tokens"], found["num_samples"]) == (4, 16 * (LENGTH - 1), 16)
        assert found["tokens_per_s"] > 0
    for checkpoint in (run / "checkpoints").glob("step-*"):
        (checkpoint / "manifest.json").write_text("{}")
    damaged = bireme(capsys, "evaluate", str(run), "--json")
    assert {name: damaged.document[name] for name in figures} == same
    assert "manifest.json" in damaged.err
    limited = evaluated(str(run), "--batches", "1")
    assert limited["num_samples"] == 8


# --- the pipeline -----------------------------------------------------------------------------------------


def _small() -> tuple[Graph, Any, list[dict[str, torch.Tensor]]]:
    """A small model's graph, its weights, and batches of it, of which one is short."""
    source = load_source(GPT, batch=4)
    make = partial(capture, source.model, source.example_inputs, training=False)
    graph = captured_once(f"evaluation of {GPT}", make, is_kept=True)
    draw = torch.Generator().manual_seed(1)
    batches = [
        {"input_ids": ids, "labels": ids.clone()}
        for ids in (torch.randint(257, (count, LENGTH), generator=draw) for count in (6, 6, 3))
    ]
    held = [state.name for state in (*graph.parameters, *graph.buffers)]
    made = materialize(source.model, held, seed=3, dtype=torch.float32)
    return graph, lambda names: {name: made[name] for name in names}, batches


def _together(num_ranks: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    fabric = ThreadFabric(num_ranks)
    return run_threads(num_ranks, lambda rank: work(fabric.of(rank)))


def test_a_pipeline_that_only_runs_forward_finds_the_loss_of_one_process() -> None:
    graph, weights, batches = _small()
    alone = ForwardPipeline(graph, weights=weights).evaluate(batches)

    def evaluated(fabric: ThreadRank) -> Any:
        pipeline = ForwardPipeline(graph, fabric, num_stages=3, num_microbatches=4, weights=weights)
        found = pipeline.evaluate(batches)
        pipeline.close()
        return found

    for found in _together(3, evaluated):
        assert found.loss == pytest.approx(alone.loss, rel=1e-6)
        assert (found.weight, found.num_samples) == (15 * (LENGTH - 1), 15)


def test_a_machine_gets_no_more_weights_than_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _, _ = _small()
    sizes, world = sizes_of(graph, units_of(graph)), cast("Any", SimpleNamespace(size=2))

    def cut(*rooms: float) -> int:
        monkeypatch.setattr(evaluating, "places_of", lambda _world: [*map(PartPlace, rooms)])
        return evaluating._cuts(graph, world)[0]

    even = cut(1e9, 1e9)
    assert (even,) == equal_cuts(graph, 2)
    less = sum(sizes[: even - 1])
    assert cut(less, 1e9) < even
    assert sum(sizes[: cut(less, 1e9)]) <= less


def test_a_rank_reads_the_weights_of_its_own_stage_only() -> None:
    graph, weights, _ = _small()
    asked: list[set[str]] = []

    def noted(names: Any) -> Any:
        asked.append(set(names))
        return weights(names)

    _together(2, lambda fabric: ForwardPipeline(graph, fabric, num_stages=2, weights=noted).close())
    first, second = asked
    assert first | second == {state.name for state in (*graph.parameters, *graph.buffers)}
    tied = {state.name for state in graph.parameters if state.aliases}
    assert first & second <= tied


# --- any model --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_transformers_folder_has_the_perplexity_that_transformers_finds(
    tmp_path: Path, capsys: Capture
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    folder = save_tokenizer(tmp_path / "llama")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("".join(TOKENIZED) * 20 + "value")
    found = bireme(capsys, "evaluate", f"hf:{folder}", "--data", str(text), "-B", "4", "--json").document
    tokenizer = FolderTokenizer(folder)
    ids = [*tokenizer.encode(text.read_text()), tokenizer.end_of_text or 0]
    rows = torch.split(torch.tensor(ids), LENGTH)
    assert len(rows[-1]) not in (1, LENGTH), "the last sample is shorter than the others"
    assert len(rows) % 4, "the last batch is smaller than the others"
    with torch.no_grad():
        losses = [float(model(input_ids=row[None], labels=row[None]).loss) * (len(row) - 1) for row in rows]
    num_scored = sum(len(row) - 1 for row in rows)
    loss = sum(losses) / num_scored
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert (found["tokens"], found["tokens_given"]) == (num_scored, len(ids))
    assert (found["num_samples"], found["samples_given"], found["length"]) == (len(rows), len(rows), LENGTH)
    num_bytes = sum(len(tokenizer.decode([token]).encode()) for row in rows for token in row[1:].tolist())
    bits = loss * num_scored / num_bytes / math.log(2)
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    model.save_pretrained(folder)
    diverged = bireme(capsys, "evaluate", str(folder), "--data", str(text), "--json").document
    assert [diverged[name] for name in ("loss", "perplexity", "bits_per_byte")] == [None] * 3


ONE_SIZE = """
import torch
from torch import nn

class OneSize(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(257, 8)
        self.head = nn.Linear(8, 257)

    def forward(self, input_ids, labels):
        hidden = self.tokens(input_ids).reshape(int(input_ids.shape[0]), -1, 8)
        logits = self.head(hidden)[:, :-1].flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)}

def made():
    ids = torch.zeros(4, 40, dtype=torch.long)
    return OneSize(), {"input_ids": ids, "labels": ids}
"""


def test_nothing_is_left_over_by_a_model_that_takes_batches_of_one_size(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples beyond the last whole batch were left out; and a folder did not have their length."""
    from safetensors.torch import save_file

    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "one_size_model.py").write_text(ONE_SIZE)
    torch.manual_seed(0)
    model = load_source("python:one_size_model:made", device="cpu").model
    (tmp_path / "model").mkdir()
    save_file(
        {name: one.detach().clone() for name, one in model.named_parameters()},
        tmp_path / "model/model.safetensors",
    )
    about = '{"format": 1, "model": "python:one_size_model:made", "step": 3, "length": 40}'
    (tmp_path / "model" / "bireme.json").write_text(about)
    text = (HELD * 2)[: 40 * 10 + 7]
    (tmp_path / "text.txt").write_text(text)
    found = bireme(
        capsys, "evaluate", str(tmp_path / "model"), "--data", str(tmp_path / "text.txt"), "--json"
    )
    assert found.status == 0, found.err
    rows = torch.split(torch.tensor([*text.encode(), 256]), 40)
    with torch.no_grad():
        losses = [float(model(row[None], row[None])["loss"]) * (len(row) - 1) for row in rows]
    document = found.document
    assert (document["tokens"], document["num_samples"], document["length"]) == (10 * 39 + 7, 11, 40)
    assert document["loss"] == pytest.approx(sum(losses) / (10 * 39 + 7), rel=1e-5)


@pytest.mark.slow
def test_the_bytes_of_tokens_add_up_to_those_of_the_text(tmp_path: Path) -> None:
    tokenizer = FolderTokenizer(save_tokenizer(tmp_path))
    lengths = tokenizer.byte_lengths()
    assert lengths is not None
    for text in (*TOKENIZED, "naïve – 中文 🚣\n"):
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert tokenizer.end_of_text is not None
    assert lengths[tokenizer.end_of_text] == 0


def test_tokens_that_write_spaces_as_letters_count_them_as_one_byte() -> None:
    description = {
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"vocab": [["<unk>", 0.0], ["<0xE4>", 0.0], ["▁ein", -1.0], ["ü", -2.0]]},
        "added_tokens": [{"id": 0, "content": "<unk>", "special": True}],
    }
    lengths = byte_lengths(description, 5)
    assert lengths is not None
    assert lengths.tolist() == [0, 1, 4, 2, 0]
    assert byte_lengths(description | {"decoder": {"type": "WordPiece"}}, 5) is None


# --- what is wrong ----------------------------------------------------------------------------------------

WRONG: list[tuple[list[str], str]] = [
    (["nowhere"], "nowhere is not a folder. Name the folder of a run"),
    (["texts"], "neither the folder of a run nor that of a model"),
    (["model"], "is a model without data. Name some to evaluate with: --data FILE"),
    (["model", "--data", "nothing.txt"], "has no text in it"),
    (["model", "--data", "short.txt", "--set", "data.tokenizer=nowhere"], "There is no tokenizer 'nowhere'"),
    (["model", "--data", "nowhere.txt"], "There is no file or folder 'nowhere.txt'"),
    (["model", "--data", "nowhere.txt", "--machines", "2"], "There is no file or folder 'nowhere.txt'"),
    (["model", "--data", "ids.npy"], "holds the token id 300, but the model has 257 tokens"),
    (["model", "--data", "texts", "--length", "64"], "Set data.length to 32"),
    (["model", "--data", "texts", "--workers", "9"], "has 6 units, which are too few for 9 processes"),
    (["model", "--data", "texts", "--set", "data.seq_len=9"], "Did you mean 'data.length'?"),
    (["bare", "--data", "texts"], "bare holds no weights"),
    (["unfinished"], "is not the folder of a run"),
]


def test_wrong_models_and_wrong_data_are_a_sentence_each(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = load_source(GPT, device="cpu").model
    from safetensors.torch import save_file

    for folder in ("model", "texts", "bare", "unfinished"):
        (tmp_path / folder).mkdir()
    about = f'{{"format": 1, "model": "{GPT}", "step": 3}}'
    for folder in ("model", "bare"):
        (tmp_path / folder / "bireme.json").write_text(about)
    weights = {name: tensor.detach().clone() for name, tensor in source.named_parameters()}
    save_file(weights, "model/model.safetensors")
    (tmp_path / "unfinished" / "run.toml").touch()
    (tmp_path / "texts" / "held.py").write_text(HELD)
    (tmp_path / "nothing.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    np.save("ids.npy", np.full(400, 300, np.uint16))
    for words, expected in WRONG:
        result: Result = bireme(capsys, "evaluate", *words)
        assert result.status == 2, (words, result.out, result.err)
        assert expected in result.err, (words, result.err)
        assert len(result.err.strip().splitlines()) == 1
