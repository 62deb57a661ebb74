"""`bireme train` from a run file to a trained model, as people call it.

Where ranks are not the point there is one, in the test's own process.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from bireme.devices import num_accelerators
from bireme.model.sources import load_source
from bireme.model.weights import materialize
from bireme.train.data.placing import Order
from bireme.train.model import RunModel
from bireme.train.run_data import data_of
from bireme.train.run_file import RunFile, load_run_file
from tests.support.alone import alone, learned_alone
from tests.support.command import bireme
from tests.support.tiny_tokenizer import save_tokenizer
from tests.support.training import losses, metrics, settings, steps_of_checkpoints, write_run

SAMPLES = "tests.support.paced_samples"

pytestmark = pytest.mark.slow

PARTS = {"predicted_peak_bytes", "measured_peak_bytes", "busy_share"}


def trained(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> dict[str, Any]:
    result = bireme(capsys, "train", str(path), *words, "--json")
    assert result.status == 0, result.err
    return result.document


def trained_alone(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> dict[str, Any]:
    with alone():
        return trained(capsys, path, *words)


def test_a_run_tells_what_was_predicted_and_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = write_run(tmp_path), tmp_path / "runs" / "run"
    plan = settings(plan__file="", plan__schedule="2bw", plan__depth=2, plan__micro_batch=4)
    document = trained(capsys, path, *plan, *settings(training__evaluate_every=6, log__sample_tokens=5))
    assert document["steps"] == 12
    assert document["schedule"] == "2bw"
    assert document["run_dir"] == str(run)
    for name in ("train_loss", "eval_loss", "tokens_per_s", "predicted_batch_s", "measured_batch_s"):
        assert math.isfinite(document[name]), name
    assert len(document["stages"]) == 2
    for stage in document["stages"]:
        assert stage.keys() >= PARTS
        assert stage["predicted_peak_bytes"] > 0
        assert 0 < stage["busy_share"] <= 1
    assert [stage["rank"] for stage in document["stages"]] == [rank["rank"] for rank in document["ranks"]]
    for rank in document["ranks"]:
        assert rank["predicted_peak_bytes"] > 2**26  # an interpreter with torch, and not only tensors
        assert rank["measured_peak_bytes"] > 2**26
    assert document["control"].keys() == {"profiled_s", "measured_s", "speed"}
    assert json.loads((run / "summary.json").read_text()) == document
    assert [line["step"] for line in metrics(run, "train")] == list(range(1, 13))
    assert [line["step"] for line in metrics(run, "evaluation")] == [6, 12]
    assert steps_of_checkpoints(run) == [4, 8, 12]
    assert (run / "model" / "model.safetensors").is_file()


def test_four_stages_learn_what_one_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(capsys, write_run(tmp_path, "1f1b", 4))["shares"] == []
    one, four = learned_alone(), losses(tmp_path / "runs" / "run")
    assert list(one) == list(four) == list(range(1, 13))
    assert four == pytest.approx(one, rel=1e-5)
    assert one[12] < one[1] - 0.5


def test_stages_of_unequal_width_learn_what_one_process_learns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan file puts the first stage on two processes, the second on one."""
    path, run = write_run(tmp_path, "1f1b", 2, widths=(2, 1)), tmp_path / "runs" / "run"
    document = trained(capsys, path, *settings(training__evaluate_every=6))
    assert losses(run) == pytest.approx(learned_alone(), rel=1e-5)
    assert [stage["rank"] for stage in document["stages"]] == [0, 2]
    assert all(rank["measured_peak_bytes"] > 2**26 for rank in document["ranks"])
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1, 2]
    assert [line["step"] for line in metrics(run, "evaluation")] == [6, 12]
    assert steps_of_checkpoints(run) == [4, 8, 12]


def test_delayed_updates_learn_what_a_plain_loop_with_the_same_delay_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, "2bw", 1)
    sgd = settings(training__optimizer="sgd", training__momentum=0.0, training__clip_norm=0)
    trained_alone(capsys, path, *sgd, *settings(training__learning_rate=0.5))
    run = load_run_file(tmp_path / "runs" / "run" / "run.toml")
    found = losses(tmp_path / "runs" / "run")
    assert [found[step] for step in sorted(found)] == pytest.approx(list(_delayed(run)), rel=1e-4)


def _delayed(run: RunFile) -> Iterator[float]:
    """The losses where batch t runs on the weights of one update before."""
    source = load_source(run.model.source, length=run.data.length, device="cpu")
    samples = data_of(run, RunModel.of(run, 1)).training
    order = Order(len(samples), run.data.seed)
    names = [name for name, _ in source.model.named_parameters()]
    newest = materialize(source.model, names, seed=run.model.seed, dtype=torch.float32)
    before = newest
    for number in range(run.training.steps):
        weights = {name: value.clone().requires_grad_() for name, value in before.items()}
        batch = samples.take(list(order.numbers(number * run.training.batch_size, run.training.batch_size)))
        loss: Tensor = functional_call(source.model, weights, kwargs=batch)["loss"]
        yield float(loss.detach())
        gradients = torch.autograd.grad(loss, list(weights.values()))
        rate = run.training.learning_rate
        stepped = {name: newest[name] - rate * g for name, g in zip(weights, gradients, strict=True)}
        before, newest = newest, stepped


def test_a_run_in_bfloat16_learns_what_one_in_float32_does_but_for_rounding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused, for the model was captured in float32 and computed with in bfloat16."""
    trained_alone(capsys, write_run(tmp_path, "1f1b", 1), *settings(model__dtype="bfloat16"))
    found, exact = losses(tmp_path / "runs" / "run"), learned_alone()
    assert found != exact
    assert found == pytest.approx(exact, rel=0.02)


@pytest.mark.long
def test_a_llama_folder_goes_in_and_one_that_transformers_evaluates_alike_comes_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    folder, tokenizer = tmp_path / "llama", save_tokenizer(tmp_path / "tokenizer")
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    path, run = write_run(tmp_path, "2bw", 1, model=f"hf:{folder}"), tmp_path / "runs" / "run"
    document = trained_alone(capsys, path, *settings(data__tokenizer=tokenizer, training__steps=8))
    assert losses(run)[8] < losses(run)[1]
    to = tmp_path / "exported"
    assert bireme(capsys, "export", str(run), "--to", str(to)).status == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(to).eval()
    assert transformers.AutoTokenizer.from_pretrained(to).decode([5])
    nowhere = bireme(capsys, "export", str(run), "--to", str(to / "config.json" / "model"))
    assert nowhere.status == 2
    assert "cannot be written" in nowhere.err
    for taken, what in ((to, "a folder that is not empty"), (to / "config.json", "a file")):
        result = bireme(capsys, "export", str(run), "--to", str(taken))
        assert result.err == f"bireme: {taken} is {what}. Name a new folder.\n"
    assert _evaluated(model, load_run_file(run / "run.toml")) == pytest.approx(
        document["eval_loss"], rel=1e-5
    )


@torch.no_grad()
def _evaluated(model: Any, run: RunFile) -> float:
    """The mean loss over the batches of an evaluation."""
    samples = data_of(run, RunModel.of(run, 1)).evaluation
    assert samples is not None
    size = min(run.training.batch_size, len(samples))
    count = min(run.training.evaluation_batches, len(samples) // run.training.batch_size) or 1
    order = Order(len(samples), run.data.seed)
    batches = [samples.take(list(order.numbers(number * size, size))) for number in range(count)]
    return sum(float(model(**batch).loss) for batch in batches) / count


WRONG = [
    (["training.step=5"], "training.steps"),
    (["plan.file=", "plan.microbatches=3"], "does not divide"),
    (["plan.file=", "plan.depth=7", "cluster.workers=7"], "plan.depth is 7, but the model has 6 units"),
    (["data.source=nowhere"], "nowhere"),
    (["model.source=gpt:layers=2,width=16,heads=2,vocab=200,context=32"], "257 tokens but the model 200"),
    (["plan.file=nowhere.json"], "nowhere.json"),
    (["cluster.device=cuda"], "cuda"),
    (
        ["model.source=gpt:layers=1,width=16,heads=2,vocab=257,context=32"],
        "cuts at unit 5",
    ),
    (["data.length=16"], "input_ids is of shape [16], and the model takes [32]. Set data.length to 32"),
    (["plan.file=", "plan.depth=3", "cluster.workers="], "is 3, but the run has 2 devices"),
    (["cluster.workers=2"], "is for 4 devices, but the run has 2. Set cluster.workers to 4"),
    (["cluster.source=one-server-of-8", "cluster.workers=3"], "has 8 devices, but cluster.workers is 3"),
    ([f"model.source=python:{SAMPLES}:no_loss"], "returns no loss. Make it return one"),
    (
        [
            f"model.source=python:{SAMPLES}:no_loss",
            f"model.loss={SAMPLES}:of_each",
        ],
        "is float32 of shape [b, 4]",
    ),
    (
        [
            f"model.source=python:{SAMPLES}:no_loss",
            f"model.loss={SAMPLES}:a_number",
        ],
        "returns no tensor",
    ),
]


@pytest.mark.parametrize(("changes", "part"), WRONG, ids=[changes[-1] for changes, _ in WRONG])
def test_a_wrong_run_file_is_a_sentence_before_any_process_starts(
    changes: list[str],
    part: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launch(*_args: object, **_options: object) -> None:
        raise AssertionError("a process was to be started")

    monkeypatch.setattr("bireme.train.launching.launch", launch)
    if "cluster.device=cuda" in changes and num_accelerators() > 1:
        pytest.skip("there are CUDA devices enough")
    own = f"{SAMPLES}:regressed" if "no_loss" in changes[0] else ""
    path = write_run(tmp_path, "1f1b", 4, data=own)
    words = [word for change in changes for word in ("--set", change)]
    result = bireme(capsys, "train", str(path), *words)
    assert result.status == 2
    assert result.err.startswith("bireme: ")
    assert part in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_a_folder_that_is_taken_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bireme.train.prepare.prepare", lambda *_: 1 / 0)
    path, taken = write_run(tmp_path), tmp_path / "runs" / "run"
    taken.mkdir(parents=True)
    (taken / "letter.txt").write_text("kept")
    result = bireme(capsys, "train", str(path))
    assert result.status == 2
    assert (
        result.err
        == f"bireme: {taken} already exists. Give the new run another name with --set log.name=NAME.\n"
    )
    (taken / "run.toml").touch()
    assert f"Resume it with `bireme resume {taken}`" in bireme(capsys, "train", str(path)).err
    under = settings(log__folder=taken / "letter.txt")
    assert "letter.txt is not a folder" in bireme(capsys, "train", str(path), *under).err
    assert (taken / "letter.txt").read_text() == "kept"


def test_a_loss_that_is_no_number_is_null_in_a_document_that_is_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = (
        f"python:{SAMPLES}:regression",
        f"{SAMPLES}:broken_at_its_end",
    )
    document = trained_alone(capsys, write_run(tmp_path, "2bw", 1, model=model, data=data))
    assert document["eval_loss"] is None
    assert math.isfinite(document["train_loss"])
    assert "the model has diverged" in document["warnings"][-1]
    assert "NaN" not in (tmp_path / "runs" / "run" / "summary.json").read_text()


def test_a_step_with_a_loss_that_is_no_number_is_left_out_everywhere_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_run(tmp_path, model=f"python:{SAMPLES}:regression", data=f"{SAMPLES}:broken")
    document = trained(capsys, path, *settings(data__evaluation_fraction=0))
    run = tmp_path / "runs" / "run"
    lines = metrics(run, "train")
    assert document["num_skipped"] == sum(line["num_skipped"] for line in lines) in (1, 2)
    assert sum(line["loss"] is None for line in lines) == document["num_skipped"]
    assert lines[-1]["loss"] is not None
    assert "not finite" in metrics(run, "warning")[0]["text"]
    assert math.isfinite(document["train_loss"])


def test_too_many_of_them_in_a_row_end_the_run_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = f"{SAMPLES}:broken_for_ever"
    path = write_run(tmp_path, "2bw", 1, model=f"python:{SAMPLES}:regression", data=data)
    more = settings(data__evaluation_fraction=0, training__most_skipped_in_a_row=3)
    with alone():
        result = bireme(capsys, "train", str(path), *more)
    assert result.status == 2
    assert "not finite in 4 steps in a row" in result.err
    assert "most_skipped_in_a_row = 3" in result.err
    assert metrics(tmp_path / "runs" / "run")[-1]["kind"] == "stop"


def test_a_run_over_data_in_which_nothing_counts_takes_no_step_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first such batch once ended the run. It is not one that has diverged, so none may be too many."""
    path = write_run(tmp_path, "2bw", 1, data=f"{SAMPLES}:uncounted")
    more = settings(training__steps=3, training__most_skipped_in_a_row=0)
    document = trained_alone(capsys, path, *more)
    assert (document["steps"], document["num_skipped"]) == (3, 3)
    assert document["train_loss"] is document["eval_loss"] is None
    run = tmp_path / "runs" / "run"
    assert [line["loss"] for line in metrics(run, "train")] == [None] * 3
    warnings = [line["text"] for line in metrics(run, "warning")]
    assert warnings[0] == "Step 1 is skipped: nothing in its batch counts for the loss."
    assert warnings[-1].startswith("The evaluation has no loss")
    assert not any("diverged" in text for text in document["warnings"])


def test_a_time_limit_ends_a_run_as_if_it_had_done_all_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = write_run(tmp_path, "2bw", 1), tmp_path / "runs" / "run"
    more = settings(training__time_limit_s=0.001, training__steps=50)
    document = trained_alone(capsys, path, *more)
    assert document["reason"] == "time limit"
    assert document["steps"] < 50
    assert document["eval_loss"] is not None
    assert (run / "model" / "model.safetensors").is_file()
    assert steps_of_checkpoints(run)[-1] == document["steps"]
