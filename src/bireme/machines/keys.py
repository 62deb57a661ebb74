"""The key of a machine: made at its first use, kept in one file, and never sent.

It is a pair of X25519. Two machines that know each other's public keys have a secret in common, with which
`wire/listener.py` lets one call the other. So a list of public keys is of no use to a thief, and the same key
serves towards any number of coordinators. Beside it are the public keys of those that have admitted this
machine.
"""

import hmac
import json
import os
import re
import secrets
import stat
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bireme.errors import BiremeError, system_errors
from bireme.files import write_text_atomically

HOME = "BIREME_HOME"
"""The environment variable that names the folder of the key, if it is not `~/.config/bireme`."""
FILE, _KNOWN = "machine.key", "coordinators.json"
HEX_KEY = r"^[0-9a-f]{64}$"
"""A key as a text, public or private: 32 bytes."""


@dataclass(frozen=True, slots=True)
class MachineKey:
    """The key of a machine; both parts are texts."""

    private: str = field(repr=False)
    public: str

    @classmethod
    def of(cls, private: str) -> "MachineKey":
        """The key with that private part."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        own = X25519PrivateKey.from_private_bytes(bytes.fromhex(private))
        return cls(private, own.public_key().public_bytes_raw().hex())

    def shared_with(self, public: str) -> str:
        """The secret that this machine and the one with that public key have in common, as a key of lines."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

        own = X25519PrivateKey.from_private_bytes(bytes.fromhex(self.private))
        try:
            found = own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
        except ValueError:
            raise BiremeError(f"{public[:16]} is not the public key of a machine.") from None
        both = "".join(sorted((self.public, public)))
        return hmac.digest(found, f"bireme machines {both}".encode(), "sha256").hex()


def key_path() -> Path:
    """Where the key of this machine is kept."""
    named = os.environ.get(HOME)
    return (Path(named) if named else Path.home() / ".config" / "bireme") / FILE


def own_key(path: Path | None = None) -> MachineKey:
    """The key of this machine, which is made if there is none. Processes that do so at once get the same."""
    path = path or key_path()
    if find_spec("cryptography") is None:
        raise BiremeError(
            "The key of a machine needs the package cryptography: pip install 'bireme[encryption]'."
        )
    remedy = f"Name in {HOME} a folder that you may write."
    with system_errors(f"The key of this machine cannot be kept in {path}", remedy):
        if not path.exists():
            _make(path)
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise BiremeError(f"Others can read {path}, the key of this machine. Run: chmod 600 {path}")
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    if not re.match(HEX_KEY, text):
        raise BiremeError(
            f"{path} does not hold the key of a machine. Remove it for a new key; coordinators must then "
            "admit this machine again."
        )
    return MachineKey.of(text)


def _make(path: Path) -> None:
    """Put a new key there, whole and for this user alone, unless another process is faster."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{FILE}-{secrets.token_hex(8)}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(secrets.token_hex(32).encode() + b"\n")
            opened.flush()
            os.fsync(opened.fileno())
        path.hardlink_to(draft)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


# Coordinators that this machine has joined, so that its key suffices the next time.


def known_coordinator(address: tuple[str, int]) -> str:
    """The public key of the coordinator there, if this machine has joined it before. Raises a `BiremeError`
    if not.
    """
    known = _coordinators()
    # A coordinator may have moved. One with another key is refused, so trying the only known key is safe.
    keys = {key for key in known.values() if isinstance(key, str)}
    found = known.get(place_of(address), next(iter(keys)) if len(keys) == 1 else None)
    if not isinstance(found, str):
        raise BiremeError(
            f"This machine has not joined a coordinator at {place_of(address)} before. Give the token that "
            "`bireme coordinate` prints there: --token TOKEN"
        )
    return found


def note_coordinator(address: tuple[str, int], public: str) -> None:
    """Keep the public key of a coordinator that has admitted this machine."""
    known = {**_coordinators(), place_of(address): public}
    write_text_atomically(key_path().with_name(_KNOWN), json.dumps(known, indent=1) + "\n")


def _coordinators() -> dict[str, Any]:
    try:
        found = json.loads(key_path().with_name(_KNOWN).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def place_of(address: tuple[str, int]) -> str:
    """An address as people type it."""
    return f"{address[0]}:{address[1]}"
