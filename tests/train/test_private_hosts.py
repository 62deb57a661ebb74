"""Nothing that leaves the owner's host holds a private row: all that it sends is recorded and searched.

The owner is one of two hosts with networks of their own. The other cannot see the owner's files, and what
both share, the run's folder, is searched too.
"""

import json
import pickle
import random
import signal
import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.command import bireme
from tests.support.eavesdropper import Streams
from tests.support.hosts import CARD, Host, hide, hosts
from tests.support.patience import patience_s
from tests.support.torchrun_runs import ROOT, torchrun_train
from tests.support.training import Ended, losses, settings, write_run

PORT, OWNER = "29400", "host-1"
LENGTH, NUM_ROWS = 32, 30
"""Tokens of a row, and how many rows are private."""

TOLD = range(8, 24)
"""The tokens of a row by which it is known: too many to be there by chance."""

SENDER = """
import socket, sys, time
data = sys.stdin.buffer.read()
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as line:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for begin in range(0, len(data), 50):
        line.send(data[begin : begin + 50])
"""

LISTENER = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("ready", flush=True)
    line, _ = server.accept()
    while line.recv(1000):
        pass
"""


def private_text() -> str:
    draws = random.Random(5)
    return "".join(draws.choice(string.ascii_letters) for _ in range(NUM_ROWS * LENGTH))


def encodings(tokens: bytes) -> Iterator[bytes]:
    """What the tokens of a row look like in whatever may carry them."""
    numbers = np.frombuffer(tokens, np.uint8)
    yield tokens
    for width in (np.uint16, np.int32, np.int64, np.float32, np.float64):
        yield numbers.astype(width).tobytes()
        yield numbers.astype(width).byteswap().tobytes()
    for separator in (", ", ",", " ", "\n"):
        yield separator.join(map(str, numbers)).encode()
    yield b"".join(b"K" + bytes([one]) for one in tokens)  # a list of small numbers, as pickle writes it
    yield tokens.hex().encode()


def rows_in(data: bytes) -> set[int]:
    """The private rows of which a part is in there, in any encoding."""
    text = private_text().encode()
    return {
        row
        for row in range(NUM_ROWS)
        if any(one in data for one in encodings(bytes(text[row * LENGTH + place] for place in TOLD)))
    }


@contextmanager
def recorded(host: Host, path: Path) -> Iterator[None]:
    """What the host sends meanwhile is in the file afterwards, all of it."""
    words = [*host.prefix, sys.executable, "-m", "tests.support.eavesdropper", CARD, str(path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "listening\n"
        yield
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "0\n"
        assert process.wait(patience_s()) == 0
    finally:
        process.kill()
        process.communicate()


def send_on_purpose(source: Host, target: Host, data: bytes) -> None:
    address = [target.address, "29500"]
    listener = subprocess.Popen(
        [*target.prefix, sys.executable, "-c", LISTENER, *address], stdout=subprocess.PIPE, text=True
    )
    try:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "ready\n"
        sender = [*source.prefix, sys.executable, "-c", SENDER, *address]
        subprocess.run(sender, input=data, check=True, timeout=patience_s())
        assert listener.wait(patience_s()) == 0
    finally:
        listener.kill()
        listener.communicate()


def enter(host: Host, hidden: Path | None) -> None:
    host.enter()
    if hidden is not None:
        hide(hidden)


def train_on(
    machines: list[Host], run: Path, words: list[str], caches: list[Path], vault: Path
) -> list[Ended]:
    """The first of the machines finds nothing in the vault."""
    first = ("--master-addr", machines[0].address, "--master-port", PORT)
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                torchrun_train(
                    run,
                    *words,
                    ranks=1,
                    options=("--nnodes", "2", "--node-rank", str(number), *first),
                    first=partial(enter, host, None if number else vault),
                    variables={"TORCH_CPP_LOG_LEVEL": "ERROR", "BIREME_CACHE": str(cache)},
                )
            )
            for number, (host, cache) in enumerate(zip(machines, caches, strict=True))
        ]
        return [one.ended() for one in started]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_private_row_leaves_its_owners_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipeline over both hosts, which comes back to the owner: activations and gradients do leave it."""
    vault, run = tmp_path / "vault", tmp_path / "runs" / "run"
    vault.mkdir()
    (vault / "own.txt").write_text(private_text())
    caches = [tmp_path / "cache", vault / "cache"]
    words = [
        str(write_run(tmp_path, "zbv", 1)),
        "--json",
        *settings(
            plan__file="",
            plan__schedule="zbv",
            plan__depth=2,
            plan__microbatches=2,
            cluster__workers="",
            data__private=f'{{{OWNER} = "{vault}/own.txt"}}',
            training__evaluate_every=6,
            training__evaluation_batches=1,
            log__trace="true",
            links__encrypt="false",  # or what leaves the host could not be searched
        ),
    ]
    with hosts(2) as machines:
        with recorded(machines[1], tmp_path / "sent"):
            first, second = train_on(machines, run, words, caches, vault)
        with recorded(machines[1], tmp_path / "sent on purpose"):
            rows = np.frombuffer(private_text().encode(), np.uint8).astype(np.int64)[: 3 * LENGTH]
            send_on_purpose(machines[1], machines[0], pickle.dumps(rows))

    document = first.document
    assert "Lines between hosts are not encrypted (links.encrypt = false)." in first.err
    assert document["private_samples"] == {OWNER: NUM_ROWS}
    assert document["placement"]["private_taken"] == {OWNER: NUM_ROWS}
    assert document["stages"][0]["device"] == document["stages"][-1]["device"] == f"{OWNER}/cpu0"
    assert f"{NUM_ROWS} of {NUM_ROWS} private samples of {OWNER}" in first.err + second.err
    assert sorted(losses(run)) == list(range(1, 13))

    sent = (tmp_path / "sent").read_bytes()
    assert len(sent) > 12 * 2 * 4 * LENGTH * 16 * 4  # activations of every micro-batch alone are as much
    assert rows_in(sent) == set()
    assert rows_in((tmp_path / "sent on purpose").read_bytes()) == {0, 1, 2}

    assert bireme(capsys, "report", str(run)).status == 0
    kept = [path for folder in (run, caches[0]) for path in folder.rglob("*") if path.is_file()]
    assert any(path.name == "report.html" or path.suffix == ".html" for path in kept)
    assert {path.name for path in kept if rows_in(path.read_bytes())} == set()
    assert rows_in(b"".join(told.encode() for one in (first, second) for told in (one.out, one.err))) == set()
    own = [path for path in caches[1].rglob("*") if path.is_file()]
    assert rows_in(b"".join(path.read_bytes() for path in own)) == set(range(NUM_ROWS))


def test_a_row_is_found_however_it_is_written() -> None:
    """So that a search that finds nothing means something."""
    tokens = private_text().encode()[2 * LENGTH : 3 * LENGTH]
    ids = list(tokens)
    said = (tokens, pickle.dumps({"rows": ids}), json.dumps(ids).encode(), str(np.array(ids)).encode())
    for one in said[:3]:
        assert rows_in(b"something" + one) == {2}
    for width in (np.uint16, np.int32, np.int64, np.float32):
        assert rows_in(pickle.dumps(np.array(ids, width))) == {2}
    assert rows_in(b"something else") == set()


def test_packets_in_any_order_are_one_stream() -> None:
    def packet(number: int, data: bytes) -> bytes:
        size = (40 + len(data)).to_bytes(2, "big")
        ip = b"\x45\0" + size + b"\0" * 5 + b"\x06" + b"\0" * 2 + bytes(range(8))
        return ip + bytes(4) + (number % 2**32).to_bytes(4, "big") + bytes(4) + b"\x50" + bytes(7) + data

    streams = Streams()
    for place, data in ((0, b"ab"), (4, b"efg"), (2, b"cde"), (0, b"ab")):
        streams.take(packet(2**32 - 3 + place, data))
    assert bytes(streams) == b"abcdefg"
