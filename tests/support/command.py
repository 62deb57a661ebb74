"""Run the command line inside the test's own process."""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import pytest

from bireme.cli.main import main

__all__ = ["Result", "bireme", "bireme_once", "run_words", "with_sets"]


@dataclass(frozen=True, slots=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on standard output."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


def bireme(capsys: pytest.CaptureFixture[str], *words: str) -> Result:
    """`bireme WORDS…` with its exit status and what it printed."""
    status = run_words(words)
    captured = capsys.readouterr()
    return Result(status, captured.out, captured.err)


def bireme_once(*words: str) -> Result:
    """The same for what several tests look at, where there is no `capsys`."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = run_words(words)
    return Result(status, out.getvalue(), err.getvalue())


def with_sets(words: Sequence[str]) -> list[str]:
    """The words, with `--set` before each `table.key=value`."""
    return [part for word in words for part in (("--set", word) if _SETTING.match(word) else (word,))]


_SETTING = re.compile(r"[a-z]+\.[a-z_.]+=")


def run_words(words: Sequence[str]) -> int:
    """The exit status of `bireme WORDS…`, which prints where this process does."""
    before, sys.argv = sys.argv, ["bireme", *words]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.argv = before
    return 0
