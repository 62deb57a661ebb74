"""From documents to token ids: of text, of rows with answers, and of ids that somebody made before.

Ids are signed: a negative number n stands for the id -1-n of a token that is read but does not count in the
loss.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from bireme.errors import BiremeError
from bireme.train.data.chat import AnswerRows
from bireme.train.data.saved_rows import Content, IdRow, SavedRows
from bireme.train.data.text_files import Passage, TextFiles
from bireme.train.data.tokenizer import Ids, Tokenizer

__all__ = ["Encoded", "dtype_of", "encoded", "encoding_identity"]

FIRST_PASSAGES, MOST_PASSAGES = 16, 1 << 12
MOST_CHARACTERS = 1 << 20
MOST_UINT16 = 1 << 16
ID_LIMIT = 1 << 31

Name = Callable[[str], None]
"""Takes the name of a file or a row, such as that of a file that was left out."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of one document, the end of it if `ends_document`; `size` of the source went into them."""

    ids: Ids
    size: int
    ends_document: bool


def encoded(
    source: TextFiles | SavedRows,
    tokenizer: Tokenizer | None,
    skip: Name,
    replaced: Name = lambda _name: None,
) -> Iterator[Encoded]:
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


def dtype_of(source: TextFiles | SavedRows, tokenizer: Tokenizer | None) -> str:
    """The type of number that holds the ids of a source."""
    if isinstance(source, SavedRows) and source.content is not Content.TEXT:
        return "int32" if source.has_labels or source.has_answers else "uint32"
    return "uint16" if tokenizer is not None and tokenizer.num_tokens <= MOST_UINT16 else "uint32"


def encoding_identity(source: TextFiles | SavedRows, tokenizer: Tokenizer | None) -> str:
    """Words that differ when the ids of a source may differ."""
    words = f"{source.identity} {'ids' if tokenizer is None else tokenizer.identity}"
    if isinstance(source, SavedRows) and source.has_answers:
        words += f" {AnswerRows(tokenizer, source).identity}"
    return words


def _of_text(text: Iterator[Passage], tokenizer: Tokenizer) -> Iterator[Encoded]:
    """The tokens of all text. An empty document has none, not even its end."""
    has_begun = False
    for passages in _gathered(text):
        many = tokenizer.encode_many([passage.text for passage in passages])
        for passage, ids in zip(passages, many, strict=True):
            has_begun = has_begun or len(ids) > 0
            if passage.ends_document:
                yield Encoded(
                    _ended(ids, tokenizer.end_of_text) if has_begun else ids, passage.size, ends_document=True
                )
                has_begun = False
            else:
                yield Encoded(ids, passage.size, ends_document=False)


def _gathered(passages: Iterator[Passage]) -> Iterator[list[Passage]]:
    """Passages by the many, for tokenizers are quick where they have much to do at once.

    The first come in small groups, so that a stream gives something soon.
    """
    gathered: list[Passage] = []
    length, most = 0, min(FIRST_PASSAGES, MOST_PASSAGES)
    for passage in passages:
        gathered.append(passage)
        length += len(passage.text)
        if length >= MOST_CHARACTERS or len(gathered) >= most:
            yield gathered
            gathered, length, most = [], 0, min(4 * most, MOST_PASSAGES)
    if gathered:
        yield gathered


def _of_rows(rows: Iterator[IdRow], origin: str, tokenizer: Tokenizer | None) -> Iterator[Encoded]:
    """The ids of all rows; those that do not count as negative numbers."""
    end = None if tokenizer is None else tokenizer.end_of_text
    for row in rows:
        ids = row.ids
        if len(ids) and ids.max() >= ID_LIMIT:
            raise BiremeError(f"{origin} holds the token id {ids.max()}; ids must be below {ID_LIMIT}.")
        signed = np.where(row.counts, ids, -1 - ids)
        is_ended = not len(ids) or end is None or ids[-1] == end
        yield Encoded(signed if is_ended else _ended(signed, end), 1, ends_document=True)


def _ended(ids: Ids, end: int | None) -> Ids:
    return ids if end is None else np.append(ids, np.int64(end))
