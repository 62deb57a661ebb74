"""The keeper of a host: a process that holds second copies of the state of a run, and outlives its ranks.

    host 0                                     host 1
    rank ── keep ──▶ keeper ──── hold ───────▶ keeper ◀── keep ── rank
                     holds 0 and 2             holds 1 and 0

A rank gives each version of its shard to the keeper of its own host, which takes no longer than a copy in
memory. That keeper codes the version as differences, keeps them, and sends them on to the keeper of the next
host, in the background. It answers the rank once both have the version whole. So the keepers of any host and
of the one after it together have what the ranks of both held. A run with one host has one keeper.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

from bireme.errors import BiremeError
from bireme.runtime.copies.versions import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    CopyVersion,
    ShardCopies,
    ShardVersion,
    digest_of,
    newest_common,
    whole_message,
)
from bireme.runtime.processes import Process, start_process
from bireme.wire.listener import HEAL_SHARE, Caller, Doorway, ListenerThread, call, new_key
from bireme.wire.messages import MessageConnection

_MOST_MESSAGE_BYTES = CHUNK_BYTES + 64
_LEAST_PRIORITY = 19
"""For `os.nice`: a keeper uses the cores when nothing else does."""
_FILLER = 1
"""The priority of packets that the kernel sends when there are no others (TC_PRIO_FILLER)."""
_CALL_S, _AGAIN_S = 5.0, 1.0


@dataclass(frozen=True, slots=True)
class KeeperAddress:
    """Where a keeper listens, and the key that it asks for."""

    address: str
    key: str


class RateLimit:
    """Bounds how fast copies cross the network: to `bytes_per_s`, or to a share of the link's time."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock, self._free_s = threading.Lock(), 0.0
        self._lifted = threading.Event()

    def lift(self) -> None:
        """Bound nothing any more, also for those that wait."""
        self._lifted.set()

    def wait(self, num_bytes: int, took_s: float) -> None:
        """Wait after `num_bytes`, which took `took_s` to cross."""
        if self._bytes_per_s is None:
            self._lifted.wait(took_s * (1.0 / HEAL_SHARE - 1.0))
            return
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s - took_s) + num_bytes / self._bytes_per_s
            left_s = self._free_s - now_s
        self._lifted.wait(max(left_s, 0.0))


class RequestConnection(MessageConnection):
    """Texts and chunks on a connection to a `RequestServer`. The `limit` bounds how fast frames of bytes
    cross it.
    """

    limit: RateLimit | None = None

    def hear(self, *, limit_s: float | None = None) -> dict[str, Any]:
        """The next text. Raises a `BiremeError` if it is an error at the other end, or no JSON object."""
        found = None
        with suppress(ValueError):
            found = super().hear(limit_s=limit_s)
        if not isinstance(found, dict):
            raise BiremeError("Another process sent a text that is no JSON object.")
        if "error" in found:
            raise BiremeError(str(found["error"]))
        return found

    def chunk(self) -> bytes:
        """The next frame of bytes."""
        began_s = time.monotonic()
        found = self.take_at_most(_MOST_MESSAGE_BYTES)
        if self.limit is not None:
            self.limit.wait(len(found), time.monotonic() - began_s)
        return found

    def send(self, *views: bytes | memoryview, share: float = 1.0) -> int:
        """As `MessageConnection` does."""
        began_s = time.monotonic()
        num_bytes = super().send(*views, share=share)
        if self.limit is not None:
            self.limit.wait(num_bytes, time.monotonic() - began_s)
        return num_bytes


@contextmanager
def talk_to(
    keeper: KeeperAddress, timeout_s: float, limit: RateLimit | None = None
) -> Iterator[RequestConnection]:
    """A connection to a keeper; one with a limit is in the background and yields to all others of the
    host.
    """
    made = call(keeper.address, keeper.key, b"", min(_CALL_S, timeout_s))
    with made:
        if limit is not None and hasattr(socket, "SO_PRIORITY"):
            with suppress(OSError):
                made.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _FILLER)
        talk = RequestConnection(made, timeout_s)
        talk.limit = limit
        yield talk


# The versions at keepers, as a start of the run lists them.


@dataclass(frozen=True, slots=True)
class KeptShard:
    """One whole version of one shard at a keeper, with the words that describe its tensors."""

    shard: int
    version: CopyVersion
    words: Mapping[str, Any]
    num_bytes: int
    digests: tuple[bytes, ...]
    keeper: KeeperAddress

    def request(self, first: int, end: int) -> dict[str, Any]:
        """The text that asks the keeper for the chunks from `first` on, without `end` itself."""
        return {"do": "read", "shard": self.shard, "version": self.version, "first": first, "end": end}

    def checked(self, index: int, chunk: bytes) -> bytes:
        """A chunk that came. Raises a `BiremeError` if it does not have its digest."""
        if digest_of(chunk) != self.digests[index]:
            raise BiremeError(f"Chunk {index} of shard {self.shard} is not as it was copied.")
        return chunk


def shards_at(keepers: Sequence[KeeperAddress], timeout_s: float, *, checks: bool) -> tuple[KeptShard, ...]:
    """All whole versions at these keepers, which are asked at the same time; those that do not answer have
    none. With `checks` each keeper leaves out a version of which a byte has changed in its memory.
    """

    def listed(keeper: KeeperAddress) -> list[KeptShard]:
        found: list[KeptShard] = []
        with suppress(OSError, BiremeError), talk_to(keeper, timeout_s) as talk:
            talk.say({"do": "list", "checks": checks})
            shards = talk.hear(limit_s=max(timeout_s, 600.0) if checks else None)["shards"]
            for shard, version, words, num_bytes, hexes in shards:
                digests = tuple(map(bytes.fromhex, hexes))
                found.append(KeptShard(shard, CopyVersion(*version), words, num_bytes, digests, keeper))
        return found

    with ThreadPoolExecutor(max(len(keepers), 1)) as threads:
        return tuple(one for own in threads.map(listed, keepers) for one in own)


def follow(keeper: KeeperAddress, follower: KeeperAddress | None, timeout_s: float) -> None:
    """Have a keeper send copies to another one from now on. Raises an `OSError` if it does not answer."""
    with talk_to(keeper, timeout_s) as talk:
        talk.say({"do": "follow", "follower": None if follower is None else asdict(follower)})
        talk.hear()


NUM_SHARDS = "num_shards"
"""In the words of a shard: how many shards its version has."""


def newest_of(shards: Sequence[KeptShard]) -> dict[int, list[KeptShard]]:
    """The newest version that is whole in every shard: for each shard where it is. Empty if there is none."""
    counts = {one.version: int(one.words[NUM_SHARDS]) for one in shards}
    newest = newest_common(((one.shard, one.version) for one in shards), counts)
    found: dict[int, list[KeptShard]] = {}
    for one in shards:
        if one.version == newest:
            found.setdefault(one.shard, []).append(one)
    return found


# The keeper itself: one thread listens, and each connection has a thread.


class _Held:
    """The copies of one shard, and the lock of the thread that uses them."""

    def __init__(self) -> None:
        self.copies, self.lock = ShardCopies(), threading.Lock()


class RequestServer:
    """Answers a request on each connection at `address` until it is closed; `acts` has the function for each
    kind of request.
    """

    acts: Mapping[str, Callable[[RequestConnection, dict[str, Any]], None]]

    def __init__(self, name: str, timeout_s: float) -> None:
        doorway = Doorway()
        self.address = KeeperAddress(doorway.address, new_key())
        self._timeout_s = timeout_s
        self._listening = ListenerThread(self.address.key, doorway.sockets, self._take, name)

    def close(self) -> None:
        """Listen no more."""
        self._listening.close()

    def _take(self, caller: Caller) -> None:
        threading.Thread(target=self._serve, args=(caller.socket,), name="bireme copies", daemon=True).start()

    def _serve(self, made: socket.socket) -> None:
        talk = RequestConnection(made, self._timeout_s)
        with made, suppress(OSError):
            try:
                asked = talk.hear()
                self.acts.get(str(asked.get("do")), _refuse)(talk, asked)
            except BiremeError as error:
                talk.say({"error": str(error)})


def _refuse(_talk: RequestConnection, asked: dict[str, Any]) -> None:
    raise BiremeError(f"{asked.get('do')!r} is no request that this process answers.")


class Keeper(RequestServer):
    """Holds copies, and serves them. `follower` is the keeper of the next host, which gets a copy of what the
    ranks of this host give.
    """

    def __init__(self, *, bytes_per_s: float | None, timeout_s: float) -> None:
        self.follower: KeeperAddress | None = None
        self._limit = RateLimit(bytes_per_s)
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()
        self.acts = {
            "keep": self._keep,
            "hold": self._hold,
            "list": self._list,
            "read": self._read,
            "follow": self._follow,
        }
        super().__init__("bireme keeper", timeout_s)

    def _of(self, shard: int) -> _Held:
        with self._lock:
            return self._held.setdefault(shard, _Held())

    def _follow(self, talk: RequestConnection, asked: dict[str, Any]) -> None:
        """Send copies to another keeper from now on, or to none."""
        self.follower = None if asked["follower"] is None else KeeperAddress(**asked["follower"])
        talk.say({})

    def _keep(self, talk: RequestConnection, asked: dict[str, Any]) -> None:
        """Take a version from a rank of this host, and send it on."""
        held, own = self._taken(talk, asked, is_coded=False)
        talk.say({"sent_bytes": self._sent_on(talk, held, own, asked)})

    def _hold(self, talk: RequestConnection, asked: dict[str, Any]) -> None:
        """Take a version from the keeper of another host."""
        self._taken(talk, asked, is_coded=True)

    def _taken(
        self, talk: RequestConnection, asked: dict[str, Any], *, is_coded: bool
    ) -> tuple[_Held, ShardVersion]:
        """A version that comes in as chunks, or as messages that another keeper has coded."""
        held = self._of(asked["shard"])
        with held.lock:
            coming = held.copies.begin(
                CopyVersion(*asked["version"]),
                asked["words"],
                asked["bytes"],
                began=asked["began"],
                settled=asked["settled"] and CopyVersion(*asked["settled"]),
            )
        talk.say({"before": coming.before})
        for index in range(len(coming.messages)):
            came = talk.chunk()
            with held.lock:
                if is_coded:
                    held.copies.put(coming, index, came[:DIGEST_BYTES], came[DIGEST_BYTES:])
                else:
                    held.copies.code(coming, index, came)
        with held.lock:
            held.copies.finish(coming)
        talk.say({"taken": True})
        return held, coming

    def _sent_on(self, talk: RequestConnection, held: _Held, own: ShardVersion, asked: dict[str, Any]) -> int:
        """Send a version on until the next keeper has it, and report trouble to the rank; returns the bytes.
        Without a next keeper there is nothing to send.
        """
        trouble = ""
        while (follower := self.follower) is not None:
            try:
                return self._send_on(held, own, follower, asked)
            except (OSError, BiremeError) as error:
                host = follower.address.partition(" ")[0]
                if str(error) != trouble:
                    trouble = str(error)
                    talk.say({"trouble": f"The keeper on {host} does not take a second copy: {trouble}"})
            with held.lock:
                if held.copies.find(own.version) is not own:
                    raise BiremeError(f"The second copy after step {own.version.step} was replaced.")
            time.sleep(_AGAIN_S)
        return 0

    def _send_on(self, held: _Held, own: ShardVersion, follower: KeeperAddress, asked: dict[str, Any]) -> int:
        """Send a version that is whole here to the next keeper, in differences if that one has the version
        before too; returns the bytes.
        """
        sent = 0
        with talk_to(follower, self._timeout_s, self._limit) as talk:
            talk.say({**asked, "do": "hold"})
            there = talk.hear()["before"]
            is_same = there is not None and CopyVersion(*there) == own.before
            for index in range(len(own.messages)):
                with held.lock:
                    message = own.messages[index]
                    if message is None or not is_same:
                        message = whole_message(held.copies.chunk(own.version, index))
                sent += talk.send(own.digests[index], message)
            talk.hear()
        return sent

    def _list(self, talk: RequestConnection, asked: dict[str, Any]) -> None:
        found = []
        for shard, held in sorted(self._held.items()):
            with held.lock:
                found += [
                    (shard, one.version, one.words, one.num_bytes, [digest.hex() for digest in one.digests])
                    for one in held.copies.versions
                    if not asked["checks"] or held.copies.is_intact(one.version)
                ]
        talk.say({"shards": found})

    def _read(self, talk: RequestConnection, asked: dict[str, Any]) -> None:
        """Send chunks of a whole version, as they are."""
        held, version = self._of(asked["shard"]), CopyVersion(*asked["version"])
        for index in range(asked["first"], asked["end"]):
            with held.lock:
                chunk = held.copies.chunk(version, index)
            talk.send(chunk)


# The keeper as a process of its own. It ends with the process that started it.


class KeeperProcess:
    """The keeper of this host, in a process that was started here. It sends at most `bytes_per_s`, or in a
    share of the link's time if that is None.
    """

    def __init__(self, bytes_per_s: float | None, timeout_s: float) -> None:
        self._bytes_per_s, self._timeout_s = bytes_per_s, timeout_s
        self._process: Process | None = None
        self._talk: Pipe | None = None
        self._address: KeeperAddress | None = None

    def started(self) -> KeeperAddress:
        """Where it listens. It is started if it does not run: then it holds nothing."""
        if self._process is None or self._process.status is not None or self._address is None:
            self.close()
            self._process, self._talk = start_process(
                "bireme keeper", _serve_copies, self._bytes_per_s, self._timeout_s
            )
            try:
                self._address = self._talk.recv()
            except EOFError:
                raise BiremeError("The keeper of second copies has ended; its output may say why.") from None
        return self._address

    def follow(self, follower: KeeperAddress | None) -> None:
        """Send copies to that keeper from now on."""
        if self._talk is not None:
            with suppress(OSError):
                self._talk.send(follower)

    def close(self) -> None:
        """End it, and all that it holds."""
        if self._talk is not None:
            self._talk.close()
        if self._process is not None:
            self._process.close()
        self._process = self._talk = self._address = None


def _serve_copies(talk: Pipe, bytes_per_s: float | None, timeout_s: float) -> None:
    """Serve until the starter hangs up. It says which keeper is the follower."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal, on which the ranks agree
    with suppress(OSError):
        os.nice(_LEAST_PRIORITY)
    keeper = Keeper(bytes_per_s=bytes_per_s, timeout_s=timeout_s)
    talk.send(keeper.address)
    with suppress(EOFError, OSError):
        while True:
            keeper.follower = talk.recv()
    keeper.close()
