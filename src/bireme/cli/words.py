"""Options whose value is one of a few words: checked in one sentence, and completed by the shell."""

from typing import Any

from bireme.errors import BiremeError, closest

__all__ = ["word"]


def word(what: str, *known: str, metavar: str, text: str) -> dict[str, Any]:
    """What makes an option of typer take one of these words, such as an enum's members.

    `what` is what to call it in an error. The words replace `{}` in the help text.
    """
    words = [str(one) for one in known]

    def parsed(value: str) -> str:
        if value not in words:
            raise BiremeError(f"There is no {what} {value!r}. {closest(value, words)}")
        return known[words.index(value)]

    def completed(incomplete: str) -> list[str]:
        return [one for one in words if one.startswith(incomplete)]

    listed = f"{', '.join(words[:-1])} or {words[-1]}"
    return {
        "parser": parsed,
        "autocompletion": completed,
        "metavar": metavar,
        "help": text.format(listed),
    }
