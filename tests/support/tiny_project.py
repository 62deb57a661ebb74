"""What a person brings to a first run: a chat model in a folder, conversations, texts, own code."""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_llama import llama_config
from tests.support.tiny_tokenizer import save_tokenizer

__all__ = ["make_project"]

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
OWN = Path(__file__).parents[2] / "examples" / "recipes" / "model.py"


def make_project(folder: Path, *, context: int = 2048) -> Path:
    """A Llama in bfloat16 with a chat template in models/llama, data/chats.jsonl, data/texts, model.py."""
    transformers: Any = pytest.importorskip("transformers")
    base, data = folder / "models" / "llama", folder / "data"
    base.mkdir(parents=True)
    save_tokenizer(base)
    tokenizer = importlib.import_module("transformers").AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(base)
    torch.manual_seed(0)
    config = llama_config(max_position_embeddings=context)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(base)
    (data / "texts").mkdir(parents=True)
    with (data / "chats.jsonl").open("w") as file:
        for number in range(240):
            asked, answer = f"value {number}?", f"return {number * number % 97}"
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    text = "".join(f"def add_{n}(value):\n    return value + {n * n % 97}\n\n\n" for n in range(400))
    (data / "texts" / "code.txt").write_text(text)
    shutil.copy(OWN, folder)
    return folder
