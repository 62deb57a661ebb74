"""The probe: measure the devices and links of a run, and make a `Cluster` of them.

It is here and not in `cluster/`, the lowest floor, because it needs processes and the timing of a model's
units. What the measurements mean is inferred in `cluster/inference.py`, which is pure.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from bireme.cluster.device import Device
from bireme.cluster.inference import Inferred, infer
from bireme.cluster.machine import host_name, memory_bytes, num_cores
from bireme.cluster.probed import AllReduce, Experiment, Flow, Measurements, experiments_for
from bireme.devices import is_accelerator, synchronize
from bireme.errors import BiremeError, Progress
from bireme.memory.disk_tier import DiskTier, HostTier
from bireme.memory.system_memory import bytes_at, chunk_memory, pages
from bireme.profile.control import device_here
from bireme.runtime.fabric import DistFabric
from bireme.runtime.launch import launch
from bireme.runtime.world import World
from bireme.sync.group import MessageGroup

if TYPE_CHECKING:
    from bireme.devices import Backend


# Flows between ranks, timed: how late a message is, how fast flows go alone and at once, what a sum takes.
#
# Every function is called by all ranks of the world at the same time, with the same arguments, and gives the
# same on all. Flows go over torch.distributed: between CPUs over gloo, between CUDA devices over NCCL.

_SMALL_BYTES = 64
_FIRST_BYTES = 32 * 1024
_MOST_BYTES = 64 * 2**20
_NUM_UNDER_WAY = 2
"""Messages of a flow under way at once, so that the next one does not wait for the last one's way back."""


@dataclass(slots=True)
class _ProbeMember:
    """What one rank needs to take part: the world, and a group in which all agree on numbers on the CPU."""

    world: World
    agreeing: MessageGroup

    @staticmethod
    def of(world: World) -> "_ProbeMember":
        """All ranks make one together."""
        if world.backend != "nccl":
            world.join_torch()
        return _ProbeMember(world, DistFabric(world).everyone())

    def everyone(self, numbers: Sequence[float]) -> list[float]:
        """The sums of all ranks' numbers; each is known to one rank, and zero elsewhere."""
        told = torch.tensor(numbers, dtype=torch.float64)
        self.agreeing.all_reduce(told).wait()
        return [float(one) for one in told]

    def together(self) -> None:
        """Return when all ranks have come here."""
        self.everyone([0.0])

    def buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.world.device)

    def settle(self) -> None:
        """Wait until the device has done what it was given."""
        synchronize(self.world.device)


def message_s(line: _ProbeMember, pair: Flow, *, rounds: int, num_bytes: int = _SMALL_BYTES) -> float:
    """Half of what a message takes there and back, the median."""
    source, destination = pair
    rank = line.world.rank
    seconds = []
    line.together()
    if rank in pair:
        message = line.buffer(num_bytes)
        other = destination if rank == source else source
        for _ in range(rounds + 1):
            begin_s = perf_counter()
            if rank == source:
                dist.send(message, other)
                dist.recv(message, other)
                line.settle()
            else:
                dist.recv(message, other)
                line.settle()
                dist.send(message, other)
            seconds.append(perf_counter() - begin_s)
    own = median(seconds[1:]) / 2 if rank == source else 0.0
    return line.everyone([own])[0]


def message_bytes(line: _ProbeMember, flow: Flow, late_s: float, *, least_s: float) -> int:
    """How large messages must be to take some time and be much longer under way than they are late."""
    num_bytes = _FIRST_BYTES
    while True:
        taken_s = num_bytes / rates(line, [flow], [num_bytes], seconds=0.0)[0]
        if taken_s >= max(least_s, 4 * late_s) or num_bytes >= _MOST_BYTES:
            return num_bytes
        num_bytes *= 2 if taken_s * 8 > least_s else 4


def rates(line: _ProbeMember, flows: Sequence[Flow], sizes: Sequence[int], *, seconds: float) -> list[float]:
    """The bytes a second of flows that all go at once for so long, each in messages of its size.

    A rank may have several. The receiver counts, from its first message to its last.
    """
    rank = line.world.rank
    line.together()
    ends_s = perf_counter() + seconds
    own_rates = [0.0] * len(flows)

    def work(number: int) -> None:
        source, destination = flows[number]
        if source == rank:
            _send(line, destination, sizes[number], ends_s)
        else:
            own_rates[number] = _receive(line, source, sizes[number])

    own = [number for number, flow in enumerate(flows) if rank in flow]
    with ThreadPoolExecutor(max(len(own), 1), thread_name_prefix="bireme-flow") as threads:
        for done in [threads.submit(work, number) for number in own]:
            done.result()
    return line.everyone(own_rates)


_LEAST_MESSAGES = 3
LAST = 1


def _send(line: _ProbeMember, destination: int, num_bytes: int, ends_s: float) -> None:
    """The near end of a flow. The first byte of a message tells whether it is the last."""
    spare = [line.buffer(num_bytes) for _ in range(_NUM_UNDER_WAY)]
    under_way: deque[tuple[dist.Work, Tensor]] = deque()
    num_sent, is_last = 0, False
    while not is_last:
        if not spare:
            work, message = under_way.popleft()
            work.wait()
            spare.append(message)
        message = spare.pop()
        is_last = num_sent >= _LEAST_MESSAGES and perf_counter() >= ends_s
        message[0] = LAST if is_last else 0
        begun = dist.isend(message, destination)
        assert begun is not None
        under_way.append((begun, message))
        num_sent += 1
    for work, _message in under_way:
        work.wait()
    line.settle()


def _receive(line: _ProbeMember, source: int, num_bytes: int) -> float:
    """The far end: the bytes a second that came."""
    message = line.buffer(num_bytes)
    come_s: list[float] = []
    while not come_s or int(message[0]) != LAST:
        dist.recv(message, source)
        line.settle()
        come_s.append(perf_counter())
    return (len(come_s) - 1) * num_bytes / (come_s[-1] - come_s[0])


def _all_reduce_s(line: _ProbeMember, num_ranks: int, num_bytes: int, *, rounds: int) -> float:
    """What a sum over the first ranks takes, the median; the group must be made by all."""
    group = dist.new_group(list(range(num_ranks)))
    seconds = []
    line.together()
    if line.world.rank < num_ranks:
        numbers = torch.zeros(num_bytes // 4, device=line.world.device)
        for _ in range(rounds + 1):
            begin_s = perf_counter()
            dist.all_reduce(numbers, group=group)
            line.settle()
            seconds.append(perf_counter() - begin_s)
    own = median(seconds[1:]) if line.world.rank == 0 else 0.0
    return line.everyone([own])[0]


# How fast chunks travel on this machine: between a device and the host, and to a disk and back.

_COPY_BYTES = 32 * 2**20
_NUM_COPIES = 5
_CHUNK_BYTES, _NUM_CHUNKS = 2**17, 16
_NUM_SMALL = 99
_BLOCK_BYTES = 4 * 2**20
_FEWEST_BLOCKS, _MOST_BLOCKS = 4, 64
_DISK_S = 0.5
"""For the first of three passes, about."""
_USABLE = 0.9
"""The share of the free disk space that paging may fill."""


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """How fast chunks go between a device and its host, the slower way. On a processor, `copy_s` is what each
    copy takes besides its bytes, and `chunk_s` what mapping a slot beneath a chunk takes, or unmapping it.
    """

    bytes_per_s: float
    copy_s: float = 0.0
    chunk_s: float = 0.0

    def of(self, device: Device) -> Device:
        """The device with these speeds."""
        speed, copy_s, chunk_s = map(_rounded, (self.bytes_per_s, self.copy_s, self.chunk_s))
        return replace(device, host_bytes_per_s=speed, copy_s=copy_s, chunk_s=chunk_s)


def measured_host_speed(device: torch.device) -> HostSpeed:
    """An accelerator copies from and to pinned memory. In a processor's memory a slot is mapped before the
    copy, or unmapped after it, as chunks are.
    """
    if is_accelerator(device):
        below = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        above = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
        rates = (_copied_bytes_per_s(*both, device) for both in ((above, below), (below, above)))
        return HostSpeed(min(rates))
    up_s, down_s, _ = map(min, zip(*_laps(device, _COPY_BYTES, 1, _NUM_COPIES), strict=True))
    bytes_per_s = _COPY_BYTES / max(up_s, down_s)  # others only make it slower
    laps = _laps(device, _CHUNK_BYTES, _NUM_CHUNKS, _NUM_SMALL)
    up_s, down_s, mapped_s = map(median, zip(*laps, strict=True))
    return HostSpeed(bytes_per_s, max(max(up_s, down_s) - _CHUNK_BYTES / bytes_per_s, 0.0), mapped_s / 2)


def _laps(
    device: torch.device, num_bytes: int, num_chunks: int, num_copies: int
) -> list[tuple[float, float, float]]:
    """Seconds of copies of chunks of one size on a processor, each way, and of mapping with unmapping: of all
    chunks in turn, as in a run, for one that was just used takes less.
    """
    memory, host = chunk_memory(device, num_chunks, num_bytes), HostTier(num_bytes, device)
    host.grow(num_chunks)
    places = torch.split(memory.reserve(num_chunks, 0), num_bytes)
    found = []
    for number in range(num_copies):
        slot = number % num_chunks
        begin_s = perf_counter()
        memory.map(places[slot], slot)
        host.read(slot, places[slot])
        fetched_s = perf_counter()
        host.write(slot, places[slot])
        memory.unmap(places[slot])
        slot = (slot + 1) % num_chunks
        evicted_s = perf_counter()
        memory.map(places[slot], slot)
        memory.unmap(places[slot])
        found.append((fetched_s - begin_s, evicted_s - fetched_s, perf_counter() - evicted_s))
    return found


def _copied_bytes_per_s(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    seconds = []
    for _ in range(_NUM_COPIES):
        begin_s = perf_counter()
        to.copy_(source)
        synchronize(device)
        seconds.append(perf_counter() - begin_s)
    return _COPY_BYTES / min(seconds)


def check_disk_folder(folder: Path, name: str) -> None:
    """Refuse what is no folder that can be written to; `name` is the key that names it."""
    if not folder.is_dir():
        raise BiremeError(f"{name} is {folder}, which is not a folder. Make it, or name another.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BiremeError(f"{name} is {folder}, which cannot be written to. Name another folder.")


def free_disk_bytes(folder: Path) -> int:
    """What paging may fill of the disk that a folder is on."""
    space = os.statvfs(folder)
    return int(space.f_bavail * space.f_frsize * _USABLE)


def measured_disk_bytes_per_s(folder: Path) -> float:
    """How fast chunks go to the disk of a folder and back, half of the bytes each way: to slots that were
    written before, as in a run but for its first steps, for new ones take longer.
    """
    block = pages(_BLOCK_BYTES)
    bytes_at(block)[:] = os.urandom(2**16) * (_BLOCK_BYTES // 2**16)
    count, begin_s = 0, perf_counter()
    try:
        with closing(DiskTier(folder, _BLOCK_BYTES)) as tier:
            while count < _FEWEST_BLOCKS or (count < _MOST_BLOCKS and perf_counter() - begin_s < _DISK_S):
                tier.grow(1)
                tier.write(count, block)
                count += 1
            tier.flush()
            begin_s = perf_counter()
            for slot in range(count):
                tier.write(slot, block)
            tier.flush()
            for slot in range(count):
                tier.read(slot, block)
            seconds = perf_counter() - begin_s
    except BiremeError as error:
        why = getattr(error.__cause__, "strerror", None) or error
        raise BiremeError(f"The disk of {folder} cannot be measured: {why}.") from error
    return _rounded(2 * count * _BLOCK_BYTES / seconds)


MODEL = "gpt:layers=2,width=256,heads=4,vocab=512,context=64"
"""What devices are timed on if nobody names a model."""

_REPEATS = 3
_LATENCY_ROUNDS = 30
_SIZE_ROUNDS = 7
_CURVE_BYTES = (4 * 2**10, 32 * 2**10, 256 * 2**10)
"""Messages of which the seconds are measured besides the smallest and those of the bandwidth."""
_SUM_BYTES = 4 * 2**20
_SUM_ROUNDS = 5
_LEAST_FLOW_S = 0.01
_MOST_FLOW_S = 0.5
_MESSAGES_OF_FLOW = 5
"""At least, in the time that a flow is measured for."""
_MOST_RANKS = 256
_TIMEOUT_S = 300.0

ProgressBar = Callable[[str], AbstractContextManager[Progress]]
"""Opens a bar that shows a first text; the block calls it with the part that is done and the next text."""


@dataclass(frozen=True, slots=True)
class ProbeSetting:
    """`seconds` are for the links, about; `model` is timed with `batch` samples on every device. With `disk`,
    a folder on every server, what devices can page to is measured too.
    """

    model: str = MODEL
    batch: int = 1
    seconds: float = 20.0
    disk: Path | None = None

    def __post_init__(self) -> None:
        if not 0.1 <= self.seconds <= 86_400:
            raise BiremeError(f"The links are measured for {self.seconds:g} s; it must be 0.1 to 86,400.")
        if self.batch < 1:
            raise BiremeError(f"The batch is {self.batch}; it must be at least 1.")


@dataclass(frozen=True, slots=True)
class _Probe:
    """What was measured and what follows from it."""

    measurements: Measurements
    inferred: Inferred

    @property
    def notes(self) -> tuple[str, ...]:
        """What the cluster's file does not say."""
        sums = ", ".join(
            f"{one.seconds * 1e3:.3g} ms over {one.num_devices}" for one in self.measurements.all_reduces
        )
        told = [f"A sum of {_SUM_BYTES / 2**20:g} MiB takes {sums}."] if sums else []
        joint = [one for one in self.measurements.experiments if len(one.flows) > 1]
        if joint:
            told.append(
                f"The links explain {len(joint)} experiments with flows that may meet to "
                f"{self.inferred.error:.1%} on average."
            )
        return (*told, *self.inferred.notes)


def _no_bar(_first: str) -> AbstractContextManager[Progress]:
    """Of the ranks other than the first, and of callers that show no bar."""
    return nullcontext(lambda _done, _what: None)


def probe_here(
    num_processes: int,
    setting: ProbeSetting | None = None,
    *,
    backend: "Backend" = "gloo",
    progress_bar: ProgressBar = _no_bar,
) -> _Probe:
    """Probe this machine with so many processes of its own. The first process opens the bar."""
    setting = setting or ProbeSetting()
    _check_setting(setting)
    if not 1 <= num_processes <= _MOST_RANKS:
        raise BiremeError(f"{num_processes} processes cannot be probed; it takes 1 to {_MOST_RANKS}.")
    found = launch(_probe_in, num_processes, setting, progress_bar, backend=backend, timeout_s=_TIMEOUT_S)[0]
    assert found is not None
    return found


def probe_of_environment(
    setting: ProbeSetting,
    *,
    backend: "Backend" = "gloo",
    progress_bar: ProgressBar = _no_bar,
) -> _Probe | None:
    """Probe the ranks that torchrun started, of which this is one; None on all but the first."""
    _check_setting(setting)
    with World.from_environment(timeout_s=_TIMEOUT_S, backend=backend) as world:
        return _probe_in(world, setting, progress_bar)


def _check_setting(setting: ProbeSetting) -> None:
    """Refuse a model or a folder that there is not, before processes are started."""
    from bireme.model.sources import load_source

    load_source(setting.model, batch=setting.batch)
    if setting.disk is not None:
        check_disk_folder(setting.disk, "--disk")


def _probe_in(world: World, setting: ProbeSetting, progress_bar: ProgressBar) -> _Probe | None:
    """On every rank of an open world; the first has the result."""
    open_bar = progress_bar if world.rank == 0 else _no_bar
    with open_bar("finding the ranks") as progress:
        line = _ProbeMember.of(world)
        progress(0.0, "timing the devices")
        hosts, devices = _devices(world, line, setting)
        found = _links(line, setting, hosts, progress)
        sums = [
            AllReduce(size, _SUM_BYTES, _all_reduce_s(line, size, _SUM_BYTES, rounds=_SUM_ROUNDS))
            for size in _group_sizes(world.size)
        ]
        tiers = _tiers(world, line, hosts, setting.disk) if setting.disk is not None else {}
        line.together()
    if world.rank:
        return None
    measurements = replace(found, devices=tuple(devices), all_reduces=tuple(sums))
    return _Probe(measurements, _with_tiers(infer(measurements), tiers))


def _group_sizes(num_ranks: int) -> list[int]:
    sizes = [2**power for power in range(1, num_ranks.bit_length()) if 2**power < num_ranks]
    return [*sizes, num_ranks] if num_ranks > 1 else []


def _devices(
    world: World, line: _ProbeMember, setting: ProbeSetting
) -> "tuple[tuple[str, ...], list[Device]]":
    """Every rank's server and device, with its speed relative to the first one's. All are timed at once."""
    own = device_here(world.device)
    line.together()
    own_s = _unit_seconds(world, setting)
    told = {"host": host_name(), "device": asdict(own), "seconds": own_s}
    all_told = _all_told(world, line, "devices", told)
    hosts = tuple(str(one["host"]) for one in all_told)
    devices = []
    for one in all_told:
        device = Device(**one["device"])
        if device.kind == "cpu":
            # The processes of a server share its processor and memory.
            sharers = hosts.count(one["host"])
            cores = max(1, num_cores() // sharers) if one["host"] == told["host"] else 0
            device = replace(device, memory_bytes=device.memory_bytes // sharers, num_cores=cores)
        speed = all_told[0]["seconds"] / one["seconds"]
        devices.append(replace(device, speed=float(f"{speed:.3g}")))
    return hosts, devices


@dataclass(frozen=True, slots=True)
class _Tiers:
    """What a server's devices can page to, and how fast."""

    host: HostSpeed
    host_memory_bytes: int
    disk_bytes: int
    disk_bytes_per_s: float


def _tiers(world: World, line: _ProbeMember, hosts: tuple[str, ...], folder: Path) -> dict[str, _Tiers]:
    """Of each server, measured by its first rank while the others of it wait."""
    own: dict[str, Any] = {}
    if hosts.index(hosts[world.rank]) == world.rank:
        found = _Tiers(
            measured_host_speed(world.device),
            memory_bytes() if world.device.type != "cpu" else 0,
            free_disk_bytes(folder),
            measured_disk_bytes_per_s(folder),
        )
        own = asdict(found)
    all_told = _all_told(world, line, "tiers", own)
    told = {host: all_told[hosts.index(host)] for host in hosts}
    return {host: _Tiers(**one | {"host": HostSpeed(**one["host"])}) for host, one in told.items()}


def _all_told(world: World, line: _ProbeMember, what: str, own: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank has found, by rank."""
    world.store.set(f"probe/{what}/{world.rank}", json.dumps(own))
    line.together()
    return [json.loads(world.store.get(f"probe/{what}/{rank}")) for rank in range(world.size)]


def _with_tiers(inferred: Inferred, tiers: Mapping[str, _Tiers]) -> Inferred:
    """The servers with what they can page to. Servers are in the order of their hosts."""
    if not tiers:
        return inferred
    cluster = inferred.cluster
    servers = (
        replace(
            server,
            devices=tuple(map(own.host.of, server.devices)),
            host_memory_bytes=own.host_memory_bytes,
            disk_bytes=own.disk_bytes,
            disk_bytes_per_s=own.disk_bytes_per_s,
        )
        for server, own in zip(cluster.servers, tiers.values(), strict=True)
    )
    return replace(inferred, cluster=replace(cluster, servers=tuple(servers)))


def _rounded(figure: float) -> float:
    return float(f"{figure:.3g}")


def _unit_seconds(world: World, setting: ProbeSetting) -> float:
    """Forward and backward of all units of the model on this rank's device."""
    from bireme.model.capture import Captures
    from bireme.model.sources import load_source
    from bireme.profile.profiler import profile
    from bireme.profile.timing import Effort

    source = load_source(setting.model, batch=setting.batch)
    captures = Captures(source.model, source.example_inputs, name=setting.model)
    found = profile(
        captures.graph,
        world.device,
        [setting.batch],
        examples=source.example_inputs,
        effort=Effort(num_least=9, seconds_per_unit=0.3),
        use_cache=False,
    )
    return sum(unit.costs[0].forward_s + unit.costs[0].backward_s for unit in found.units)


def _links(
    line: _ProbeMember, setting: ProbeSetting, hosts: tuple[str, ...], progress: Progress
) -> Measurements:
    """All ways alone, then flows that may meet. The devices are yet to be filled in."""
    experiments = experiments_for(hosts)
    alone = [flows[0] for flows in experiments if len(flows) == 1]
    each_s = setting.seconds / max(len(experiments), 1) / _REPEATS
    flow_s = min(max(each_s, _LEAST_FLOW_S), _MOST_FLOW_S)
    late_s: dict[Flow, float] = {}
    sizes: dict[Flow, int] = {}
    by_size: dict[Flow, tuple[tuple[int, float], ...]] = {}
    for number, flow in enumerate(alone):
        progress(0.3 * number / len(alone), f"way {number + 1} of {len(alone)}: latency, size of messages")
        late_s[flow] = message_s(line, flow, rounds=_LATENCY_ROUNDS)
        sizes[flow] = message_bytes(line, flow, late_s[flow], least_s=flow_s / _MESSAGES_OF_FLOW)
        if flow[0] < flow[1]:
            by_size[flow] = tuple(
                (size, message_s(line, flow, rounds=_SIZE_ROUNDS, num_bytes=size))
                for size in _CURVE_BYTES
                if size < sizes[flow]
            )
    found = []
    for number, flows in enumerate(experiments):
        done = 0.3 + 0.7 * number / len(experiments)
        progress(done, f"flows {number + 1} of {len(experiments)}: {_shown(flows)}")
        own = [sizes[flow] for flow in flows]
        laps = [rates(line, flows, own, seconds=flow_s) for _ in range(_REPEATS)]
        found.append(Experiment(flows, tuple(median(same) for same in zip(*laps, strict=True))))
    progress(1.0, "sums over groups")
    # A message is as late one way as the other, as far as anyone can tell without a common clock.
    even = {(a, b): (late_s[a, b] + late_s[b, a]) / 2 for a, b in late_s}
    devices = (Device("", "cpu"),) * len(hosts)
    return Measurements(hosts, devices, even, tuple(found), by_size=by_size)


def _shown(flows: tuple[Flow, ...]) -> str:
    return ", ".join(f"{a} → {b}" for a, b in flows[:3]) + (", …" if len(flows) > 3 else "")
