"""How a replica comes to the state of the others: a snapshot from one of them, and the sums since then."""

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from torch import Tensor

from bireme.runtime.coordinator_client import DroppedError
from bireme.runtime.exchange.agent import ExchangeAgent
from bireme.runtime.exchange.deals import heal_in
from bireme.runtime.snapshot import Snapshot, own_sections
from bireme.runtime.stage import Stage
from bireme.sync.coordinator.messages import CoordinatorReply, Heal, Window
from bireme.sync.coordinator.state import HealTimes
from bireme.sync.rounds.peer_line import LineBroken


class Donations:
    """Takes snapshots for other replicas, of all stages of a rank right before the first of them is updated
    from a batch: updates of a batch follow each other. What replicas have `rebuilt` by themselves is not in
    them; what `more` gives is.
    """

    def __init__(
        self,
        agent: ExchangeAgent,
        stages: Mapping[int, Stage],
        clip_scale: Callable[[], float],
        rebuilt: frozenset[str],
        more: Callable[[], Mapping[str, Tensor]],
        *,
        replica: int,
    ) -> None:
        self._agent, self._stages, self._clip_scale = agent, stages, clip_scale
        self._rebuilt, self._more, self._replica = rebuilt, more, replica
        self._updated = -1
        """The last batch that a stage was updated from."""

    def before_update(self, _stage: Stage, batch: int) -> None:
        """A stage is about to make the update of a batch."""
        if batch == self._updated:
            return
        self._updated = batch
        name = self._agent.due(batch)
        if name is None:
            return
        tensors = dict(self._more())
        for stage in self._stages.values():
            names = {*stage.banks.names, *stage.buffers} - self._rebuilt
            tensors |= own_sections(stage, names, replica=self._replica)
        self._agent.provide(name, Snapshot(batch, self._clip_scale(), tensors))


def join(
    agent: ExchangeAgent,
    held: int,
    restore: Callable[[Snapshot], None],
    *,
    window: Window | None = None,
    follow: Callable[[int], None] | None = None,
    on_first: Callable[[int], None] | None = None,
) -> int:
    """Come to where this replica has a part; gives the first batch that it has.

    It has the state after `held` batches. If others have gone on it gets a snapshot from one of them, which
    `restore` takes. Replicas that train batches of their own are in a `window` then. Else the replica also
    gets all sums that were committed since, each of which `follow` waits for and applies; `on_first` is told
    the first batch as soon as it is known, which is while those sums come.
    """
    own = agent.own
    named_s = fetched_s = 0.0
    asked: Heal | None = None
    """The last one whose snapshot was asked for."""
    is_healed = False

    def begin() -> None:
        agent.begin(window, used=[held] if window is None else [0] * len(agent.lines))

    def is_new(heal: Heal) -> bool:
        return asked is None or (heal.donor, heal.batch) != (asked.donor, asked.batch)

    def first_in(word: CoordinatorReply) -> int | None:
        """The first batch, once that is certain."""
        heal = heal_in(word, own)
        if heal is not None:
            return heal.first
        is_certain = window is None or word.is_installed  # whoever coordinates next
        members = (one for one in word.members if is_certain and one.own_life == own.own_life)
        return next((one.first for one in members), None)

    def is_there(word: CoordinatorReply) -> bool:
        first = first_in(word)
        return first is not None and held >= first

    def goes_on(word: CoordinatorReply) -> bool:
        heal = heal_in(word, own)
        if heal is not None and (is_new(heal) or not is_healed):
            return is_new(heal)
        has_begun = heal is not None or first_in(word) is not None
        return is_there(word) or (follow is not None and has_begun and word.committed[0] > held)

    begin()
    while True:
        word = agent.wait_for(goes_on)
        heal, first = heal_in(word, own), first_in(word)
        if first is not None and on_first is not None:
            on_first(max(first, held))
            on_first = None
        if heal is not None and is_new(heal):
            if is_healed:  # another rank of this replica may wait for a sum that only the first donor had
                raise DroppedError(f"replica {own.replica} has lost its donor.")
            if asked is not None:
                begin()  # a donor that was lost may be asked again
            asked, named_s = heal, named_s or monotonic()
            if (found := fetched(agent, heal)) is not None:
                fetched_s = monotonic()
                snapshot, words = found
                restore(snapshot)
                held, is_healed = snapshot.num_trained, True
                if window is not None:
                    window = Window(words["window"], words["until"])
                agent.begin(window, used=words["used"], healed=heal.batch)
        elif is_there(word):
            if is_healed:
                agent.heal_times = HealTimes(fetched_s - named_s, monotonic() - fetched_s)
            return held
        elif follow is not None:  # the sum is committed without this replica, so it comes
            follow(held)
            held += 1


def fetched(agent: ExchangeAgent, heal: Heal) -> tuple[Snapshot, dict[str, Any]] | None:
    """What a donor sends, and what it says along with it; None if it could not be had, and the coordinator is
    to name a donor again.
    """
    try:
        with agent.fetch(heal) as parcel:
            words = parcel.words()
            tensors = parcel.named(words)
    except (LineBroken, OSError):
        if heal in agent.word.heals:
            agent.tell_lost(heal.donor)
        return None
    return Snapshot(words["num_trained"], words["clip_scale"], tensors), words
