"""Shared weights: the same program for replicas that each keep a part of every stage's weights and gradients.

The other replicas are a tier. A stage's weights are fetched from them before it computes, and evicted
afterwards. The device holds up to `most` whole weights, each of a stage and a version: those that the rank
uses next, which is Belady's rule. So the weights of the next pass travel while this one runs. A rank has
little whole if it has several small stages instead of a large one.

```
rank 0:  FETCH 0  FETCH 1  F0  EVICT 0 … F1  B1  EVICT 1  SCATTER 1  B0  COLLECT 1  SCATTER 0 …
```

Gradients of a stage are summed over the replicas (SCATTER) when the rank turns to another stage, and before
their REDUCE. What is summed travels while the rank computes on the other stage. It ends (COLLECT) before the
rank sums anything else or adds to these gradients again, and before the last REDUCE of its stages, with which
the batch ends here. So gradients of two stages are whole at a time. Where weights of one stage only may be
whole at a time, so may its gradients, and COLLECT follows SCATTER at once.

Where weights of two may be, several passes in a row share the time: sums travel during the first half of
them, and the weights of the next stage during the second. So gradients of two stages are not whole beside the
weights of two, unless passes go to and fro between two stages.

```
rank 0:  SCATTER 2  B1 of 0  B1 of 1  COLLECT 2  FETCH 0  B1 of 2  B1 of 3  EVICT 1  SCATTER 1  B0 of 0 …
```

All replicas run the same program, and so they fetch and sum in the same order.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from bireme.errors import BiremeError
from bireme.schedule.instruction import COMPUTE, GRADIENT_DONE, Instruction, Item, Kind, Page
from bireme.schedule.program import Program, Rule
from bireme.schedule.source import fold, repeats_of

_Weights = tuple[int, int]
"""A stage and a version."""

_PAGE = Page(Item.WHOLE, 0, is_copied=False)

_HALVES = 2
"""Weights that are whole at a time where passes in a row share the time between sums and weights."""


def gathered(program: Program, num_sharers: int, most: int) -> Program:
    """The program for so many replicas that share weights, of which at most `most` are whole on a rank at a
    time; itself if `most` is 0 or there is one replica. Raises where gradients may be needed whole.
    """
    if num_sharers == 1 or not most:
        return program
    if program.rule not in (Rule.SYNCHRONOUS, Rule.DELAYED):
        raise BiremeError(
            f"Replicas cannot share their weights under {program.name}, which takes steps with gradients of "
            "one replica alone. Use another schedule, such as 1f1b or 2bw, or share the optimizer only."
        )
    repeats = repeats_of(program)

    def make(num_batches: int) -> Program:
        shown = program.of_length(num_batches) if repeats else program
        tracks = tuple(track.of(_woven([*track], most)) for track in shown.tracks)
        return replace(shown, tracks=tracks, num_sharers=num_sharers)

    shortest = program.num_batches - repeats + 1
    return fold(make, program.num_batches, shortest=shortest) if repeats else make(program.num_batches)


def times_a_batch(program: Program, kind: Kind) -> tuple[float, ...]:
    """How often in a batch each stage exchanges weights (FETCH) or gradients (SCATTER) with its replicas: in
    the steady state, or over the window.
    """
    found = [0.0] * program.num_stages
    for track in program.tracks:
        steps, num_batches = track.steady(program.num_batches)
        for step in steps:
            if step.kind is kind and (step.page is None or step.moves_whole):
                found[step.stage] += 1 / num_batches
    return tuple(found)


@dataclass(slots=True)
class _Run:
    """Passes one after the other on the same weights: their places in the track."""

    weights: _Weights
    places: list[int]

    @property
    def middle(self) -> int:
        """The place of the first of the second half."""
        return self.places[len(self.places) // 2]


def _woven(steps: Sequence[Instruction], most: int) -> Iterator[Instruction]:
    """The track of a rank with what sharing takes between its instructions."""
    before: defaultdict[int, list[Instruction]] = defaultdict(list)
    after: defaultdict[int, list[Instruction]] = defaultdict(list)
    runs = _runs(steps)
    middles = {run.middle for run in runs if run.middle > run.places[0]} if most == _HALVES else set()
    for place, step in _sums(steps, middles, hides=most > 1):
        before[place].append(step)
    # A rank averages all its stages at once, when the last of them comes to its AVERAGE_END.
    averaged = {step.batch: place for place, step in enumerate(steps) if step.kind is Kind.AVERAGE_END}
    made = {
        (step.stage, step.version): averaged[step.batch] if step.kind is Kind.AVERAGE_END else place
        for place, step in enumerate(steps)
        if step.kind in (Kind.UPDATE, Kind.AVERAGE_END)
    }
    held: list[_Weights] = []
    last_batch: dict[_Weights, int] = {}
    for number, run in enumerate(runs):
        wanted = _next_ones(runs, number, most)
        for weights in held:
            if weights not in wanted:
                after[runs[number - 1].places[-1]].append(_moved(Kind.EVICT, weights, last_batch[weights]))
        for weights, user in wanted.items():
            if weights not in held:
                fetch = _moved(Kind.FETCH, weights, steps[user.places[0]].batch)
                sums_first = user is not run and any(one.kind is Kind.COLLECT for one in before[run.middle])
                begin = run.middle if sums_first and run.middle in middles else run.places[0]
                place = made.get(weights, -1)
                (before[begin] if place < begin else after[place]).append(fetch)
        held = [*wanted]
        last_batch[run.weights] = steps[run.places[-1]].batch
    for weights in held:
        after[runs[-1].places[-1]].append(_moved(Kind.EVICT, weights, last_batch[weights]))
    for place, step in enumerate(steps):
        yield from before[place]
        yield step
        yield from after[place]


def _runs(steps: Sequence[Instruction]) -> list[_Run]:
    runs: list[_Run] = []
    for place, step in enumerate(steps):
        if step.kind not in COMPUTE:
            continue
        assert step.version is not None, "passes run on a version"
        weights = step.stage, step.version
        if runs and runs[-1].weights == weights:
            runs[-1].places.append(place)
        else:
            runs.append(_Run(weights, [place]))
    return runs


def _next_ones(runs: Sequence[_Run], number: int, most: int) -> dict[_Weights, _Run]:
    """The weights that are used from a run on, up to so many, each with the run that is first to."""
    found: dict[_Weights, _Run] = {}
    for run in runs[number:]:
        if len(found) == most:
            break
        found.setdefault(run.weights, run)
    return found


def _sums(
    steps: Sequence[Instruction], middles: Collection[int], *, hides: bool
) -> Iterator[tuple[int, Instruction]]:
    """The sums of parts and their ends, each with the place of the instruction that it comes before. With
    `hides` one is under way while the rank goes on, but not beyond the places in `middles`.
    """
    waiting: list[tuple[int, int]] = []
    """Stages and batches with gradients that are not summed yet."""
    under_way: tuple[int, int] | None = None
    ends = {step.batch: place for place, step in enumerate(steps) if step.kind is Kind.REDUCE}
    for place, step in enumerate(steps):
        own = step.stage, step.batch
        if step.kind in COMPUTE:
            due = [one for one in waiting if one[0] != step.stage]
        else:
            due = [one for one in waiting if one == own and step.kind is Kind.REDUCE]
        for gradients in due:
            if under_way is not None:
                yield place, Instruction(Kind.COLLECT, *under_way)
            yield place, Instruction(Kind.SCATTER, *gradients)
            waiting.remove(gradients)
            under_way = gradients
            if not hides:
                yield place, Instruction(Kind.COLLECT, *gradients)
                under_way = None
        adds = step.kind in GRADIENT_DONE
        is_needed = (adds and under_way == own) or place in middles
        if under_way is not None and (is_needed or ends.get(under_way[1]) == place):
            yield place, Instruction(Kind.COLLECT, *under_way)
            under_way = None
        if adds and own not in waiting:
            waiting.append(own)


def _moved(kind: Kind, weights: _Weights, batch: int) -> Instruction:
    stage, version = weights
    return Instruction(kind, stage, batch, version=version, page=_PAGE)
