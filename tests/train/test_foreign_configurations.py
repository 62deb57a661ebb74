"""Configurations of axolotl and LLaMA-Factory: each key is translated, has no effect, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from bireme.errors import BiremeError
from bireme.train.run_file import foreign, load_run_file
from bireme.train.run_file.foreign import translated
from tests.support.command import bireme
from tests.support.tiny_project import make_project

yaml = pytest.importorskip("yaml")

AXOLOTL = """
base_model: models/llama
load_in_8bit: false
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: data/chats.jsonl
    type: chat_template
    roles_to_train: ["assistant"]
    train_on_eos: turn
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/lora-out
sequence_len: 1024
sample_packing: true
pad_to_sequence_len: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
gradient_checkpointing: true
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
special_tokens:
  pad_token: <end>
"""

FACTORY = """
model_name_or_path: models/llama
stage: sft
do_train: true
finetuning_type: lora
lora_target: q_proj,v_proj
dataset: chats
template: llama3
cutoff_len: 512
output_dir: saves/llama3-8b/lora/sft
save_steps: 500
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""


def settings(folder: Path, text: str, **more: Any) -> dict[str, Any]:
    """The settings of a configuration with some keys changed; None takes a key out."""
    content = yaml.safe_load(text) | more
    path = folder / "theirs.yml"
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return dict(translated(path).values)


def refused(folder: Path, text: str, **more: Any) -> str:
    with pytest.raises(BiremeError) as caught:
        settings(folder, text, **more)
    return str(caught.value)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    chats = {
        "file_name": "chats.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": tags,
    }
    odd = {"file_name": "odd.json", "columns": {"prompt": "question"}}
    hub = {"hf_hub_url": "me/rows", "subset": "en", "split": "held"}
    listing = {"chats": chats, "odd": odd, "alpaca": {"file_name": "alpaca.json"}, "hub": hub}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(listing))
    return tmp_path


def test_axolotl_s_lora_is_translated_with_its_defaults(here: Path) -> None:
    found = settings(here, AXOLOTL)
    assert found == {
        "model.source": "hf:models/llama",
        "model.dtype": "bfloat16",
        "model.seed": 42,
        "model.lora.rank": 32,
        "model.lora.alpha": 16.0,
        "model.lora.dropout": 0.05,
        "data.source": "data/chats.jsonl",
        "data.text_column": "messages",
        "data.packing": "documents",
        "data.length": 1024,
        "data.evaluation_fraction": 0.1,
        "data.seed": 42,
        "training.batch_size": 8,
        "training.epochs": 4.0,
        "training.seed": 42,
        "training.learning_rate": 2e-4,
        "training.schedule": "cosine",
        "training.final_fraction": 0.0,
        "training.warmup_steps": 10,
        "training.optimizer": "adamw",
        "training.betas": [0.9, 0.999],
        "training.weight_decay": 0.0,
        "training.clip_norm": 1.0,
        "log.folder": "outputs",
        "log.name": "lora-out",
    }
    assert load_run_file(None, translated(here / "theirs.yml").settings).training.epochs == 4


def test_llama_factory_s_lora_is_translated_with_its_defaults(here: Path) -> None:
    found = settings(here, FACTORY)
    assert found["model.lora.rank"] == 8
    assert found["model.lora.alpha"] == 16
    assert found["model.lora.targets"] == ["q_proj", "v_proj"]
    assert (found["data.source"], found["data.text_column"]) == ("data/chats.jsonl", "messages")
    assert (found["training.batch_size"], found["training.epochs"]) == (8, 3)
    assert (found["training.warmup_fraction"], found["data.evaluation_fraction"]) == (0.1, 0)
    assert (found["log.folder"], found["log.name"]) == ("saves/llama3-8b/lora", "sft")
    assert "data.packing" not in found
    load_run_file(None, translated(here / "theirs.yml").settings)


@pytest.mark.parametrize(
    ("text", "more", "expected"),
    [
        (AXOLOTL, {"max_steps": 50}, {"training.steps": 50}),
        (AXOLOTL, {"warmup_steps": None}, {"training.warmup_fraction": 0.03}),
        (AXOLOTL, {"warmup_steps": 0}, {"training.warmup_steps": 0}),
        (FACTORY, {"warmup_steps": 0}, {"training.warmup_fraction": 0.1}),
        (
            AXOLOTL,
            {"lr_scheduler": "constant"},
            {"training.schedule": "constant", "training.warmup_steps": 0},
        ),
        (AXOLOTL, {"optimizer": "sgd"}, {"training.optimizer": "sgd", "training.momentum": 0.0}),
        (AXOLOTL, {"bf16": None}, {"model.dtype": "float32"}),
        (AXOLOTL, {"cosine_min_lr_ratio": 0.2}, {"training.final_fraction": 0.2}),
        (AXOLOTL, {"wandb_project": "mine"}, {"log.wandb": True, "log.project": "mine"}),
        (AXOLOTL, {"plugins": ["axolotl.integrations.liger.LigerPlugin"]}, {"model.dtype": "bfloat16"}),
        (AXOLOTL, {"adapter": "qlora", "load_in_4bit": True}, {"model.frozen_dtype": "nf4"}),
        (FACTORY, {"quantization_bit": 4}, {"model.frozen_dtype": "nf4"}),
        (AXOLOTL, {"peft_use_dora": True}, {"model.lora.use_dora": True}),
        (FACTORY, {"use_rslora": True}, {"model.lora.use_rslora": True}),
        (FACTORY, {"train_on_prompt": True}, {"data.loss_on": "all"}),
        (AXOLOTL, {"adapter": None}, {"training.learning_rate": 2e-4}),
        (FACTORY, {"finetuning_type": "full"}, {"training.batch_size": 8}),
        (FACTORY, {"num_train_epochs": "1e0"}, {"training.epochs": 1.0}),
        (FACTORY, {"neat_packing": True, "packing": True}, {"data.packing": "documents"}),
        (FACTORY, {"stage": "pt", "dataset": "alpaca"}, {"data.packing": "stream"}),
        (FACTORY, {"dataset": "alpaca"}, {"data.source": "data/alpaca.json"}),
        (FACTORY, {"eval_dataset": "alpaca"}, {"data.evaluation_source": "data/alpaca.json"}),
        (FACTORY, {"report_to": "tensorboard"}, {"log.tensorboard": True}),
        (FACTORY, {"max_samples": 90}, {"data.source": "hf:data/chats.jsonl,split=train[:90]"}),
        (
            FACTORY,
            {"dataset": "hub", "eval_dataset": "hub", "max_samples": 90},
            {"data.evaluation_source": "hf:me/rows,config=en,split=held[:90]"},
        ),
    ],
)
def test_keys_have_their_meaning(
    text: str, more: dict[str, Any], expected: dict[str, Any], here: Path
) -> None:
    found = settings(here, text, **more)
    assert {key: found.get(key) for key in expected} == expected
    load_run_file(None, translated(here / "theirs.yml").settings)


@pytest.mark.parametrize(
    ("text", "more", "sentence"),
    [
        (AXOLOTL, {"rl": "dpo"}, "rl = dpo (Bireme trains the next token, not preferences or rewards)"),
        (
            AXOLOTL,
            {"load_in_8bit": True},
            "load_in_8bit = true (frozen weights in 8 bits give other numbers)",
        ),
        (AXOLOTL, {"lora_modules_to_save": ["lm_head"]}, 'lora_modules_to_save = ["lm_head"]'),
        (AXOLOTL, {"plugins": ["axolotl.integrations.spectrum.SpectrumPlugin"]}, "plugins = ["),
        (AXOLOTL, {"nonsense": 3}, "nonsense = 3 (it is unknown here and may change the model)"),
        (AXOLOTL, {"optimizer": "lion_8bit"}, "optimizer = lion_8bit (Bireme has only sgd, adamw_torch"),
        (AXOLOTL, {"chat_template": "chatml"}, "chat_template = chatml"),
        (AXOLOTL, {"lora_target_linear": None}, "lora_target_modules (it is missing"),
        (AXOLOTL, {"special_tokens": {"eos_token": "x"}}, "the tokenizer is used as its folder has it"),
        (AXOLOTL, {"datasets": [{"path": "a.jsonl", "type": "alpaca"}]}, "datasets.type = alpaca"),
        (AXOLOTL, {"datasets": []}, "datasets lists 0 datasets, and exactly one can be translated."),
        (AXOLOTL, {"learning_rate": "fast"}, "learning_rate is 'fast'; it must be a number."),
        (AXOLOTL, {"max_steps": float("inf")}, "max_steps is inf; it must be a number."),
        (AXOLOTL, {"learning_rate": None}, "learning_rate (it is missing)"),
        (FACTORY, {"stage": "dpo"}, "stage = dpo"),
        (FACTORY, {"packing": True}, "neat_packing keeps them apart"),
        (FACTORY, {"dataset": "odd"}, "prompt = question of dataset odd"),
        (FACTORY, {"dataset": "chats,odd"}, "put the rows into one file"),
        (FACTORY, {"dataset": "none"}, "it is not there"),
        (FACTORY, {"dataset_dir": "nowhere"}, "dataset_info.json. Call bireme in the folder"),
        (FACTORY, {"val_size": 300}, "val_size = 300 (it must be a share of the data, below 1)"),
    ],
)
def test_what_would_change_the_model_is_refused_by_name(
    text: str, more: dict[str, Any], sentence: str, here: Path
) -> None:
    assert sentence in refused(here, text, **more)


def test_a_file_of_another_kind_is_refused(here: Path) -> None:
    path = here / "other.yml"
    for text, sentence in (
        ("model: x", "is neither a configuration of axolotl"),
        ("- a", "is not a table of keys in YAML"),
        ("a: [", "is not YAML"),
    ):
        path.write_text(text)
        with pytest.raises(BiremeError, match=sentence):
            translated(path)
    with pytest.raises(BiremeError, match="There is no file"):
        translated(here / "none.yml")


def test_init_writes_the_run_file_with_the_name_of_each_key(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "theirs.yml").write_text(AXOLOTL)
    document = bireme(capsys, "init", "run.toml", "--from", "theirs.yml", "--json").document
    assert document["translated"]["training.batch_size"] == 8
    assert document["without_effect"]["flash_attention"] == "attention and kernels are chosen here"
    text = (here / "run.toml").read_text()
    assert "lora_r\n" in text
    assert load_run_file(here / "run.toml").training.epochs == 4


@pytest.mark.slow
def test_train_shows_the_translation_and_begins_with_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As far as the plan, of a model on a machine of its own."""
    (here / "data" / "dataset_info.json").unlink()
    (here / "data").rmdir()
    make_project(here)
    (here / "theirs.yml").write_text(AXOLOTL)
    result = bireme(capsys, "train", "run.toml", "--from", "theirs.yml")
    assert result.status == 2
    assert "both say what to train" in result.err
    result = bireme(capsys, "train", "--from", "theirs.yml", "--dry-run", "--set", "data.source=nowhere")
    assert result.status == 2
    assert "training.learning_rate = 0.0002  (learning_rate)" in result.err
    assert "There is no file or folder" in result.err


def test_the_page_names_every_key_that_has_no_effect_or_is_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "other-programs.md").read_text(encoding="utf-8")
    for groups in ("foreign_idle.txt", "foreign_refused.txt"):
        for name, why in foreign._by_key(groups).items():
            assert any(f"`{name}`" in line and why in line for line in page.splitlines()), name
    for name in {*foreign._FACTORY.names, *foreign._FACTORY.names.values()}:
        assert f"`{name}`" in page, name
