"""Second copies: the versions of a shard at keepers, also if messages come late, twice or not at all."""

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bireme.errors import BiremeError
from bireme.runtime.copies import keeper as keeper_module
from bireme.runtime.copies import versions
from bireme.runtime.copies.copier import Copier, CopyOrders, CopySource
from bireme.runtime.copies.keeper import Keeper, KeeperAddress, newest_of, shards_at
from bireme.runtime.copies.versions import (
    CopyVersion,
    ShardCopies,
    coded,
    decoded,
    digest_of,
    newest_common,
)
from bireme.runtime.snapshot import Snapshot
from bireme.train.rendezvous import until
from tests.support.patience import patience_s

NUM_SHARDS, CHUNK = 3, 16


@given(st.binary(min_size=1, max_size=80), st.binary(min_size=1, max_size=80), st.booleans())
def test_a_chunk_is_decoded_to_the_same_bytes(chunk: bytes, other: bytes, is_near: bool) -> None:
    before = bytes(chunk[:-1]) + other[:1] if is_near else other
    assert decoded(coded(chunk, before), before) == chunk
    assert decoded(coded(chunk, None), None) == chunk
    assert len(coded(chunk, before)) <= 1 + len(chunk)


def test_a_chunk_that_is_the_same_takes_one_byte_and_one_of_near_numbers_less_than_itself() -> None:
    numbers = torch.rand(4096, generator=torch.Generator().manual_seed(1))
    before, after = (one.numpy().tobytes() for one in (numbers, numbers * 1.0001))
    assert len(coded(before, before)) == 1
    assert len(coded(after, before)) < 0.8 * len(after)


@pytest.mark.parametrize("message", [b"", b"\x07", b"\x02abc", b"\x02" + bytes(40)])
def test_a_message_that_is_none_is_refused(message: bytes) -> None:
    with pytest.raises(BiremeError):
        decoded(message, bytes(16))


class _Timelines:
    """A run of three shards, each copied to the keeper of its host and to the next one, in any order.

    A version's bytes are drawn from its start, its step and its shard, so a mix of two versions shows. Every
    rank begins a version only after the one before is whole everywhere, as votes have it. Starts that are
    over may still send.
    """

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self.held = [[ShardCopies() for _ in range(NUM_SHARDS)] for _ in range(NUM_SHARDS)]
        """By keeper and shard."""
        self.start, self.step, self.began = 0, 0, 0
        self.settled: CopyVersion | None = None
        self._late: list[Iterator[None]] = []

    def live(self) -> None:
        """One start of the run, which dies anywhere. The next one begins with the newest common version."""
        name, own = f"{self.start:08d}-{self._draws.random()}", None
        for _ in range(self._draws.randrange(4)):
            self.step += self._draws.randrange(1, 4)
            version = CopyVersion(name, self.step)
            sends = [self._send(version, shard, keeper, own) for shard, keeper in _places()]
            self._draws.shuffle(sends)
            if not self._advance(sends, dies=self._draws.random() < 0.3):
                break
            own = version
            self.settled = version
        newest = self.newest
        if self.settled is not None:
            assert newest is not None
            assert newest >= self.settled, "a version that was settled is there for good"
        self.began = self.step = 0 if newest is None else newest.step
        self.start += 1

    @property
    def newest(self) -> CopyVersion | None:
        held = [
            (shard, one.version)
            for own in self.held
            for shard, copies in enumerate(own)
            for one in copies.versions
        ]
        return newest_common(held, dict.fromkeys((version for _, version in held), NUM_SHARDS))

    def check(self) -> None:
        """Each whole version has its own bytes."""
        for own in self.held:
            for shard, copies in enumerate(own):
                for one in copies.versions:
                    found = b"".join(copies.chunk(one.version, at) for at in range(len(one.messages)))
                    assert found == _content(one.version, shard)
                    assert copies.is_intact(one.version)

    def _advance(self, sends: list[Iterator[None]], *, dies: bool) -> bool:
        """Send chunks in any order; False if the ranks die meanwhile. What they had begun may come later."""
        left = [*sends]
        while left:
            if dies and self._draws.random() < 0.1:
                self._late += left
                return False
            one = self._draws.choice(left)
            try:
                next(one)
            except StopIteration:
                left.remove(one)
            if self._late and self._draws.random() < 0.3:
                late = self._draws.choice(self._late)
                try:
                    next(late)
                except (StopIteration, BiremeError):
                    self._late.remove(late)
        return True

    def _send(self, version: CopyVersion, shard: int, keeper: int, own: CopyVersion | None) -> Iterator[None]:
        copies, content = self.held[keeper][shard], _content(version, shard)
        coming = copies.begin(version, {}, len(content), began=self.began, settled=own)
        order = list(range(len(coming.messages)))
        self._draws.shuffle(order)
        for index in order:
            yield
            chunk = content[index * CHUNK : (index + 1) * CHUNK]
            if keeper == shard:
                copies.code(coming, index, chunk)
            else:
                copies.put(coming, index, digest_of(chunk), versions.whole_message(chunk))
        yield
        copies.finish(coming)


def _places() -> list[tuple[int, int]]:
    return [(shard, (shard + more) % NUM_SHARDS) for shard in range(NUM_SHARDS) for more in (0, 1)]


def _content(version: CopyVersion, shard: int) -> bytes:
    """Bytes of which a part is the same in all versions, as frozen weights are."""
    draws = random.Random(f"{version} {shard}")
    return bytes(20) + draws.randbytes(35 + shard)


@given(st.integers(min_value=0, max_value=2**32))
def test_all_shards_go_back_to_one_version_after_any_deaths(seed: int) -> None:
    with _small_chunks():
        run = _Timelines(random.Random(seed))
        for _ in range(5):
            run.live()
            run.check()


@contextmanager
def _small_chunks() -> Iterator[None]:
    before, versions.CHUNK_BYTES = versions.CHUNK_BYTES, CHUNK
    try:
        yield
    finally:
        versions.CHUNK_BYTES = before


def test_a_keeper_has_two_versions_and_the_one_that_comes_in() -> None:
    copies = ShardCopies()
    content = random.Random(1).randbytes(1000)
    settled: CopyVersion | None = None
    for step in range(1, 6):
        version = CopyVersion("0", step)
        copies.code(copies.begin(version, {}, 1000, began=0, settled=settled), 0, content)
        copies.finish(copies._next)  # type: ignore[arg-type]
        settled = version
        assert len(copies.versions) <= 2
        num_bytes = sum(len(message or b"") for one in copies.versions for message in one.messages)
        assert num_bytes <= 1000 + 8, "what does not change takes no room twice"


def _kept(copies: ShardCopies, version: CopyVersion, began: int = 0) -> None:
    coming = copies.begin(version, {}, 4, began=began, settled=None)
    copies.code(coming, 0, b"abcd")
    copies.finish(coming)


def test_a_version_that_a_later_one_has_replaced_takes_no_more_chunks() -> None:
    copies = ShardCopies()
    old = copies.begin(CopyVersion("0", 1), {}, 4, began=0, settled=None)
    copies.code(old, 0, b"abcd")
    copies.begin(CopyVersion("0", 2), {}, 4, began=0, settled=None)
    with pytest.raises(BiremeError, match="a later version has replaced it"):
        copies.finish(old)
    with pytest.raises(BiremeError, match="was replaced by a later"):
        copies.code(old, 0, b"abcd")
    with pytest.raises(BiremeError, match="was replaced by a later"):
        copies.put(old, 0, digest_of(b"abcd"), versions.whole_message(b"abcd"))


def test_a_version_counts_only_with_all_of_its_chunks_as_they_were_sent() -> None:
    copies = ShardCopies()
    coming = copies.begin(CopyVersion("0", 1), {}, CHUNK, began=0, settled=None)
    with pytest.raises(BiremeError, match="not as it was sent"):
        copies.put(coming, 0, digest_of(b"other"), versions.whole_message(bytes(CHUNK)))
    with pytest.raises(BiremeError, match="is not of the second copy"):
        copies.code(coming, 0, bytes(CHUNK - 1))
    with pytest.raises(BiremeError, match="a chunk is missing"):
        copies.finish(coming)
    assert copies.newest is None


def test_a_start_from_an_earlier_step_gives_up_the_states_that_the_run_has_left() -> None:
    """The run went on from a checkpoint of step 30: what was 42 before is no state of it any more."""
    copies = ShardCopies()
    for step in (20, 42):
        _kept(copies, CopyVersion("0", step))
    _kept(copies, CopyVersion("1", 33), began=30)
    assert [one.version for one in copies.versions] == [CopyVersion("0", 20), CopyVersion("1", 33)]


# Keepers with their sockets and threads.


def _snapshot(step: int, seed: int = 0) -> Snapshot:
    draws = torch.Generator().manual_seed(100 * seed + step)
    tensors = {
        f"weights/{seed}": torch.rand(300, 700, generator=draws),
        f"weights/half{seed}": torch.rand(33, generator=draws).bfloat16(),
        f"optimizer/{seed}/step": torch.tensor(float(step)),
        f"optimizer/{seed}/count": torch.tensor([step, 7]),
        f"buffers/none{seed}": torch.empty(0, 3),
        f"weights/frozen{seed}": torch.ones(400_000),
    }
    return Snapshot(step, 1.0, tensors)


@contextmanager
def _keepers(count: int, bytes_per_s: float | None = None) -> Iterator[list[Keeper]]:
    found = [Keeper(bytes_per_s=bytes_per_s, timeout_s=patience_s()) for _ in range(count)]
    for number, one in enumerate(found):
        one.follower = found[(number + 1) % count].address if count > 1 else None
    try:
        yield found
    finally:
        for one in found:
            one.close()


def _copier(keeper: Keeper, shard: int, count: int, start: str = "0") -> Copier:
    return Copier(CopyOrders(keeper.address, start, 0), shard, count, patience_s())


def _wait(is_so: Callable[[], bool]) -> None:
    assert until(is_so, patience_s())


def _copied(copier: Copier, snapshot: Snapshot, settled: CopyVersion | None = None) -> CopyVersion:
    version = copier.begin(snapshot, {"meta": {}}, settled)
    _wait(lambda: not copier.is_busy)
    assert copier.newest == version, copier.failure
    return version


def _equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == one.dtype and torch.equal(found[name], one) for name, one in expected.items()
    )


def test_ranks_read_the_state_of_a_host_that_is_gone_from_the_keeper_of_the_next_one() -> None:
    with _keepers(2) as keepers:
        copiers = [_copier(one, number, 2) for number, one in enumerate(keepers)]
        versions = [_copied(one, _snapshot(4, number)) for number, one in enumerate(copiers)]
        before = copiers[0].sent_bytes
        for number, one in enumerate(copiers):
            _copied(one, _snapshot(5, number), versions[number])
        assert 0 < copiers[0].sent_bytes - before < before / 2, "only what changed was sent"
        keepers.pop().close()  # the second host dies
        addresses = (keepers[0].address, KeeperAddress("127.0.0.1 1 gone", "key"))
        whole = newest_of(shards_at(addresses, patience_s(), checks=True))
        assert {number: [one.version.step for one in own] for number, own in whole.items()} == {
            0: [5],
            1: [5],
        }
        source = CopySource(CopyVersion("0", 5), addresses, patience_s())
        assert _equal(source.tensors(), {**_snapshot(5, 0).tensors, **_snapshot(5, 1).tensors})


def test_a_copy_whose_bytes_have_changed_in_memory_is_not_believed() -> None:
    with _keepers(1) as (keeper,):
        copier = _copier(keeper, 0, 1)
        first = _copied(copier, _snapshot(1))
        second = _copied(copier, _snapshot(2))
        held = keeper._held[0].copies.versions[-1]
        message = held.messages[0]
        assert message is not None
        middle = len(message) // 2
        held.messages[0] = message[:middle] + bytes([message[middle] ^ 1]) + message[middle + 1 :]
        listed = shards_at([keeper.address], patience_s(), checks=True)
        assert [one.version for one in listed] == [first]
        with pytest.raises(BiremeError, match="cannot be read"):
            dict(CopySource(second, (keeper.address,), patience_s()).tensors())


def test_all_keepers_check_their_copies_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start waited for one keeper after the other, each of which reads all that it holds."""
    all_check, is_intact = Barrier(3, timeout=patience_s()), ShardCopies.is_intact

    def checked(copies: ShardCopies, version: CopyVersion) -> bool:
        all_check.wait()
        return is_intact(copies, version)

    monkeypatch.setattr(ShardCopies, "is_intact", checked)
    with _keepers(3) as keepers:
        for number, one in enumerate(keepers):
            one.follower = None
            _copied(_copier(one, number, 3), _snapshot(1, number))
        listed = shards_at([one.address for one in keepers], patience_s(), checks=True)
    assert [one.shard for one in listed] == [0, 1, 2]


def test_a_version_is_no_copy_before_the_next_host_has_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper of the next host is away, then there."""
    monkeypatch.setattr(keeper_module, "_AGAIN_S", 0.01)
    with _keepers(2) as (own, other), closing(socket.create_server(("127.0.0.1", 0))) as absent:
        port = absent.getsockname()[1]
        own.follower = KeeperAddress(f"127.0.0.1 {port} gone", "key")
        absent.close()
        copier = _copier(own, 0, 1)
        version = copier.begin(_snapshot(3), {}, None)
        _wait(lambda: "does not take a second copy" in copier.failure)
        assert copier.is_busy
        assert (copier.newest, copier.failure == "") == (None, False)
        own.follower = other.address
        _wait(lambda: not copier.is_busy)
        assert (copier.newest, copier.failure) == (version, "")
        assert _equal(CopySource(version, (other.address,), patience_s()).tensors(), _snapshot(3).tensors)


def test_a_start_that_is_over_replaces_nothing() -> None:
    with _keepers(1) as (keeper,):
        _copied(_copier(keeper, 0, 1, "1"), _snapshot(3))
        late = _copier(keeper, 0, 1, "0")
        late.begin(_snapshot(9), {}, None)
        _wait(lambda: not late.is_busy)
        assert "is of a start that is over" in late.failure
        (kept,) = shards_at([keeper.address], patience_s(), checks=True)
        assert kept.version == CopyVersion("1", 3)


def test_a_bounded_rate_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    limit: Any = keeper_module.RateLimit(1000.0)
    monkeypatch.setattr(limit._lifted, "wait", waits.append)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    for _ in range(3):
        limit.wait(500, 0.0)
    assert waits == [0.5, 1.0, 1.5]


def test_a_rate_is_lifted_for_a_piece_that_waits_already() -> None:
    """It took long on a busy machine, and the end of a phase waited for it three times as long."""
    limit = keeper_module.RateLimit(None)
    waiting = threading.Thread(target=limit.wait, args=(1, 1e6), daemon=True)
    waiting.start()
    limit.lift()
    waiting.join(patience_s())
    assert not waiting.is_alive()
