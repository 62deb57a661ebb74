"""Second copies of all that trains: each state goes to a keeper and comes back as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from threading import Lock
from typing import Any

import torch

from bireme.runtime.copies import keeper as keepers
from bireme.runtime.copies.copier import Copier, CopyOrders, CopySource
from bireme.runtime.copies.keeper import Keeper
from bireme.runtime.copies.versions import CopyVersion
from bireme.runtime.pipeline import Pipeline
from bireme.train.rendezvous import until
from tests.support.patience import patience_s

__all__ = ["all_copied"]


@contextmanager
def all_copied() -> Iterator[None]:
    """Copy the state of every pipeline after each of its batches, and compare what its copy has."""
    keeper, shards, numbering = Keeper(bytes_per_s=None, timeout_s=patience_s()), count(), Lock()
    train, usual_call_s = Pipeline.train, keepers._CALL_S

    def copied(pipeline: Pipeline, *words: Any, **more: Any) -> Iterator[Any]:
        with numbering:
            shard = next(shards)
        start, settled = f"{shard:08d}", None
        copier = Copier(CopyOrders(keeper.address, start, 0), shard, 1, patience_s())
        for result in train(pipeline, *words, **more):
            settled = _checked(keeper, copier, pipeline, settled)
            yield result

    Pipeline.train = copied  # type: ignore[method-assign, assignment]
    keepers._CALL_S = patience_s()  # its keeper shares the cores of a busy machine
    try:
        yield
    finally:
        Pipeline.train = train  # type: ignore[method-assign]
        keepers._CALL_S = usual_call_s
        keeper.close()


def _checked(keeper: Keeper, copier: Copier, pipeline: Pipeline, settled: CopyVersion | None) -> CopyVersion:
    snapshot = pipeline.snapshot()
    version = copier.begin(snapshot, {}, settled)
    assert until(lambda: not copier.is_busy, patience_s())
    assert copier.newest == version, copier.failure
    found = CopySource(version, (keeper.address,), patience_s()).tensors()
    assert found.keys() == snapshot.tensors.keys()
    for name, tensor in snapshot.tensors.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
    return version
