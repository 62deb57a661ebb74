"""Encrypted connections: TLS 1.3, in which both ends prove that they know the key of the run.

`listener.py` calls this once a caller has given the right answer, so strangers never reach it. A line is
encrypted if it leaves the host, unless the environment variable `BIREME_ENCRYPT` turns that off. A private
key and a certificate are derived from the key of the run, so all its processes have the same ones, present
them and accept no others. The keys of a connection come from a fresh exchange: an eavesdropper cannot read
what was recorded before the key of the run became known.

TLS with pre-shared keys would need no certificate, but Python has it from 3.13 on only, and ends of different
versions must understand each other. The package `cryptography` makes the certificate.
"""

import functools
import hmac
import ipaddress
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.util import find_spec
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, cast

from bireme.errors import BiremeError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

VARIABLE = "BIREME_ENCRYPT"
"""The environment variable that decides for a process and those that it starts."""
NEVER, ALWAYS = "never", "always"
"""Its values: no encryption, or also between processes of one host. Any other value is the default."""
_RECORD_BYTES = 22
"""What TLS 1.3 adds to a record: a header of 5 bytes, a type, and a tag of 16."""
_AHEAD_BYTES = 256 * 1024
"""Bytes to encrypt at once, and to take from the kernel at once, at most."""


def set_encryption(is_on: bool) -> None:
    """Turn encryption off in this process and those that it starts, if it is not to be on."""
    if not is_on:
        os.environ[VARIABLE] = NEVER


Policy = int
WANTED, LEAVES, LACKS = 1, 2, 4
"""Of a `Policy`: lines that leave the host are to be encrypted; this one leaves it; the package for it is
missing. A listener puts it into its challenge, which the answer of the caller is made for.
"""


def policy_for(made: socket.socket) -> Policy:
    """What the end of a connection that accepted it wants."""
    asked = os.environ.get(VARIABLE, "")
    if asked == NEVER:
        return 0
    leaves = asked == ALWAYS or leaves_host(made)
    return WANTED | (LEAVES if leaves else 0) | (0 if _has_package() else LACKS)


def encrypts(made: socket.socket, policy: Policy) -> bool:
    """Whether the caller has to encrypt a connection to a listener of that policy. Raises a `BiremeError` if
    the package for it is missing at either end.
    """
    if not policy & WANTED or not (policy & LEAVES or leaves_host(made)):
        return False
    if policy & LACKS:
        raise BiremeError(_missing(f"the machine at {made.getpeername()[0]}"))
    if not _has_package():
        raise BiremeError(_missing("this machine"))
    return True


def leaves_host(made: socket.socket) -> bool:
    """Whether a connection leads to another host. Containers with an address of their own count as hosts."""
    if made.family == socket.AF_UNIX:
        return False
    own, peer = made.getsockname()[0], made.getpeername()[0]
    return own != peer and not ipaddress.ip_address(peer.partition("%")[0]).is_loopback


def _missing(place: str) -> str:
    return (
        f"Lines between hosts are encrypted, which needs the package cryptography on {place}: pip install "
        f"'bireme[encryption]'. Or set links.encrypt = false ({VARIABLE}={NEVER} without a run file), if "
        "nobody else can read this network."
    )


@functools.cache
def _has_package() -> bool:
    return find_spec("cryptography") is not None


@functools.lru_cache(maxsize=64)
def _context(key: str, *, is_listener: bool) -> ssl.SSLContext:
    """What both ends prove themselves with. It takes milliseconds to make."""
    certificate, private_key, password = _certificate(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_listener else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # who has the key is of the run, wherever it is
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    with NamedTemporaryFile() as file:  # ssl takes it from a file only
        file.write(private_key + certificate)
        file.flush()
        context.load_cert_chain(file.name, password=password)
    if is_listener:
        context.num_tickets = 0  # nothing crosses before the proof of the listener
    return context


def _certificate(key: str) -> tuple[bytes, bytes, bytes]:
    """A certificate and its private key as texts, which follow from the key of the run; the second is under
    the password that comes third. Clocks do not matter.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
    )

    own = Ed25519PrivateKey.from_private_bytes(hmac.digest(key.encode(), b"bireme certificate", "sha256"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bireme")])
    certificate = (
        x509.CertificateBuilder(name, name, own.public_key(), serial_number=1)
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 12, 31, tzinfo=UTC))
        .sign(own, None)
    )
    password = secrets.token_hex(16).encode()
    private = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password))
    return certificate.public_bytes(Encoding.PEM), private, password


class EncryptedSocket(socket.socket):
    """A connection that behaves as the socket it is made of, which is not to be used any more.

    One thread may send while another one receives. What `poll` finds is not all: bytes that are `ready` have
    left the kernel. A call to send that raises `BlockingIOError` must be repeated with the same bytes.
    """

    def __init__(self, made: socket.socket, key: str, *, is_listener: bool) -> None:
        context = _context(key, is_listener=is_listener)
        timeout_s = made.gettimeout()
        super().__init__(made.family, made.type, made.proto, made.detach())
        self.settimeout(timeout_s)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_listener)
        self._using = threading.Lock()
        """Held while `_tls` is used, and never while this end waits for the other."""
        self._sealed = memoryview(b"")
        """Encrypted bytes that the kernel has not taken, which stand for `_sealed_bytes` of the caller's."""
        self._sealed_bytes = 0
        self.is_ready = False
        """Whether bytes may have come that the next read finds without the kernel."""

    def shake_hands(self) -> bool:
        """Go on with the handshake; whether it is done. On a socket that does not block, call it again when
        more has come. Raises an `OSError` if the other end has another key.
        """
        while True:
            try:
                self._tls.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                is_done = False
            words = self._outgoing.read()
            if words:
                super().sendall(words)
            if is_done:
                return True
            try:
                more = super().recv(_AHEAD_BYTES)
            except BlockingIOError:
                return False
            if not more:
                raise BrokenPipeError("the other end has hung up instead of encrypting")
            self._incoming.write(more)

    @property
    def is_half_sent(self) -> bool:
        """Whether bytes of a call to send that has not returned are on their way."""
        return bool(self._sealed)

    def send(self, data: "ReadableBuffer", flags: int = 0, /) -> int:
        """Send some of these bytes; returns how many."""
        return self.sendmsg([data])

    def sendall(self, data: "ReadableBuffer", flags: int = 0, /) -> None:
        """Send all of them, on a socket that blocks."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.send(rest) :]

    def sendmsg(self, buffers: Iterable["ReadableBuffer"], *_: Any) -> int:
        """Send some bytes of these, one after the other; returns how many."""
        if not self._sealed:
            taken = 0
            with self._using:
                for one in buffers:
                    view = memoryview(one)[: _AHEAD_BYTES - taken]
                    taken += self._tls.write(view) if view else 0
                self._sealed, self._sealed_bytes = memoryview(self._outgoing.read()), taken
        while self._sealed:
            self._sealed = self._sealed[super().send(self._sealed) :]
        return self._sealed_bytes

    def recv(self, num_bytes: int, flags: int = 0, /) -> bytes:
        """What has come, at most that many bytes. Nothing beyond the record that holds them leaves the
        kernel. With flags it is the encrypted bytes.
        """
        if flags:
            return super().recv(num_bytes, flags)
        found = bytearray(num_bytes)
        return bytes(found[: self._receive(memoryview(found), num_bytes + _RECORD_BYTES)])

    def recv_into(self, buffer: "WriteableBuffer", num_bytes: int = 0, flags: int = 0, /) -> int:
        """Write what has come there; returns how many bytes, and 0 if the other end has hung up."""
        return self._receive(memoryview(buffer), _AHEAD_BYTES)

    def _receive(self, into: memoryview, ahead_bytes: int) -> int:
        while True:
            if self.is_ready and (came := self._decrypted(into)) is not None:
                return came
            more = super().recv(ahead_bytes)
            if not more:
                return 0
            with self._using:
                self._incoming.write(more)
            self.is_ready = True

    def _decrypted(self, into: memoryview) -> int | None:
        """The number of bytes that were there, 0 at the end; None if there are none without the kernel."""
        came = 0
        with self._using:
            try:
                while came < len(into) and self.is_ready:
                    came += cast("int", self._tls.read(len(into) - came, cast("bytearray", into[came:])))
                    # To read when there is nothing costs an exception.
                    self.is_ready = bool(self._tls.pending() or self._incoming.pending)
            except ssl.SSLWantReadError:
                self.is_ready = False
            except ssl.SSLZeroReturnError:
                return came
        return came or None
