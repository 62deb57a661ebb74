"""The store of a run: what torch asks of it, connections that break, and strangers."""

import gc
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from bireme.errors import BiremeError
from bireme.runtime.stores import (
    HashStore,
    PrefixStore,
    RunStore,
    TCPStore,
    environment_store,
    part_of,
    serve_store,
    torch_store,
)
from bireme.runtime.world import World
from tests.support.patience import patience_s
from tests.support.ports import free_port
from tests.support.together import run_threads

LOCALHOST = "127.0.0.1"


@pytest.fixture
def store() -> RunStore:
    return serve_store(LOCALHOST, key="key", timeout_s=patience_s())


def other(store: RunStore, key: str = "key", timeout_s: float | None = None) -> RunStore:
    return RunStore(LOCALHOST, store.port, key, patience_s() if timeout_s is None else timeout_s)


def test_values_are_those_of_torch_s_stores_also_through_torch_s_own_prefixes(store: RunStore) -> None:
    for there in (other(store), PrefixStore("run", PrefixStore("group", other(store)))):
        every_byte = bytes(range(256))
        there.set("text", "ä")
        there.set("bytes", every_byte)  # type: ignore[arg-type]  # torch forgets that it may
        assert there.get("text") == "ä".encode()
        assert there.multi_get(["bytes", "text"]) == [every_byte, "ä".encode()]
        assert [there.add("number", 2), there.add("number", -5)] == [2, -3]
        assert there.get("number") == b"-3"
        assert there.check(["text", "number"])
        assert not there.check(["text", "nothing"])
        assert there.compare_set("cause", "", "first") == b"first"
        assert there.compare_set("cause", "", "second") == b"first"
        assert there.compare_set("cause", "first", "third") == b"third"
        assert there.compare_set("nothing", "something", "else") == b"something"
        assert [there.delete_key("text"), there.delete_key("text")] == [True, False]
        with pytest.raises(dist.DistStoreError, match=r"wait timeout after 0\.01 s, keys: .*text"):
            there.wait(["bytes", "text"], timedelta(seconds=0.01))
    assert store.num_keys() == 6
    assert store.get("group/run/bytes") == every_byte


def test_a_value_is_replaced_once_the_connection_that_has_put_it_is_closed(store: RunStore) -> None:
    first, second = other(store), other(store)
    first.set_while_here("a", "here", "gone")
    first.set_while_here("b", "here", "gone")
    second.set_while_here("b", "there", "gone too")  # as a connection that was made again
    assert first._connection is not None
    first._connection.socket.close()
    ends_s = time.monotonic() + patience_s()
    while store.get("a") != b"gone":
        assert time.monotonic() < ends_s
    assert store.get("b") == b"there"
    kept = PrefixStore("run", HashStore())
    kept.set_while_here("a", "here", "gone")
    assert kept.get("a") == b"here"


def test_a_value_is_waited_for(store: RunStore) -> None:
    found = list[bytes]()
    waiting = threading.Thread(target=lambda: found.append(PrefixStore("run", other(store)).get("late")))
    waiting.start()
    store.set("run/late", "value")
    waiting.join()
    assert found == [b"value"]


def test_a_store_that_torch_alone_holds_stays() -> None:
    """Torch's prefix holds no store that is written in Python."""
    served = serve_store(LOCALHOST, key="key", timeout_s=patience_s())
    part = PrefixStore("run", served)
    del served
    gc.collect()
    part.set("name", "value")
    assert part.get("name") == b"value"


def test_a_request_after_one_that_failed_goes_over_a_new_connection(store: RunStore) -> None:
    mine = other(store)
    mine.set("name", "value")
    assert mine._connection is not None
    mine._connection.socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(dist.DistNetworkError, match="cannot be reached: "):
        mine.get("name")
    assert mine.get("name") == b"value"


def test_a_store_ends_with_its_object_and_who_asks_then_is_told_at_once() -> None:
    served = serve_store(LOCALHOST, key="key", timeout_s=patience_s())
    mine = other(served)
    mine.set("name", "value")
    del served
    gc.collect()
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError, match="cannot be reached: "):
            mine.get("name")


def test_strangers_learn_and_change_nothing(store: RunStore) -> None:
    with pytest.raises(dist.DistNetworkError, match="cannot be reached: "):
        other(store, key="another").set("name", "value")
    with socket.create_connection((LOCALHOST, store.port)) as stranger:
        stranger.sendall(b'["set", "name", "value"]' * 100)
        with suppress(ConnectionResetError):
            while stranger.recv(100):
                pass
    assert store.num_keys() == 0


@pytest.mark.parametrize("request_", [b"{", b"3", b'["set", "name"]', b'["unknown"]'])
def test_a_request_that_makes_no_sense_changes_nothing_and_the_store_goes_on(
    store: RunStore, request_: bytes
) -> None:
    mine = other(store)
    assert mine.num_keys() == 0
    assert mine._connection is not None
    mine._connection._connection.say(request_)
    mine._connection._connection.flush(patience_s())
    assert store.num_keys() == 0


def test_a_store_named_by_the_environment_is_served_by_rank_0_and_asks_for_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    monkeypatch.setenv("BIREME_KEY", "secret")

    def join(rank: int) -> bytes:
        there = environment_store(rank, LOCALHOST, port, timeout_s=patience_s())
        if rank:
            there.set("run/name", "value")
        return part_of(there, "run", rank, timeout_s=patience_s()).get("name")

    assert run_threads(2, join) == [b"value"] * 2
    monkeypatch.setenv("BIREME_KEY", "another")
    with pytest.raises(BiremeError, match="the same BIREME_KEY if it is set"):
        environment_store(1, LOCALHOST, port, timeout_s=0.01)


@pytest.mark.parametrize("key", ["", "secret"])
def test_of_torchrun_s_store_only_the_address_is_used_and_no_key_that_is_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("BIREME_KEY", key)
    monkeypatch.setenv("BIREME_ADDRESS", LOCALHOST)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    agent = torch_store(LOCALHOST, 0, serve=True, timeout_s=patience_s())

    def join(rank: int) -> RunStore:
        there = environment_store(rank, LOCALHOST, agent.port, timeout_s=patience_s())
        own = part_of(there, "run", rank, timeout_s=patience_s())
        assert isinstance(own, RunStore)
        own.set(f"here {rank}", "")
        own.wait(["here 0", "here 1"])
        return own

    first, second = run_threads(2, join)
    assert first.key == second.key
    assert (first.key == "secret") == (first.key not in agent.get("run/store").decode()) == bool(key)
    assert not agent.check(["here 0"])


def test_nccl_has_a_store_of_torch_s_own_whose_address_is_in_that_of_the_run(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads ask for as long as there is a group, and must not wait for the Python of a rank."""
    monkeypatch.setenv("BIREME_ADDRESS", LOCALHOST)

    def join(rank: int) -> World:
        world = World(other(store), rank=rank, size=2, timeout_s=patience_s(), backend="nccl")
        groups = world._store_of_groups()
        assert isinstance(groups, TCPStore)
        groups.set(f"here {rank}", "yes")
        assert groups.get(f"here {1 - rank}") == b"yes"
        return world  # the store ends with that of rank 0

    assert len(run_threads(2, join)) == 2
