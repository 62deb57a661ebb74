"""What people should know of the data before they are trained on: sentences for the log of a run."""

from collections.abc import Iterator, Sequence

from bireme.bounds import counted
from bireme.train.data.documents import DocumentSamples
from bireme.train.data.hub import Content
from bireme.train.data.mixture import sources_of
from bireme.train.data.prepare import RowForm, RunData
from bireme.train.data.samples import PackedSamples, Samples, Tokens

_BUILT_IN = "stdlib"
"""The source whose files nobody chose, so that nobody needs to hear of those that are left out."""

_MOST_PADDING = 0.5
"""Share of padding in samples above which packing is suggested."""


def data_notes(data: RunData) -> tuple[str, ...]:
    """A sentence for each thing that loses data, or time: files and rows that are no text, documents cut off,
    samples in which nothing counts, or with more padding than tokens.
    """
    padded = (note for one in sources_of(data.training).values() for note in _padding(one))
    held = () if data.held is None else _unread(data.held)
    plain = (
        f"{one.origin} holds conversations, and the tokenizer has no chat template: messages get plain "
        "headings, such as ### Response:. A tokenizer with a template can be named in data.tokenizer."
        for one in data.recognized
        if one.form is RowForm.HEADINGS and one.what == Content.CHATS
    )
    return (*plain, *sample_notes(data.training), *padded, *held)


def sample_notes(samples: Samples) -> tuple[str, ...]:
    """A sentence for each thing that loses some of the data that samples are made of."""
    return tuple(note for one in sources_of(samples).values() for note in _losses(one))


def _losses(samples: Samples) -> Iterator[str]:
    if not isinstance(samples, DocumentSamples | PackedSamples):
        return
    yield from _unread(samples.tokens)
    if isinstance(samples, DocumentSamples) and samples.num_cut_off:
        yield (
            f"{samples.num_cut_off} of {len(samples)} documents of {samples.tokens.origin} are longer than "
            f"data.length = {samples.length} and lose their ends."
        )
    if samples.tokens.has_uncounted and (num_idle := sum(not count for count in samples.num_targets())):
        yield (
            f"{num_idle} of {len(samples)} samples of {samples.tokens.origin} hold no answer, or no other "
            "token that counts in the loss, and have weight zero. A larger data.length may leave fewer."
        )


def _unread(tokens: Tokens) -> Iterator[str]:
    """A sentence on files that are not text, wholly or in part, and on rows without text."""
    if tokens.origin == _BUILT_IN or not (tokens.num_unread or tokens.num_replaced):
        return
    named = _names(tokens.unread, tokens.num_unread)
    if named.startswith(("row ", "line ")):
        yield f"Left out of {tokens.origin}: {counted(tokens.num_unread, 'row')} without text, {named}."
        return
    lost = []
    if tokens.num_unread:
        count = counted(tokens.num_unread, "file")
        are = "is" if tokens.num_unread == 1 else "are"
        lost.append(f"Left out of {tokens.origin}: {count} that {are} not text in UTF-8, {named}.")
    if tokens.num_replaced:
        count = counted(tokens.num_replaced, "file")
        among = f"Replaced by U+FFFD in {count} of {tokens.origin}: bytes that are not UTF-8, in"
        lost.append(f"{among} {_names(tokens.replaced, tokens.num_replaced)}.")
    yield f"{' '.join(lost)} Convert them to UTF-8, or choose the files to read with data.pattern."


def _names(first: Sequence[str], count: int) -> str:
    """The first few names of that count, and how many more there are."""
    return ", ".join(first) + (f" and {count - len(first)} more" if count > len(first) else "")


def _padding(samples: Samples) -> Iterator[str]:
    """A sentence on samples of one document each that are mostly padding."""
    if not isinstance(samples, DocumentSamples) or samples.is_shared or not len(samples):
        return
    share = 1 - samples.num_tokens / (len(samples) * samples.length)
    if share <= _MOST_PADDING:
        return
    longest = -(-samples.longest // 8) * 8
    shorter = f", or data.length = {longest}, which is enough for all" if longest < samples.length else ""
    yield (
        f"{share:.0%} of the samples of {samples.tokens.origin} is padding: a document has "
        f"{samples.num_tokens / len(samples):.0f} tokens in the mean, and data.length is {samples.length}. "
        f'Set data.packing = "documents", which puts several into a sample{shorter}.'
    )
