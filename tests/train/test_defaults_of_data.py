"""Defaults that follow from model and data: a chat model is never tuned as bytes, nor on padding."""

import json
import shutil
from pathlib import Path

import pytest

from bireme.errors import BiremeError
from bireme.train.folder import RunFolder
from bireme.train.model import RunModel
from bireme.train.resume_checks import data_identity, write_identity
from bireme.train.run_data import completed, counted, data_of, tokenizer_name, with_length_of_data
from bireme.train.run_file import RunFile, load_run_file
from tests.support.tiny_project import make_project

pytestmark = pytest.mark.slow  # transformers makes the model


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


def asked(project: Path, *sets: str) -> RunFile:
    source = (f"model.source=hf:{project / 'models/llama'}", f"data.source={project / 'data/chats.jsonl'}")
    return load_run_file(None, [*source, *sets])


def test_a_chat_model_is_tuned_with_its_tokenizer_its_template_its_format_and_a_small_rate(
    project: Path,
) -> None:
    """Without a word it was tuned as bytes, at 3e-3, in float32."""
    run = with_length_of_data(asked(project))
    data = data_of(run, RunModel.of(run, 1))
    assert data.tokenizer is not None
    assert data.tokenizer.num_tokens == 300
    assert data.loss_on == "answers only"
    assert all(one.form for one in data.recognized)
    assert (run.model.dtype, run.training.learning_rate, run.data.length) == ("bfloat16", 2e-5, 32)


def test_a_trained_model_without_its_tokenizer_is_refused_and_not_read_as_bytes(
    project: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(project / "models/llama", folder, ignore=shutil.ignore_patterns("tokenizer*"))
    texts = ("data.source=" + str(project / "data/texts"), f"model.source=hf:{folder}", "data.length=16")
    run = asked(project, *texts)
    with pytest.raises(BiremeError, match=r"weights and no tokenizer, so its model would read bytes"):
        data_of(run, RunModel.of(run, 1))
    for more in ("data.tokenizer=bytes", "model.from_scratch=true"):
        run = asked(project, *texts, more)
        assert data_of(run, RunModel.of(run, 1)).tokenizer is not None


def test_the_built_in_model_with_weights_reads_bytes(project: Path) -> None:
    run = asked(
        project, "model.source=gpt:layers=2,width=8,heads=2,vocab=257,context=16", "model.weights=saved"
    )
    run = run.with_keys("data", source=str(project / "data/texts"), length=16)
    assert tokenizer_name(data_of(run, RunModel.of(run, 1)).tokenizer) == "bytes"


@pytest.mark.parametrize(
    ("sets", "length"),
    [
        ((), 32),
        (("data.length=48",), 48),
        (("data.packing=documents",), 1024),
        (("data.packing=none",), 32),
    ],
)
def test_samples_are_as_long_as_the_longest_conversation(
    project: Path, sets: tuple[str, ...], length: int
) -> None:
    assert with_length_of_data(asked(project, *sets)).data.length == length


def test_texts_fill_the_context_and_long_conversations_at_most_2048(project: Path, tmp_path: Path) -> None:
    texts = asked(project, f"data.source={project / 'data/texts'}")
    assert with_length_of_data(texts).data.length == 1024
    answer = {"role": "assistant", "content": "value " * 9000}
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "?"}, answer]}) + "\n")
    assert with_length_of_data(asked(project, f"data.source={path}")).data.length == 2048


def test_epochs_become_steps_that_a_resume_keeps_or_counts_anew(project: Path, tmp_path: Path) -> None:
    run = completed(asked(project, "training.epochs=3", "training.batch_size=16"))
    assert (run.training.steps, run.training.epochs, run.data.length) == (42, None, 32)  # of 224 samples
    folder = RunFolder(tmp_path)
    folder.write_run(run)
    write_identity(folder.data, data_identity(run, data_of(run, RunModel.of(run, 1))))
    assert folder.load_run().training.steps == 42
    assert folder.load_run(["training.epochs=4"]).training.steps == 56
    # A launcher gives the file that the run began with.
    again = folder.completed(asked(project, "training.epochs=3", "training.batch_size=16"))
    assert (again.training.steps, again.data.length) == (42, 32)


def test_epochs_of_a_stream_are_refused(project: Path) -> None:
    pytest.importorskip("datasets")
    stream = f"data.source=hf:{project / 'data/chats.jsonl'},streaming=true"
    run = asked(project, stream, "training.epochs=3", "data.evaluation_fraction=0")
    with pytest.raises(BiremeError, match=r"is a stream, whose end is not known\. Set training\.steps"):
        counted(run, data_of(run, RunModel.of(run, 1)))
