"""A unit of systemd that keeps a machine offering itself: `bireme join … --service`."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bireme.devices import VISIBLE
from bireme.errors import BiremeError
from bireme.machines.keys import HOME

_KEPT = (HOME, VISIBLE, "BIREME_ADDRESS", "BIREME_ENCRYPT", "PYTHONPATH")
"""Variables that hold for the service if they are set here."""
_WAIT_S = 60
"""Between the end of a run, or a coordinator that does not answer, and the next call."""


def service_unit(where: str, words: Sequence[str]) -> str:
    """The unit for `bireme join WORDS…`, of this user, from this folder, with this Python."""
    kept = [f"{name}={os.environ[name]}" for name in _KEPT if os.environ.get(name)]
    command = (sys.executable, "-m", "bireme", "join", *words)
    lines = [
        "[Unit]",
        f"Description=Bireme: take part in the runs of {_literal(where)}",
        "Wants=network-online.target",
        "After=network-online.target",
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        f"ExecStart={' '.join(map(_quoted, command)).replace('$', '$$')}",
        f"WorkingDirectory={_literal(str(Path.cwd()))}",
        *(f"Environment={_quoted(one)}" for one in kept),
        "Restart=always",
        f"RestartSec={_WAIT_S}",
        "# The machine leaves, and the run goes on if it can.",
        "KillSignal=SIGHUP",
        "KillMode=mixed",
        "TimeoutStopSec=180",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    """A text in which systemd replaces nothing."""
    if not text.isprintable():
        raise BiremeError(f"{text!r} has a character that cannot be in a unit of systemd.")
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """A word of a command or of a variable."""
    plain = _literal(word)
    if shlex.quote(word) == word:
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
