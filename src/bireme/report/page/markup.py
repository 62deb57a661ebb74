"""HTML and SVG as text: tags with escaped attributes and escaped text.

What these functions return may be put inside further tags as it is; everything else goes through `words`
first.
"""

from html import escape

_EMPTY = frozenset({"input", "meta", "br"})
"""Tags of HTML that have no end."""


def tag(name: str, /, *contents: str, **attributes: str | float | bool | None) -> str:
    """A tag around ready contents.

    `class_` and `for_` stand for words that Python keeps for itself, `_` within a name for a hyphen. An
    attribute that is None or False is left out, one that is True has no value.
    """
    shown = "".join(
        _attribute(key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return f"<{name}{shown}>" if name in _EMPTY else f"<{name}{shown}>{''.join(contents)}</{name}>"


def words(text: object) -> str:
    """Text between tags; what no font can show becomes a question mark."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else "?" for c in str(text)), quote=False)


def titled(text: str) -> str:
    """What a reader sees who points at a shape."""
    return tag("title", words(text))


def number(value: float) -> str:
    """A number of pixels, as short as it goes."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def _attribute(key: str, value: str | float | bool) -> str:
    if value is True:
        return f" {key}"
    text = number(value) if isinstance(value, int | float) else escape(value)
    return f' {key}="{text}"'
