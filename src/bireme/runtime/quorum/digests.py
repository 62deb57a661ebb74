"""When a rank takes the digest of its weights: at its first batch, where a replica has come, and every so
many batches, which are the same for all replicas.
"""

import platform
from collections.abc import Mapping
from zlib import crc32

import torch

from bireme.devices import is_accelerator, properties_of
from bireme.runtime.quorum.reducer import QuorumReducer
from bireme.runtime.stage import Stage
from bireme.sync.quorum.digest import Digest, digest_of

__all__ = ["Digests"]


class Digests:
    """Those of one rank's stages, on a device; they go with the contributions of its reducer. `every` so many
    batches, never for that reason if 0.
    """

    def __init__(
        self, reducer: QuorumReducer, stages: Mapping[int, Stage], device: torch.device, every: int
    ) -> None:
        self._reducer, self._stages, self._every = reducer, stages, every
        # The arithmetic of another kind of device may differ in the last bit.
        self._kind = crc32(_kind_of(device).encode())
        self._begun: dict[int, dict[str, int]] = {}

    def before_update(self, stage: Stage, batch: int) -> None:
        """A stage is about to make the update of a batch."""
        if not self._is_due(batch):
            return
        begun = self._begun.setdefault(batch, {})
        begun[str(stage.index)] = digest_of(stage.banks.newest())
        if len(begun) == len(self._stages):
            self._begun.clear()
            value = digest_of({name: torch.tensor(one) for name, one in begun.items()})
            self._reducer.digest = Digest(batch, value, self._kind, self._reducer.first)

    def _is_due(self, batch: int) -> bool:
        if batch == self._reducer.first or (self._every and batch % self._every == 0):
            return True
        return any(one.first == batch for one in self._reducer.agent.word.members)


def _kind_of(device: torch.device) -> str:
    """What devices with the same arithmetic have in common."""
    if is_accelerator(device):
        return properties_of(device).name
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
