"""What the end of a batch takes for some parameters: REDUCE, TRIAL and UPDATE, run by the engine.

The parameters of a unit are put into a model that does nothing with them but give each a gradient, and the
engine trains that on this process alone under the rule that has all three instructions. Between batches,
and before TRIAL and UPDATE, other memory is gone through: in training other work fills the caches.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from socket import socketpair
from statistics import median
from time import perf_counter, process_time, thread_time

import torch
from torch import Tensor, nn

from bireme.balance import Times
from bireme.cluster.device import EngineCost
from bireme.devices import synchronize
from bireme.memory.arena import LentArena, Slots
from bireme.model.capture import capture
from bireme.model.graph import Graph, ModelState, Operator, Output, Reference, Value
from bireme.model.stage import untouched
from bireme.model.units import Unit
from bireme.plan.plan import Plan
from bireme.profile.measuring import BatchEndTimes
from bireme.profile.timing import waited_s
from bireme.runtime.fabric import DistFabric, Fabric, PipelineFabric
from bireme.runtime.pipeline import Pipeline
from bireme.runtime.settings import PipelineSettings, named_optimizer
from bireme.runtime.shared_weights import Sharers
from bireme.runtime.stage import LOSS, Stage
from bireme.runtime.world import World
from bireme.schedule.instruction import RECEIVES, SENDS, Instruction, Kind, Message
from bireme.sync.exchange import BatchGradients, sum_flats
from bireme.sync.slices import DENSE_SLICE_BYTES, SLICE_BYTES
from bireme.timeline.timeline import Timeline

# What instructions and messages take, read off what ranks of a machine did with messages of two sizes.
#
# The last rank has much to do and the others little, so that what goes forward has come long before it is
# used, and what comes back is waited for. That tells apart what a message costs the rank that takes it and
# how long it is under way.

WIDTH = 64
_HEAVY = 320
"""Rows and columns of a matrix that the last rank multiplies by itself."""

_SMALL_BYTES = 4 * 2**10
NUM_MICROBATCHES = 6
_NUM_SETTLING_MESSAGES, _NUM_COUNTED_MESSAGES = 4, 8

_SURELY_S = 2e-4
"""A message that was sent so long before has come, and one that is sent so long after has not."""


class _Lopsided(nn.Module):
    def __init__(self, num_ranks: int, *, is_tied: bool) -> None:
        super().__init__()
        self.is_tied = is_tied
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks)))
        self.heavy = nn.Parameter(torch.empty(_HEAVY, _HEAVY))

    def forward(self, given: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """How far the result is from what is wanted; the heavy part counts as well."""
        bias = self.layers[0].bias if self.is_tied else 0.0
        given = self.layers(given) + bias  # ahead of the heavy part, which thus belongs to the last stage
        heavy = (self.heavy @ self.heavy @ self.heavy).mean()
        return {"loss": nn.functional.mse_loss(given, wanted) + heavy}


def lopsided_graph(num_ranks: int, *, is_tied: bool = False) -> Graph:
    """The model for so many ranks, captured, so that they need not do it: what that takes no rank of a run
    takes. If it `is_tied`, the first and the last stage share a parameter, and a thread of each rank sums.
    """
    batch = {name: torch.ones(2, WIDTH) for name in ("given", "wanted")}
    return capture(_Lopsided(num_ranks, is_tied=is_tied), batch, name="lopsided")


def message_costs(
    world: World,
    graph: Graph,
    large_bytes: int,
    reads: Iterator[object],
    *,
    counts_threads: bool,
) -> EngineCost:
    """The costs of a message, of instructions and of a batch, found with that model.

    `large_bytes` is about as much as a message of the model to be trained has; between it and a small one
    costs grow evenly. `reads` gives batches of a run, as its ranks read them. With `counts_threads` the other
    threads of a process take the core from its rank; without it they have cores of their own. Operators must
    have one thread then.
    """
    # Large ones first: what a process does for the first time it does slowly.
    large_bytes = max(large_bytes, 2 * _SMALL_BYTES)
    large, large_beside_s = _run_messages(world, graph, large_bytes, reads)
    small, small_beside_s = _run_messages(world, graph, _SMALL_BYTES, reads)
    if counts_threads:
        # Only large messages have threads of their own.
        num_sent = ((world.rank > 0) + (world.rank < world.size - 1)) * _num_microbatches(world)
        moving_s = max(large_beside_s - small_beside_s, 0.0) / num_sent
        large = replace(large, send_s=large.send_s + moving_s)
        small = replace(small, batch_s=small.batch_s + small_beside_s)
    more = large_bytes - _SMALL_BYTES
    send, take, late = (
        max(one - other, 0.0) / more
        for one, other in (
            (large.send_s, small.send_s),
            (large.take_s, small.take_s),
            (large.late_s, small.late_s),
        )
    )
    costs = replace(
        small,
        send_s=max(small.send_s - send * _SMALL_BYTES, 0.0),
        send_s_per_byte=send,
        take_s=max(small.take_s - take * _SMALL_BYTES, 0.0),
        take_s_per_byte=take,
        late_s=max(small.late_s - late * _SMALL_BYTES, 0.0),
        late_s_per_byte=late,
    )
    return exchange_costs(DistFabric(world), world.device, costs)


def _num_microbatches(world: World) -> int:
    return max(NUM_MICROBATCHES, world.size)


def _run_messages(
    world: World, graph: Graph, num_bytes: int, reads: Iterator[object]
) -> tuple[EngineCost, float]:
    """The costs with messages of one size, and what threads beside the rank's own take for a batch."""
    samples = max(1, num_bytes // (4 * WIDTH))
    num_microbatches = _num_microbatches(world)
    torch.manual_seed(0)
    batch = {name: torch.randn(samples * num_microbatches, WIDTH) for name in ("given", "wanted")}
    pipeline = Pipeline(
        graph,
        Plan(tuple(range(1, world.size)), num_microbatches, "2bw"),
        world,
        weights=lambda names: {
            state.name: torch.full(state.shape, 1e-3) for state in graph.parameters if state.name in names
        },
        optimizer="sgd",
    )

    def batches(count: int) -> Iterator[Mapping[str, Tensor]]:
        for _ in islice(reads, count):
            yield batch

    for _ in pipeline.train(batches(_NUM_SETTLING_MESSAGES)):
        pass
    before_s = process_time() - thread_time()
    for _ in pipeline.train(batches(_NUM_COUNTED_MESSAGES), record=True):
        pass
    beside_s = (process_time() - thread_time() - before_s) / _NUM_COUNTED_MESSAGES
    costs = read_off(pipeline.timeline())
    pipeline.close()
    return costs, beside_s


def read_off(timeline: Timeline) -> EngineCost:
    """What messages of one size and instructions took in a measured run of several batches; the cost of a
    message is all in the part that does not grow.
    """
    num_stages = timeline.program.num_stages
    sent_s: dict[Message, float] = {}
    reduced_s: dict[int, float] = {}
    for one in (one for rank in timeline.ranks for one in rank.intervals()):
        if one.instruction.kind in SENDS:
            sent_s[one.instruction.carries()] = one.end_s
        elif one.instruction.kind is Kind.REDUCE:
            reduced_s[one.instruction.batch] = max(reduced_s.get(one.instruction.batch, 0.0), one.end_s)
    lasts: dict[bool, list[float]] = {True: [], False: []}
    plain, taken, late, agreed = (list[float]() for _ in range(4))
    turns: list[list[float]] = []
    for rank in timeline.ranks:
        by_place: dict[tuple[Kind, int, int | None], list[float]] = {}
        for before, one in pairwise(one for one in rank.intervals() if one.instruction.batch > 0):
            step, gap_s = one.instruction, one.start_s - before.end_s
            message = step.needs(num_stages)
            if step.kind in SENDS | RECEIVES:
                lasts[step.kind in SENDS].append(one.end_s - one.start_s)
            if step.kind is Kind.UPDATE:
                if before.end_s < reduced_s[step.batch]:
                    agreed.append(one.start_s - reduced_s[step.batch])
            elif message is None:
                plain.append(gap_s)
                by_place.setdefault((step.kind, step.stage, step.microbatch), []).append(gap_s)
            elif sent_s[message] < before.end_s - _SURELY_S:
                taken.append(gap_s)
            elif sent_s[message] > before.end_s + _SURELY_S:
                late.append(one.start_s - sent_s[message])
        turns.append([_median(gaps) for gaps in by_place.values()])
    instruction_s, take_s = _median(plain), _median(taken)
    return EngineCost(
        instruction_s=instruction_s,
        send_s=_median(lasts[True]),
        receive_s=_median(lasts[False]),
        take_s=max(take_s - instruction_s, 0.0),
        late_s=max(_median(late) - take_s, 0.0),
        # The next batch is cut at one place of a batch's instructions, and a result is given at another.
        batch_s=_median([sum(gap_s - instruction_s for gap_s in gaps) for gaps in turns]),
        agree_s=_median(agreed),
    )


def _median(values: list[float]) -> float:
    return max(median(values), 0.0) if values else 0.0


# What a machine loses when it wakes a process while all cores are wanted: the kernel may let the process wait
# for a busy core while another core is idle. Processes in a ring, one more than there are cores, compute and
# pass tokens on, one token for each core: every core always has work, so the time in which cores are idle is
# lost. Other programs use such time, so they make the figures smaller, never larger.

_RINGS = ((0.001, 200), (0.01, 30))
"""Seconds of work for a token, and how many tokens each process takes: a share of short work is lost, and of
long work no more than the kernel lets a process wait."""
_NUM_SETTLING_LAPS = 5
_PASS_ON = f"""
import os, sys, time
def idle_s():
    with open("/proc/stat") as file:
        return sum(map(int, file.readline().split()[4:6])) / os.sysconf("SC_CLK_TCK")
source, target, count, work_s = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
for number in range(count):
    if number == {_NUM_SETTLING_LAPS}:
        begin_s, begin_idle_s = time.perf_counter(), idle_s()
    if not os.read(source, 1):
        sys.exit(1)
    end_s = time.thread_time() + work_s
    while time.thread_time() < end_s:
        pass
    try:
        os.write(target, b"x")
    except BrokenPipeError:
        pass  # the last tokens, which nobody takes
print(time.perf_counter() - begin_s, idle_s() - begin_idle_s)
"""


def wake_costs(num_cores: int) -> tuple[float, float]:
    """`wake_share` and `wake_s` of a machine with `num_cores`; 0 if its kernel does not count idle time."""
    if not Path("/proc/stat").exists():
        return 0.0, 0.0
    short_s, long_s = (_lost_s(num_cores, *ring) for ring in _RINGS)
    return short_s / _RINGS[0][0], max(short_s, long_s)


def _lost_s(num_cores: int, work_s: float, count: int) -> float:
    """The seconds of a core that are lost for each token that a process of the ring takes."""
    size = num_cores + 1
    processes = []
    with ExitStack() as stack:
        pairs = [[stack.enter_context(end) for end in socketpair()] for _ in range(size)]
        for place in range(size):
            own = pairs[place][0].fileno(), pairs[(place + 1) % size][1].fileno()
            words = [sys.executable, "-S", "-c", _PASS_ON, *map(str, (*own, count, work_s))]
            processes.append(
                subprocess.Popen(
                    words, pass_fds=own, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            )
        for _, token in pairs[:num_cores]:
            token.send(b"x")
    # The ring holds its ends alone now: if a process dies, the others find the ring broken and end.
    said = [one.communicate()[0] for one in processes]
    if any(one.returncode for one in processes):
        return 0.0
    took_s, idle_s = map(float, said[0].split())
    num_tokens = size * (count - _NUM_SETTLING_LAPS)
    # Cores that this process may not use can be idle as well.
    return max(min(idle_s / num_tokens, num_cores * took_s / num_tokens - work_s), 0.0)


# The seconds for a byte that the processes of a machine exchange as replicas do: they sum whole gradients, or
# gather parts of weights into memory that is new to them and sum gradients part by part there.

_EXCHANGED_ELEMENTS = 4 * 2**20
_NUM_EXCHANGES = 3


@torch.no_grad()
def exchange_costs(joined: Fabric, device: torch.device, known: EngineCost) -> EngineCost:
    """The known costs of the engine, with the seconds for a byte that the ranks of this machine exchange."""
    fabric, size = PipelineFabric(joined), joined.size
    group = fabric.group(range(size))
    assert group is not None, "this process is one of all"
    sharers = Sharers(joined.rank, size, gathers=True)
    sharers.join(group, None, device)
    parts = tuple(place * _EXCHANGED_ELEMENTS // size for place in range(size + 1))
    arena = LentArena(Slots({"weights": (_EXCHANGED_ELEMENTS,)}), torch.float32, device)
    whole = torch.zeros_like(arena.flat)

    def reduce() -> None:
        sum_flats(group, [whole], SLICE_BYTES, sharers.summed)

    def gather() -> None:
        arena.take()
        arena.flat[parts[joined.rank] : parts[joined.rank + 1]].fill_(0.0)
        for pending in sharers.gather([(arena.flat, parts)], trains=False):
            pending.wait()
        arena.let_go()

    def sum_in_parts() -> None:
        arena.take()
        arena.flat.fill_(0.0)
        gradients = BatchGradients(arena.views, {"weights"}, [arena.flat], parts=[parts])
        sharers.how.sum(group, ["weights"], gradients, DENSE_SLICE_BYTES, sharers.summed, batch=0)
        arena.let_go()

    def median_s(exchange: Callable[[], None]) -> float:
        laps = []
        for _ in range(1 + _NUM_EXCHANGES):
            group.all_reduce(torch.zeros(1, device=device)).wait()
            begin_s = _busy_s(device)
            exchange()
            laps.append(_busy_s(device) - begin_s)
        return median(laps[1:])

    part_bytes = arena.num_bytes * (size - 1) / size
    found = replace(
        known,
        reduce_s_per_byte=median_s(reduce) / (2 * part_bytes),
        gather_s_per_byte=median_s(gather) / part_bytes,
        scatter_s_per_byte=median_s(sum_in_parts) / part_bytes,
    )
    sharers.close()
    fabric.close()
    return found


def _busy_s(device: torch.device) -> float:
    """A clock that runs while this process works: on a processor the time of all its threads, without
    waits.
    """
    synchronize(device)
    return process_time() if device.type == "cpu" else perf_counter()


# How long each replica takes for micro-batches of several sizes, measured on its own devices.
#
# All ranks run the forward and the backward of their own stages at the same time, on the real model and
# shapes and with the weights that they train, which stay as they are. What comes from a neighbor is made up.
# A replica is as fast as its slowest rank.

_NUM_RUNS, _LEAST_S = 5, 0.2
"""So often, and for so long, is each stage run at each size: what is over soon scatters most."""
_NEVER = float("inf")

Rows = Callable[[int, Sequence[str]], Mapping[str, Tensor]]
"""Gives so many samples of some inputs of the model."""


def replica_times(pipeline: Pipeline, rows: Rows, sizes: Sequence[int], most: Sequence[int]) -> list[Times]:
    """What each replica takes for each of the sizes, of which its memory holds those up to `most[replica]`.

    All ranks call it, when nothing is under way.
    """
    per_replica = pipeline.layout.num_pipeline_ranks
    found: list[list[float]] = [[] for _ in most]
    for size in sizes:
        own_s = 0.0
        for stage in pipeline.stages.values():
            with _gathered(stage):
                if size <= most[pipeline.layout.replica]:
                    own_s += _seconds(pipeline, stage, rows, size)
        of_ranks = pipeline.gather([own_s])
        for replica, seconds in enumerate(found):
            ranks = of_ranks[replica * per_replica : (replica + 1) * per_replica]
            seconds.append(max(row[0] for row in ranks) if size <= most[replica] else _NEVER)
    return [Times(tuple(sizes), tuple(seconds)) for seconds in found]


def _gathered(stage: Stage) -> AbstractContextManager[object]:
    """Within this context a stage's weights are whole here, where each replica keeps a part of them."""
    gathered = stage.banks.gathered
    return nullcontext() if gathered is None else gathered.lent(stage.banks.newest_version)


def _seconds(pipeline: Pipeline, stage: Stage, rows: Rows, size: int) -> float:
    """The median of a stage's forward and backward, after a first one that does not count."""
    device = pipeline.device
    given = {name: one.to(device) for name, one in rows(size, stage.function.inputs).items()}
    specs = pipeline.boundaries.forward(stage.index, size).specs
    received = {spec.name: _made_up(spec.shape, spec.dtype, device) for spec in specs}
    laps: list[float] = []
    while len(laps) <= _NUM_RUNS or sum(laps) < _LEAST_S:
        synchronize(device)
        begin_s = perf_counter()
        _run(stage, given, received, device)
        synchronize(device)
        laps.append(perf_counter() - begin_s)
    return median(laps[1:])


def _made_up(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)


def _run(
    stage: Stage, given: Mapping[str, Tensor], received: Mapping[str, Tensor], device: torch.device
) -> None:
    """One forward and one backward, of which nothing is kept."""
    function, banks = stage.function, stage.banks
    leaves = {
        name: tensor.requires_grad_(name in banks.trainable)
        for name, tensor in banks.newest_to_compute_with().items()
    }
    into = {
        name: tensor.detach().requires_grad_(tensor.dtype.is_floating_point)
        for name, tensor in received.items()
    }
    buffers = untouched(stage.buffers, function.writes)
    results = function(leaves, buffers, {**given, **into}, device=device, seed=0)
    roots = [results[name] for name in (*function.sends, LOSS) if name in results]
    roots = [root for root in roots if root.requires_grad]
    wanted = [one for one in (*leaves.values(), *into.values()) if one.requires_grad]
    if roots and wanted:
        torch.autograd.grad(roots, wanted, [torch.ones_like(root) for root in roots], allow_unused=True)


_NUM_SETTLING, _NUM_COUNTED = 3, 7
"""Batches: an optimizer makes its state in the first ones."""

_OTHER_BYTES = 8 * 2**20
"""More than a core's own cache."""

RATE = 1e-6


def batch_end_of(graph: Graph, unit: Unit, optimizer: str, num_counted: int = _NUM_COUNTED) -> BatchEndTimes:
    """The medians of so many batches for the parameters of a unit; nothing where none of them learns. On the
    CPU.
    """
    states = [state for state in graph.parameters if state.name in unit.parameters and state.trainable]
    return _batch_end_of(states, optimizer, num_counted) if states else BatchEndTimes(0.0, 0.0, 0.0)


def batch_end_of_next_to_nothing(optimizer: str) -> BatchEndTimes:
    """The same for one parameter of a few numbers: what the instructions themselves take."""
    return _batch_end_of(
        [ModelState("weight", (8,), "float32", is_parameter=True, trainable=True)], optimizer
    )


def _batch_end_of(
    states: Sequence[ModelState], optimizer: str, num_counted: int = _NUM_COUNTED
) -> BatchEndTimes:
    shortest = min((getattr(torch, state.dtype) for state in states), key=lambda one: one.itemsize)
    laps = _Laps(other := torch.zeros(_OTHER_BYTES // 4))
    pipeline = Pipeline(
        _graph_of(states),
        Plan((), 1, "2bw-fresh"),
        weights=lambda names: {
            one.name: torch.full(one.shape, 0.01, dtype=getattr(torch, one.dtype))
            for one in states
            if one.name in names
        },
        optimizer=named_optimizer(optimizer, lr=RATE),
        settings=PipelineSettings(
            clip_norm=1.0,
            on_instruction=laps,
            bank_dtype=shortest if shortest.itemsize < torch.float32.itemsize else None,
        ),
    )

    def batches() -> Iterator[dict[str, Tensor]]:
        for _ in range(_NUM_SETTLING + num_counted):
            laps.pause()
            other.add_(1.0)
            yield {"given": torch.ones(2, 1)}

    for _ in pipeline.train(batches()):
        laps.pause()
    pipeline.close()
    reduce_s, update_s, trial_s = (
        median(laps.seconds[kind][-num_counted:]) for kind in (Kind.REDUCE, Kind.UPDATE, Kind.TRIAL)
    )
    return BatchEndTimes(reduce_s, update_s, trial_s)


def _graph_of(states: Sequence[ModelState]) -> Graph:
    """A model of these parameters alone, whose loss is the sum of the first number of each.

    It is written down and not captured, which would take longer than what is measured.
    """
    given = Value("given", ("b", 1), "float32")
    operators = [_call("mean.default", "sum", Reference("given"))]
    for place, state in enumerate(states):
        flat, first = Value(f"flat{place}", (state.num_elements,), state.dtype), f"first{place}"
        before = operators[-1].outputs[0]
        assert before is not None, "each has a result"
        operators += [
            Operator("aten.reshape.default", (Reference(state.name), (-1,)), (), (flat,)),
            Operator("aten.select.int", (Reference(flat.name), 0, 0), (), (Value(first, (), state.dtype),)),
            _call("add.Tensor", f"sum{place}", Reference(before.name), Reference(first)),
        ]
    loss = operators[-1].outputs[0]
    assert loss is not None, "each has a result"
    return Graph(
        name="the end of a batch",
        training=True,
        batch=2,
        any_batch=True,
        inputs=(given,),
        parameters=tuple(states),
        buffers=(),
        constants=(),
        operators=tuple(operators),
        outputs=(Output("loss", Reference(loss.name)),),
    )


def _call(name: str, result: str, *arguments: Reference) -> Operator:
    """An operator that makes a number."""
    return Operator(f"aten.{name}", arguments, (), (Value(result, (), "float32"),))


class _Laps:
    """How long instructions took, by kind; waits for a core are left out, as in all of a profile.

    If operators have one thread, these are the seconds of a core that this process took: the thread that sums
    works while its rank waits. Before an UPDATE or a TRIAL `other` memory is gone through: other stages and
    micro-batches have used the core since the instruction before.
    """

    def __init__(self, other: Tensor) -> None:
        self.seconds: dict[Kind, list[float]] = {}
        self._other = other
        self._kind: Kind | None = None
        self._began_s = 0.0

    def __call__(self, step: Instruction) -> None:
        self.pause()
        if step.kind in (Kind.UPDATE, Kind.TRIAL):
            self._other.add_(1.0)
        self._kind, self._began_s = step.kind, _worked_s()

    def pause(self) -> None:
        """The instruction under way, if there is one, is over."""
        if self._kind is not None:
            self.seconds.setdefault(self._kind, []).append(max(_worked_s() - self._began_s, 0.0))
            self._kind = None


def _worked_s() -> float:
    return process_time() if torch.get_num_threads() == 1 else perf_counter() - waited_s()
