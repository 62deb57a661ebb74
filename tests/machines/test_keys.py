"""Every machine has one key, made once and kept to itself."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bireme.errors import BiremeError
from bireme.machines.keys import HOME, MachineKey, key_path, own_key

pytest.importorskip("cryptography", reason="keys of machines need it")


def test_the_key_is_made_at_first_use_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME, str(tmp_path / "home"))
    umask = os.umask(0)
    try:
        made = own_key()
    finally:
        os.umask(umask)
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    assert own_key() == made
    assert made.private not in repr(made)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["machine.key"]


def test_processes_that_make_it_at_once_get_the_same_key(tmp_path: Path) -> None:
    code = "from bireme.machines.keys import own_key; print(own_key().public)"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, HOME: str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    assert len({one.communicate()[0] for one in started}) == 1


def test_a_key_that_others_can_read_or_that_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.key"
    own_key(path)
    path.chmod(0o640)
    with pytest.raises(BiremeError, match="chmod 600"):
        own_key(path)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(BiremeError, match="does not hold the key of a machine"):
        own_key(path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BiremeError, match=r"cannot be kept in .*machine\.key"):
        own_key(tmp_path / "file" / "machine.key")


def test_two_machines_have_a_secret_in_common_that_a_third_does_not_have() -> None:
    one, two, three = (MachineKey.of(f"{number:064x}") for number in (1, 2, 3))
    assert one.shared_with(two.public) == two.shared_with(one.public)
    assert (
        len({one.shared_with(two.public), one.shared_with(three.public), two.shared_with(three.public)}) == 3
    )
    with pytest.raises(BiremeError, match="not the public key"):
        one.shared_with("0" * 64)
