"""`bireme generate`: text that a trained model writes."""

from typing import Annotated

import typer

from bireme.cli.options import Json, Sets, print_json


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="The folder of a run, of an exported model, or of any transformers model.",
        ),
    ],
    prompt: Annotated[str, typer.Argument(help="The text to continue, or with --chat a message.")],
    tokens: Annotated[int, typer.Option(metavar="N", min=1, max=10**6, help="Most tokens to write.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(metavar="T", min=0.0, max=100.0, help="Randomness; 0 always takes the likeliest token."),
    ] = 0.8,
    seed: Annotated[int, typer.Option(metavar="S", min=0, help="Random seed of the draws.")] = 0,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Give the prompt as a message of a user, by the chat template.",
        ),
    ] = False,
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """Let a model write: continue a prompt, or answer it.

    The model may be larger than this machine's memory. [dim]bireme generate runs/first-run "def "[/dim]
    """
    from bireme.report.terminal import progress_bar, tell
    from bireme.train.generating import TextRequest, writer_of
    from bireme.train.subject import subject_of

    asked = TextRequest(prompt, tokens, temperature, seed, chat)
    with progress_bar("loading the model") as progress:
        writer = writer_of(subject_of(model, set_ or (), tell), asked, progress)
    if not as_json and not chat:
        typer.echo(prompt, nl=False)
    found = writer.write(lambda text: None if as_json else typer.echo(text, nl=False))
    if as_json:
        print_json(found.document())
        return
    typer.echo()
    count, rate = len(found.ids), len(found.ids) / found.seconds if found.seconds else 0.0
    tell(f"{count:,} tokens, {rate:,.1f} tokens/s on {found.device}, by {found.by}")
