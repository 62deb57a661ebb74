"""Emulated links: when the messages of several processes come through the lanes that they share.

Messages between two ranks go one after the other. Those of different pairs that meet on a lane share it
fairly, at every moment, as in the simulator. Nobody serves the lanes: what is under way lies in a file that
all processes map, and whoever looks at it first brings it up to the present. So there is no message and no
wake-up other than those of the engine.
"""

import fcntl
import pickle
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Self

from bireme.cluster.inference import fair_rates

__all__ = ["Channel", "Lanes", "SharedLanes"]

FILE_BYTES = 1 << 20
LENGTH_BYTES = 8
LEAST_SLEEP_S = 1e-5


@dataclass(frozen=True, slots=True)
class Channel:
    """What carries messages one after the other: the lanes they cross, by number, and by how much they are
    late.

    A message sets out when `num_ready` have said that they are ready for it, and `num_takers` look when it
    has come.
    """

    lanes: tuple[int, ...]
    latency_s: float = 0.0
    num_ready: int = 2
    num_takers: int = 1


@dataclass(slots=True)
class _Flow:
    channel: int
    key: Hashable
    left_bytes: float
    rate: float = 0.0


@dataclass(slots=True)
class Lanes:
    """What is under way on some lanes at `now_s`; pure, and told the time by who asks."""

    bytes_per_s: tuple[float, ...]
    channels: tuple[Channel, ...]
    now_s: float = 0.0
    flows: list[_Flow] = field(default_factory=list)
    queues: dict[int, list[tuple[Hashable, float]]] = field(default_factory=dict)
    num_ready: dict[tuple[int, Hashable], int] = field(default_factory=dict)
    through_s: dict[tuple[int, Hashable], float] = field(default_factory=dict)
    """When messages came through that not all have taken."""
    num_taken: dict[tuple[int, Hashable], int] = field(default_factory=dict)

    def ready(self, channel: int, key: Hashable, num_bytes: float, now_s: float) -> None:
        """One end is ready for a message; when all are, it sets out."""
        self.advance(now_s)
        place = channel, key
        count = self.num_ready.pop(place, 0) + 1
        if count < self.channels[channel].num_ready:
            self.num_ready[place] = count
            return
        if any(flow.channel == channel for flow in self.flows):
            self.queues.setdefault(channel, []).append((key, num_bytes))
        else:
            self._begin(channel, key, num_bytes)
            self._share()

    def arrival_s(self, channel: int, key: Hashable) -> float | None:
        """When a message is there, as things are now; None if it has not set out. Nothing changes."""
        place = channel, key
        future = self._copy()
        while place not in future.through_s and future.flows:
            future.advance(future._next_end_s())
        through_s = future.through_s.get(place)
        return None if through_s is None else through_s + self.channels[channel].latency_s

    def take(self, channel: int, key: Hashable) -> None:
        """One of those who look for a message has seen that it is there."""
        place = channel, key
        count = self.num_taken.pop(place, 0) + 1
        if count < self.channels[channel].num_takers:
            self.num_taken[place] = count
        else:
            del self.through_s[place]

    def advance(self, now_s: float) -> None:
        """Let everything continue until then."""
        while self.flows and (end_s := self._next_end_s()) <= now_s:
            self._flow_until(end_s)
            ended = [flow for flow in self.flows if flow.left_bytes <= 0]
            self.flows = [flow for flow in self.flows if flow.left_bytes > 0]
            for flow in ended:
                self.through_s[flow.channel, flow.key] = end_s
                if queue := self.queues.get(flow.channel):
                    self._begin(flow.channel, *queue.pop(0))
            self._share()
        self._flow_until(max(now_s, self.now_s))

    def _begin(self, channel: int, key: Hashable, num_bytes: float) -> None:
        if num_bytes > 0 and self.channels[channel].lanes:
            self.flows.append(_Flow(channel, key, num_bytes))
            return
        self.through_s[channel, key] = self.now_s
        if queue := self.queues.get(channel):
            self._begin(channel, *queue.pop(0))

    def _share(self) -> None:
        paths = [self.channels[flow.channel].lanes for flow in self.flows]
        rates = fair_rates(paths, {lane: self.bytes_per_s[lane] for path in paths for lane in path})
        for flow, rate in zip(self.flows, rates, strict=True):
            flow.rate = rate

    def _next_end_s(self) -> float:
        return self.now_s + min(flow.left_bytes / flow.rate for flow in self.flows)

    def _flow_until(self, now_s: float) -> None:
        passed_s = now_s - self.now_s
        next_s = min((flow.left_bytes / flow.rate for flow in self.flows), default=0.0)
        for flow in self.flows:
            # The one that comes through leaves nothing, whatever the rounding.
            is_last = flow.left_bytes / flow.rate <= next_s and self.now_s + next_s <= now_s
            flow.left_bytes = 0.0 if is_last else flow.left_bytes - flow.rate * passed_s
        self.now_s = now_s

    def _copy(self) -> "Lanes":
        return Lanes(
            self.bytes_per_s,
            self.channels,
            self.now_s,
            [_Flow(flow.channel, flow.key, flow.left_bytes, flow.rate) for flow in self.flows],
            {channel: list(queue) for channel, queue in self.queues.items()},
            {},
            dict(self.through_s),
            {},
        )

    def plain(self) -> tuple[object, ...]:
        """What changes, as small as can be."""
        flows = [(flow.channel, flow.key, flow.left_bytes, flow.rate) for flow in self.flows]
        queues = {channel: queue for channel, queue in self.queues.items() if queue}
        return self.now_s, flows, queues, self.num_ready, self.through_s, self.num_taken

    def load(self, plain: tuple[object, ...]) -> None:
        """Take over what another has left."""
        self.now_s, flows, self.queues, self.num_ready, self.through_s, self.num_taken = plain  # type: ignore[assignment]  # it is what plain() gave
        self.flows = [_Flow(*flow) for flow in flows]  # type: ignore[attr-defined]  # the same


class SharedLanes:
    """The lanes as one process sees them. All must make them alike, over the same file, on one machine."""

    def __init__(self, path: Path, bytes_per_s: Sequence[float], channels: Sequence[Channel]) -> None:
        self._lanes = Lanes(tuple(bytes_per_s), tuple(channels))
        self._file = path.open("r+b")
        self._map = mmap(self._file.fileno(), FILE_BYTES)
        self._thread_lock = threading.Lock()

    @staticmethod
    def make(path: Path) -> None:
        """Make the file, before any process uses it."""
        path.write_bytes(bytes(FILE_BYTES))

    def ready(self, channel: int, key: Hashable, num_bytes: float) -> None:
        """This end is ready for a message."""
        with self:
            self._lanes.ready(channel, key, num_bytes, time.monotonic())

    def wait(self, channel: int, key: Hashable) -> None:
        """Return when a message is there. All who must be ready for it have said so."""
        while True:
            with self:
                now_s = time.monotonic()
                self._lanes.advance(now_s)
                arrival_s = self._lanes.arrival_s(channel, key)
                if arrival_s is None:
                    raise RuntimeError(f"message {key} of channel {channel} has not set out")
                if arrival_s <= now_s:
                    self._lanes.take(channel, key)
                    return
            # What sets out meanwhile may make it later, so look again.
            time.sleep(max(arrival_s - now_s, LEAST_SLEEP_S))

    def plain(self) -> tuple[object, ...]:
        """What is under way; for who holds the lanes as a context."""
        return self._lanes.plain()

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()
        self._file.close()

    def __enter__(self) -> Self:
        self._thread_lock.acquire()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        length = int.from_bytes(self._map[:LENGTH_BYTES], "little")
        if length:
            self._lanes.load(pickle.loads(self._map[LENGTH_BYTES : LENGTH_BYTES + length]))
        return self

    def __exit__(self, *error: object) -> None:
        try:
            data = pickle.dumps(self._lanes.plain(), protocol=5)
            if LENGTH_BYTES + len(data) > FILE_BYTES:
                raise RuntimeError(
                    f"{len(data)} bytes of messages under way are too many for the lanes' file"
                )
            self._map[: LENGTH_BYTES + len(data)] = len(data).to_bytes(LENGTH_BYTES, "little") + data
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._thread_lock.release()
