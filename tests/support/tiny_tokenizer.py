"""A tokenizer of transformers with few tokens, made here and saved in a folder."""

import importlib
from pathlib import Path
from typing import Any

import pytest

__all__ = ["save_tokenizer"]

TEXT = ("def function(self, value):\n    return self.value\n\n\n", "class Sample:\n    value = 1\n")


def save_tokenizer(folder: Path) -> Path:
    """Train a byte-level BPE on two short texts, save it in the folder, and give the folder back."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    transformers: Any = importlib.import_module("transformers")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        TEXT, vocab_size=300, min_frequency=1, special_tokens=["<end>"], show_progress=False
    )
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<end>")
    fast.save_pretrained(str(folder))
    return folder
