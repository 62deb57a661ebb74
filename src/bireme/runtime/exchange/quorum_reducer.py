"""The end of a batch where replicas may die: its gradients are summed by rounds, its norm in the pipeline.

It is in the place of a `Reducer`. The agent's thread gets the committed sum of a batch while the rank goes
on; the few numbers that all ranks of the replica must agree on follow over the pipeline's own lines.
"""

import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor

from bireme.codec.sum_description import DENSE, SumCodec
from bireme.devices import pinned_like
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.rounds import BatchOffer, RoundSum, SettledRound
from bireme.sync.coded import CodedSums
from bireme.sync.coordinator.state import numbers_of_healing
from bireme.sync.exchange import (
    BatchGradients,
    FlatViews,
    SentBytes,
    held_flags,
    squared_norm,
    sum_in_slices,
    sum_parts,
)
from bireme.sync.feedback import Feedback
from bireme.sync.group import Group, SharingGroup, Sums
from bireme.sync.quorum.coded_rounds import CodedFlats, HostStream, bases_in, components_in
from bireme.sync.quorum.line import NO_DIGEST
from bireme.sync.quorum.ring import Contribution
from bireme.sync.reducer import (
    More,
    OwnPart,
    Reduced,
    Reduction,
    nothing_more,
    numbers_of,
    reduced_of,
)
from bireme.sync.slices import PART_SLICE_BYTES, SLICE_BYTES

# A site: several replicas that share an optimizer or weights, and live and die together.
#
# For the coordinator a site is one replica. Its ranks first add up their gradients, each its own part, in the
# agent's thread. Then each rank has rounds about its part with the same rank of the other sites. Ranks of a
# site prepare every batch together, so none leaves out one that has been committed without the site.


class SiteSums:
    """The sums within a site, over the replicas of one rank's stages. Those of `tied` parameters are made
    later, over all ranks of the site that hold them.
    """

    def __init__(self, group: SharingGroup, tied: Collection[str]) -> None:
        self._group, self._tied = group, frozenset(tied)

    def own(self, gradients: BatchGradients) -> BatchGradients:
        """What this rank contributes of a batch: the pieces that it owns, and tied parameters. They lie where
        they do in `gradients`; which are held is known after `add_up`.
        """
        tied = {name: gradients.views[name] for name in sorted(self._tied)}
        return BatchGradients({**gradients.owned, **tied}, set(), [*gradients.owned_flats, *tied.values()])

    @torch.no_grad()
    def add_up(self, gradients: BatchGradients, own: BatchGradients, sent: SentBytes) -> None:
        """Sum a batch over the site. All its ranks must call it."""
        names = [name for name in gradients.views if name not in self._tied]
        sum_parts(self._group, names, gradients, PART_SLICE_BYTES, sent)
        own.held.update(gradients.held & own.views.keys())


# Parameters that stages of several ranks of a replica share: their gradients are added up within it.
#
# That follows the sum over replicas, on copies, in the agent's thread. All ranks of a replica get the
# committed sums in the same order, so they meet here in the same order too.


class TiedSums:
    """The tied parameters of one rank, each with the group of all ranks of the replica that hold it."""

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = {name: groups[name] for name in sorted(groups)}

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def names(self) -> Set[str]:
        """The tied parameters."""
        return self._groups.keys()

    def sum(self, gradients: BatchGradients, flats: Sequence[Tensor], held: set[str]) -> BatchGradients:
        """The whole gradients of these parameters, from those in `flats`, which lie as `gradients` do."""
        own = {name: gradients.views[name] for name in self._groups}
        views = FlatViews.of(own, gradients.flats).in_(flats)
        copies = {name: view.clone() for name, view in views.items()}
        found = BatchGradients(copies, held & copies.keys())
        for name, group in self._groups.items():
            sum_in_slices(group, [name], found, [copies[name]], SLICE_BYTES, SentBytes())
        return found


class QuorumReducer:
    """Gets the sums of one rank's batches. `num_replicas` there are in all, of which this is `replica`.

    `control` are the ranks of this replica, and `speaks` whether this one speaks for it where one must. It
    adds the gradients of `counted` parameters to the norm, and the pieces that it owns; those that are `tied`
    are summed within the replica too. Sums over replicas go through `codec`. Where each of these replicas is
    a site of several, `site` makes the sums within it.
    """

    sums_gradients = True
    weighs = True
    """Whether it finds out by itself if anything in a batch counts."""

    def __init__(
        self,
        control: Sums,
        agent: ExchangeAgent,
        *,
        num_replicas: int,
        speaks: bool,
        device: torch.device | None,
        counted: Collection[str],
        tied: TiedSums,
        codec: SumCodec = DENSE,
        site: SiteSums | None = None,
    ) -> None:
        self.agent = agent
        self._site = site
        self._control = control
        self._num_replicas = num_replicas
        self._speaks = speaks
        self._device = device
        self._counted, self._tied = frozenset(counted), tied
        self._coded = None if codec == DENSE else CodedSums(codec)
        self._verdicts: dict[int, threading.Event] = {}
        """Set once it is known whether a batch counts, which residuals depend on."""
        self._last_verdict: threading.Event | None = None
        self._whole: dict[int, BatchGradients] = {}
        """The sums of tied parameters, by batch."""
        self.sent = SentBytes()
        self._offers: dict[int, tuple[BatchOffer, BatchGradients]] = {}
        """What is under way, with what is contributed to it."""
        self.first = 0
        """The first batch that this replica has a part in."""
        self.digest = NO_DIGEST
        """The last one of this rank's weights."""
        self._copied: tuple[RoundSum, torch.Event] | None = None
        """A sum that the device may still be reading."""

    @property
    def feedback(self) -> Feedback | None:
        """What a codec has not sent yet, if it keeps that."""
        return None if self._coded is None else self._coded.feedback

    @property
    def summed_apart(self) -> Set[str]:
        """In a site tied parameters are not cut into parts; else none is summed over other ranks."""
        return frozenset() if self._site is None else self._tied.names

    def start(
        self,
        batch: int,
        gradients: BatchGradients,
        *,
        loss_sum: float | Tensor,
        stamp: int = 0,
        votes: float = 0.0,
        more: More = nothing_more,
        own: OwnPart | None = None,
    ) -> Reduction:
        """Contribute this replica's part of a batch; returns at once. Nothing given may be written before
        `finish`. `more` gives the seconds that this rank was busy with it.
        """
        assert own is not None, "a replica that may be alone must know what it has"
        site = self._site
        contributed = gradients if site is None else site.own(gradients)
        how = self._how(batch, contributed)
        holds = _holds(gradients) if site is None else b""
        samples, firsts = [0.0] * self._num_replicas, [0.0] * self._num_replicas
        samples[self.agent.own.replica] = float(own.num_samples)
        firsts[self.agent.own.replica] = float(self.first)
        ready, digest = self._event(), self.digest

        def make() -> Contribution:
            if site is not None:
                if ready is not None:
                    ready.synchronize()
                site.add_up(gradients, contributed, self.sent)
            if how is not None and gradients.streams:
                if ready is not None:
                    ready.synchronize()
                how.streams = {name: HostStream.of(one) for name, one in gradients.streams.items()}
            return Contribution(
                self._on_host(contributed.flats, ready),
                holds if site is None else _holds(contributed),
                own.weight,
                own.nominal,
                (float(loss_sum),),
                (votes, *samples, *firsts, *self._heal_numbers()),
                digest,
            )

        offer = BatchOffer(make, busy_s=lambda: sum(more()), how=how)
        return self._begun(batch, gradients, contributed, offer, stamp)

    def follow(self, batch: int, gradients: BatchGradients) -> Reduction:
        """Have the sum of a batch that this replica has no part in."""
        contributed = gradients if self._site is None else self._site.own(gradients)
        return self._begun(batch, gradients, contributed, BatchOffer(None))

    @torch.no_grad()
    def finish(self, reduction: Reduction) -> Reduced:
        """Wait until a batch is committed; its gradients are the committed sum then.

        Raises what went wrong.
        """
        gradients = reduction.gradients
        offer, contributed = self._offers.pop(reduction.batch)
        settled = self.agent.wait_for_batch(offer)
        result, summed = settled.result, settled.summed
        for flat, found in zip(contributed.flats, result.flats, strict=True):
            flat.copy_(found.view(flat.shape), non_blocking=True)
        if offer.how is None:
            self.sent.note(max(len(settled.parts), 1), raw=result.num_bytes, sent=result.num_bytes)
        self._use_up(result)
        gradients.components.update(components_in(summed.more, self._device))
        held = {*_names(contributed, summed.holds)}
        if (whole := self._whole.pop(reduction.batch, None)) is not None:
            held |= whole.held
            for name, view in whole.views.items():
                gradients.views[name].copy_(view)
        gradients.held.difference_update(contributed.views)  # the rest are pieces of other ranks of the site
        gradients.held.update(held)
        held &= self._counted | gradients.owned.keys()
        counted = [view for name, view in contributed.views.items() if name in held]
        # Their values alone have the norm of components.
        counted += [one.values for name, one in gradients.components.items() if name in self._counted]
        votes, *facts = summed.numbers
        numbers = numbers_of(
            loss_sum=summed.means[0],
            squared_norm=squared_norm(counted),
            stamp=reduction.stamp,
            votes=votes,
            more=[summed.weight, *facts] if self._speaks else [0.0] * (1 + len(facts)),
        )
        self._control.all_reduce(numbers).wait()
        reduced = reduced_of(numbers, reduction.batch, num_ranks=self._control.size)
        if not summed.weight:
            # A mean of nothing is NaN; and a step with gradients of zero would decay weights and momenta.
            reduced = Reduced(math.nan, 0.0, False, reduced.votes, reduced.more)
        self._settle(reduction.batch, settled, is_counted=reduced.is_finite)
        return reduced

    def close(self, timeout_s: float | None = None) -> None:
        """The agent belongs to who made it, and outlives a pipeline."""
        del timeout_s
        self._settle_copies()

    def _begun(
        self,
        batch: int,
        gradients: BatchGradients,
        contributed: BatchGradients,
        offer: BatchOffer,
        stamp: int = 0,
    ) -> Reduction:
        def after(settled: SettledRound) -> None:
            if self.agent.own.replica in settled.parts:
                self.agent.heal_times = None  # the others have it now
            if self._tied:
                held = set(_names(contributed, settled.summed.holds))
                self._whole[batch] = self._tied.sum(contributed, settled.result.flats, held)

        offer.may_make, offer.is_joint, offer.after = self._last_verdict, self._site is not None, after
        self._offers[batch] = offer, contributed
        if self.feedback is not None:
            self._last_verdict = self._verdicts[batch] = threading.Event()
        self.agent.offer_batch(batch, offer, contributed.flats)
        return Reduction(batch, gradients, 0.0, stamp, 0.0, nothing_more)

    def _heal_numbers(self) -> list[float]:
        return numbers_of_healing(self.agent.heal_times, self.agent.own.replica, self._num_replicas)

    def _how(self, batch: int, gradients: BatchGradients) -> CodedFlats | None:
        """How a batch is added up, if its gradients do not go as they are."""
        if self._coded is None and not gradients.streams:
            return None
        views = FlatViews.of(gradients.views, gradients.flats)
        return CodedFlats(batch, views, self._coded, self.sent)

    def _settle(self, batch: int, settled: SettledRound, *, is_counted: bool) -> None:
        """Keep what a batch has left of its codec, now that it is known whether the batch counts.

        A member that has the sum from another one does not know which of its messages were in it: what it had
        not sent before stays as it was.
        """
        if self._coded is None or self.feedback is None:
            return
        is_own = settled.is_own and settled.result.is_own
        common = bases_in(settled.summed.more) if is_counted and not is_own else None
        self._coded.settle(counts=is_counted and is_own, common=common)
        self._verdicts.pop(batch).set()
        self.agent.poke()

    def _event(self) -> torch.Event | None:
        """What the rank's stream has had to do by now, on an accelerator."""
        if self._device is None:
            return None
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _on_host(self, flats: Sequence[Tensor], ready: torch.Event | None) -> Sequence[Tensor]:
        """The gradients as others are sent them. Called from the agent's thread."""
        if ready is None:
            return flats
        ready.synchronize()
        found = [*map(pinned_like, flats)]
        for target, flat in zip(found, flats, strict=True):
            target.copy_(flat, non_blocking=True)
        torch.accelerator.current_stream(self._device).synchronize()
        return found

    def _use_up(self, result: RoundSum) -> None:
        """Give a sum's memory back, once the device has copied it."""
        if self._device is None:
            self.agent.lines[0].give_back(result)
            return
        self._settle_copies()
        event = self._event()
        assert event is not None, "there is a device"
        self._copied = result, event

    def _settle_copies(self) -> None:
        if self._copied is not None:
            result, event = self._copied
            event.synchronize()
            self.agent.lines[0].give_back(result)
            self._copied = None


def _holds(gradients: BatchGradients) -> bytes:
    """For each parameter whether it has a gradient; those that have none become zeros."""
    views = [*gradients.views]
    return bytes(held_flags(views, gradients).tolist()) if views else b""


def _names(gradients: BatchGradients, holds: bytes) -> Iterator[str]:
    """The parameters that some member has a gradient of."""
    return (name for name, one in zip(gradients.views, holds, strict=True) if one)
