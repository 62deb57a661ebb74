"""Who may take part: a coordinator's list of the machines it has admitted and the tokens it has given.

A token admits one machine, once, until it expires or is revoked. From then on the key of the machine counts.
The list holds public keys and digests of tokens, so it gives nothing away. Times are seconds of the epoch.
"""

import base64
import binascii
import fcntl
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from json import dumps
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Len
from pydantic import StringConstraints

from bireme.documents import read_dataclass
from bireme.errors import BiremeError
from bireme.files import write_text_atomically
from bireme.machines.keys import HEX_KEY, key_path

FORMAT = 1
_HexKey = Annotated[str, StringConstraints(pattern=HEX_KEY)]
_Seconds = Annotated[float, Ge(0)]
_SECRET_BYTES, _KEY_BYTES, _SUM_BYTES = 16, 32, 4


@dataclass(frozen=True, slots=True)
class AdmissionToken:
    """What a person types on a machine that is to be admitted: whom to trust, and a secret."""

    coordinator: str
    """The public key of the coordinator."""
    secret: str

    def __str__(self) -> str:
        whole = bytes.fromhex(self.coordinator + self.secret)
        return base64.urlsafe_b64encode(whole + _sum_of(whole)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> "AdmissionToken":
        """The token that was typed. Raises a `BiremeError` if it is not whole."""
        try:
            found = base64.b64decode(text.strip() + "=" * (-len(text.strip()) % 4), b"-_", validate=True)
        except (ValueError, binascii.Error):
            found = b""
        whole = found[:-_SUM_BYTES]
        if len(whole) != _KEY_BYTES + _SECRET_BYTES or found[-_SUM_BYTES:] != _sum_of(whole):
            raise BiremeError(
                "That is not a whole token. Copy it again from the line that the coordinator prints."
            )
        return cls(whole[:_KEY_BYTES].hex(), whole[_KEY_BYTES:].hex())


def _sum_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_SUM_BYTES]


@dataclass(frozen=True, slots=True)
class IssuedToken:
    """A token in the list of a coordinator. `used_by` is the public key that it has admitted, if any."""

    digest: _HexKey
    ends_s: _Seconds
    used_by: _HexKey | None = None
    is_revoked: bool = False


@dataclass(frozen=True, slots=True)
class AdmittedMachine:
    """A machine in the list of a coordinator, by its public key; the name is for people."""

    public: _HexKey
    name: Annotated[str, Len(1, 255)]
    since_s: _Seconds
    is_revoked: bool = False


@dataclass(frozen=True, slots=True)
class AdmissionList:
    """The list. It never changes: each event gives the next one."""

    machines: tuple[AdmittedMachine, ...] = ()
    tokens: tuple[IssuedToken, ...] = ()

    def __post_init__(self) -> None:
        for what, keys in (
            ("machine", [one.public for one in self.machines]),
            ("token", [one.digest for one in self.tokens]),
        ):
            if twice := {key for key in keys if keys.count(key) > 1}:
                raise BiremeError(f"The {what} {min(twice)[:16]} is listed twice. Remove one of the two.")

    def with_token(self, now_s: float, lifetime_s: float) -> tuple["AdmissionList", str]:
        """The list with a new token, and the token's secret, which is nowhere else."""
        secret = secrets.token_hex(_SECRET_BYTES)
        issued = IssuedToken(digest_of(secret), now_s + lifetime_s)
        return replace(self, tokens=(*self.tokens, issued)), secret

    def admit(self, secret: str, public: str, name: str, now_s: float) -> "AdmissionList":
        """The list once a machine has shown a token. A machine whose answer was lost may show it again.
        Raises a `BiremeError` that says why it is not admitted.
        """
        digest = digest_of(secret)
        token = next((one for one in self.tokens if one.digest == digest), None)
        known = self._machine(public)
        if known is not None and known.is_revoked:
            raise BiremeError(_revoked(known))
        if token is None:
            raise BiremeError("The coordinator has given no such token. Ask it for a new one.")
        if token.is_revoked:
            raise BiremeError("The token has been revoked. Ask the coordinator for a new one.")
        if token.used_by == public:
            return self
        if token.used_by is not None:
            raise BiremeError("The token has admitted another machine. Each machine needs its own.")
        if now_s >= token.ends_s:
            raise BiremeError("The token has expired. Ask the coordinator for a new one.")
        used = tuple(replace(one, used_by=public) if one is token else one for one in self.tokens)
        if known is not None:  # by the name that it gives now
            machines = [replace(one, name=name) if one is known else one for one in self.machines]
            return replace(self, machines=tuple(machines), tokens=used)
        return replace(self, machines=(*self.machines, AdmittedMachine(public, name, now_s)), tokens=used)

    def check(self, public: str) -> AdmittedMachine:
        """The machine with that key. Raises a `BiremeError` if it may not take part."""
        found = self._machine(public)
        if found is None:
            raise BiremeError("This machine is not admitted. Join with a token of the coordinator.")
        if found.is_revoked:
            raise BiremeError(_revoked(found))
        return found

    def marked(self, word: str, *, is_revoked: bool) -> "AdmissionList":
        """The list in which the machine of that name, or the machine or the token whose key or digest begins
        so, counts no more, or counts again. It stays listed.
        """
        machines = self.named(word)
        tokens = [one for one in self.tokens if one.digest.startswith(word)]
        if len(machines) + len(tokens) != 1 or not word:
            num = "no" if not machines + tokens else "more than one"
            listed = ", ".join(f"{one.name} ({one.public[:8]}…)" for one in self.machines)
            raise BiremeError(
                f"There is {num} machine or token {word!r}. Give a name, or the beginning of a key that only "
                f"one of them has{f': {listed}' if listed else ''}."
            )
        return replace(
            self,
            machines=tuple(
                replace(one, is_revoked=is_revoked) if one in machines else one for one in self.machines
            ),
            tokens=tuple(
                replace(one, is_revoked=is_revoked) if one in tokens else one for one in self.tokens
            ),
        )

    def named(self, word: str) -> list[AdmittedMachine]:
        """The machines of that name, or whose keys begin so."""
        return [one for one in self.machines if one.name == word or one.public.startswith(word)]

    def _machine(self, public: str) -> AdmittedMachine | None:
        return next((one for one in self.machines if one.public == public), None)


def _revoked(one: AdmittedMachine) -> str:
    return (
        f"The key of {one.name} has been revoked. To take part again it must be admitted where the "
        f"coordinator is: bireme coordinate --admit {one.public[:16]}"
    )


def digest_of(secret: str) -> str:
    """What the list has of a token."""
    return hashlib.sha256(b"bireme token " + secret.encode()).hexdigest()


def read_admissions(path: Path) -> AdmissionList:
    """The list in a file; an empty one if there is no file. Raises a `BiremeError` if it is damaged."""
    return read_dataclass(path, AdmissionList, number=FORMAT) if path.exists() else AdmissionList()


def change_admissions(path: Path, change: Callable[[AdmissionList], AdmissionList]) -> AdmissionList:
    """Put the next list into the file, which no other process or thread changes meanwhile; returns it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # `lockf` would hold off other processes, and no thread of this one
        found = change(read_admissions(path))
        write_admissions(path, found)
    return found


def write_admissions(path: Path, found: AdmissionList) -> None:
    """Put the list into the file, whole."""
    write_text_atomically(path, dumps({"format": FORMAT, **asdict(found)}, indent=1) + "\n")


def admissions_path(home: Path | None = None) -> Path:
    """Where this machine keeps its list, which is one for all runs that this user coordinates here; `home` is
    the folder of the coordinator's key if that is another one.
    """
    return (home or key_path().parent) / "admitted.json"


def issue_tokens(path: Path, coordinator: str, count: int, lifetime_s: float) -> list[AdmissionToken]:
    """New tokens of the coordinator with that public key, one for each machine."""
    given = list[AdmissionToken]()

    def change(found: AdmissionList) -> AdmissionList:
        for _ in range(count):
            found, secret = found.with_token(time.time(), lifetime_s)
            given.append(AdmissionToken(coordinator, secret))
        return found

    change_admissions(path, change)
    return given


def withdraw_tokens(path: Path, tokens: Sequence[AdmissionToken]) -> None:
    """Take those of the tokens off the list that have admitted no machine."""
    digests = {digest_of(token.secret) for token in tokens}

    def change(found: AdmissionList) -> AdmissionList:
        kept = [one for one in found.tokens if one.used_by or one.digest not in digests]
        return replace(found, tokens=tuple(kept))

    change_admissions(path, change)
