"""A Llama of a few thousand parameters, as a folder of transformers."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

__all__ = ["greedy", "llama_config", "save_config", "save_llama"]

SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def llama_config(**sizes: Any) -> Any:
    transformers: Any = pytest.importorskip("transformers")
    return transformers.LlamaConfig(**(SIZES | sizes))


def save_llama(folder: Path, **sizes: Any) -> Path:
    """With weights from a seed."""
    config = llama_config(**sizes)
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_config(folder: Path, **sizes: Any) -> Path:
    """Without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = llama_config(**sizes).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(plain))
    return folder


def greedy(folder: Path, prompt: str, count: int) -> list[int]:
    """The likeliest ids after a prompt, from transformers' own `generate`."""
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    given = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=count, do_sample=False, pad_token_id=0)
    found: list[int] = made[0, given["input_ids"].shape[1] :].tolist()
    return found
