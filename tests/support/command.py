"""Run the command line inside the test's own process."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from bireme.cli.main import main
from tests.support.patience import patience_s

__all__ = ["Result", "bireme", "loads_torch"]


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


def loads_torch(*commands: str, modules: str = "bireme") -> bool:
    """Do these commands, in a process of their own that first imports `modules`, import torch?"""
    code = f"""
import sys
import {modules}
from bireme.cli.main import main
for words in {commands!r}:
    sys.argv = ["bireme", *words.split()]
    try:
        main()
    except SystemExit:
        pass
print("torch loaded:", "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=patience_s()
    )
    return done.stdout.splitlines()[-1] != "torch loaded: False"
