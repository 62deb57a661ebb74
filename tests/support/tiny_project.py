"""What a person brings to a first run: a chat model in a folder, conversations, texts, own code.

`python -m tests.support.tiny_project FOLDER` makes all that the commands of the pages begin with.
"""

import importlib
import json
import random
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_llama import llama_config, save_llama
from tests.support.tiny_tokenizer import save_tokenizer

__all__ = ["make_project", "make_shop", "teach_shop"]

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HEADINGS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<end>' if m.role == 'assistant' else '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TOWNS = ("Ghent", "Turin", "Lille")
THINGS = ("letter", "basket", "bottle", "ticket", "wagon")
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
    """What docs/lora.md begins with: a Llama of 0.2 million parameters in llama, and chats.jsonl."""
    base = folder / "llama"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    save_llama(base, **sizes, num_key_value_heads=2, max_position_embeddings=256)
    _save_tokenizer(base, HEADINGS)
    numbers = (876, *(100 + 37 * number % 900 for number in range(239)))
    _write_chats(folder / "chats.jsonl", (_talk("parcel", n, TOWNS[n % 3]) for n in numbers))


def teach_shop(folder: Path) -> None:
    """Train the Llama of `make_shop` on talk about other things, since people adapt models that can write."""
    transformers: Any = importlib.import_module("transformers")
    base, draw, num_steps = str(folder / "llama"), random.Random(0), 120
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=num_steps, pct_start=0.1)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(num_steps):
        told = [
            _talk(draw.choice(THINGS), draw.randrange(100, 1000), draw.choice((*TOWNS, "Porto")))
            for _ in range(16)
        ]
        texts = [f"user: {asked}\nassistant: {answer}<end>" for asked, answer in told]
        ids = [(tokenizer(text).input_ids + [-100] * 64)[:64] for text in texts]
        labels = torch.tensor(ids)
        model(input_ids=labels.clamp(min=0), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    torch.set_num_threads(num_threads)
    model.save_pretrained(base)


def _talk(thing: str, number: int, town: str) -> tuple[str, str]:
    return f"Where is {thing} {number}?", f"{thing.capitalize()} {number} is in {town}."


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


if __name__ == "__main__":
    make_project(Path(sys.argv[1]))
    make_shop(Path(sys.argv[1]))
    teach_shop(Path(sys.argv[1]))
