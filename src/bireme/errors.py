"""The one base error, and sentences to people. What a user can cause is a `BiremeError`; anything else that
escapes is a bug.

The command line turns a `BiremeError` into one paragraph and exit status 2. So its text is written for
the person who has to act on it: what went wrong, the values, why it matters, what to do next.
"""

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


class BiremeError(Exception):
    """Something the user can put right: a wrong file, flag, model, cluster, checkpoint."""


class SampleError(BiremeError):
    """Samples of the data that cannot be read or made, on one machine at least. `samples` are their names."""

    def __init__(self, text: str, samples: tuple[str, ...]) -> None:
        super().__init__(text)
        self.samples = samples


Tell = Callable[[str], None]
"""Gets a sentence for people."""

Progress = Callable[[float, str], None]
"""Gets the share of some work that is done, from 0 to 1, and what is being done."""


def tell(sentence: str) -> None:
    """Print a sentence to people, beside the output of the command."""
    print(f"bireme: {sentence}", file=sys.stderr, flush=True)  # noqa: T201 (for people)


def system_reason(error: Exception) -> str:
    """Why something failed, without the number and the address that Python puts before and after it."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).partition(" (while ")[0]


def first_line(error: BaseException) -> str:
    """The first line of the text of an error, or the kind of an error that says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def printable(text: object, kept: str = "") -> str:
    """A text of a file, a model or another machine. Letters that a terminal acts on become question marks."""
    return "".join(one if one.isprintable() or one in kept else "?" for one in str(text))


@contextmanager
def system_errors(what: str, remedy: str = "") -> Iterator[None]:
    """Raise an `OSError` of the block as a `BiremeError`: what cannot be done, the system's reason, and the
    remedy.
    """
    try:
        yield
    except OSError as error:
        raise BiremeError(f"{what}: {system_reason(error)}. {remedy}".rstrip()) from error


@contextmanager
def errors_of(source: object) -> Iterator[None]:
    """Begin a `BiremeError` of the block with the source that is wrong, such as the path of a file."""
    try:
        yield
    except BiremeError as error:
        raise BiremeError(f"{source}: {error}") from None


def closest(name: str, known: Iterable[str]) -> str:
    """A hint that names the known word nearest to `name`, or all known words when none is near."""
    words = sorted(map(str, known))
    near = difflib.get_close_matches(name, words, n=1, cutoff=0.5)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"Known are: {', '.join(words)}."
