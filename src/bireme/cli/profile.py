"""`bireme profile`: time and memory of every unit of a model, measured here or estimated for elsewhere."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    Measuring,
    Optimizer,
    Train,
    measure,
    part_of,
)
from bireme.cli.options import Force, Json, check_writable, print_json, refuse
from bireme.codec.description import parse_codec

if TYPE_CHECKING:
    from bireme.profile.profile import Profile, UnitProfile


def profile(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="gpt:layers=8,width=256,…, hf:FOLDER, or file.py:function."),
    ],
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", "-b", help="Samples per micro-batch. Repeatable.", show_default="1"),
    ] = None,
    length: Length = None,
    device: Annotated[
        str, typer.Option(help="Device: cpu, cuda, cuda:1; meta estimates without running.")
    ] = "cpu",
    like: Like = None,
    dtype: DataType = "float32",
    optimizer: Optimizer = "adamw",
    halves: Annotated[
        bool,
        typer.Option(
            "--halves", help="Also measure the two halves of the backward, for zero-bubble schedules."
        ),
    ] = False,
    train: Train = None,
    freeze: Freeze = None,
    lora_rank: LoraRank = None,
    lora_target: LoraTarget = None,
    fresh: Fresh = False,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CODEC",
            help="Measure also how long a codec of boundaries takes, such as topk:0.25:8. Repeat it.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "--to", "-o", metavar="FILE.json", help="Write the profile to a file."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure each unit of a model: seconds forward and backward, bytes kept and sent.

    [dim]bireme profile gpt:layers=8,width=256,heads=8,vocab=256,context=128 --batch 8[/dim]
    """
    if device != "meta":
        refuse(context, f"--device {device} measures and does not estimate", "like")
    else:
        refuse(context, "--device meta estimates and does not measure", "codec")
    check_writable(output, force=force)
    asked = Measuring(
        model,
        batch or [1],
        length=length,
        device=device,
        like=like,
        dtype=dtype,
        optimizer=optimizer,
        halves=halves,
        fresh=fresh,
        part=part_of(train, freeze, lora_rank, lora_target),
        codecs=[str(parse_codec(word)) for word in codec or ()],
    )
    from bireme.report.terminal import progress_bar

    with progress_bar("capturing the model") as progress:
        found = measure(asked, progress)
    if output is not None:
        from bireme.profile.profile import save_profile

        save_profile(found, output)
    _show(found, output, as_json=as_json)


def _show(found: "Profile", output: Path | None, *, as_json: bool) -> None:
    if as_json:
        from bireme.profile.profile import plain_profile

        plain = plain_profile(found)
        units = [_plain_unit(unit, own) for unit, own in zip(found.units, plain["units"], strict=True)]
        print_json(plain | {"num_units": len(found.units), "units": units})
        return
    from rich.console import Console

    from bireme.report.profile_table import print_profile

    print_profile(found, Console())
    if output is not None:
        typer.echo(f"\nWrote {output}.")


def _plain_unit(unit: "UnitProfile", plain: dict[str, Any]) -> dict[str, Any]:
    """A unit with its costs at all sizes and, separately, at the first."""
    first = unit.costs[0]
    return {
        "name": unit.name,
        "forward_s": first.forward_s,
        "backward_s": first.backward_s,
        "parameter_bytes": unit.parameter_bytes,
        "saved_bytes": first.saved_bytes,
        "boundary_bytes": first.boundary_bytes,
        "workspace_bytes": first.workspace_bytes,
        "same_as": unit.same_as,
        **{key: value for key, value in plain.items() if key not in ("name", "parameter_bytes", "same_as")},
    }
