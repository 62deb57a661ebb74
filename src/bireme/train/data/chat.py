"""Rows with answers to token ids: conversations by a tokenizer's chat template, prompts with completions as
they are. Only answers count in the loss.

Where the template marks what the assistant says ({% generation %}), its marks decide. Else an answer is what
the template adds to the conversation before it: the ids with the answer, less those up to the answer's begin.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from bireme.errors import BiremeError
from bireme.train.data.saved_rows import ALPACA, Content, IdRow, Row, SavedRows
from bireme.train.data.tokenizer import FolderTokenizer, Tokenizer

__all__ = ["AnswerRows", "ChatTemplate"]

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"

ROLES = {
    "human": USER,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": TOOL,
    "function_response": TOOL,
} | {role: role for role in (USER, ASSISTANT, SYSTEM, TOOL)}
"""The speakers of ShareGPT's conversations, in lower case, and the roles of chat templates that they have."""

FORMAT = 1
"""Of the texts that are made here without a template."""

Messages = Sequence[dict[str, Any]]


class ChatTemplate:
    """The chat template of a tokenizer; `origin` is whose conversations it is for."""

    def __init__(self, tokenizer: Tokenizer | None, origin: str) -> None:
        template = _template(tokenizer)
        if not isinstance(tokenizer, FolderTokenizer) or template is None:
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

    def question(self, text: str) -> list[int]:
        """The ids of a conversation with one message of the user's, up to where the answer begins."""
        return self._ids([{"role": USER, "content": text}], asks=True)

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


class AnswerRows:
    """Encodes the rows of a source that holds conversations, or prompts with completions.

    Conversations need a chat template. Alpaca's rows become conversations if the tokenizer has one, else
    texts with headings. A prompt and a completion that are texts follow each other as they are.
    """

    def __init__(self, tokenizer: Tokenizer | None, source: SavedRows) -> None:
        self._source, self._tokenizer = source, tokenizer
        is_chat = source.content is Content.CHATS
        uses_template = is_chat or (self._is_alpaca and _template(tokenizer) is not None)
        self._template = ChatTemplate(tokenizer, source.origin) if uses_template else None

    @property
    def uses_template(self) -> bool:
        """Whether rows become text by the tokenizer's chat template."""
        return self._template is not None

    @property
    def identity(self) -> str:
        """Words that differ when the same row may give other ids."""
        return f"answers {FORMAT}" if self._template is None else self._template.identity

    def encoded(self, skip: Callable[[str], None]) -> Iterator[IdRow]:
        """The ids of all rows, of which those of answers count; `skip` is told of rows without any."""
        for number, row in enumerate(self._source.rows()):
            where = f"row {number} of {self._source.origin}"
            if self._source.content is Content.CHATS:
                messages = self._messages(row, where)
                if messages and self._template is not None:
                    yield self._template.encode(messages, where)
                else:
                    skip(where)
                continue
            prompt, answer = (self._text(row, name, where) for name in self._pair)
            if not prompt or not answer:
                skip(where)
            elif not self._is_alpaca:
                yield self._followed(prompt, answer)
            else:
                yield self._alpaca(row, prompt, answer, where)

    @property
    def _is_alpaca(self) -> bool:
        return self._source.columns[0] == ALPACA[0]

    @property
    def _pair(self) -> tuple[str, str]:
        return (
            (ALPACA[0], ALPACA[1]) if self._is_alpaca else (self._source.columns[0], self._source.columns[1])
        )

    def _messages(self, row: Row, where: str) -> Messages:
        """The messages of a conversation; those of a prompt and of its completion are one."""
        found: list[dict[str, Any]] = []
        for column in self._source.columns:
            for one in row[column] or ():
                if not isinstance(one, Mapping):
                    raise _no_messages(where, column)
                # A dataset has every key in every message, and None where a message lacks it.
                message = {key: value for key, value in one.items() if value is not None}
                if {"from", "value"} <= set(message):
                    message = {"role": _role(message["from"], where), "content": message["value"]}
                if "role" not in message or not message.keys() & {"content", "tool_calls"}:
                    raise _no_messages(where, column)
                found.append(message)
        return found

    def _text(self, row: Row, column: str, where: str) -> str:
        text = row.get(column)
        if text is not None and not isinstance(text, str):
            raise BiremeError(
                f"In {where} the column {column!r} holds a {type(text).__name__} and not a text. Correct the "
                "row, or leave it out."
            )
        return text or ""

    def _alpaca(self, row: Row, instruction: str, output: str, where: str) -> IdRow:
        given, system = (self._text(row, name, where) for name in ALPACA[2:])
        if self._template is not None:
            question = f"{instruction}\n\n{given}" if given else instruction
            before = [{"role": SYSTEM, "content": system}] if system else []
            asked = {"role": USER, "content": question}
            return self._template.encode([*before, asked, {"role": ASSISTANT, "content": output}], where)
        parts = [system, f"### Instruction:\n{instruction}", f"### Input:\n{given}" if given else ""]
        return self._followed("\n\n".join([*filter(None, parts), "### Response:\n"]), output)

    def _followed(self, prompt: str, answer: str) -> IdRow:
        """The ids of a text, of its answer, and the end of text, of which the last two count."""
        if self._tokenizer is None:
            raise BiremeError(f"{self._source.origin} holds text, but there is no tokenizer for it.")
        end = self._tokenizer.end_of_text
        asked = self._tokenizer.encode(prompt)
        answered = [*self._tokenizer.encode(answer), *(() if end is None else (end,))]
        ids = np.asarray([*asked, *answered], np.int64)
        return IdRow(ids, np.arange(len(ids)) >= len(asked))


def _template(tokenizer: Tokenizer | None) -> str | None:
    found = tokenizer.backend.chat_template if isinstance(tokenizer, FolderTokenizer) else None
    return found if isinstance(found, str) else None


def _role(speaker: object, where: str) -> str:
    role = ROLES.get(str(speaker).lower())
    if role is None:
        raise BiremeError(
            f"In {where} a message is from {speaker!r}. Bireme takes messages from {', '.join(ROLES)}."
        )
    return role


def _no_messages(where: str, column: str) -> BiremeError:
    return BiremeError(
        f"In {where} the column {column!r} is not a list of messages. A message is a role and a content, "
        'such as {"role": "user", "content": "Hello"}, or {"from": "human", "value": "Hello"}.'
    )
