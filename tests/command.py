"""Run the command line inside the test's own process."""

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from bireme.cli.main import main

__all__ = ["Result", "bireme"]


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
    before, sys.argv = sys.argv, ["bireme", *words]
    try:
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.argv = before
    captured = capsys.readouterr()
    return Result(status, captured.out, captured.err)
