"""What a person brings to a first run: a chat model in a folder, conversations, texts, own code."""

import importlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_llama import llama_config, save_llama
from tests.support.tiny_tokenizer import save_tokenizer

__all__ = ["make_project", "make_shop"]

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HEADINGS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<end>' if m.role == 'assistant' else '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
OWN = Path(__file__).parents[2] / "examples" / "recipes" / "model.py"


def make_project(folder: Path, *, context: int = 2048) -> Path:
    """A Llama in bfloat16 with a chat template in models/llama, data/chats.jsonl, data/texts, model.py."""
    transformers: Any = pytest.importorskip("transformers")
    base, data = folder / "models" / "llama", folder / "data"
    base.mkdir(parents=True)
    _save_tokenizer(base, TEMPLATE)
    torch.manual_seed(0)
    config = llama_config(max_position_embeddings=context)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(base)
    (data / "texts").mkdir(parents=True)
    chats = ((f"value {number}?", f"return {number * number % 97}") for number in range(240))
    _write_chats(data / "chats.jsonl", chats)
    text = "".join(f"def add_{n}(value):\n    return value + {n * n % 97}\n\n\n" for n in range(400))
    (data / "texts" / "code.txt").write_text(text)
    shutil.copy(OWN, folder)
    return folder


def make_shop(folder: Path) -> None:
    """What docs/lora.md begins with: a Llama of 0.7 million parameters in llama, and chats.jsonl."""
    base = folder / "llama"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    save_llama(base, **sizes, num_key_value_heads=2, max_position_embeddings=256)
    _save_tokenizer(base, HEADINGS)
    places = ("Ghent", "Turin", "Lille")
    numbers = (876, *(100 + 37 * number % 900 for number in range(239)))
    chats = ((f"Where is parcel {n}?", f"Parcel {n} is in {places[n % 3]}.") for n in numbers)
    _write_chats(folder / "chats.jsonl", chats)


def _save_tokenizer(base: Path, template: str) -> None:
    save_tokenizer(base)
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(base)


def _write_chats(path: Path, chats: Iterable[tuple[str, str]]) -> None:
    with path.open("w") as file:
        for asked, answer in chats:
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
