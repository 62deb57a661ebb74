"""Which capabilities go together: for people, as a document, and as the page docs/composition.md."""

import shlex
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from bireme.capabilities import CAPABILITIES, Capability, exclusion, pairs, settings_of

_COLUMNS = 80
_EXCLUDED, _TOGETHER, _ALTERNATIVE = "x", ".", " "


def composition_document(capabilities: Sequence[Capability]) -> dict[str, Any]:
    """These capabilities, and all pairs of them."""
    return {
        "capabilities": [
            {"name": one.name, "title": one.title, "axis": one.axis, "settings": dict(one.settings)}
            for one in capabilities
        ],
        "pairs": [
            {
                "a": one.name,
                "b": other.name,
                "excluded": exclusion(one.name, other.name),
                "settings": settings_of((one, other)),
            }
            for one, other in pairs(capabilities)
        ],
    }


def command_of(capabilities: Sequence[Capability]) -> str:
    """The `bireme train` that uses all of these, a key on each line."""
    sets = [f"--set {shlex.quote(f'{key}={value}')}" for key, value in settings_of(capabilities).items()]
    return " \\\n    ".join(["bireme train", *sets])


def composition_lines() -> Iterator[str]:
    """The matrix within 80 columns, and why pairs are excluded."""
    every = list(CAPABILITIES.values())
    wide = max(len(one.name) for one in every)
    numbers = [f"{number:>2}" for number in range(1, len(every))]
    for place in range(2):
        yield f"{' ' * (wide + 4)}{' '.join(number[place] for number in numbers)}".rstrip()
    for row, one in enumerate(every):
        marks = " ".join(_mark(one, other) for other in every[:row])
        yield f"{row + 1:>2} {one.name:<{wide}} {marks}".rstrip()
    yield ""
    yield f"{_TOGETHER} together   {_EXCLUDED} excluded   blank: alternatives, of which a run has one"
    excluded = excluded_pairs()
    yield f"{_num_pairs()} pairs, {len(excluded)} of them excluded:"
    for reason in dict.fromkeys(reason for *_, reason in excluded):
        both = [f"{one.name} and {other.name}" for one, other, why in excluded if why == reason]
        yield from (
            "",
            *wrap(", ".join(both), _COLUMNS),
            *wrap(reason, _COLUMNS, initial_indent="  ", subsequent_indent="  "),
        )


def composition_page() -> str:
    """The text of docs/composition.md."""
    excluded = excluded_pairs()
    lines = [
        "# What goes together",
        "",
        "This page is generated: `bireme capabilities --markdown > docs/composition.md`.",
        "",
        "A *capability* is something that a run file switches on. Capabilities of one axis are alternatives: "
        "a run has one schedule, and one way for replicas to agree. Any two capabilities of different axes "
        f"are a pair. There are {_num_pairs()} pairs, of which {len(excluded)} are excluded. "
        "`tests/composition/` trains every other pair and compares it with one process.",
        "",
        "`bireme capabilities` shows the matrix, and `bireme capabilities A B` the keys that switch on both.",
        "",
        "## Capabilities",
        "",
        "`HOST` stands for the name of the machine (`bireme cluster discover`), `TEXTS` for a folder of "
        "texts, and `ROWS.txt` for a file of rows.",
        "",
        "| name | what it is | axis | keys |",
        "|---|---|---|---|",
        *(f"| `{one.name}` | {one.title} | {one.axis} | {_keys(one)} |" for one in CAPABILITIES.values()),
        "",
        "## Excluded pairs",
        "",
        "| pair | why |",
        "|---|---|",
        *(f"| `{one.name}`, `{other.name}` | {reason} |" for one, other, reason in excluded),
        "",
    ]
    return "\n".join(lines)


def excluded_pairs() -> list[tuple[Capability, Capability, str]]:
    """Each with the reason."""
    found = ((one, other, exclusion(one.name, other.name)) for one, other in pairs(CAPABILITIES.values()))
    return [(one, other, reason) for one, other, reason in found if reason is not None]


def _num_pairs() -> int:
    return sum(1 for _ in pairs(CAPABILITIES.values()))


def _keys(one: Capability) -> str:
    return "<br>".join(f"`{key} = {value}`" for key, value in one.settings.items())


def _mark(one: Capability, other: Capability) -> str:
    if one.axis == other.axis:
        return _ALTERNATIVE
    return _TOGETHER if exclusion(one.name, other.name) is None else _EXCLUDED
