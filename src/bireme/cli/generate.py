"""`bireme generate`: text that a trained model writes."""

import os
import sys
from typing import Annotated

import typer

from bireme.cli.options import Json, Sets, print_json
from bireme.cli.train import INTERRUPTED_STATUS
from bireme.errors import BiremeError, tell


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="The folder of a run, of an exported model, or of any transformers model.",
        ),
    ],
    prompt: Annotated[
        str,
        typer.Argument(help="The text to continue, or with --chat a message; - reads standard input."),
    ],
    tokens: Annotated[int, typer.Option(metavar="N", min=1, max=10**6, help="Most tokens to write.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(metavar="T", min=0.0, max=100.0, help="Randomness; 0 always takes the likeliest token."),
    ] = 0.8,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            min=0.0,
            max=1.0,
            help="Draw among the likeliest tokens that together have this probability.",
        ),
    ] = 1.0,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Random seed of the draws.")] = 0,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Give the prompt as a message of a user, by the chat template.",
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes of this machine, each with a part of the model; by default as many as the "
            "weights need. Under torchrun the processes are those that it starts.",
            min=1,
            metavar="N",
        ),
    ] = None,
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """Let a model write: continue a prompt, or answer it.

    The model may be larger than the memory of this machine. [dim]bireme generate runs/first-run "def "[/dim]
    """
    others = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if others and (workers is not None or prompt == "-"):
        what = "--workers" if workers is not None else "- as the prompt"
        raise BiremeError(f"{what} is for one process, but torchrun started several. Leave it out.")
    is_first = not others or os.environ["RANK"] == "0"
    if workers is not None:
        from bireme.runtime.processes import serve_from_here

        serve_from_here("bireme.train.generating")  # so that none of the processes imports it
    from bireme.report.terminal import progress_bar
    from bireme.runtime.board import RankFailed
    from bireme.runtime.world import number_of
    from bireme.train.generating import TextRequest, hide, show, writer_of
    from bireme.train.subject import subject_of

    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    asked = TextRequest(text, tokens, temperature, seed, chat, top_p)
    count = number_of(os.environ, "WORLD_SIZE") if others else workers
    try:
        with progress_bar("loading the model") as progress:
            subject = subject_of(model, set_ or (), tell)
            writer = writer_of(subject, asked, progress, workers=count, is_of_many=others)
        if is_first and not as_json and not chat:
            show(text)
        tell_text = hide if as_json else show
        found = writer.write_with_others(tell_text) if others else writer.write(tell_text)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED_STATUS) from None
    except RankFailed as error:
        typer.echo(f"\nbireme: {error}", err=True)
        raise typer.Exit(1) from None
    if found is not None and as_json:
        print_json(found.document())
    elif found is not None:
        typer.echo()
        tell(found.speed)
