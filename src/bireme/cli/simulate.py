"""`bireme simulate`: predict time and memory of a run's plan, or of a schedule with given costs and links."""

from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bireme.cli.options import (
    build_program,
    check_extent,
    check_plan_file,
    check_writable,
    given_of,
    profiled_run,
    refuse,
    say_written,
    show,
)
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.schedule.budgets import Budgets
    from bireme.schedule.program import Program
    from bireme.simulate.comparison import Contest, Lookahead
    from bireme.simulate.costs import Costs
    from bireme.simulate.links import Links
    from bireme.timeline.timeline import Timeline
    from bireme.train.run_file.tables import Tables


COSTS = (
    *("forward_s", "backward_s", "update_s", "reduce_s", "host_update_s"),
    *("message_bytes", "weight_bytes", "optimizer_bytes", "stash_bytes"),
)
NOUNS = ("costs", "source", "compare", *COSTS)
"""Options that replace the model and the machines of a run: any of them does."""
OFFLOADING = "Offloading, with given costs and memory.device"
"""The panel of options that only a limited device needs."""
OF_A_SCHEDULE = ("stages_per_rank", "slices", "lookahead", "sweep")
OF_COSTS = (
    *("Given costs of a stage and a micro-batch", "Links, with given costs", OFFLOADING),
    *OF_A_SCHEDULE,
)
"""Options that only given costs need."""
SHAPE = ("schedule", "depth", "microbatches", "recompute")
"""Keys of `[plan]` that have no effect with a schedule file."""

DEPTH = 4
"""Devices where plan.depth is not set and there are given costs."""

WINDOW = 10
"""Batches that show start-up, steady state and drain."""


def simulate(
    context: typer.Context,
    run_file: Path | None = None,
    set_: list[str] | None = None,
    batches: int | None = None,
    profile: list[str] | None = None,
    like: str | None = None,
    fresh: bool = False,
    file: Path | None = None,
    costs: Path | None = None,
    source: Path | None = None,
    compare: bool = False,
    stages_per_rank: int | None = None,
    slices: int | None = None,
    lookahead: int = 0,
    sweep: int = 1,
    forward_s: float | None = None,
    backward_s: float | None = None,
    update_s: float = 0.0,
    reduce_s: float = 0.0,
    overlap_reduce: bool = True,
    agree: bool = False,
    message_bytes: float = 0.0,
    link_bytes_per_s: float | None = None,
    link_latency_s: float = 0.0,
    half_duplex: bool = False,
    ranks_per_server: int | None = None,
    link_overlap: str = "full",
    weight_bytes: float = 0.0,
    optimizer_bytes: float = 0.0,
    stash_bytes: float = 0.0,
    host_bytes_per_s: float | None = None,
    disk_bytes_per_s: float | None = None,
    host_update_s: float | None = None,
    chunk_bytes: int | None = None,
    trace: Path | None = None,
    picture: Path | None = None,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Predict the time and memory of a run's plan, or of a schedule with given costs.

    With given costs the run file needs no model: its keys of plan and memory are the shape of the schedule.

    [dim]bireme simulate run.toml --set plan.schedule=2bw --picture run.svg[/dim]

    [dim]bireme simulate --set plan.schedule=2bw --set plan.depth=8 --forward-s 0.01 --backward-s 0.02[/dim]

    Options:
        costs (FILE.json): File with seconds and bytes per stage, instead of a model and the options below.
        compare: Compare all schedules on plan.depth devices with given costs.

    Given costs of a stage and a micro-batch:
        forward_s: Seconds of a stage's forward; by default 1.
        backward_s: Seconds of a stage's backward; by default twice the forward.
        update_s: Seconds of a stage's optimizer step.
        reduce_s: Seconds of a stage's gradient sync, per batch.
        overlap_reduce: Overlap the gradient sync with the next work.
        agree: Update only when all ranks have the batch's gradients, as in Bireme's engine.
        weight_bytes: Bytes of one weight version of a stage; its gradient has the same size.
        optimizer_bytes: Bytes of a stage's optimizer state.
        stash_bytes: Bytes kept per micro-batch until its backward.

    Links, with given costs:
        message_bytes: Bytes between two stages, in each direction.
        link_bytes_per_s: Bandwidth of a link; by default unlimited.
        link_latency_s: Latency of a link.
        half_duplex: Links carry one direction at a time.
        ranks_per_server: Ranks per server: they share one network card, and messages inside a server are
            free.
        link_overlap (none|receiver|full): While a message crosses, full: both ends compute, receiver: the
            receiver waits, none: both ends wait.

    Offloading, with given costs and memory.device:
        host_bytes_per_s: Bandwidth between device and host, in each direction; by default unlimited.
        disk_bytes_per_s: Bandwidth of each rank's disk; by default unlimited.
        host_update_s: Seconds of a stage's optimizer step on the host; without it all steps run on the
            device.
        chunk_bytes: Bytes of a chunk; by default the size that wastes least.

    Output:
        trace (FILE.json): Write a Chrome trace, for ui.perfetto.dev.
        picture (FILE): Draw the timeline to a .svg or .png file.
    """
    check_writable(trace, picture, force=force)
    window = WINDOW if batches is None else batches
    if not given_of(context, *NOUNS):
        refuse(context, "Without given costs the run's plan is simulated", *OF_COSTS)
        from bireme.report.terminal import progress_bar

        check_extent(1, 1, window)
        check_plan_file(file)
        profiled = profiled_run(context, run_file, set_, profiles=profile, like=like, is_fresh=fresh)
        with progress_bar("planning") as progress:
            planned = profiled.planned(progress) if file is None else profiled.given(file)
            timeline = planned.timeline(window)
        _write(timeline, trace, picture)
        _show(timeline, None, trace, picture, as_json=as_json)
        return
    refuse(context, "Given costs stand for a model", "profile", "like", "fresh", "file")
    from bireme.cluster.cluster import Overlap, overlap_named
    from bireme.schedule.generators.shape import Shape
    from bireme.simulate.comparison import Contest, solve_paging, solve_slices
    from bireme.simulate.comparison import compare as compare_all
    from bireme.simulate.links import Links
    from bireme.train.run_file.run import load_tables

    tables = load_tables(run_file, set_ or ())
    asked = tables.plan
    given = {
        "forward_s": 1.0 if forward_s is None else forward_s,
        "backward_s": (2.0 if forward_s is None else 2 * forward_s) if backward_s is None else backward_s,
        "update_s": update_s,
        "reduce_s": reduce_s,
        "message_bytes": message_bytes,
        "weight_bytes": weight_bytes,
        "optimizer_bytes": optimizer_bytes,
        "stash_bytes": stash_bytes,
        "host_update_s": host_update_s,
    }
    if costs is not None:
        refuse(context, "--costs already gives seconds and bytes", *given)
    if source is not None:
        refuse(context, "The file defines the schedule", *OF_A_SCHEDULE)
        _refuse_keys(tables, "The file defines the schedule", *SHAPE)
    if compare:
        refuse(context, "--compare shows all schedules", "source", *OF_A_SCHEDULE, "Output", OFFLOADING)
        _refuse_keys(tables, "--compare shows all schedules", "schedule")
    budgets = None if compare else _budgets(tables)
    if budgets is None:
        refuse(context, "Without memory.device nothing is offloaded", OFFLOADING)
    name = None if source is not None or compare else _schedule_of(tables)
    depth, recompute = asked.depth or DEPTH, asked.recompute == "always"
    stages = depth * (stages_per_rank or _stages_per_rank(name))
    num_microbatches = asked.microbatches or stages
    Shape(stages, num_microbatches, window, sweep=sweep)
    check_extent(stages, num_microbatches, window)
    bandwidth = inf if link_bytes_per_s is None else link_bytes_per_s
    links = Links(bandwidth, link_latency_s, not half_duplex, ranks_per_server, overlap_named(link_overlap))

    def contest(num_stages: int) -> Contest:
        found = _costs(costs, given, num_stages)
        return Contest(found, num_microbatches, links.network, recompute, overlap_reduce)

    if compare:
        from bireme.report.terminal import print_comparison
        from bireme.report.timeline_document import comparison_document

        outcomes = list(compare_all(contest(stages), window, agree=agree))
        show(partial(comparison_document, outcomes), partial(print_comparison, outcomes), as_json=as_json)
        return
    if name == "1f1b-sliced" and slices is None:
        slices = solve_slices(contest(stages))
    program = build_program(
        name,
        source,
        stages=stages,
        microbatches=num_microbatches,
        batches=window,
        stages_per_rank=stages_per_rank,
        num_sliced=slices,
        lookahead=lookahead,
        sweep=sweep,
        recompute=recompute,
    )
    if source is not None:
        _refuse_unsound(source)
    from bireme.simulate.copies import TierLinks
    from bireme.simulate.simulator import simulate as run

    own = contest(program.num_stages)
    whole, tier_links = program, TierLinks(host_bytes_per_s or inf, disk_bytes_per_s or inf)
    if budgets is not None:
        program = solve_paging(
            program,
            own.costs,
            budgets,
            tier_links,
            links.network(program),
            may_be_apart=tables.memory.updates == "apart",
            chunk_bytes=chunk_bytes,
            overlap_reduce=overlap_reduce,
            agree=agree,
        )

    timeline = run(
        program,
        own.costs,
        links.network(program),
        overlap_reduce=overlap_reduce,
        agree=agree,
        memory_series=trace is not None,
        tier_links=tier_links,
    )
    _write(timeline, trace, picture)
    advice = None
    if (
        links.overlap is Overlap.FULL
        and source is None
        and lookahead == 0
        and sweep == 1
        and program is whole
    ):
        advice = _advice(program, own, links)
    _show(timeline, advice, trace, picture, as_json=as_json)


# Keys of the run file that say what is simulated with given costs.


def _refuse_keys(tables: "Tables", why: str, *names: str) -> None:
    given = [f"plan.{name}" for name in names if name in tables.plan.model_fields_set]
    if given:
        raise BiremeError(f"{why}: leave out {', '.join(given)}.")


def _schedule_of(tables: "Tables") -> str:
    if tables.plan.schedule == "auto":
        raise BiremeError(
            "plan.schedule is auto, but costs of stages do not describe a model to plan for. Name a "
            "schedule, such as --set plan.schedule=2bw, or give a file with --from FILE.csv."
        )
    return tables.plan.schedule


def _stages_per_rank(name: str | None) -> int:
    from bireme.schedule.catalogue import schedule_named

    return 1 if name is None else schedule_named(name).stages_per_rank


def _budgets(tables: "Tables") -> "Budgets | None":
    """What each rank may use of each tier; None if nothing is offloaded."""
    from bireme.schedule.budgets import Budgets
    from bireme.train.run_file.checks import check_paging

    check_paging(tables.memory, tables.plan)
    if not tables.memory.is_on:
        return None
    device, disk = tables.memory.device_bytes, tables.memory.most_disk_bytes
    if device is None or disk is None:
        what = "device" if device is None else "disk_bytes"
        raise BiremeError(
            f"memory.{what} is auto, but costs of stages do not describe the machine. Set it to bytes, such "
            f"as --set memory.{what}=6GB."
        )
    return Budgets(device, tables.memory.host_bytes, disk)


def _write(timeline: "Timeline", trace: Path | None, picture: Path | None) -> None:
    if trace is not None:
        from bireme.report.timeline_document import write_trace

        write_trace(timeline, trace)
    if picture is not None:
        from bireme.report.picture import write_picture

        write_picture(timeline, picture)


def _costs(path: Path | None, given: dict[str, float | None], num_stages: int) -> "Costs":
    from bireme.documents import validated
    from bireme.simulate.costs import CostsFile, load_costs

    if path is not None:
        return load_costs(path, num_stages)
    return validated(given, CostsFile, source="command line").costs(num_stages)


def _refuse_unsound(source: Path) -> None:
    """Check that a file is asked for one batch; it has no more."""
    from bireme.schedule.checker import check
    from bireme.schedule.torch_csv import load

    program = load(source)
    report = check(program)
    if not report.ok:
        raise BiremeError(report.verdict(program.name))


def _advice(program: "Program", contest: "Contest", links: "Links") -> "Lookahead | None":
    """The gain of a lookahead, for schedules that allow one and links that take time."""
    from bireme.schedule.catalogue import schedule_named
    from bireme.simulate.comparison import solve_lookahead

    takes_time = links.latency_s > 0 or (links.bytes_per_s < inf and any(contest.costs.message_bytes))
    if not takes_time or schedule_named(program.name).most_lookahead is None:
        return None
    return solve_lookahead(program.name, contest)


def _show(timeline: "Timeline", advice: "Lookahead | None", *written: Path | None, as_json: bool) -> None:
    from bireme.report.terminal import print_timeline
    from bireme.report.timeline_document import timeline_document

    show(
        lambda: timeline_document(timeline, advice),
        lambda console: print_timeline(timeline, console, advice),
        as_json=as_json,
    )
    if not as_json:
        say_written(*written)
