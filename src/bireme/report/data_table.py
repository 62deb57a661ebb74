"""The data of a run for people and programs: what was found in each source, and samples token by token."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bireme.bounds import counted
from bireme.errors import printable

_LEARN, _READ, _PADDING = "learn", "read", "pad"
_COLORS = {_LEARN: ("green", "bold bright_green"), _READ: ("default", "cyan")}
"""Of neighboring tokens, so that each is seen; a bar stands between them besides."""

_SHOWN = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "|": "\\|"}


@dataclass(frozen=True, slots=True)
class ShownToken:
    """Some ids that make a text together, mostly one. `learns` if they count in the loss, `begins` if they
    begin another document in the sample.
    """

    ids: tuple[int, ...]
    text: str
    learns: bool
    begins: bool = False


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A sample as the model gets it. One of a function has tensors, such as `x: float32 [8]`, and no tokens
    if they are no token ids.
    """

    number: int
    tokens: tuple[ShownToken, ...]
    num_padding: int
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceView:
    """What a source holds. Counts are of the samples to train on, None if they are unknown, as of a stream.

    `num_targets` of the `num_tokens` count in the loss. `num_cut_off` documents lose their ends.
    """

    origin: str
    what: str
    columns: tuple[str, ...]
    written_by: str | None
    loss_on: str
    num_documents: int | None
    num_samples: int | None
    num_tokens: int | None
    num_targets: int | None
    num_cut_off: int | None
    num_padding: int | None
    samples: tuple[ShownSample, ...]


@dataclass(frozen=True, slots=True)
class DataView:
    """All sources, and how they are cut. `num_held_out` samples are for evaluation."""

    sources: tuple[SourceView, ...]
    tokenizer: str | None
    length: int | None
    num_held_out: int | None
    warnings: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """In the words of JSON."""
        return asdict(self)


def print_data(view: DataView, console: Console) -> None:
    """What was recognized, the counts, then the samples."""

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style))

    for source in view.sources:
        columns = f" ({'column' if len(source.columns) == 1 else 'columns'} {', '.join(source.columns)})"
        written = f", written by {source.written_by}" if source.written_by else ""
        say(f"{source.origin}: {source.what}{columns if source.columns else ''}{written}", "bold")
        say(f"loss on {source.loss_on}")
        for name, value in _counts(source):
            say(f"  {name:<24}{value}")
    about = [] if view.tokenizer is None else [f"tokenizer: {view.tokenizer}"]
    about += [] if view.length is None else [f"{view.length:,} tokens in a sample"]
    about += [f"{counted(view.num_held_out, 'sample')} held out for evaluation"] if view.num_held_out else []
    if about:
        say("; ".join(about))
    for source in view.sources:
        for sample in source.samples:
            say("")
            _print_sample(sample, source.origin, console, has_bars=view.tokenizer != "bytes")
    if any(one.tokens for source in view.sources for one in source.samples):
        say("")
        each = " Each byte is a token." if view.tokenizer == "bytes" else ""
        say(
            f"{_LEARN}: tokens that count in the loss. {_READ}: tokens that the model only reads.{each}",
            "dim",
        )


def _counts(source: SourceView) -> Iterator[tuple[str, str]]:
    """Each number with its name; those that are not known are left out."""
    whole = source.num_tokens or 0
    filled = whole + (source.num_padding or 0)
    share = f"{source.num_targets / whole:.1%} of the tokens" if source.num_targets and whole else ""
    padding = f"{source.num_padding / filled:.1%} of the samples" if source.num_padding and filled else ""
    for name, number, more in (
        ("documents", source.num_documents, ""),
        ("samples", source.num_samples, ""),
        ("tokens", source.num_tokens, ""),
        ("count in the loss", source.num_targets, share),
        ("documents cut off", source.num_cut_off, ""),
        ("padding", source.num_padding, padding),
    ):
        if number is not None:
            yield name, f"{number:,}" + (f" ({more})" if more else "")


def _print_sample(sample: ShownSample, origin: str, console: Console, *, has_bars: bool) -> None:
    if not sample.tokens:
        console.print(Text(f"Sample {sample.number} of {origin}: {', '.join(sample.tensors)}"))
        return
    size = sum(len(token.ids) for token in sample.tokens)
    learned = sum(len(token.ids) for token in sample.tokens if token.learns)
    padding = f", then {sample.num_padding:,} of padding" if sample.num_padding else ""
    heading = f"{counted(size, 'token')}, {learned:,} in the loss{padding}"
    console.print(Text(f"Sample {sample.number} of {origin}: {heading}", "bold"))
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for kind, tokens in _stretches(sample.tokens):
        table.add_row(
            Text(kind, "bold green" if kind == _LEARN else "dim"), _line(kind, tokens, has_bars=has_bars)
        )
    if sample.num_padding:
        table.add_row(Text(_PADDING, "dim"), Text(counted(sample.num_padding, "token"), "dim"))
    console.print(table)


def _stretches(tokens: Sequence[ShownToken]) -> Iterator[tuple[str, list[ShownToken]]]:
    """Neighboring tokens of one kind, and of one document."""
    documents = accumulate(token.begins for token in tokens)
    for (_, learns), found in groupby(
        zip(documents, tokens, strict=True), lambda pair: (pair[0], pair[1].learns)
    ):
        yield _LEARN if learns else _READ, [token for _, token in found]


def _line(kind: str, tokens: Sequence[ShownToken], *, has_bars: bool) -> Text:
    """The texts of tokens, with bars between them if they are longer than letters."""
    bar = Text.assemble(("|", "dim")) if has_bars else Text()
    texts = ("".join(_SHOWN.get(one) or printable(one) for one in token.text) for token in tokens)
    colored = (Text(text, _COLORS[kind][number % 2]) for number, text in enumerate(texts))
    return Text.assemble(bar, bar.join(colored), bar)
