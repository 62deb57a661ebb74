"""From documents to token ids: of text, of rows with answers, and of ids that were made before.

Ids are signed: a negative number n stands for the id -1-n of a token that is read but does not count in the
loss.
"""

import contextlib
import fcntl
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from bireme.documents import read_json
from bireme.errors import BiremeError, Progress, system_errors
from bireme.files import write_bytes_atomically, write_chunks_atomically, write_text_atomically
from bireme.pieces import PieceFile
from bireme.profile.control import cache_folder
from bireme.train.data.hub import ALPACA, Content, IdRow, Row, SavedRows
from bireme.train.data.samples import Tokens
from bireme.train.data.text_files import Named, Passage, TextFiles
from bireme.train.data.tokenizer import FolderTokenizer, Ids, Tokenizer
from bireme.train.fetched import bring
from bireme.user_code import reason_of

# Rows with answers to token ids: conversations by a tokenizer's chat template or with plain headings, prompts
# with completions as they are. Only answers count in the loss, unless data.loss_on asks for all.
#
# Where the template marks what the assistant says ({% generation %}), its marks decide. Else an answer is
# what the template adds to the conversation before it: the ids with the answer, less those up to the answer's
# begin.

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_USER, _ASSISTANT, _SYSTEM, _TOOL = "user", "assistant", "system", "tool"
_INPUT = "### Input:\n"

_ROLES = {
    "human": _USER,
    "gpt": _ASSISTANT,
    "chatgpt": _ASSISTANT,
    "bing": _ASSISTANT,
    "bard": _ASSISTANT,
    "model": _ASSISTANT,
    "function_call": _ASSISTANT,
    "observation": _TOOL,
    "function_response": _TOOL,
} | {role: role for role in (_USER, _ASSISTANT, _SYSTEM, _TOOL)}
"""The speakers of ShareGPT's conversations, in lower case, and the roles of chat templates that they have."""

_HEADINGS = {
    _SYSTEM: "",
    "developer": "",
    _USER: "### Instruction:\n",
    _ASSISTANT: "### Response:\n",
    _TOOL: "### Tool:\n",
}
"""What stands before the messages of a conversation if the tokenizer has no chat template."""

_FORMAT = 1
"""Of the ids that are made here of one conversation."""

Messages = Sequence[dict[str, Any]]


def chat_form(tokenizer: Tokenizer) -> "ChatForm":
    """The tokenizer's chat template; plain headings if it has none."""
    found = tokenizer.backend.chat_template if isinstance(tokenizer, FolderTokenizer) else None
    if isinstance(found, dict):  # several templates by name, such as one for tools
        found = found.get("default")
    if isinstance(tokenizer, FolderTokenizer) and isinstance(found, str):
        return ChatTemplate(tokenizer, found)
    return PlainHeadings(tokenizer)


class ChatTemplate:
    """The chat template of a tokenizer. `is_template` is whether a form is the tokenizer's own."""

    is_template = True

    def __init__(self, tokenizer: FolderTokenizer, template: str) -> None:
        self._backend = tokenizer.backend
        self._template = template

    @property
    def identity(self) -> str:
        """The version of this code, and a digest of the template."""
        return f"chat {_FORMAT} {sha256(self._template.encode()).hexdigest()}"

    def question(self, text: str) -> list[int]:
        """The ids of a message of the user's, and of the beginning of an answer."""
        return self._ids([{"role": _USER, "content": text}], asks=True)

    def encode(self, messages: Messages, where: str) -> IdRow:
        """The ids of a conversation, of which those of answers count; `where` is what to call it."""
        try:
            if _MARKS.search(self._template) and all(map(_counts, messages)):
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
            raise BiremeError(
                f"The tokenizer's chat template does not take {where}: {reason_of(error)}. "
                "Correct the row, or leave it out."
            ) from error

    def _by_differences(self, messages: Messages, where: str) -> IdRow:
        ids = self._ids(messages)
        counts = np.zeros(len(ids), np.bool_)
        for place, message in enumerate(messages):
            if message["role"] != _ASSISTANT or not _counts(message):
                continue
            begin = self._ids(messages[:place], asks=True) if place else []
            end = self._ids(messages[: place + 1])
            if end[: len(begin)] != begin:
                begin = begin[:-1]  # a space before the answer may be in one token with its first letters
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


class PlainHeadings:
    """Conversations as text with a heading before each message, and the end of text after each answer."""

    is_template = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @property
    def identity(self) -> str:
        """The version of the headings."""
        return f"answers {_FORMAT}"

    def question(self, text: str) -> list[int]:
        """The ids of a message of the user's, and of the beginning of an answer."""
        return self._tokenizer.encode(f"{_HEADINGS[_USER]}{text}\n\n{_HEADINGS[_ASSISTANT]}")

    def encode(self, messages: Messages, where: str) -> IdRow:
        """The ids of a conversation, of which those of answers count; `where` is what to call it."""
        parts: list[tuple[list[int], bool]] = []
        before = ""
        for message in messages:
            if "content" not in message or "tool_calls" in message:
                raise BiremeError(
                    f"In {where} a message calls a tool, and the tokenizer has no chat template to write "
                    "that with. Set data.tokenizer to the folder of a tokenizer with one."
                )
            role = message["role"]
            before += _HEADINGS[role if role in _HEADINGS else _role(role, where)]
            if role == _ASSISTANT:
                parts.append((self._tokenizer.encode(before), False))
                parts.append((_with_end(message["content"], self._tokenizer), _counts(message)))
                before = "\n\n"
            else:
                before += f"{message['content']}\n\n"
        if before.strip():  # messages without an answer after them
            parts.append((self._tokenizer.encode(before), False))
        return _joined(parts)


ChatForm = ChatTemplate | PlainHeadings
"""How a conversation becomes token ids. `identity` differs when the same conversation may give other ids."""


def _counts(message: Mapping[str, Any]) -> bool:
    """Whether an answer counts in the loss: OpenAI's data turn some off with a weight of 0."""
    return message.get("weight") != 0


def _with_end(answer: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of an answer, and the end of text."""
    end = tokenizer.end_of_text
    return [*tokenizer.encode(answer), *(() if end is None else (end,))]


def _joined(parts: Sequence[tuple[list[int], bool]]) -> IdRow:
    """One row of ids from its parts, each with whether it counts."""
    ids = [number for part, _ in parts for number in part]
    counts = [counted for part, counted in parts for _ in part]
    return IdRow(np.asarray(ids, np.int64), np.asarray(counts, np.bool_))


class AnswerRows:
    """Encodes the rows of a source that holds conversations, or prompts with completions.

    Alpaca's rows become conversations. A prompt and a completion that are texts follow each other as they
    are, without a `chat` form.
    """

    def __init__(self, tokenizer: Tokenizer | None, source: SavedRows) -> None:
        if tokenizer is None:
            raise BiremeError(f"{source.origin} holds text, but there is no tokenizer for it.")
        self._source, self._tokenizer = source, tokenizer
        is_text = source.content is not Content.CHATS and not source.is_alpaca
        self.chat = None if is_text else chat_form(tokenizer)

    @property
    def identity(self) -> str:
        """Words that differ when the same row may give other ids."""
        form = f"answers {_FORMAT}" if self.chat is None else self.chat.identity
        return f"{form} {'all' if self._source.counts_all else ''}".rstrip()

    def encoded(self, skip: Named) -> Iterator[IdRow]:
        """The ids of all rows, of which those of answers count; `skip` is told of rows without any."""
        for number, row in self._source.rows():
            found = self._encoded(row, self._source.name_of(number))
            if found is None:
                skip(self._source.name_of(number))
            elif self._source.counts_all:
                yield IdRow(found.ids, np.ones(len(found.ids), np.bool_))
            else:
                yield found

    def _encoded(self, row: Row, where: str) -> IdRow | None:
        """The ids of a row; None if it has no messages, or no question, or no answer."""
        columns = self._source.columns
        if self._source.content is Content.CHATS:
            assert self.chat is not None
            messages = self._messages(row, where)
            return self.chat.encode(messages, where) if messages else None
        prompt, answer = (self._text(row, name, where) for name in columns[:2])
        if not prompt or not answer:
            return None
        if self.chat is None:
            parts = [(self._tokenizer.encode(prompt), False), (_with_end(answer, self._tokenizer), True)]
            return _joined(parts)
        given, system = (self._text(row, name, where) for name in ALPACA[2:])
        if given:
            prompt += f"\n\n{'' if self.chat.is_template else _INPUT}{given}"
        turns = ((_SYSTEM, system), (_USER, prompt), (_ASSISTANT, answer))
        return self.chat.encode([{"role": who, "content": text} for who, text in turns if text], where)

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
                    weight = {key: message[key] for key in ("weight",) if key in message}
                    message = {"role": _role(message["from"], where), "content": message["value"]} | weight
                if "role" not in message or not message.keys() & {"content", "tool_calls"}:
                    raise _no_messages(where, column)
                message["role"] = _ROLES.get(str(message["role"]).lower(), message["role"])
                if "content" in message:
                    message["content"] = _content(message["content"], where)
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


def _role(speaker: object, where: str) -> str:
    role = _ROLES.get(str(speaker).lower())
    if role is None:
        raise BiremeError(
            f"In {where} a message is from {speaker!r}. Bireme takes messages from {', '.join(_ROLES)}."
        )
    return role


def _content(content: object, where: str) -> str:
    """The text of a message, which may be in parts of type text."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [one.get("text") if isinstance(one, Mapping) else one for one in parts]
    if not all(isinstance(text, str) for text in texts):
        raise BiremeError(
            f"In {where} the content of a message is not text. Bireme learns text alone: leave out images "
            "and sound, and write numbers and tables as text."
        )
    return "".join(map(str, texts))


def _no_messages(where: str, column: str) -> BiremeError:
    return BiremeError(
        f"In {where} the column {column!r} is not a list of messages. A message is a role and a content, "
        'such as {"role": "user", "content": "Hello"}, or {"from": "human", "value": "Hello"}.'
    )


_FIRST_PASSAGES, MOST_PASSAGES = 16, 1 << 12
_MOST_CHARACTERS = 1 << 20
_MOST_UINT16 = 1 << 16
_ID_LIMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Ids of one document, the end of it if `ends_document`; `size` of the source went into them."""

    ids: Ids
    size: int
    ends_document: bool


def encoded(
    source: TextFiles | SavedRows,
    tokenizer: Tokenizer | None,
    skip: Named,
    replaced: Named = lambda _name: None,
) -> Iterator[_Encoded]:
    """The ids of all documents, each with the end of text after it. Calls `skip` with each file or row
    without text, and `replaced` with each file of which bytes that are not UTF-8 were replaced.

    A source that holds ids needs no tokenizer; if there is one, its end of text is put after each row that
    does not have it. A conversation ends as its template says.
    """
    content = source.content if isinstance(source, SavedRows) else Content.TEXT
    if isinstance(source, SavedRows) and content is Content.IDS:
        return _of_rows(source.id_rows(), source.origin, tokenizer)
    if isinstance(source, SavedRows) and source.has_answers:
        return _of_rows(AnswerRows(tokenizer, source).encoded(skip), source.origin, None)
    if tokenizer is None:
        raise BiremeError(f"{source.origin} holds text, but there is no tokenizer for it.")
    passages = source.passages(skip, replaced) if isinstance(source, TextFiles) else source.passages(skip)
    return _of_text(passages, tokenizer)


def _dtype_of(source: TextFiles | SavedRows, tokenizer: Tokenizer | None) -> str:
    """The type of number that holds the ids of a source."""
    if isinstance(source, SavedRows) and source.content is not Content.TEXT:
        return "int32" if source.has_labels or source.has_answers else "uint32"
    return "uint16" if tokenizer is not None and tokenizer.num_tokens <= _MOST_UINT16 else "uint32"


def _encoding_identity(source: TextFiles | SavedRows, tokenizer: Tokenizer | None) -> str:
    """Words that differ when the ids of a source may differ."""
    words = f"{source.identity} {'ids' if tokenizer is None else tokenizer.identity}"
    if isinstance(source, SavedRows) and source.has_answers:
        words += f" {AnswerRows(tokenizer, source).identity}"
    return words


def _of_text(text: Iterator[Passage], tokenizer: Tokenizer) -> Iterator[_Encoded]:
    """The tokens of all text. An empty document has none, not even its end."""
    has_begun = False
    for passages in _gathered(text):
        many = tokenizer.encode_many([passage.text for passage in passages])
        for passage, ids in zip(passages, many, strict=True):
            has_begun = has_begun or len(ids) > 0
            if passage.ends_document:
                yield _Encoded(
                    _ended(ids, tokenizer.end_of_text) if has_begun else ids, passage.size, ends_document=True
                )
                has_begun = False
            else:
                yield _Encoded(ids, passage.size, ends_document=False)


def _gathered(passages: Iterator[Passage]) -> Iterator[list[Passage]]:
    """Passages by the many, for tokenizers are quick where they have much to do at once.

    The first come in small groups, so that a stream gives something soon.
    """
    gathered: list[Passage] = []
    length, most = 0, min(_FIRST_PASSAGES, MOST_PASSAGES)
    for passage in passages:
        gathered.append(passage)
        length += len(passage.text)
        if length >= _MOST_CHARACTERS or len(gathered) >= most:
            yield gathered
            gathered, length, most = [], 0, min(4 * most, MOST_PASSAGES)
    if gathered:
        yield gathered


def _of_rows(rows: Iterator[IdRow], origin: str, tokenizer: Tokenizer | None) -> Iterator[_Encoded]:
    """The ids of all rows; those that do not count as negative numbers."""
    end = None if tokenizer is None else tokenizer.end_of_text
    for row in rows:
        ids = row.ids
        if len(ids) and ids.max() >= _ID_LIMIT:
            raise BiremeError(f"{origin} holds the token id {ids.max()}; ids must be below {_ID_LIMIT}.")
        signed = np.where(row.counts, ids, -1 - ids)
        is_ended = not len(ids) or end is None or ids[-1] == end
        yield _Encoded(signed if is_ended else _ended(signed, end), 1, ends_document=True)


def _ended(ids: Ids, end: int | None) -> Ids:
    return ids if end is None else np.append(ids, np.int64(end))


# Text made into tokens once, and kept in the cache, so that a second run starts at once.
#
# What is kept lies in a folder of `tokens` in the cache, whose name is a hash of all that the tokens depend
# on: the paths, sizes and times of change of the files, and the tokenizer. It is written piece by piece, so a
# corpus may be larger than memory, and is there for readers only once it is complete. Processes that want the
# same corpus wait for the first.


_CORPUS_FORMAT = 2

_MOST_NAMED = 3
"""Files or rows without text that are named in a warning."""


class _Record(BaseModel):
    """What the folder holds; it is written last, so without it there is nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = Field(ge=_CORPUS_FORMAT, le=_CORPUS_FORMAT)
    dtype: str
    num_tokens: int = Field(ge=1)
    num_documents: int = Field(ge=1)
    num_skipped: int = Field(ge=0)
    skipped: tuple[str, ...] = ()
    """The first few files or rows that were left out."""
    num_replaced: int = Field(ge=0)
    replaced: tuple[str, ...] = ()
    """The first few files of which bytes that are not UTF-8 were replaced."""


def tokenized(
    source: TextFiles | SavedRows, tokenizer: Tokenizer | None, progress: Progress | None = None
) -> Tokens:
    """The tokens of a source's documents, as `encoded` makes them, from the cache if they are there."""
    folder = token_folder(source, tokenizer)
    kept = kept_tokens(folder, source)
    if kept is not None:
        return kept
    what = f"The tokens of {source.origin} cannot be cached in {folder}"
    with system_errors(what, "Name a writable folder in BIREME_CACHE."):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    with lock:
        # No lock on some network drives: then two do the same, and one replaces what the other wrote by it.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        kept = kept_tokens(folder, source)
        if kept is None:
            _write(folder, source, tokenizer, progress)
            kept = kept_tokens(folder, source)
    if kept is None:
        raise BiremeError(
            f"The tokens in {folder} were deleted while they were written. Run the command again, and let "
            "nothing else empty the cache meanwhile."
        )
    return kept


def token_folder(source: TextFiles | SavedRows, tokenizer: Tokenizer | None) -> Path:
    """The folder for the tokens of a source in the cache."""
    words = f"{_CORPUS_FORMAT} {_encoding_identity(source, tokenizer)}"
    return cache_folder() / "tokens" / sha256(words.encode()).hexdigest()[:24]


_TOKENS, _ENDS, CORPUS = "tokens.bin", "ends.bin", "corpus.json"


def kept_tokens(folder: Path, source: TextFiles | SavedRows | None = None) -> Tokens | None:
    """The tokens in a folder of the cache or one from there, None where they are not all there."""
    bring(folder / _ENDS)
    try:
        record = read_json(folder / CORPUS, _Record)
        ids = np.memmap(folder / _TOKENS, record.dtype, mode="r")
        ends = np.memmap(folder / _ENDS, np.int64, mode="r")
    except (BiremeError, OSError, TypeError, ValueError):
        return None
    if (len(ids), len(ends)) != (record.num_tokens, record.num_documents):
        return None
    num_skipped = record.num_skipped + (len(source.skipped) if isinstance(source, TextFiles) else 0)
    return Tokens(
        str(folder) if source is None else source.origin,
        ids,
        ends,
        has_uncounted=ids.dtype.kind == "i",
        num_skipped=num_skipped,
        num_unread=record.num_skipped,
        unread=record.skipped,
        num_replaced=record.num_replaced,
        replaced=record.replaced,
        partial=folder / _TOKENS if PieceFile.at(folder / _TOKENS) is not None else None,
    )


def _write(
    folder: Path, source: TextFiles | SavedRows, tokenizer: Tokenizer | None, progress: Progress | None
) -> None:
    skipped: list[str] = []
    replaced: list[str] = []
    dtype = _dtype_of(source, tokenizer)
    ends: array[Any] = array("q")
    num_tokens = 0

    def chunks() -> Iterator[bytes]:
        """The ids as bytes; counts what it lets through."""
        nonlocal num_tokens
        done = 0
        for part in encoded(source, tokenizer, skipped.append, replaced.append):
            num_tokens += len(part.ids)
            if part.ends_document and num_tokens > (ends[-1] if ends else 0):
                ends.append(num_tokens)
            done += part.size
            yield part.ids.astype(dtype).tobytes()
            if progress is not None:
                progress(min(done / max(source.size or 1, 1), 1.0), f"tokenizing {source.origin}")
        if not num_tokens:
            named = ""
            if skipped:
                named = f" Skipped because they are not text: {len(skipped)}, such as {skipped[0]}."
            raise BiremeError(f"{source.origin} has no text in it, so there is nothing to train on.{named}")

    write_chunks_atomically(folder / _TOKENS, chunks())
    write_bytes_atomically(folder / _ENDS, ends.tobytes())
    record = _Record(
        format=_CORPUS_FORMAT,
        dtype=dtype,
        num_tokens=num_tokens,
        num_documents=len(ends),
        num_skipped=len(skipped),
        skipped=tuple(skipped[:_MOST_NAMED]),
        num_replaced=len(replaced),
        replaced=tuple(replaced[:_MOST_NAMED]),
    )
    write_text_atomically(folder / CORPUS, record.model_dump_json(indent=2) + "\n")
