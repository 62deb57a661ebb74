"""Conversations to token ids by a tokenizer's chat template; only what the assistant says counts in the loss.

Where the template marks what the assistant says ({% generation %}), its marks decide. Else an answer is what
the template adds to the conversation before it: the ids with the answer, less those up to the answer's begin.
"""

import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from bireme.errors import BiremeError
from bireme.train.data.saved_rows import IdRow
from bireme.train.data.tokenizer import FolderTokenizer, Tokenizer

__all__ = ["ChatTemplate"]

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
ASSISTANT = "assistant"

Messages = Sequence[dict[str, Any]]


class ChatTemplate:
    """The chat template of a tokenizer; `origin` is whose conversations it is for."""

    def __init__(self, tokenizer: Tokenizer | None, origin: str) -> None:
        template = tokenizer.backend.chat_template if isinstance(tokenizer, FolderTokenizer) else None
        if not isinstance(tokenizer, FolderTokenizer) or not isinstance(template, str):
            raise BiremeError(
                f"{origin} holds conversations, and the tokenizer has no chat template to make text of "
                "them. Set data.tokenizer to the folder of a tokenizer with one, such as that of a chat "
                "model."
            )
        self._backend = tokenizer.backend
        self._template = template

    @property
    def identity(self) -> str:
        """Words that differ when the same conversation may give other ids."""
        return f"chat {sha256(self._template.encode()).hexdigest()}"

    def encode(self, messages: Messages, where: str) -> IdRow:
        """The ids of a conversation, of which those of answers count; `where` is what to call it."""
        try:
            if MARKS.search(self._template):
                made = self._backend.apply_chat_template(
                    list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
                )
                return IdRow(
                    np.asarray(made["input_ids"], np.int64), np.asarray(made["assistant_masks"], np.bool_)
                )
            return self._by_differences(messages, where)
        except BiremeError:
            raise
        except Exception as error:  # a template is code, and says what is wrong in its own way
            lines = str(error).strip().splitlines() or ["it says no more"]
            raise BiremeError(
                f"The tokenizer's chat template does not take {where}: {type(error).__name__}: "
                f"{lines[0].rstrip('.')}. Correct the row, or leave it out."
            ) from error

    def _by_differences(self, messages: Messages, where: str) -> IdRow:
        ids = self._ids(messages)
        counts = np.zeros(len(ids), np.bool_)
        for place, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            begin = self._ids(messages[:place], asks=True) if place else []
            end = self._ids(messages[: place + 1])
            if ids[: len(end)] != end or end[: len(begin)] != begin:
                raise BiremeError(
                    f"In {where} Bireme cannot tell which tokens are message {place + 1}: the tokenizer's "
                    "chat template writes the beginning of a conversation in another way when more "
                    "follows. Put {% generation %} and {% endgeneration %} around the assistant's content "
                    "in the template."
                )
            counts[len(begin) : len(end)] = True
        return IdRow(np.asarray(ids, np.int64), counts)

    def _ids(self, messages: Messages, *, asks: bool = False) -> list[int]:
        """With `asks` up to where the assistant's answer begins."""
        made = self._backend.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, add_generation_prompt=asks
        )
        return [int(number) for number in made["input_ids"]]
