"""Count hard idiom in the documentation and list the sentences that have the most of it.

`python -m tests.support.prose [PAGE ...]` prints the counts of each page and its worst sentences.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 35
"""Words of a sentence; longer ones count as a pattern."""

PATTERNS = {
    "what as a noun": re.compile(r"\b(?:what|whatever|whoever)\b(?! to\b)(?![^.]*\?$)", re.IGNORECASE),
    "where for if": re.compile(r"(?<!from )\bwhere\b(?! it lies\b)(?![^.]*\?$)", re.IGNORECASE),
    "things that speak": re.compile(r"\b(?:says?|said|knows?|tells?|told|minds?|forgets?)\b", re.IGNORECASE),
    "so many, of it": re.compile(
        r"\b(?:so many|as many|so much|of it|of them|of these|of those)\b", re.IGNORECASE
    ),
    "vague words": re.compile(r"\b(?:deals?|dealt|nobody|somebody|looks?|behind)\b", re.IGNORECASE),
    "ratios in words": re.compile(
        r"\b(?:an? |one |two |three |four |five |seven |nine )"
        r"(?:half|halves|thirds?|quarters?|fifths?|sixths?|eighths?|tenths?|twentieths?|hundredths?)\b",
        re.IGNORECASE,
    ),
}
_CODE = re.compile(r"^```.*?^```|<!--.*?-->", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`[^`]*`")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z*`\[\"“(0-9])")
_LIST = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")


@dataclass(frozen=True)
class Sentence:
    """A sentence of a page and how often each pattern occurs in it."""

    page: str
    text: str
    counts: Counter[str]


def prose_of(text: str) -> Iterator[str]:
    """Paragraphs and list items of a Markdown page, without code, tables, headings and pictures."""
    lines: list[str] = []
    for line in [*_CODE.sub("", text).splitlines(), ""]:
        is_other = line.lstrip().startswith(("|", "#", "<", "!", "---"))
        if not line.strip() or is_other or _LIST.match(line):
            if lines:
                yield " ".join(lines)
            lines = []
        if line.strip() and not is_other:
            lines.append(_LIST.sub("", line).strip())


def num_words(text: str) -> int:
    """Words of a page outside of code and comments."""
    return len(re.findall(r"[A-Za-z][\w'’-]*", _LINK.sub(r"\1", _CODE.sub("", text))))


def sentences_of(page: Path) -> Iterator[Sentence]:
    """Sentences of a page, with the patterns that occur in them."""
    for paragraph in prose_of(page.read_text(encoding="utf-8")):
        for text in _END.split(_LINK.sub(r"\1", _INLINE.sub("`code`", paragraph))):
            counts = Counter({name: len(pattern.findall(text)) for name, pattern in PATTERNS.items()})
            counts["long sentences"] = int(len(text.split()) > LONGEST)
            yield Sentence(page.name, text, +counts)


def pages() -> list[Path]:
    """Pages that people write: the README and `docs`, without pages that are generated from the code."""
    generated = {"run-file.md", "composition.md", "gpu.md"}
    docs = sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name not in generated)
    return [ROOT / "README.md", *docs]


def report(named: list[Path]) -> Iterator[str]:
    """The counts of every page; the worst sentences, too, if pages are named."""
    total: Counter[str] = Counter()
    for page in named or pages():
        found = list(sentences_of(page))
        counts: Counter[str] = sum((sentence.counts for sentence in found), Counter())
        total += counts
        yield f"{page.name:24} {num_words(page.read_text(encoding='utf-8')):6} words  {_listed(counts)}"
        worst = sorted(found, key=lambda sentence: -sentence.counts.total())[:20] if named else []
        yield from (
            f"    {sentence.counts.total()}  {sentence.text}" for sentence in worst if sentence.counts
        )
    yield f"all: {_listed(total)}"


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in counts.most_common())


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in report([Path(name) for name in sys.argv[1:]]))
