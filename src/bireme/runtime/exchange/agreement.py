"""What a pipeline needs where its replica is one of several that may die: its agent, and how to join.

The pipeline itself is of one replica, with a plan of width 1, and knows no rank of another one.
"""

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from bireme.devices import is_accelerator, properties_of
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.joining import Donations
from bireme.runtime.exchange.round_reducer import RoundReducer
from bireme.runtime.layout import Layout
from bireme.runtime.snapshot import feedback_sections
from bireme.runtime.stage import Stage
from bireme.sync.rounds.digest import Digest, digest_of

# When a rank takes the digest of its weights: at its first batch, where a replica has come, and every so
# many batches, which are the same for all replicas.


class _Digests:
    """Those of one rank's stages, on a device; they go with the contributions of its reducer. `every` so many
    batches, never for that reason if 0.
    """

    def __init__(
        self, reducer: RoundReducer, stages: Mapping[int, Stage], device: torch.device, every: int
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
        begun[str(stage.index)] = digest_of(_compared(stage))
        if len(begun) == len(self._stages):
            self._begun.clear()
            value = digest_of({name: torch.tensor(one) for name, one in begun.items()})
            self._reducer.digest = Digest(batch, value, self._kind, self._reducer.first)

    def _is_due(self, batch: int) -> bool:
        if batch == self._reducer.first or (self._every and batch % self._every == 0):
            return True
        return any(one.first == batch for one in self._reducer.agent.word.members)


def _compared(stage: Stage) -> Mapping[str, Tensor]:
    """The newest weights of a stage, or what this rank owns of them: the same in all replicas or sites."""
    if stage.banks.shared is None:
        return stage.banks.newest()
    return {str(place): flat for place, (_, flat) in enumerate(stage.banks.averaged)}


def _kind_of(device: torch.device) -> str:
    """What devices with the same arithmetic have in common."""
    if is_accelerator(device):
        return properties_of(device).name
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


_ClipScale = Callable[[], float]
_BeforeUpdate = Callable[[Stage, int], None]


@dataclass(frozen=True, slots=True)
class QuorumAgreement:
    """How a pipeline agrees with others like it. A whole batch has `num_samples`; of `num_replicas` there are
    at most, this one gets its part. A pipeline of several replicas, which must share an optimizer or weights,
    is a site, and counts as one replica here.
    """

    agent: ExchangeAgent
    num_replicas: int
    num_samples: int
    balances: bool = True
    """Whether its ranks say how long batches keep them busy, so that samples are dealt by speed."""
    compare_every: int = 0
    """After so many batches all replicas compare their weights; 0 is only where one has come."""
    rebuilt: frozenset[str] = frozenset()
    """The weights that every life of a replica has by itself, and that none is sent."""

    def before_updates(
        self,
        reducer: RoundReducer,
        stages: Mapping[int, Stage],
        layout: Layout,
        device: torch.device,
        scale: _ClipScale,
    ) -> _BeforeUpdate:
        """What a rank with these stages does before each of them makes the update of a batch."""
        digests = _Digests(reducer, stages, device, self.compare_every)
        feedback = reducer.feedback

        def unsent() -> Mapping[str, Tensor]:
            """What a replica that heals had not sent through a codec is lost with it. In its place it takes
            what the donor has not sent, as an estimate.
            """
            return {} if feedback is None else feedback_sections(feedback, feedback.num_batches, layout)

        donations = Donations(self.agent, stages, scale, self.rebuilt, unsent, replica=layout.replica)

        def before(stage: Stage, batch: int) -> None:
            digests.before_update(stage, batch)
            donations.before_update(stage, batch)

        return before
