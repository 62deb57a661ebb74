"""A run of batches over unequal replicas on a clock, with speeds that change, under any rule of shares.

It is what the engine does, without a model: a replica takes its own time for its share of a batch, all agree
at the batch's end, and whoever makes the shares learns the busy seconds when the batch is done. So rules of
shares can be compared before anything trains.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from bireme.balance import Balance, Policy, ShareLimits, Shares, begun, fair_shares, rebalance
from bireme.errors import BiremeError


@dataclass(frozen=True, slots=True)
class ReplicaCost:
    """What a replica takes for a batch: `fixed_s`, and `sample_s` for each sample of its share.

    `speeds` are pairs of a batch and the speed from it on, relative to these costs; until the first it is 1.
    In the last `load_batches` of every `load_period` batches another program slows it to `load_speed` of
    that. A batch takes up to the part `jitter` longer or shorter, by chance.
    """

    sample_s: float
    fixed_s: float = 0.0
    speeds: tuple[tuple[int, float], ...] = ()
    load_period: int = 0
    load_batches: int = 0
    load_speed: float = 1.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name, speed in (
            *(("speeds", speed) for _, speed in self.speeds),
            ("load_speed", self.load_speed),
        ):
            if speed <= 0:
                raise BiremeError(f"{name} has the value {speed}; it must be greater than 0.")
        if not 0 <= self.jitter < 1:
            raise BiremeError(f"jitter is {self.jitter}; it must be at least 0 and less than 1.")

    def speed(self, batch: int) -> float:
        """How fast it is in a batch, but for chance."""
        found = 1.0
        for begin, speed in self.speeds:
            if batch >= begin:
                found = speed
        is_loaded = self.load_period and batch % self.load_period >= self.load_period - self.load_batches
        return found * self.load_speed if is_loaded else found

    def seconds(self, share: int, batch: int, chance: float) -> float:
        """For how long a share keeps it busy. `chance` is between -1 and 1."""
        return (self.fixed_s + share * self.sample_s) / self.speed(batch) * (1 + self.jitter * chance)


class _ShareRule(Protocol):
    """Something that says how batches are shared out."""

    def shares(self, batch: int) -> Shares:
        """The shares of a batch."""

    def note(self, batch: int, seconds: Sequence[float]) -> None:
        """Learn the busy seconds of each replica in a batch that is done; batches come in order."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Shares that stay as they are."""

    always: Shares

    def shares(self, batch: int) -> Shares:
        """The same for every batch."""
        return self.always

    def note(self, batch: int, seconds: Sequence[float]) -> None:
        """Nothing follows."""


@dataclass(frozen=True, slots=True)
class Informed:
    """The best shares of one who knows every speed beforehand, but not chance: what is possible."""

    replicas: Sequence[ReplicaCost]
    batch_size: int
    limits: ShareLimits

    def shares(self, batch: int) -> Shares:
        """Those for the speeds that there are in this batch."""
        speeds = [one.speed(batch) for one in self.replicas]
        paces = [one.sample_s / speed for one, speed in zip(self.replicas, speeds, strict=True)]
        return fair_shares(self.batch_size, paces, self.limits)

    def note(self, batch: int, seconds: Sequence[float]) -> None:
        """It knew."""


@dataclass(slots=True)
class Following:
    """The engine's policy: shares follow the busy seconds, and take effect on what nobody has read yet."""

    first: Shares
    limits: ShareLimits
    policy: Policy = field(default_factory=Policy)
    read_ahead: int = 2
    balance: Balance = field(init=False)

    def __post_init__(self) -> None:
        self.balance = begun(self.first)

    def shares(self, batch: int) -> Shares:
        """What is decided for a batch so far."""
        return self.balance.at(batch)

    def note(self, batch: int, seconds: Sequence[float]) -> None:
        """Decide."""
        takes_effect = batch + self.read_ahead + 1
        self.balance = rebalance(
            self.balance, batch, seconds, limits=self.limits, policy=self.policy, takes_effect=takes_effect
        )


@dataclass(frozen=True, slots=True)
class BalancedRun:
    """What came of a run: the shares of every batch, and when it was done."""

    shares: tuple[Shares, ...]
    end_s: tuple[float, ...]

    @property
    def changes(self) -> tuple[int, ...]:
        """The batches with other shares than the one before."""
        return tuple(b for b in range(1, len(self.shares)) if self.shares[b] != self.shares[b - 1])

    def samples_per_s(self, begin: int = 0, end: int | None = None) -> float:
        """Of the batches `begin` up to but without `end`."""
        last = len(self.end_s) if end is None else end
        seconds = self.end_s[last - 1] - (self.end_s[begin - 1] if begin else 0.0)
        return sum(map(sum, self.shares[begin:last])) / seconds


def balanced_run(
    replicas: Sequence[ReplicaCost],
    num_batches: int,
    rule: _ShareRule,
    *,
    sync_s: float = 0.0,
    slack: int = 0,
    seed: int = 0,
) -> BalancedRun:
    """A run on a clock. All replicas agree on each batch, which takes `sync_s`.

    A replica begins a batch when it is done with the one before and all have agreed on the one `slack`
    earlier than that: none under synchronous updates, one under delayed ones. The same seed draws the same
    chance for every rule.
    """
    random = Random(seed)
    free_s = [0.0] * len(replicas)
    end_s: list[float] = []
    shared: list[Shares] = []
    for batch in range(num_batches):
        shares = rule.shares(batch)
        agreed_s = end_s[batch - 1 - slack] if batch > slack else 0.0
        seconds = [
            one.seconds(share, batch, random.uniform(-1, 1))
            for one, share in zip(replicas, shares, strict=True)
        ]
        free_s = [max(free, agreed_s) + busy_s for free, busy_s in zip(free_s, seconds, strict=True)]
        end_s.append(max(free_s) + sync_s)
        shared.append(shares)
        rule.note(batch, seconds)
    return BalancedRun(tuple(shared), tuple(end_s))
