"""The files with which a deputy coordinates a run in the place of a coordinator that is lost.

`bireme coordinate --deputy NAME` sends them to one machine of the run, over its encrypted line: the key of
the coordinator, its list of machines and the record of the run. The deputy keeps them for its user alone
beside its own key, until the run has ended. `bireme coordinate --take-over RUN` unpacks them into a folder,
in which they lie as beside the key of the coordinator. The process that has taken over locks this folder, so
that `bireme join` on the same machine does not remove it. A machine with these files can be the coordinator.
"""

import base64
import fcntl
import hashlib
import os
import shutil
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from json import dumps
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Len
from pydantic import StringConstraints

from bireme.documents import read_dataclass
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.machines.admission import AdmissionList, admissions_path, write_admissions
from bireme.machines.keys import FILE, HEX_KEY, key_path
from bireme.machines.orders import RunRecord, read_record_at, write_record

_FORMAT = 1
_MOST_BYTES = 1 << 26
_Count = Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True)
class Handover:
    """What a deputy gets: `run` is the name of the run, which begins with the least and takes the most of
    `machines`.
    """

    run: Annotated[str, Len(1, 200)]
    key: Annotated[str, StringConstraints(pattern=HEX_KEY)] = field(repr=False)
    machines: tuple[_Count, _Count]
    admitted: AdmissionList
    record: RunRecord

    def packed(self) -> str:
        """A text for a message."""
        text = dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n"
        return base64.b64encode(zlib.compress(text.encode())).decode()


def digest_of_packed(text: str) -> str:
    """What a deputy says of the text that it has."""
    return hashlib.sha256(text.encode()).hexdigest()


def keep_handover(run: str, packed: str) -> None:
    """Keep the text that a coordinator has sent for a run: it replaces all that was kept before, unless a
    process goes on with that. Raises a `BiremeError` if it cannot be kept.
    """
    path = _path(run)
    try:
        text = zlib.decompressobj().decompress(base64.b64decode(packed), _MOST_BYTES).decode()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_text_atomically(path, text, is_private=True)
        _remove_unused(path.with_suffix(".home"))
    except (ValueError, zlib.error, OSError) as error:
        raise BiremeError(f"What a deputy needs cannot be kept in {path}: {error}.") from error


def forget_handover(run: str) -> None:
    """Remove all that was handed over for a run, except a folder that another process goes on with."""
    path = _path(run)
    path.unlink(missing_ok=True)
    _remove_unused(path.with_suffix(".home"))


def _remove_unused(home: Path) -> None:
    with suppress(OSError):  # there is none, or it is in use
        lock = _locked(home)
        shutil.rmtree(home, ignore_errors=True)
        os.close(lock)


def _locked(home: Path) -> int:
    """The open lock of such a folder, which ends with this process. Raises an `OSError` if another process
    has it, or if there is no such folder. `lockf` does not hold off the process that has it.
    """
    lock = os.open(home / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def taken_over(run: str) -> tuple[Handover, Path]:
    """What was handed over for a run, and the folder with the key, the list and the record, from which an
    earlier take-over may have gone on. This process has the folder for itself from now on. Raises a
    `BiremeError` if nothing was handed over, or another process has the folder.
    """
    path = _path(run)
    if not path.exists():
        known = ", ".join(sorted(one.stem for one in path.parent.glob("*.json")))
        raise BiremeError(
            f"This machine is no deputy for a run {run!r}{f', only for {known}' if known else ''}. The "
            "coordinator must have been started with --deputy and the name of this machine."
        )
    found, home = read_dataclass(path, Handover, number=_FORMAT), path.with_suffix(".home")
    if not home.exists():
        draft = path.with_suffix(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        write_text_atomically(draft / FILE, f"{found.key}\n", is_private=True)
        write_admissions(admissions_path(draft), found.admitted)
        write_record(handed_record(draft), found.record)
        draft.rename(home)
    try:
        _locked(home)
    except OSError as error:
        raise BiremeError(
            f"Another bireme coordinate on this machine has taken over the run {run!r}. End that one first."
        ) from error
    return found, home


def handed_record(home: Path) -> Path:
    """The record of the run in such a folder."""
    return home / "runs" / "run.json"


def packed_handover(
    run: str, key: str, machines: tuple[int, int], admitted: AdmissionList, record: Path
) -> str:
    """What a deputy needs now, as a text; empty while there is no record of the run."""
    found = read_record_at(record) if record.exists() else None
    return "" if found is None else Handover(run, key, machines, admitted, found).packed()


def _path(run: str) -> Path:
    if not run or Path(run).name != run:
        raise BiremeError(f"{run!r} is not the name of a run.")
    return key_path().with_name("deputy") / f"{run}.json"
