"""The end of a batch where replicas may die: its gradients are summed by rounds, its norm in the pipeline.

The agent's thread gets the committed sum of a batch while the rank goes
on; the few numbers that all ranks of the replica must agree on follow over the pipeline's own lines.
"""

import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bireme.codec.sum_description import DENSE, SumCodec
from bireme.devices import pinned_like
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.rounds import BatchOffer, RoundSum
from bireme.sync.coded import GradientSummation
from bireme.sync.components import HostStream, components_in
from bireme.sync.coordinator.recoveries import numbers_of_healing
from bireme.sync.exchange import (
    BatchGradients,
    FlatViews,
    SentBytes,
    held_flags,
    sum_in_slices,
    sum_parts,
)
from bireme.sync.group import Group, Sums
from bireme.sync.reducer import (
    OwnPart,
    Reduced,
    Reducer,
    Reduction,
    numbers_of,
    reduced_of,
)
from bireme.sync.rounds.contribution import NO_DIGEST, CodedFlats, Contribution, bases_in
from bireme.sync.slices import DENSE_SLICE_BYTES, SLICE_BYTES

# A site: several replicas that share an optimizer or weights, and live and die together.
#
# For the coordinator a site is one replica. Its ranks first add up their gradients, each its own part, in the
# agent's thread. Then each rank has rounds about its part with the same rank of the other sites. Ranks of a
# site prepare every batch together, so none leaves out one that has been committed without the site.
#
# Parameters that stages of several ranks of a replica or site share, each with the group of all its ranks
# that hold it: their gradients are added up within it. That follows the sum over replicas, on copies, in the
# agent's thread. All ranks of a replica get the committed sums in the same order, so they meet here in the
# same order too.


@dataclass(slots=True, eq=False)
class _UnderWay:
    """A batch: what was offered, what is contributed, the whole gradients of tied parameters once they are
    there, and whether it is known if the batch counts, which residuals depend on.
    """

    offer: BatchOffer
    contributed: BatchGradients
    tied: BatchGradients | None = None
    is_known: threading.Event = field(default_factory=threading.Event)


class RoundReducer(Reducer):
    """Gets the sums of one rank's batches over replicas that may die, of which there are `num_replicas`.

    `control` are the ranks of this replica, and `speaks` whether this one speaks for it where one must. It
    adds the gradients of `counted` parameters to the norm, and the pieces that it owns; those that are `tied`
    are summed within the replica too. Sums over replicas go through `codec`. Where each of these replicas is
    a site of several, `site` are the ranks that share what this one has.
    """

    sums_gradients = True
    weighs = True

    def __init__(
        self,
        control: Sums,
        agent: ExchangeAgent,
        *,
        num_replicas: int,
        speaks: bool,
        device: torch.device | None,
        counted: Collection[str],
        tied: Mapping[str, Group],
        codec: SumCodec = DENSE,
        site: Group | None = None,
    ) -> None:
        super().__init__(control, counted, device)
        self.agent = agent
        self._site, self._num_replicas, self._speaks = site, num_replicas, speaks
        self._tied = {name: tied[name] for name in sorted(tied)}
        # In a site tied parameters are not cut into parts; else none is summed over other ranks.
        self.summed_apart = frozenset() if site is None else self._tied.keys()
        self._coded = None if codec == DENSE else GradientSummation(codec)
        self.feedback = None if self._coded is None else self._coded.feedback
        self._under_way: dict[int, _UnderWay] = {}
        self._last_known: threading.Event | None = None
        self.first = 0
        """The first batch that this replica has a part in."""
        self.digest = NO_DIGEST
        """The last one of this rank's weights."""
        self._copied: tuple[RoundSum, torch.Event] | None = None
        """A sum that the device may still be reading."""

    def start(self, reduction: Reduction) -> None:
        """Contribute this replica's part of a batch, or only have its sum got; returns at once. `more` gives
        the seconds that this rank was busy with it.
        """
        contributed = self._contributed(reduction.gradients)
        offer = (
            BatchOffer(None) if reduction.own is None else self._offer(reduction, reduction.own, contributed)
        )
        own = self._under_way[reduction.batch] = _UnderWay(offer, contributed)

        def after(settled: RoundSum) -> None:
            if self.agent.own.replica in settled.parts:
                self.agent.heal_times = None  # the others have it now
            if self._tied:
                own.tied = self._sum_tied(contributed, settled)

        offer.may_make, offer.is_joint, offer.after = self._last_known, self._site is not None, after
        if self.feedback is not None:
            self._last_known = own.is_known
        self.agent.offer_batch(reduction.batch, offer, contributed.flats)

    def _offer(self, reduction: Reduction, own: OwnPart, contributed: BatchGradients) -> BatchOffer:
        gradients, replica = reduction.gradients, self.agent.own.replica
        how = self._how(reduction.batch, contributed)
        holds = _holds(gradients) if self._site is None else b""
        samples, firsts = [0.0] * self._num_replicas, [0.0] * self._num_replicas
        samples[replica], firsts[replica] = float(own.num_samples), float(self.first)
        ready, digest = self._event(), self.digest

        def make() -> Contribution:
            if ready is not None:
                ready.synchronize()
            if self._site is not None:
                self._add_up(self._site, gradients, contributed)
            if how is not None and gradients.streams:
                how.streams = {name: HostStream.of(one) for name, one in gradients.streams.items()}
            healing = numbers_of_healing(self.agent.heal_times, replica, self._num_replicas)
            return Contribution(
                self._on_host(contributed.flats),
                holds if self._site is None else _holds(contributed),
                own.weight,
                own.nominal,
                (float(reduction.loss_sum),),
                (reduction.votes, *samples, *firsts, *healing),
                digest,
            )

        return BatchOffer(make, busy_s=lambda: sum(reduction.more()), how=how)

    @torch.no_grad()
    def finish(self, reduction: Reduction) -> Reduced:
        """Wait until a batch is committed; its gradients are the committed sum then."""
        gradients, own = reduction.gradients, self._under_way.pop(reduction.batch)
        result = self.agent.wait_for_batch(own.offer)
        summed = result.summed
        for flat, found in zip(own.contributed.flats, result.flats, strict=True):
            flat.copy_(found.view(flat.shape), non_blocking=True)
        if own.offer.how is None:
            self.sent.note(max(len(result.parts), 1), raw=result.num_bytes, sent=result.num_bytes)
        self._use_up(result)
        gradients.components.update(components_in(summed.more, self._device))
        held = {*_names(own.contributed, summed.holds)}
        if own.tied is not None:
            held |= own.tied.held
            for name, view in own.tied.views.items():
                gradients.views[name].copy_(view)
        gradients.held.difference_update(
            own.contributed.views
        )  # the rest are pieces of other ranks of the site
        gradients.held.update(held)
        votes, *facts = summed.numbers
        numbers = numbers_of(
            loss_sum=summed.means[0],
            squared_norm=self._squared_norm(gradients),
            stamp=reduction.stamp,
            votes=votes,
            more=[summed.weight, *facts] if self._speaks else [0.0] * (1 + len(facts)),
        )
        self._control.all_reduce(numbers).wait()
        reduced = reduced_of(numbers, reduction.batch, num_ranks=self._control.size)
        if not summed.weight:
            # A mean of nothing is NaN; and a step with gradients of zero would decay weights and momenta.
            reduced = Reduced(math.nan, 0.0, False, reduced.votes, reduced.more)
        self._settle(own, result, is_counted=reduced.is_finite)
        return reduced

    def close(self, timeout_s: float | None = None) -> None:
        """The agent belongs to who made it, and outlives a pipeline."""
        del timeout_s
        self._settle_copies()

    def _contributed(self, gradients: BatchGradients) -> BatchGradients:
        """What this rank contributes of a batch: in a site the pieces that it owns, and tied parameters. They
        lie where they do in `gradients`; which are held is known once the site has added up.
        """
        if self._site is None:
            return gradients
        tied = {name: gradients.views[name] for name in self._tied}
        return BatchGradients({**gradients.owned, **tied}, set(), [*gradients.owned_flats, *tied.values()])

    @torch.no_grad()
    def _add_up(self, site: Group, gradients: BatchGradients, contributed: BatchGradients) -> None:
        """Sum a batch over the site. All its ranks call it."""
        names = [name for name in gradients.views if name not in self._tied]
        sum_parts(site, names, gradients, DENSE_SLICE_BYTES, self.sent)
        contributed.held.update(gradients.held & contributed.views.keys())

    def _sum_tied(self, contributed: BatchGradients, settled: RoundSum) -> BatchGradients:
        """The whole gradients of tied parameters, from those of this rank in a committed sum."""
        own = {name: contributed.views[name] for name in self._tied}
        views = FlatViews.of(own, contributed.flats).in_(settled.flats)
        held = own.keys() & _names(contributed, settled.summed.holds)
        found = BatchGradients({name: view.clone() for name, view in views.items()}, held)
        for name, group in self._tied.items():
            sum_in_slices(group, [name], found, [found.views[name]], SLICE_BYTES, SentBytes())
        return found

    def _how(self, batch: int, gradients: BatchGradients) -> CodedFlats | None:
        """How a batch is added up, if its gradients do not go as they are."""
        if self._coded is None and not gradients.streams:
            return None
        views = FlatViews.of(gradients.views, gradients.flats)
        return CodedFlats(batch, views, self._coded, self.sent)

    def _settle(self, own: _UnderWay, settled: RoundSum, *, is_counted: bool) -> None:
        """Keep what a batch has left of its codec, now that it is known whether the batch counts.

        A member that has the sum from another one does not know which of its messages were in it: what it had
        not sent before stays as it was.
        """
        if self._coded is None or self.feedback is None:
            return
        is_own = settled.has_own and settled.is_made_here
        common = bases_in(settled.summed.more) if is_counted and not is_own else None
        self._coded.settle(counts=is_counted and is_own, common=common)
        own.is_known.set()
        self.agent.poke()

    def _on_host(self, flats: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradients as others are sent them. Called from the agent's thread."""
        if self._device is None:
            return flats
        found = [*map(pinned_like, flats)]
        for target, flat in zip(found, flats, strict=True):
            target.copy_(flat, non_blocking=True)
        torch.accelerator.current_stream(self._device).synchronize()
        return found

    def _use_up(self, result: RoundSum) -> None:
        """Give a sum's memory back, once the device has copied it."""
        if self._device is None:
            result.give_back()
            return
        self._settle_copies()
        event = self._event()
        assert event is not None, "there is a device"
        self._copied = result, event

    def _settle_copies(self) -> None:
        if self._copied is not None:
            result, event = self._copied
            event.synchronize()
            result.give_back()
            self._copied = None


def _holds(gradients: BatchGradients) -> bytes:
    """For each parameter whether it has a gradient; those that have none become zeros."""
    views = [*gradients.views]
    return bytes(held_flags(views, gradients).tolist()) if views else b""


def _names(gradients: BatchGradients, holds: bytes) -> Iterator[str]:
    """The parameters that some member has a gradient of."""
    return (name for name, one in zip(gradients.views, holds, strict=True) if one)
