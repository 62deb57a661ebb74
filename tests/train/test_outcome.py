"""How a run hears of the loads of all ranks while it trains."""

import threading
import time
from collections.abc import Callable

from bireme.runtime.stores import HashStore
from bireme.train.outcome import LoadsOfRanks
from tests.support.patience import patience_s


class FarStore(HashStore):
    """Its answers are on their way until somebody lets them arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.arrives = threading.Event()

    def check(self, keys: list[str]) -> bool:
        assert self.arrives.wait(patience_s())
        return super().check(keys)


def wait_until(happens: Callable[[], bool]) -> None:
    end_s = time.monotonic() + patience_s()
    while not happens():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_the_log_does_not_wait_for_the_loads_of_other_ranks() -> None:
    store = FarStore()
    first, second = (LoadsOfRanks(store, rank, 3) for rank in range(2))
    assert second.latest(200, 20) == []
    wait_until(lambda: HashStore.check(store, ["load/1"]))
    assert first.latest(100, 10) == [(100, 10), None, None]
    store.arrives.set()
    wait_until(lambda: first.latest(100, 10) == [(100, 10), (200, 20), None])
