"""Time to a loss over slow links: what the schedule brings, what the codec brings, and both.

    python benchmarks/links.py [--section times|encryption] [--quick] [--json]

The setting of a public benchmark at our size: eight stages, links of 50 ms with the bandwidth at which dense
bfloat16 under 1f1b spends 85 % of a step on bytes. T is the steps to the loss of the synchronous dense run,
times seconds of a step. A run with delayed updates has its first fifth under 1f1b, one with an ending its
last steps in int8: T counts these steps as they are.

Seconds are the simulator's. Three rows are also run by the engine, over links that are as late, with stages
that sleep for as long as they would compute, slowed down or sped up until a step of each takes as long: what
is seen of a short step is the machine that emulates eight devices at once. Steps are not measured here: those
of delayed updates are of docs/convergence.md, those of codecs of a pilot and a study
(docs/figures-codecs.md), and the two are multiplied.

The section encryption measures what it costs to encrypt a line: bytes per second between two processes over
the loopback, processor seconds of both ends, and the time of a small message there and back.
"""

import multiprocessing
import os
import select
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common.command import Findings, Section, benchmark, log
from benchmarks.common.verdicts import Verdict, at_least, at_most
from benchmarks.made_up.models import profile_of
from benchmarks.rehearsal.rehearsal import Effort, rehearse
from benchmarks.rehearsal.rehearsed import rehearsed, simulated_s
from bireme.cluster.cluster import Cluster, Link, Mesh, Server
from bireme.cluster.device import Device
from bireme.codec import BoundaryCodecs
from bireme.codec.description import bits_a_value
from bireme.plan.penalties import DEFAULT_DELAY_WARMUP, codec_steps, steps_for_one, unseen_share
from bireme.plan.plan import Plan
from bireme.profile.profile import Profile
from bireme.schedule.catalogue import schedule_named
from bireme.schedule.program import Rule
from bireme.wire.connection import HEADER_BYTES, Connection, FrameKind, frame_header, wait_for
from bireme.wire.encryption import ALWAYS, NEVER, VARIABLE
from bireme.wire.listener import Caller, ListenerThread, call_port, open_port

STAGES, MICRO_BATCHES = 8, 32
FORWARD_S, BACKWARD_S, UPDATE_S = 0.04, 0.08, 0.02
LATENCY_S = 0.05
BOUNDARY_BYTES, VALUE_BYTES = 2_000_000, 2
"""Of a micro-batch's activations in bfloat16."""
BYTES_SHARE = 0.85
STEPS = 300
"""Of the synchronous dense run: those of the study that the penalties are from."""
ENDING = 0.06
"""The share of a run that the penalties with an ending are for."""
LOOKAHEADS = (0, 7, 14, 21, MICRO_BATCHES - STAGES)
ENGINE_STEP_S = 13.5
"""A step of each row that the engine runs: seconds and bytes are scaled until it takes as long."""
LEAST_GAIN, MOST_ERROR = 5.0, 0.05
CODECS = ("none", "int8", "int6", "int5", "topk:0.5:4", "topk:0.25:8", "topk:0.125:8")
SCHEDULES = ("1f1b", "zb-h1", "2bw-fresh")
SOURCE = "convergence.md, figures-codecs.md"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train: a schedule, a codec on all boundaries, and whether the last steps have int8."""

    schedule: str
    codec: str
    has_ending: bool = False

    @property
    def name(self) -> str:
        return f"{self.codec}, then int8" if self.has_ending else self.codec


def profile(share_of_time: float) -> Profile:
    """Eight equal units. Messages are as large whatever the time, so that encoding them takes its part."""
    several = [1.0] * STAGES
    return profile_of(
        [share_of_time * FORWARD_S * one for one in several],
        [share_of_time * BACKWARD_S * one for one in several],
        boundary_bytes=[round(share_of_time * BOUNDARY_BYTES)] * STAGES,
        parameter_bytes=[40] * STAGES,
        update_s=[share_of_time * UPDATE_S * one for one in several],
    )


def cluster(bytes_per_s: float, share_of_time: float = 1.0) -> Cluster:
    """Eight devices, each two with a cable of their own."""
    devices = (Device("emulated", "emulated", memory_bytes=1 << 40),) * STAGES
    link = Link(bytes_per_s, share_of_time * LATENCY_S)
    return Cluster((Server("server0", devices, meshes=(Mesh("mesh0", tuple(range(STAGES)), link),)),))


def plan_of(schedule: str, codec: str, lookahead: int = 0) -> Plan:
    codecs = () if codec == "none" else (BoundaryCodecs(codec, codec),) * (STAGES - 1)
    return Plan(
        tuple(range(1, STAGES)),
        MICRO_BATCHES,
        schedule,
        lookahead=lookahead,
        updates_early=False,
        codecs=codecs,
    )


def seconds_of(plan: Plan, bytes_per_s: float) -> float:
    joined = cluster(bytes_per_s)
    return simulated_s(rehearsed(profile(1.0), joined, plan, value_bytes=VALUE_BYTES), joined)


@cache
def bandwidth() -> float:
    """At which so much of a step of dense 1f1b is spent on bytes."""
    dense = plan_of("1f1b", "none")
    without_s = seconds_of(dense, 1e15)
    least, most = 1e5, 1e9
    for _ in range(24):
        middle = (least * most) ** 0.5
        is_too_slow = 1 - without_s / seconds_of(dense, middle) > BYTES_SHARE
        least, most = (middle, most) if is_too_slow else (least, middle)
    return most


@cache
def step(schedule: str, codec: str) -> tuple[float, int]:
    """Seconds of a step, with the lookahead at which it takes least."""
    most = 0 if schedule_named(schedule).most_lookahead is None or schedule == "1f1b" else LOOKAHEADS[-1]
    times = {one: seconds_of(plan_of(schedule, codec, one), bandwidth()) for one in LOOKAHEADS if one <= most}
    best = min(times, key=lambda one: (times[one], one))
    return times[best], best


def row_of(way: Way) -> dict[str, Any]:
    """The time to the loss of the dense synchronous run, and what it is made of."""
    seconds, lookahead = step(way.schedule, way.codec)
    rule = schedule_named(way.schedule).rule
    is_delayed = rule is not Rule.SYNCHRONOUS
    unseen = unseen_share(STAGES, MICRO_BATCHES, lookahead)
    codecs = BoundaryCodecs(way.codec, way.codec)
    steps = STEPS * codec_steps([codecs], "adamw", has_ending=way.has_ending)
    steps *= steps_for_one(rule, "adamw", delay_warmup=DEFAULT_DELAY_WARMUP, unseen=unseen)
    start = DEFAULT_DELAY_WARMUP if is_delayed else 0.0
    end = ENDING if way.has_ending else 0.0
    mean_s = (1 - start - end) * seconds
    mean_s += start * step("1f1b", way.codec)[0] + end * step(way.schedule, "int8")[0]
    bits = [
        bits_a_value(codecs.choice(forward=there), VALUE_BYTES, is_back=not there) for there in (True, False)
    ]
    return {
        "schedule": way.schedule,
        "lookahead": lookahead,
        "codec": way.name,
        "bits": (1 - end) * sum(bits) / 2 + end * 8.5,
        "steps": steps,
        "step_s": seconds,
        "T": steps * mean_s,
        "T_dense_over_T": 0.0,
        "engine_step_s": None,
        "engine_error": None,
        "steps_from": SOURCE,
    }


def engine_rows(rows: Sequence[dict[str, Any]], ways: Sequence[Way]) -> None:
    """Let the engine run three rows, and write down what it took."""
    best = max(rows, key=lambda row: row["T_dense_over_T"])
    for row, way in zip(rows, ways, strict=True):
        is_dense = way.schedule == "1f1b" and way.name == "none"
        if not is_dense and row is not best and (way.schedule, row["codec"]) != ("1f1b", best["codec"]):
            continue
        log(f"the engine runs {way.schedule} with {way.name}")
        scale = ENGINE_STEP_S / row["step_s"]
        found = rehearse(
            profile(scale),
            cluster(bandwidth(), scale),
            [plan_of(way.schedule, way.codec, row["lookahead"])],
            effort=Effort(counted=2, rounds=2),
            value_bytes=VALUE_BYTES,
        )
        row["engine_step_s"] = found[0].measured_s.median / scale
        row["engine_error"] = found[0].error


def verdicts(rows: Sequence[dict[str, Any]]) -> list[Verdict]:
    def gain(schedules: Sequence[str], codecs: Sequence[str] | None) -> float:
        found: list[float] = [
            row["T_dense_over_T"]
            for row in rows
            if row["schedule"] in schedules and (codecs is None or row["codec"] in codecs)
        ]
        return max(found)

    errors = [abs(row["engine_error"]) for row in rows if row["engine_error"] is not None]
    found = [
        at_least("T of dense 1f1b over T, the schedule alone", gain(SCHEDULES, ("none",)), 1.0),
        at_least("T of dense 1f1b over T, the codec alone", gain(("1f1b",), None), 1.0),
        at_least("T of dense 1f1b over T, both", gain(SCHEDULES, None), LEAST_GAIN),
    ]
    if errors:
        found.append(at_most("error of the simulator, worst row", max(errors), MOST_ERROR))
    return found


# What encryption costs.

LARGE_BYTES, SMALL_BYTES = 4 << 20, (64, 4096)
NUM_LARGE, NUM_SMALL, WARM = 256, 4000, 200
"""Messages of each size; the first small ones do not count."""
WAIT_S = 60.0


def _send(connection: Connection, body: memoryview) -> None:
    connection.send(memoryview(frame_header(FrameKind.TENSOR, len(body))), body)
    connection.flush(WAIT_S)


def _take(connection: Connection, into: memoryview) -> None:
    while connection.next_frame(lambda _: into) is None:
        if not wait_for(connection, select.POLLIN, WAIT_S):
            raise TimeoutError


def _echo(port: int, told: "multiprocessing.SimpleQueue[float]", num_large: int, num_small: int) -> None:
    """The other end: take the large messages, and send each small one back."""
    connection = Connection(call_port(("127.0.0.1", port), "key", WAIT_S))
    body = memoryview(bytearray(LARGE_BYTES))
    _take(connection, body[:HEADER_BYTES])
    began_s = time.process_time()
    for _ in range(num_large):
        _take(connection, body)
    _send(connection, body[:1])
    told.put(time.process_time() - began_s)
    for size in SMALL_BYTES:
        for _ in range(num_small):
            _take(connection, body[:size])
            _send(connection, body[:size])


def encryption_row(policy: str, *, is_quick: bool) -> dict[str, Any]:
    num_large, num_small = (8, 2 * WARM) if is_quick else (NUM_LARGE, NUM_SMALL)
    os.environ[VARIABLE] = policy
    came: multiprocessing.SimpleQueue[float] = multiprocessing.SimpleQueue()
    callers = list[Caller]()
    listening = open_port("127.0.0.1")
    words = (listening.getsockname()[1], came, num_large, num_small)
    other = multiprocessing.get_context("fork").Process(target=_echo, args=words)
    other.start()
    thread = ListenerThread("key", [listening], callers.append, "bireme benchmark")
    while not callers:
        time.sleep(0.01)
    thread.close()
    connection = Connection(callers[0].socket)
    body = memoryview(bytearray(os.urandom(LARGE_BYTES)))
    _send(connection, body[:HEADER_BYTES])
    began_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(num_large):
        _send(connection, body)
    _take(connection, memoryview(bytearray(1)))
    took_s = time.perf_counter() - began_s
    cpu_s = time.process_time() - cpu_s
    gigabytes = 1e-9 * num_large * LARGE_BYTES
    row: dict[str, Any] = {
        "encrypted": policy == ALWAYS,
        "MB_per_s": 1e3 * gigabytes / took_s,
        "send_cpu_s_per_GB": cpu_s / gigabytes,
        "receive_cpu_s_per_GB": came.get() / gigabytes,
    }
    for size in SMALL_BYTES:
        times = []
        for _ in range(num_small):
            began_s = time.perf_counter()
            _send(connection, body[:size])
            _take(connection, body[:size])
            times.append(time.perf_counter() - began_s)
        row[f"there_and_back_us_{size}_bytes"] = 1e6 * median(times[WARM:])
    connection.close()
    other.join()
    return row


def encryption(asked: Namespace) -> Findings:
    rows = [encryption_row(policy, is_quick=asked.quick) for policy in (NEVER, ALWAYS, NEVER, ALWAYS)]
    plain, encrypted = ([row for row in rows if row["encrypted"] is one] for one in (False, True))

    def least(rows: Sequence[dict[str, Any]], *columns: str) -> float:
        found: float = min(sum(row[column] for column in columns) for row in rows)
        return found

    small, cpu = f"there_and_back_us_{SMALL_BYTES[0]}_bytes", ("send_cpu_s_per_GB", "receive_cpu_s_per_GB")
    added_us = (least(encrypted, small) - least(plain, small)) / 2
    limits = [
        at_most("us that encryption adds to a small message", added_us, 50),
        at_most("processor seconds that it adds a GB", least(encrypted, *cpu) - least(plain, *cpu), 2.5),
    ]
    return Findings([Section("A line between two processes over the loopback", rows)], limits)


def measure(asked: Namespace) -> Findings:
    if asked.section == "encryption":
        return encryption(asked)
    ways = [Way(schedule, codec) for schedule in SCHEDULES for codec in CODECS]
    ways += [
        Way(schedule, codec, True) for schedule in SCHEDULES for codec in CODECS if codec.startswith("topk")
    ]
    rows = [row_of(way) for way in ways]
    dense = next(row["T"] for row in rows if row["schedule"] == "1f1b" and row["codec"] == "none")
    for row in rows:
        row["T_dense_over_T"] = dense / row["T"]
    if not asked.quick:
        engine_rows(rows, ways)
    megabits = 8e-6 * bandwidth()
    links = f"links of {LATENCY_S * 1e3:g} ms and {megabits:.0f} Mbit/s"
    title = f"{STAGES} stages, {MICRO_BATCHES} micro-batches, {links}"
    return Findings([Section(title, rows)], verdicts(rows))


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--section", choices=("times", "encryption"), default="times", help="what to measure")


if __name__ == "__main__":
    benchmark(__doc__, measure, quick="the simulator alone, or few messages", options=_options)
