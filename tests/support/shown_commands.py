"""Commands that pages show, what they print, and how the two are compared.

Pages show commands in blocks of the language `console`. A line that begins with `$ ` is typed; after a
backslash at its end the next line goes on with it. The lines below a command are its output, both streams as
in a terminal; `…` stands for any text, or for none. A command without lines below it only has to succeed.
A block with a title is a file in the reader's folder.

A comment of HTML in the line before a block may hold, with commas between them:

    long            runs take many seconds, so only `make test-all` runs them
    any numbers     counts depend on the machine, too
    status 2        the exit status of its commands, if it is not 0
    until Ctrl-C    its commands run until they are interrupted, after they have printed the lines below them
    on NAME         its commands are typed on the machine of that name
    beside          its commands go on beside those of later blocks, once the lines above `…` are printed
    not run: WHY    a test cannot run its commands
    other output: WHY    its commands have to succeed, and may print something else

Machines are on the loopback: addresses on a page stand for any. A line to type that another machine has
printed is typed with the token and the address of that line.

`python -m tests.support.shown_commands --write [PAGE ...]` runs the commands of pages, and replaces each
output that differs by the real one; with BIREME_TESTS=all it does so for long ones as well.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITE = "BIREME_WRITE_PAGES"
"""Variable that has the test write the pages instead of comparing them."""

_BLOCK = re.compile(
    r"(?:^<!-- (?P<how>[^\n]+?) -->\n)?"
    r"^```(?P<language>[\w-]*)(?: title=\"(?P<title>[^\"\n]+)\")?\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_TYPED = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """How the commands of a block run."""

    reason: str = ""
    """Why a test cannot run them; none if it can."""
    is_long: bool = False
    has_any_numbers: bool = False
    status: int = 0
    is_interrupted: bool = False
    machine: str = ""
    is_beside: bool = False
    has_other_output: bool = False

    @property
    def is_in_a_process(self) -> bool:
        """Whether its commands need a process of their own."""
        return self.is_long or self.is_interrupted or self.is_beside or bool(self.machine)


@dataclass(frozen=True, slots=True)
class ShownFile:
    """A file that a page shows."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class ShownCommand:
    """A command of a page: the text that is typed, the output below it and its place in the page's text."""

    typed: str
    shown: str
    begin: int
    end: int
    block: Block

    @property
    def words(self) -> list[str]:
        """What is typed, without a comment."""
        return shlex.split(self.typed, comments=True)


def parts_of(text: str) -> Iterator[ShownFile | ShownCommand]:
    """Files and commands of a page, in their order."""
    for found in _BLOCK.finditer(text):
        if found["title"]:
            yield ShownFile(found["title"], found["body"])
        elif found["language"] == "console":
            block, at = _block(found["how"] or ""), found.start("body")
            for one in _TYPED.finditer(found["body"]):
                typed = one[1].replace("\\\n", " ")
                yield ShownCommand(typed, one[2], at + one.start(2), at + one.end(2), block)


def _block(how: str) -> Block:
    words, _, reason = how.partition("not run: ")
    words, other, _ = words.partition("other output: ")
    known = {word.strip() for word in words.split(",") if word.strip()}
    status = next((int(word.removeprefix("status ")) for word in known if word.startswith("status ")), 0)
    machine = next((word.removeprefix("on ") for word in known if word.startswith("on ")), "")
    flags = "long", "any numbers", "until Ctrl-C", "beside"
    assert known <= {*flags, "status 1", "status 2", f"on {machine}"}, f"a block has the comment {how!r}"
    is_long, has_any_numbers, is_interrupted, is_beside = (flag in known for flag in flags)
    return Block(
        reason,
        is_long,
        has_any_numbers,
        status,
        is_interrupted,
        machine,
        is_beside,
        has_other_output=bool(other),
    )


def unmarked_commands(text: str) -> list[str]:
    """Commands in blocks of a page that no test would find."""
    others = [one["body"] for one in _BLOCK.finditer(text) if one["language"] != "console"]
    typed = re.compile(r"^(?:\$ .*|(?:\w+=\S+ )*(?:bireme|torchrun|make|pip|ssh) .*)$", re.MULTILINE)
    return [line for body in others for line in typed.findall(body)]


# Comparison. Words must be equal, wherever lines are broken. What differs from machine to machine and from
# run to run is compared by its shape: seconds, bytes and rates with their units, numbers with a fraction,
# percentages, ports, versions, and counts of cores and threads. Other whole numbers must be equal.

_NUMBER = r"(?<![\w.])[+−-]?\d[\d,]*(?:\.\d+)*(?:e[+-]?\d+)?"
_SHAPES = [
    (re.compile(r"(?<![\d.])\d+(?:\.\d+){3}(?::\d+)?(?![\d.])"), "<host>"),
    (re.compile(r"http://<host>/[\w-]*/?"), "<address>"),
    (re.compile(r"\b\d{8}-\d{6}\b"), "<date>"),
    (re.compile(r"[━─╸╺#▁▂▃▄▅▆▇█]{2,}"), "<bar>"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b|\b[\w-]{60,}\b"), "<key>"),
    (re.compile(r"\b\d+(?::\d\d)+\b"), "<clock>"),
    (re.compile(rf"{_NUMBER}\+?[a-z]*(?= (?:threads?|cores?)\b)"), "<amount>"),
    (re.compile(rf"{_NUMBER} ?(?:%|×|(?:[kMGT]?bit|tokens|samples|[KMGTk]?i?B)/s)"), "<amount>"),
    (re.compile(rf"{_NUMBER} (?:[KMGT]i?B|B|ns|µs|ms|s|min|h|days?|hours?|J|joules)(?!\w)"), "<amount>"),
    (re.compile(r"(?<![\w.])[+−-]?\d[\d,]*(?:\.\d+)+(?:e[+-]?\d+)?(?:\+\w+)?(?![\w])"), "<amount>"),
    (re.compile(r"(?<=\w:)\d{4,5}\b"), "<port>"),
]


def shape_of(text: str, *, any_numbers: bool = False) -> str:
    """An output in one line, without what differs from machine to machine."""
    for pattern, name in _SHAPES:
        text = pattern.sub(name, text)
    return " ".join((re.sub(_NUMBER, "<amount>", text) if any_numbers else text).split())


def agrees(command: ShownCommand, printed: str) -> bool:
    """Whether an output on a page has the shape of the real one."""
    if not command.shown or command.block.has_other_output:
        return True
    shown, real = (
        shape_of(text, any_numbers=command.block.has_any_numbers) for text in (command.shown, printed)
    )
    return re.fullmatch(re.escape(shown).replace("\\ …", ".*").replace("…", ".*"), real) is not None


def with_outputs(text: str, outputs: dict[int, str]) -> str:
    """The text of a page with other outputs, by the places where they begin."""
    for found in reversed([one for one in parts_of(text) if isinstance(one, ShownCommand)]):
        if found.begin in outputs:
            text = text[: found.begin] + outputs[found.begin] + text[found.end :]
    return text


def _main(words: list[str]) -> int:
    """Run the test of the pages that are named, or of all, and have it write what it would refuse."""
    if words[:1] != ["--write"]:
        sys.stderr.write("python -m tests.support.shown_commands --write [PAGE ...]\n")
        return 2
    os.environ[WRITE] = "1"
    named = [Path(name).resolve() for name in words[1:]] or PAGES
    test = ROOT / "tests" / "cli" / "test_shown_commands.py"
    tests = [f"{test}::test_a_page_shows_what_its_commands_print[{page.relative_to(ROOT)}]" for page in named]
    return int(pytest.main([*tests, "-q", "-p", "no:cacheprovider", "--show-capture=no", "--durations=40"]))


if __name__ == "__main__":
    raise SystemExit(_main(sys.argv[1:]))
