"""`bireme fit`: whether a model fits machines, how fast it trains there, and what would help."""

from functools import partial
from typing import Annotated

import typer

from bireme.cli.options import Json, show
from bireme.errors import BiremeError, closest

_DEFAULT_TOKENS = "100M"


def fit(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Built-in shape such as llama-3-8b, or a folder with a config.json."
        ),
    ],
    machines: Annotated[
        str,
        typer.Option(
            metavar='"NAME[:MEMORY][+HOST], … [@ LINK]"',
            help='Machines by the words of `bireme cluster devices`, such as "2x rtx3090, m3-max:64GB @ '
            '1Gbit/s".',
        ),
    ] = "",
    train: Annotated[
        str, typer.Option(metavar="full|lora|qlora", help="Train all weights, or adapters of rank 16.")
    ] = "full",
    length: Annotated[
        int | None, typer.Option(help="Tokens of a sequence.", show_default="4096, or the model's most")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Sequences of a batch.")] = 16,
    tokens: Annotated[
        str, typer.Option(metavar="NUMBER", help="Tokens to count the hours for, such as 100M or 2e9.")
    ] = _DEFAULT_TOKENS,
    within: Annotated[
        float, typer.Option(min=0, help="Seconds after which no further change is tried.")
    ] = 6.0,
    as_json: Json = False,
) -> None:
    """Answer whether a model fits machines, how fast it trains there, and what would help.

    Nothing is measured, and no weights and no GPU are needed.

    [dim]bireme fit llama-3-8b --train lora --machines "rtx3090, rtx4060-laptop, m3-max:64GB @ 1Gbit/s"[/dim]
    """
    from bireme.cluster.named_machines import machines_of
    from bireme.model.shapes import shape_of
    from bireme.plan.fit import FitQuestion
    from bireme.plan.fit import fit as answer
    from bireme.profile.shape_profile import TrainedShare
    from bireme.report.fit_table import fit_document, print_fit

    if train not in tuple(TrainedShare):
        raise BiremeError(f"There is no --train {train!r}. {closest(train, tuple(TrainedShare))}")
    num_tokens, shape = _number(tokens), shape_of(model)
    asked = min(4096, shape.context) if length is None else length
    question = FitQuestion(shape, machines_of(machines or _here()), TrainedShare(train), asked, batch)
    found = answer(question, within_s=within)
    show(partial(fit_document, found, num_tokens), partial(print_fit, found, num_tokens), as_json=as_json)


def _number(text: str) -> float:
    from bireme.bounds import bytes_of

    try:
        found = float(bytes_of(text.replace("B", "G").replace("b", "g"), "--tokens"))
    except BiremeError:
        found = 0.0
    if not 1 <= found <= 1e18:
        raise BiremeError(f"--tokens is {text!r}; write a number of tokens as 100M, 2B or 2e9.")
    return found


def _here() -> str:
    """This machine in words, if its GPUs are in the catalogue."""
    from bireme.cluster.catalogue import catalogued_as
    from bireme.cluster.machine import find_cuda_devices

    devices = find_cuda_devices().devices
    known = [catalogued_as(device.name) for device in devices]
    if not devices or any(one is None or one is not known[0] for one in known) or known[0] is None:
        raise BiremeError(
            "This machine has no GPUs of one kind that the catalogue knows. Name machines, such as "
            "--machines rtx3090; `bireme cluster devices` lists the names."
        )
    return f"{len(devices)}x {known[0].word}:{min(device.memory_bytes for device in devices)}"
