"""Several replicas of a simulation, each with a part of the batches, that average their weights.

A replica trains batches of its own, at its own time, and steps by its own gradient and optimizer state. Then
its weights are averaged with those of a group, as `meetings` says. Averages of weights change neither the
mean of all replicas nor, with plain SGD and all of them in every group, what one process would compute.

An outer step takes the mean of what all replicas have drifted since the last one as a gradient:

    D = mean of A − W_r      M ← μ·M + D      A ← A − η·(D + μ·M)      (Nesterov)

Its result comes one batch late: what a replica has done meanwhile is put on top of the new A.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.delay_study.meetings import Agreed, meetings
from benchmarks.delay_study.simulation import Simulation

__all__ = ["DilocoStep", "Replicas", "mean_of"]

BatchOf = Callable[[int, int], Tensor]
"""The samples of a replica in one of its batches."""


@torch.no_grad()
def mean_of(vectors: Sequence[Tensor]) -> Tensor:
    """The mean of the same tensor of several replicas."""
    return torch.stack(list(vectors)).mean(dim=0)


class DilocoStep:
    """Nesterov's momentum on the weights that all replicas began from."""

    def __init__(self, anchor: Tensor, rate: float, momentum: float) -> None:
        self.anchor = anchor.clone()
        self.rate = rate
        self.momentum = momentum
        self.memory = torch.zeros_like(anchor)

    @torch.no_grad()
    def step(self, drift: Tensor) -> Tensor:
        """The new anchor, after the mean of A − W over the replicas."""
        self.memory = self.momentum * self.memory + drift
        self.anchor = self.anchor - self.rate * (drift + self.momentum * self.memory)
        return self.anchor


class Replicas:
    """Replicas in training. `batch_of` gives a replica's samples; the run will be of `num_batches`."""

    def __init__(
        self,
        simulations: Sequence[Simulation],
        agreed: Agreed,
        batch_of: BatchOf,
        *,
        num_batches: int,
        seed: int = 0,
    ) -> None:
        self.simulations = simulations
        self.agreed = agreed
        self.batch_of = batch_of
        self.num_updates = 0
        self.diloco = None
        self.offered: list[Tensor] = []
        """The weights that replicas gave into the round that is under way."""
        if agreed.is_diloco:
            first = simulations[0].newest.whole
            self.diloco = DilocoStep(first, agreed.rate, agreed.momentum)
            self.groups = self._at_one_pace()
        else:
            self.groups = meetings(agreed, len(simulations), num_batches * len(simulations), seed)

    def train(self, number: int) -> float:
        """Go on until as many updates are made as all replicas make in `number + 1` batches; a loss.

        The loss is the mean over the batches trained; it is not finite if one diverged.
        """
        losses = []
        while self.num_updates < (number + 1) * len(self.simulations):
            group = next(self.groups)
            for replica, batch in group.items():
                assert self.simulations[replica].batch == batch, "each batch of a replica once, in order"
                losses.append(self.simulations[replica].train(self.batch_of(replica, batch)))
                if losses[-1] != losses[-1]:
                    return losses[-1]
                self.num_updates += 1
            self._agree(group)
        return sum(losses) / len(losses) if losses else 0.0

    @torch.no_grad()
    def evaluated(self, input_ids: Tensor) -> float:
        """The loss of the mean of all replicas' newest weights, which stay as they are."""
        first = self.simulations[0]
        kept = first.newest.whole.clone()
        first.newest.whole.copy_(mean_of([one.newest.whole for one in self.simulations]))
        loss = first.loss_on_newest(input_ids)
        first.newest.whole.copy_(kept)
        return loss

    def _at_one_pace(self) -> Iterator[dict[int, int]]:
        batch = 0
        while True:
            yield dict.fromkeys(range(len(self.simulations)), batch)
            batch += 1

    @torch.no_grad()
    def _agree(self, group: Mapping[int, int]) -> None:
        if self.diloco is not None:
            self._step_outside(next(iter(group.values())))
        elif len(group) > 1:
            mean = mean_of([self.simulations[replica].newest.whole for replica in group])
            for replica in group:
                self.simulations[replica].newest.whole.copy_(mean)

    def _step_outside(self, batch: int) -> None:
        """Take the result of the round of the batch before, if there was one; begin one if it is due."""
        assert self.diloco is not None, "only diloco rounds come here"
        if self.offered:
            anchor = self.diloco.step(mean_of([self.diloco.anchor - one for one in self.offered]))
            for simulation, offered in zip(self.simulations, self.offered, strict=True):
                simulation.newest.whole.add_(anchor - offered)
            self.offered = []
        if (batch + 1) % self.agreed.every == 0:
            self.offered = [simulation.newest.whole.clone() for simulation in self.simulations]
