"""A plan for people: its stages, what it promises, what limits it, and other kinds of plans."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bireme.bounds import bytes_text, counted, seconds_text
from bireme.codec.sum_description import DENSE, SumCodec
from bireme.plan.agreements import AgreementForecast
from bireme.plan.forecast import (
    Answer,
    Candidate,
    PlanKind,
    PlanSummary,
    StageForecast,
    best_of_kinds,
    summarize,
    tightest_device,
)
from bireme.plan.penalties import sum_steps
from bireme.plan.plan import Plan, device_ranges
from bireme.plan.search.draft_paging import PagedStageMemory
from bireme.profile.profile import Profile
from bireme.report.plan_document import Explanation, sent_words
from bireme.report.terminal import GAP, columns, tiers_table
from bireme.schedule.instruction import Item

# Paging in the table of a plan: what each tier of a rank does, and what other ways to save memory take.


def _stages_table(stages: Sequence[PagedStageMemory]) -> Table:
    """What each stage copies in a batch, and what recomputation takes or would take."""
    items = [item for item in Item if any(item in stage.copied_bytes for stage in stages)]
    headings = ("stage", "rank", *items, "copies take", "recomputes", "that takes")
    table = columns(headings, words=("recomputes",))
    for one in stages:
        table.add_row(
            str(one.stage),
            str(one.rank),
            *(bytes_text(one.copied_bytes.get(item, 0)) for item in items),
            seconds_text(one.copies_s),
            "yes" if one.recomputes else "no",
            seconds_text(one.recompute_s),
            style=None if one.recomputes or one.copied_bytes else "dim",
        )
    return table


def ways_table(answer: Answer) -> Table:
    """What each way to live with the memory would take."""
    headings = ("memory", "schedule", "shape", "parts", "sweep", "again", "a batch", "cost")
    table = columns(headings, words=("memory", "schedule"), wrapped=("memory",))
    for way in answer.memory_ways:
        if way.candidate is None:
            table.add_row(escape(way.words), "none", style="dim")
            continue
        plan, short = way.candidate.plan, summarize(way.candidate)
        table.add_row(
            escape(way.words),
            plan.schedule,
            f"{short.shape}, {short.num_microbatches}×{max(short.micro_batch_sizes)}",
            str(short.num_stages // short.depth),
            str(plan.sweep),
            str(short.num_recomputed),
            seconds_text(short.batch_s),
            seconds_text(short.cost_s_per_sample),
            style="bold" if way.candidate is answer.best else None,
        )
    return table


_LEAST_UNITS = 12
"""Letters for the units of a stage, however narrow the terminal is."""

_MOST_DEVICES = 24
"""Letters for the devices of a stage; where there are more, they wrap."""

_SEVERAL = (PlanKind.FLUSH, PlanKind.ZERO_BUBBLE)
"""The kinds that have more than one schedule."""

_NOT_SHOWN = PlanKind.STASHED
"""The kind that the engine does not run."""

LEGEND = (
    "shape: depth×width or the replicas of each stage, micro-batches×samples; steps: with this update rule, "
    "for one synchronous step (plan.penalties); cost: seconds per sample times steps"
)

_AGREEMENTS = (
    "simulated, from the links between the replicas and the spread of measured times; the steps are those of "
    "the study (docs/agreement.md)"
)

_MOST_CANDIDATES = 12
_HELPS = 1.005
"""Gains below this are not shown."""


def print_plan(
    answer: Answer,
    profile: Profile,
    planning_s: float,
    console: Console,
    *,
    sums: SumCodec = DENSE,
    is_given: bool = False,
) -> None:
    """The best plan and the best of each kind, or a given plan. `sums` is the codec of sums over replicas."""
    best = answer.best
    short = summarize(best)
    console.print(f"[bold]{escape(profile.model)}[/bold]")
    console.print(f"{_shape(best.plan, short)}\n")
    console.print(stages_table(best, [unit.name for unit in profile.units], console.width))
    if best.forecast.tiers:
        console.print()
        chunk_bytes = () if best.plan.paging is None else best.plan.paging.chunk_bytes
        console.print(tiers_table(best.forecast.tiers, chunk_bytes))
    console.print()
    console.print(_promise(best, short))
    console.print(_limit(best, short))
    if count := len(short.assumptions):
        console.print(f"It depends on {counted(count, 'assumption')}:", style="yellow")
        for place, sentence in enumerate(short.assumptions, 1):
            console.print(f"{place}. {escape(sentence)}", style="yellow")
    if best.plan.codecs:
        console.print(_about_codecs(answer))
    if best.plan.width > 1 and sums != DENSE:
        console.print(_about_sums(sums, best.forecast.sum_penalty, profile.optimizer))
    console.print()
    console.print(kinds_table(answer, () if is_given else tuple(PlanKind)))
    console.print(LEGEND, style="dim")
    if answer.memory_ways:
        console.print()
        console.print(ways_table(answer))
    verb = "Simulated" if is_given else "Found"
    console.print(f"\n{verb} in {seconds_text(planning_s)}: {escape(answer.origin.how)}", style="dim")


def print_explanation(answer: Answer, found: Explanation, console: Console) -> None:
    """Print what each stage pages, the best candidates with what limits each, other ways for the replicas to
    agree, and the changes that help.
    """

    def say(title: str, *parts: Table) -> None:
        console.print(f"\n[bold]{title}[/bold]", *parts, sep="\n")

    if found.stages:
        say("What each stage copies in a batch", _stages_table(found.stages))
    sent = ("sent",) if answer.ways else ()
    headings = ("candidate", "shape", *sent, "a step", "steps", "to a loss", "limited by", "memory left")
    batch_size = summarize(answer.best).batch_size
    rows = (
        (
            short.schedule,
            _sizes(short),
            *([escape(sent_words(candidate.plan))] if sent else []),
            seconds_text(short.batch_s),
            f"{short.penalty:.2f}",
            seconds_text(batch_size * short.cost_s_per_sample),
            escape(short.bottleneck),
            _left(candidate)[1],
        )
        for candidate in _runners_up(answer)[:_MOST_CANDIDATES]
        for short in (summarize(candidate),)
    )
    say("The best candidates", _table(headings, rows))
    console.print(_TO_LOSS, style="dim")
    if found.agreements:
        say("How the replicas could agree", _agreements_table(found.agreements))
        console.print(_AGREEMENTS, style="dim")
    helping = [one for one in found.helps if one.gain >= _HELPS]
    others = "; ".join(escape(one.words) for one in found.helps if one.gain < _HELPS)
    if not helping:
        say("What would help")
        console.print(f"Nothing that was tried: {others}.")
        return
    gains = (
        (
            escape(one.words),
            f"{one.gain:.2f}×",
            f"{short.schedule}, {_sizes(short)}",
            seconds_text(short.batch_s),
            _rate(short),
        )
        for one in helping
        for short in (summarize(one.candidate),)
    )
    say("What would help", _table(("with", "gain", "then", "a batch", "samples/s"), gains))
    if others:
        console.print(f"No help: {others}.", style="dim")


def _runners_up(answer: Answer) -> list[Candidate]:
    """The best plans; if the planner chose what to send, the best with each schedule and way to send."""
    if not answer.ways:
        return [*answer.candidates]
    found: dict[tuple[str, str], Candidate] = {}
    for one in answer.candidates:
        found.setdefault((one.plan.schedule, sent_words(one.plan)), one)
    return [*found.values()]


_TO_LOSS = "to a loss: seconds for the samples of the best plan's step, times steps (docs/convergence.md)"


def _agreements_table(agreed: Sequence[AgreementForecast]) -> Table:
    return _table(
        ("mode", "every", "samples/s", "steps", "gain"),
        (
            (
                one.mode,
                counted(one.every, "batch"),
                f"{one.samples_per_s:,.1f}",
                f"{'≥ ' if one.is_at_least else ''}{one.steps:.2f}",
                f"{'≤ ' if one.is_at_least else ''}{one.gain:.2f}×",
            )
            for one in agreed
        ),
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> Table:
    words = ("candidate", "sent", "limited by", "with", "then", "best of a kind")
    return columns(headings, rows, words=words, wrapped=("sent", "with"))


def _shape(plan: Plan, short: PlanSummary) -> str:
    """The plan in a line."""
    devices = counted(plan.num_ranks, "device")
    stages = counted(plan.num_stages, "stage")
    replicas = f" in each of {plan.width} replicas" if plan.width > 1 else plan.replicas_text
    sizes = sorted(set(short.micro_batch_sizes))
    samples = counted(sizes[0], "sample") if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} samples"
    more = "".join(
        (
            f", {counted(plan.lookahead, 'forward')} further ahead" if plan.lookahead else "",
            f", {counted(plan.num_sliced, 'micro-batch')} sliced" if plan.num_sliced else "",
            f", in sweeps of {plan.sweep}" if plan.sweep > 1 else "",
            f", shared weights of {plan.whole_weights} whole at a time" if plan.whole_weights else "",
            ", updates on the host" if plan.paging is not None and plan.paging.host_updates else "",
        )
    )
    return (
        f"[bold]{escape(plan.schedule)}[/bold] on {devices}: {stages}{replicas}, "
        f"{counted(plan.num_microbatches, 'micro-batch')} of {samples}{more}"
    )


def stages_table(best: Candidate, names: Sequence[str], width: int) -> Table:
    """A row for each stage, with these `names` of units if there is room; names of devices wrap."""
    stages = best.forecast.stages
    again = ["again" if stage.recompute else "" for stage in stages]
    ranks = best.plan.source.rank_of_stage
    # The bytes of a stage are those of its rank, which may have other stages too.
    memory = [
        f"{bytes_text(stage.peak_bytes)} of {bytes_text(stage.limit_bytes)}"
        if ranks.index(ranks[place]) == place
        else ""
        for place, stage in enumerate(stages)
    ]
    cells = {
        "stage": [str(place) for place in range(len(stages))],
        "devices": [device_ranges(stage.devices) for stage in stages],
        "forward": again,
        "share": [_ranges(share) for share in best.plan.shares] or [""] * len(stages),
        "busy": [seconds_text(stage.busy_s) for stage in stages],
        "": [f"{stage.busy_s / best.forecast.batch_s:.0%}" for stage in stages],
        "memory": memory,
    }
    if not any(again):
        del cells["forward"]
    if not best.plan.stage_widths:
        del cells["share"]
    wide = {heading: max(map(len, (heading, *texts))) for heading, texts in cells.items()}
    wide["devices"] = min(wide["devices"], _MOST_DEVICES)
    room = width - sum(GAP + letters for letters in wide.values())
    units = [_units(stage, names, max(room, _LEAST_UNITS)) for stage in stages]
    headings = list(cells)
    headings.insert(1, "units")
    table = columns(headings, words=("devices", "forward", "units"), wrapped=("devices",))
    for column in table.columns:
        column.min_width = wide.get(str(column.header))
    for name, (number, *others) in zip(units, zip(*cells.values(), strict=True), strict=True):
        table.add_row(number, escape(name), *map(escape, others))
    return table


def _ranges(share: Sequence[int]) -> str:
    """The micro-batches of a batch that each replica of a stage takes, such as `4 × 15` or `8, 4 × 2`."""
    runs = [(count, len(list(group))) for count, group in groupby(share)]
    return ", ".join(f"{count} × {times}" if times > 1 else str(count) for count, times in runs)


def _units(stage: StageForecast, units: Sequence[str], longest: int) -> str:
    """The numbers of a stage's units and, where there is room, the names of the first and the last."""
    first, last = stage.begin, stage.end - 1
    numbers = str(first) if first == last else f"{first}…{last}"
    names = [units[unit] for unit in dict.fromkeys((first, last)) if units]
    for shown in (names, [_inner(name) for name in names]) if names else ():
        text = f"{numbers} {' … '.join(shown)}"
        if len(text) <= longest:
            return text
    return numbers


def _inner(name: str) -> str:
    """A unit's name from its layer's number on, or its last word."""
    words = name.split(".")
    number = next((place for place, word in enumerate(words) if word.isdecimal()), len(words) - 1)
    return ".".join(words[number:])


def _promise(best: Candidate, short: PlanSummary) -> str:
    busy = "it is" if best.plan.num_ranks == 1 else "the devices are"
    return (
        f"[bold]{seconds_text(short.batch_s)}[/bold] for a batch of {counted(short.batch_size, 'sample')}, "
        f"[bold]{_rate(short)} samples/s[/bold]; {busy} busy {short.busy_share:.0%} of the time."
        + (f" {short.joules_per_sample:.3g} J per sample." if short.joules_per_sample else "")
    )


def _limit(best: Candidate, short: PlanSummary) -> str:
    device, left = _left(best)
    return f"{escape(short.bottleneck)} limits the pace. {escape(device)} has the least free memory: {left}."


def _about_codecs(answer: Answer) -> str:
    """What is sent, what that costs in steps, and what the best plan without codecs would take."""
    best = answer.best
    places: dict[str, list[str]] = {}
    for stage, one in enumerate(best.plan.codecs):
        word = one.forward if one.forward == one.backward else f"{one.forward} and back {one.backward}"
        places.setdefault(word, []).append(f"{stage}-{stage + 1}")
    words = "; ".join(f"{escape(word)} between stages {', '.join(own)}" for word, own in places.items())
    text = f"Sent as: {words}. That takes {best.forecast.codec_penalty:.2f} steps for one."
    without = next((one for one in answer.candidates if not one.plan.codecs), None)
    if without is None:
        return text
    times = without.forecast.cost_s_per_sample / best.forecast.cost_s_per_sample
    return f"{text} The best plan without codecs takes {times:.2f} times as long to the same loss."


def _about_sums(codec: SumCodec, steps: float, optimizer: str) -> str:
    """What the codec of sums over replicas costs in steps; 1 where the goal is throughput."""
    least = "at least " if steps > 1 and sum_steps(codec, optimizer).is_at_least else ""
    return f"Sums over the replicas go through {codec}. That takes {least}{steps:.2f} steps for one."


def _left(candidate: Candidate) -> tuple[str, str]:
    """The device with the smallest share of free memory, and how much that is."""
    found = tightest_device(candidate)
    left = max(found.left_bytes, 0.0)
    return found.name, f"{bytes_text(left)} ({left / found.limit_bytes:.0%})"


def kinds_table(answer: Answer, searched: Sequence[PlanKind] = ()) -> Table:
    """The best plan of each kind, the best first; only the name of searched kinds without a plan."""
    found = best_of_kinds(answer.candidates)
    table = _table(("best of a kind", "shape", "a batch", "samples/s", "steps", "cost", "slower by"))
    least = answer.best.forecast.cost_s_per_sample
    for place, short in enumerate(found.values()):
        table.add_row(
            f"{short.kind} ({short.schedule})" if short.kind in _SEVERAL else short.kind,
            _sizes(short),
            seconds_text(short.batch_s),
            _rate(short),
            f"{short.penalty:.2f}",
            seconds_text(short.cost_s_per_sample),
            "" if place == 0 else f"{short.cost_s_per_sample / least - 1:.0%}",
            style="bold" if place == 0 else None,
        )
    for kind in searched:
        if kind not in found and kind is not _NOT_SHOWN:
            table.add_row(str(kind), "none", style="dim")
    return table


def _sizes(short: PlanSummary) -> str:
    """Such as `4×2, 8×4`: the shape, micro-batches and their samples."""
    sizes = sorted(set(short.micro_batch_sizes))
    samples = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]}…{sizes[-1]}"
    return f"{short.shape}, {short.num_microbatches}×{samples}"


def _rate(short: PlanSummary) -> str:
    per_s = short.samples_per_s
    return f"{per_s:,.0f}" if per_s >= 1000 else f"{per_s:.4g}"
