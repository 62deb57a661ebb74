"""Runs that train a part: an adapter comes out that peft loads, and a folder to which it was added.

Their checkpoints hold what was trained and no more. A run resumes from them with the same base, and with
no other.
"""

import json
import shutil
from contextlib import closing
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from bireme import pieces
from bireme.model.graph_file import load_graph
from bireme.model.stage import StageFunction
from bireme.model.units import units_of
from bireme.pieces import PIECE_BYTES, partial_files
from bireme.plan.plan_file import load_plan, write_plan
from bireme.runtime.copies import folder_server
from bireme.runtime.evaluation import Evaluation
from bireme.runtime.stores import HashStore
from bireme.schedule.instruction import Item
from bireme.train import evaluating, fetched, shared_model
from bireme.train.checkpoint.checkpoint import MachinesNote, newest_good
from bireme.train.data.samples import Samples
from bireme.train.fetched import FetchProgress
from bireme.train.folder import RunFolder, load_asked
from bireme.train.generating import WritingStyle, writer_of
from bireme.train.joined_processes import RUNS
from bireme.train.launching import start
from bireme.train.model import RunModel
from bireme.train.prepare import prepare, write_prepared
from bireme.train.run_file import with_paths_of_machine
from bireme.train.run_machines import MachineFolders, fetch_weights_of
from bireme.train.shared_model import ModelFiles, ModelWork
from bireme.train.subject import subject_of
from tests.support.command import bireme
from tests.support.extent import TRY_ALL
from tests.support.once import made_once
from tests.support.paged import paged, sizes_of
from tests.support.small_models import Model
from tests.support.tiny_llama import greedy, save_llama
from tests.support.tiny_tokenizer import save_tokenizer
from tests.support.together import run_threads
from tests.support.training import losses, settings, write_run

pytestmark = pytest.mark.slow


def _train_an_adapter(folder: Path) -> None:
    base, tokenizer = save_llama(folder / "llama"), save_tokenizer(folder / "tokenizer")
    path = write_run(folder, "2bw-fresh", model=f"hf:{base}")
    lora = settings(model__lora__rank=4, model__lora__dropout=0.1, log__sample_tokens=3)
    more = settings(data__tokenizer=tokenizer, training__steps=8, training__weight_decay=0.1)
    assert _trained(path, folder / "runs" / "run", [*lora, *more])["sample"]


def _trained(path: Path, run: Path, words: list[str]) -> dict[str, Any]:
    """What a run tells in the end."""
    prepared = prepare(
        load_asked(path, [word for word in words if word != "--set"]), lambda _done, _what: None
    )
    made = RunFolder(run)
    made.path.mkdir(parents=True)
    write_prepared(prepared, made)
    return start(prepared, made, None, is_shown=False).summary


@pytest.fixture(scope="module")
def run() -> Path:
    """The folder of a run of two ranks that has trained an adapter, next to `llama` with its base."""
    pytest.importorskip("peft")
    return made_once("adapter", _train_an_adapter) / "runs" / "run"


@torch.no_grad()
@pytest.mark.long
def test_an_adapter_of_two_ranks_has_the_same_logits_in_peft_and_merged(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft: Any = pytest.importorskip("peft")
    transformers: Any = pytest.importorskip("transformers")
    base = run.parents[1] / "llama"
    curve = losses(run)
    assert curve[8] < curve[1]

    adapter = run / "model"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8)
    assert config["base_model_name_or_path"] == str(base)
    assert len(load_file(adapter / "adapter_model.safetensors")) == 2 * 2 * 7

    ids = torch.randint(300, (2, 32), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "labels": ids}
    trained = _pipeline_logits(run, inputs)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    assert not torch.allclose(plain(ids).logits, trained, atol=1e-3)
    loaded = peft.PeftModel.from_pretrained(plain, adapter).eval()
    torch.testing.assert_close(loaded(ids).logits, trained, rtol=0, atol=0)

    merged = tmp_path / "merged"
    assert bireme(capsys, "export", str(run), "--to", str(merged), "--merged").status == 0
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
    torch.testing.assert_close(whole(ids).logits, trained)
    words = ("export", str(run), "--format", "dcp", "--to")
    refused = bireme(capsys, *words, str(tmp_path / "adapter"))
    assert refused.status == 2
    assert "add --merged to export the whole model" in refused.err
    assert bireme(capsys, *words, str(tmp_path / "dcp"), "--merged").status == 0
    found = {name: torch.zeros_like(tensor) for name, tensor in whole.state_dict().items()}
    load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    whole.load_state_dict(found)
    torch.testing.assert_close(whole(ids).logits, trained)


@torch.no_grad()
def test_a_run_writes_by_the_stages_of_its_plan(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "def function(self, value)"
    subject = subject_of(str(run), (), lambda _text: None)
    writer = writer_of(subject, WritingStyle(3, 0.0, 0), [prompt], lambda _done, _what: None, count=2)
    assert load_plan(run / "plan.json").plan.cuts == (3,)
    assert writer.work.cuts == (1,)  # of two layers, of which each is two units after the embedding
    words = (prompt, "--temperature", "0", "--tokens", "3", "--json")
    found = bireme(capsys, "generate", str(run), *words).document
    assert found["by"] == "1 process with a cache of keys and values"
    first = writer.tokenizer.encode(prompt)
    known = [*first, *found["ids"]]
    ids = torch.zeros((1, 32), dtype=torch.int64)
    ids[0, : len(known)] = torch.tensor(known)
    likeliest = _pipeline_logits(run, {"input_ids": ids, "labels": ids})[0].argmax(1)
    assert found["ids"] == likeliest[len(first) - 1 : len(known) - 1].tolist()


def test_another_machine_reads_the_tensors_of_a_checkpoint_where_the_first_one_has_them(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine alone wrote the checkpoint, so its tensors have no digests of their own."""
    monkeypatch.setenv(RUNS, str(tmp_path))
    monkeypatch.setattr(shared_model, "host_name", lambda: str(get_ident()))
    store, form = HashStore(), TypeAdapter(ModelWork)
    graph = load_graph(run / "evaluation-graph.json")
    learned = [state.name for state in graph.parameters if state.trainable]

    def shared(rank: int) -> tuple[Path, dict[str, Tensor]]:
        world: Any = SimpleNamespace(rank=rank, size=2, store=store)
        files, work = ModelFiles(world, str(run) if rank == 0 else "/nowhere/run"), None
        if rank == 0:
            subject = files.find((), lambda _text: None)
            work = ModelWork(subject=subject, run=subject.run)
        subject = (work := files.share(work, form)).subject
        assert subject.checkpoint is not None
        found = dict(subject.weights(RunModel.of(work.run, 1), graph)(learned))
        store.set(f"read/{rank}", "")
        store.wait(["read/0", "read/1"])
        files.close()
        return subject.checkpoint, found

    (first, wanted), (path, found) = run_threads(2, shared)
    assert path.is_relative_to(tmp_path)
    assert [one.name for one in path.iterdir()] == ["manifest.json"]
    assert path.name == first.name
    assert found.keys() == wanted.keys() == set(learned)
    assert all(torch.equal(found[name], wanted[name]) for name in learned)


def test_another_machine_evaluates_pieces_of_the_tokens_that_the_first_one_has_made(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched, "WHOLE_BYTES", PIECE_BYTES)
    monkeypatch.setenv(RUNS, str(tmp_path / "runs"))
    monkeypatch.setattr(shared_model, "host_name", lambda: str(get_ident()))
    source, store, exists, other = tmp_path / "book.txt", HashStore(), Path.exists, list[int]()
    source.write_text("".join(f"{number} is a number.\n" for number in range(20_000)))
    monkeypatch.setattr(
        Path, "exists", lambda path: exists(path) and (path != source or get_ident() not in other)
    )

    def samples_of(rank: int) -> tuple[Samples, Tensor]:
        world: Any = SimpleNamespace(rank=rank, size=2, store=store)
        other.extend([get_ident()] * rank)
        with closing(ModelFiles(world, str(run) if rank == 0 else "/nowhere/run")) as files:
            found = list[Samples]()

            def measure(job: evaluating._Job | None) -> Any:
                shared = files.share(job, evaluating._JOB)
                found.append(evaluating._found(shared, RunModel.of(shared.run, 1)).training)
                return {"": Evaluation(1.0, 1.0, 1)}, 1.0

            if rank:
                measure(None)
            else:
                given: Any = {"most_batches": None, "workers": 2, "progress": lambda *_: None}
                evaluating.evaluate(files.find((), print), str(source), measure=measure, **given)
            ids = found[0].take([len(found[0]) - 1])["input_ids"]
            store.set(f"read/{rank}", "")
            store.wait(["read/0", "read/1"])
        return found[0], ids

    (first, wanted), (samples, ids) = run_threads(2, samples_of)
    assert len(first) == len(samples)
    assert torch.equal(ids, wanted)
    (file,) = partial_files(tmp_path / "runs")
    assert file.path.name == "tokens.bin"
    assert 0 < len(file.missing()) < file.num_pieces


def test_another_machine_fetches_the_weights_of_its_stages_and_after_a_resume_those_of_the_base(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched, "WHOLE_BYTES", 0)
    for one in (pieces, fetched, folder_server):
        monkeypatch.setattr(one, "PIECE_BYTES", 1 << 9)
    first, base = RunFolder(run).load_run(), run.parents[1] / "llama"
    graph = load_graph(run / "graph.json")
    stages = [names for _, names in sorted(_names_of_stages(run).items())]
    server, here = MachineFolders(), MachineFolders()
    addresses = server.served(run, [str(base)]), here.served(tmp_path / "machine")
    folder = RunFolder(Path(shutil.copytree(run, tmp_path / "machine")))
    try:
        for place, resumes in ((0, True), (1, True), (1, False)):
            progress = FetchProgress(lambda _text: None, {})
            note = MachinesNote(addresses, 1)
            found = here.take_files(folder, run, ["/nowhere/llama"], note, progress)
            before = sum(progress.from_machines.values())
            moved = with_paths_of_machine(first, {str(base): found["/nowhere/llama"]})
            monkeypatch.setattr(RunFolder, "load_run", lambda _self, run=moved: run)
            fetch_weights_of(folder, [place], progress, resumes=resumes)
            assert (sum(progress.from_machines.values()) > before) == resumes
            read = RunModel.of(moved, 1).weights(graph)(sorted(stages[place]))
            wanted = RunModel.of(first, 1).weights(graph)(sorted(stages[place]))
            assert all(torch.equal(read[name], wanted[name]) for name in wanted)
            if place == 0:
                assert any(partial_files(folder.path / "files"))
    finally:
        server.close()
        here.close()


def _names_of_stages(run: Path) -> dict[int, set[str]]:
    """The parameters of each stage of a run."""
    plan, units = load_plan(run / "plan.json").plan.by_program, units_of(load_graph(run / "graph.json"))
    return {
        stage: {name for index in plan.units_of(stage, len(units)) for name in units[index].parameters}
        for stage in range(plan.source.num_stages)
    }


def _pipeline_logits(run: Path, inputs: dict[str, Tensor]) -> Tensor:
    """What the stages of a run make of its newest checkpoint."""
    checkpoint = newest_good(run / "checkpoints")
    assert checkpoint is not None
    saved = checkpoint.snapshot().tensors
    graph = load_graph(run / "evaluation-graph.json")
    whole = StageFunction(graph, units_of(graph), outputs=("logits",))
    frozen = {state.name for state in graph.parameters if not state.trainable}
    given = RunModel.of(RunFolder(run).load_run(), 1).weights(graph)(sorted(frozen))
    learned = {name: saved[f"weights/{name}"] for name in whole.parameters if name not in frozen}
    weights = dict(given) | learned
    buffers = {name: saved[f"buffers/{name}"] for name in whole.buffers}
    return whole(weights, buffers, inputs)["logits"]


@pytest.mark.long
def test_a_run_with_an_adapter_writes_what_its_merged_model_writes(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run with the adapter beside its base, the merged model as transformers would."""
    merged, prompt = str(tmp_path / "merged"), "def function(self"
    assert bireme(capsys, "merge", str(run), "--to", merged, "--json").document["step"] == 8
    words = [prompt, "--tokens", "12", "--temperature", "0", "--json"]
    found = bireme(capsys, "generate", str(run), *words).document
    again = bireme(capsys, "generate", merged, *words).document
    assert (found["step"], again["step"]) == (8, 8)
    assert "with a cache" in found["by"]
    assert "with a cache" in again["by"]
    assert found["ids"] == again["ids"] == greedy(Path(merged), prompt, 12)


@pytest.mark.long
def test_a_run_of_an_adapter_resumes_to_the_last_bit_with_its_base_and_no_other(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped, base = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(run, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-00000008")
    shutil.rmtree(stopped / "model")
    shutil.copytree(run.parents[1] / "llama", base)
    saved = newest_good(stopped / "checkpoints")
    assert saved is not None
    sections = {name.partition("/")[2] for name in saved.snapshot().tensors if name.startswith("weights/")}
    assert len(sections) == 2 * 2 * 7  # A and B of every linear layer, and nothing of the base
    assert all(".lora_" in name for name in sections)

    words = ["resume", str(stopped), "--json", "--set"]
    other = tmp_path / "other"
    shutil.copytree(base, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1.0
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    log = (stopped / "metrics.jsonl").read_bytes()
    refused = bireme(capsys, *words, f"model.source=hf:{other}")
    assert refused.status == 2
    assert f"hf:{other} holds others now" in refused.err
    (other / "model.safetensors").unlink()
    refused = bireme(capsys, *words, f"model.source=hf:{other}")
    assert refused.status == 2
    assert f"hf:{other} has no safetensors to read them from" in refused.err
    for word in ("model.lora.rank=2", "model.frozen_dtype=nf4"):
        refused = bireme(capsys, *words, word)
        assert refused.status == 2
        assert "set model.train, model.freeze, model.lora and model.frozen_dtype back" in refused.err
    assert (stopped / "metrics.jsonl").read_bytes() == log

    resumed = bireme(capsys, *words, f"model.source=hf:{base}")
    assert resumed.status == 0, resumed.err
    assert len(losses(stopped)) == 8  # and none of a step that was trained twice has changed
    weights = [load_file(one / "model" / "adapter_model.safetensors") for one in (run, stopped)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.skipif(not TRY_ALL, reason="threads do the same in tests/runtime/test_paging_frozen.py")
def test_an_adapter_learns_the_same_with_its_base_on_a_disk(run: Path, tmp_path: Path) -> None:
    graph, plan = load_graph(run / "graph.json"), load_plan(run / "plan.json").plan
    names = [state.name for state in graph.parameters]
    weights = dict(RunModel.of(RunFolder(run).load_run(), 1).weights(graph)(names))
    sizes = sizes_of(Model(graph, weights), plan, stash=2**20)
    within = paged(plan, sizes, 0.0, host=0.0, disk=True, stashes=False)
    assert any(item is Item.FROZEN for tiers in within.program(4).tiers if tiers for item, _ in tiers.chunks)
    write_plan(tmp_path / "plan.json", within)
    tokenizer = run.parents[1] / "tokenizer"
    lora = settings(model__lora__rank=4, model__lora__dropout=0.1, memory__disk=tmp_path)
    more = settings(data__tokenizer=tokenizer, training__weight_decay=0.1, training__steps=3)
    words = [*lora, *more, *settings(plan__file=tmp_path / "plan.json")]
    document = _trained(run.parents[1] / "run-2bw-fresh-2.toml", tmp_path / "run", words)
    assert losses(tmp_path / "run") == {step: loss for step, loss in losses(run).items() if step <= 3}
    for tier in document["tiers"]:
        assert 0 < tier["bytes_moved"] == tier["predicted_bytes_moved"]


@torch.no_grad()
@pytest.mark.long
@pytest.mark.skipif(not TRY_ALL, reason="whole runs, of which the others train the same way")
def test_an_adapter_on_four_bits_resumes_to_the_last_bit_and_is_merged_with_what_it_was_trained_on(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers: Any = pytest.importorskip("transformers")
    tokenizer, whole = run.parents[1] / "tokenizer", tmp_path / "whole"
    words = settings(
        model__lora__rank=4, model__frozen_dtype="nf4", data__tokenizer=tokenizer, training__steps=8
    )
    _trained(run.parents[1] / "run-2bw-fresh-2.toml", whole, words)
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-00000008")
    shutil.rmtree(stopped / "model")
    resumed = bireme(capsys, "resume", str(stopped), "--json")
    assert resumed.status == 0, resumed.err
    weights = [load_file(one / "model" / "adapter_model.safetensors") for one in (whole, stopped)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())

    merged = tmp_path / "merged"
    assert bireme(capsys, "export", str(whole), "--to", str(merged), "--merged").status == 0
    ids = torch.randint(300, (2, 32), generator=torch.Generator().manual_seed(1))
    logits = _pipeline_logits(whole, {"input_ids": ids, "labels": ids})
    model = transformers.AutoModelForCausalLM.from_pretrained(merged).eval()
    torch.testing.assert_close(model(ids).logits, logits)


def test_a_run_without_an_adapter_has_nothing_to_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for name in ("run.toml", "plan.json", "graph.json"):
        (run / name).touch()
    result = bireme(capsys, "merge", str(run), "--to", str(tmp_path / "to"))
    assert result.status == 2
    assert "has trained no adapter, so there is nothing to merge. Export the model as it is" in result.err
