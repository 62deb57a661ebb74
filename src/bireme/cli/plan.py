"""`bireme plan`: find the fastest plan for a profile and a cluster."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bireme.cli.measuring import (
    PANEL,
    DataType,
    Freeze,
    Fresh,
    Length,
    Like,
    LoraRank,
    LoraTarget,
    MeasureOn,
    Optimizer,
    Train,
    part_of,
)
from bireme.cli.options import Force, Json, check_writable, word
from bireme.cli.plan_options import (
    asked_sums,
    exports_of,
    penalties_of,
    tier_limits_of,
)
from bireme.cli.plan_run import PlanRun, cluster_of, measuring_of, profile_of, sizes_of
from bireme.codec.sum_description import DENSE
from bireme.errors import BiremeError, closest
from bireme.plan.penalties import DEFAULT_DELAY_WARMUP

if TYPE_CHECKING:
    from bireme.cluster.cluster import Cluster
    from bireme.plan.plan_request import PlanRequest


given_option = partial(typer.Option, rich_help_panel="Model, batch and machines")
constraint_option = partial(typer.Option, rich_help_panel="Constraints on the plan")
freedom_option = partial(typer.Option, rich_help_panel="What the plan may do")
memory_option = partial(typer.Option, rich_help_panel="Memory of each process")
output_option = partial(typer.Option, rich_help_panel="Output")


def plan(
    context: typer.Context,
    batch_size: Annotated[int, given_option("--batch-size", "-B", help="Samples per optimizer step.")],
    model: Annotated[
        str | None,
        given_option("--model", metavar="MODEL", help="Model to measure here, as in `bireme profile`."),
    ] = None,
    profile: Annotated[
        Path | None, given_option(metavar="FILE.json", help="Profile written by `bireme profile`.")
    ] = None,
    cluster: Annotated[
        str | None,
        given_option(
            metavar="FILE.toml|NAME",
            help="Cluster file, or name of a ready cluster; by default this machine.",
        ),
    ] = None,
    schedule: Annotated[
        str,
        constraint_option(
            "--schedule", "-s", metavar="NAME|auto", help="Schedule to use, or auto for the best."
        ),
    ] = "auto",
    synchronous: Annotated[bool, freedom_option("--synchronous", help="Forbid delayed updates.")] = False,
    objective: Annotated[
        str,
        constraint_option(
            **word(
                "objective",
                "time-to-loss",
                "throughput",
                "energy",
                metavar="GOAL",
                text="What to optimize: {}. Throughput ignores the extra steps that delayed updates cost; "
                "energy needs the watts of all devices.",
            ),
        ),
    ] = "time-to-loss",
    penalty: Annotated[
        list[str] | None,
        constraint_option(
            metavar="RULE=STEPS",
            help="Steps with delayed or fresh updates that equal one synchronous step. Repeatable.",
        ),
    ] = None,
    delay_warmup: Annotated[
        float | None,
        constraint_option(
            metavar="SHARE",
            help="Fraction of steps run under 1f1b before updates are delayed.",
            show_default=f"{DEFAULT_DELAY_WARMUP:g}, or 0 with --schedule",
        ),
    ] = None,
    depth: Annotated[int | None, constraint_option(help="Number of devices per replica.")] = None,
    width: Annotated[int | None, constraint_option(help="Replicas.")] = None,
    micro_batch: Annotated[int | None, constraint_option(help="Samples per micro-batch.")] = None,
    largest_batch: Annotated[
        int | None, constraint_option(help="Allow steps of up to this many samples.")
    ] = None,
    memory_fraction: Annotated[
        float, memory_option(help="Share of each device's memory that the plan may use.")
    ] = 1.0,
    devices: Annotated[
        str | None, constraint_option(metavar="NAME,…", help="Use only these devices.")
    ] = None,
    recompute: Annotated[
        str,
        memory_option(
            **word(
                "kind of recompute",
                "never",
                "where-needed",
                "always",
                metavar="WHEN",
                text="When stages recompute activations to save memory: {}.",
            ),
        ),
    ] = "where-needed",
    lookahead: Annotated[
        bool,
        freedom_option(help="Allow stages to run further ahead to hide slow links; other frameworks cannot."),
    ] = True,
    codec: Annotated[
        str,
        constraint_option(
            metavar="CODEC|auto",
            help="How stages send to each other: none, bfloat16, int8, int4, topk:0.25:8, or auto for the "
            "least time to a loss.",
        ),
    ] = "none",
    sync_codec: Annotated[
        str,
        constraint_option(
            metavar="CODEC", help="What sums over replicas go through, as sync.codec of a run file."
        ),
    ] = "none",
    gradient: Annotated[
        str,
        constraint_option(
            metavar="FORM",
            help="How gradients of linear maps are kept, as training.gradient of a run file: whole or "
            "principal:RANK.",
        ),
    ] = "whole",
    gradient_of: Annotated[
        list[str] | None,
        constraint_option(
            metavar="PATTERN",
            help="Weights whose gradients --gradient is for; by default all that get smaller. Repeatable.",
        ),
    ] = None,
    shard: Annotated[
        str,
        memory_option(
            **word(
                "thing to share",
                "none",
                "optimizer",
                "weights",
                metavar="STATE",
                text="State that replicas of a stage share, as memory.shard of a run file: {}.",
            ),
        ),
    ] = "none",
    device_memory: Annotated[
        str | None,
        memory_option(
            metavar="BYTES|auto",
            help="Memory that each process may use of its device, such as 6GB, or all of it; what does not "
            "fit may be offloaded to the host.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        memory_option(
            metavar="BYTES",
            help="Host memory of each process, 0 for none; by default its share of the host's.",
        ),
    ] = None,
    disk: Annotated[
        str | None,
        memory_option(metavar="BYTES|auto", help="Disk space of each process; by default none."),
    ] = None,
    memory_optimizer: Annotated[
        str,
        memory_option(
            **word(
                "place for the optimizer to step",
                "auto",
                "device",
                "host",
                metavar="PLACE",
                text="Place where the optimizer steps offloaded weights, as memory.optimizer of a run "
                "file: {}.",
            ),
        ),
    ] = "auto",
    memory_updates: Annotated[
        str,
        memory_option(
            **word(
                "order of updates",
                "agreed",
                "apart",
                metavar="ORDER",
                text="Order in which offloaded stages step, as memory.updates: {}. The order apart needs "
                "runs without clipping.",
            ),
        ),
    ] = "agreed",
    pin: Annotated[
        list[str] | None, constraint_option(metavar="UNIT=DEVICE", help="Put a unit on a device. Repeatable.")
    ] = None,
    together: Annotated[
        list[str] | None,
        constraint_option(
            metavar="FIRST..LAST", help="Units, by number or name, to keep on one stage. Repeatable."
        ),
    ] = None,
    whole_layers: Annotated[
        bool, freedom_option("--whole-layers", help="Cut only between layers, as other frameworks do.")
    ] = False,
    measure_batch: Annotated[
        list[int] | None,
        typer.Option(
            help="Micro-batch size to measure. Repeatable.",
            show_default="1, 2, 4, … 16",
            rich_help_panel=PANEL,
        ),
    ] = None,
    measure_on: MeasureOn = "cpu",
    like: Like = None,
    length: Length = None,
    dtype: DataType = "float32",
    optimizer: Optimizer = "adamw",
    train: Train = None,
    freeze: Freeze = None,
    lora_rank: LoraRank = None,
    lora_target: LoraTarget = None,
    fresh: Fresh = False,
    explain: Annotated[
        bool,
        output_option(
            "--explain",
            help="Show what limits the best plans and what would help. Plans again for each change.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        output_option("--output", "--to", "-o", metavar="FILE.json", help="Write the plan to a file."),
    ] = None,
    force: Force = False,
    export: Annotated[
        list[str] | None,
        output_option(
            metavar="NAME[:FILE]",
            help="Export for torch-csv, torchtitan, nemo or megatron; prints it without a file. Repeatable.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest plan that fits: where to cut a model, on which devices, with which schedule.

    [dim]bireme plan --profile profile.json --cluster two-unequal-servers --batch-size 64[/dim]
    """
    exports = exports_of(export or (), has_model=model is not None)
    if output is not None and output.suffix != ".json":
        raise BiremeError(
            f"A plan file must end in .json, and {output} does not. Name it {output.stem}.json."
        )
    check_writable(output, *(export.path for export in exports), force=force)
    asked = measuring_of(
        context,
        model,
        profile,
        sizes_of(batch_size, largest_batch, micro_batch, measure_batch),
        length=length,
        device=measure_on,
        like=like,
        dtype=dtype,
        optimizer=optimizer,
        fresh=fresh,
        part=part_of(train, freeze, lora_rank, lora_target),
    )
    schedule = schedule.lower()
    _check_words(schedule, synchronous=synchronous)
    sums = asked_sums(
        sync_codec,
        gradient,
        gradient_of,
        schedule,
        pages=device_memory is not None,
        shares=shard != "none",
    )
    from bireme.plan.partition.loads import Recompute
    from bireme.plan.plan_request import AUTO, Goal, PlanRequest

    request = PlanRequest(
        batch_size=batch_size,
        largest_batch=largest_batch,
        schedule=schedule,
        synchronous=synchronous,
        goal=Goal(objective),
        penalties=penalties_of(penalty or ()),
        delay_warmup=delay_warmup,
        memory_fraction=memory_fraction,
        depth=depth,
        width=width,
        micro_batch=micro_batch,
        devices=() if devices is None else tuple(name.strip() for name in devices.split(",")),
        recompute=Recompute(recompute.replace("-", " ")),
        lookahead=lookahead,
        codec=AUTO if codec.lower() == AUTO else codec,
        value_bytes=2 if dtype == "bfloat16" else 4,
        memory=tier_limits_of(device_memory, host_memory, disk, memory_optimizer, memory_updates),
        whole_backwards=sums.form is not None,
        shard=shard,
    )
    found_cluster = cluster_of(cluster)
    _check_numbers(request, found_cluster, None if asked is None else asked.optimizer)
    for name in request.devices:
        found_cluster.number_of(name)
    if asked is not None:
        summed = DENSE if width == 1 else sums.codec
        asked = replace(asked, codecs=request.codec_words, sums=summed)
    found_profile = profile_of(profile, asked)
    found_profile, sum_cost = sums.counted(found_profile, asked, schedule, synchronous=synchronous)
    from bireme.plan.plan_request import pins_of, ranges_of

    names = [unit.name for unit in found_profile.units]
    request = replace(
        request,
        pinned=pins_of(pin or (), names, "--pin"),
        together=ranges_of(together or (), names, "--together", whole_layers=whole_layers),
        sums=sum_cost,
    )
    for name in request.pinned.values():
        found_cluster.number_of(name)
    run = PlanRun(found_profile, found_cluster, request, asked, sums, is_given=profile is not None)
    run.show(output, exports, explained=explain, as_json=as_json)


def _check_words(schedule: str, *, synchronous: bool) -> None:
    from bireme.schedule.catalogue import SCHEDULES
    from bireme.schedule.program import Rule

    if schedule == "auto":
        return
    known = [name for name, one in SCHEDULES.items() if one.rule is not Rule.STASHED]
    if schedule not in known:
        raise BiremeError(f"Bireme cannot plan for {schedule!r}. {closest(schedule, ['auto', *known])}")
    rule = SCHEDULES[schedule].rule
    if synchronous and rule is not Rule.SYNCHRONOUS:
        raise BiremeError(
            f"--synchronous forbids {schedule}, whose update rule is {rule}. Leave out one of the two."
        )


def _check_numbers(request: "PlanRequest", cluster: "Cluster", optimizer: str | None) -> None:
    """Refuse impossible requests before measuring a profile, for that optimizer if it is to be measured."""
    from bireme.plan.search.problem import check_numbers, check_shard

    check_numbers(request, len(request.devices) or cluster.num_devices)
    if optimizer is not None:
        check_shard(request, optimizer)
