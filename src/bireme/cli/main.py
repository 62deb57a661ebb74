"""The command `bireme`. Verbs live in files of their own, or in the file in
brackets, and import what they need when they run.

Train a model:
    init: Write a run file for `bireme train`: what one purpose needs, or with --all every key, explained.
    train: Train a model over a pipeline. Without a run file: a small language model on Python's sources.
    data (model): Show samples as the model will see them, token by token, and what counts in the loss.
    coordinate: Wait for machines that type `bireme join`, and train a model with all of them.
    join (coordinate): Take part in a run with this machine: check it and the line, wait for the others,
        train.
    evaluate (model): Evaluate a model: its loss, perplexity, bits per byte of text, and tokens per second.
    resume (train): Resume a run from its most recent intact checkpoint.
    report: Write one HTML page about a run: curves, timeline, memory, plan. It needs no network.
    watch (report): Show the page of a run in the browser, with new figures while the run trains. Ctrl-C ends
        it.
    ledger (report): Check the ledger of a run: every sample in one committed round of each finished epoch.
    export (model): Export the latest model of a run: a transformers folder, or safetensors with the model's
        names.
    merge (model): Add the adapter of a run to its base, and export the whole model: `bireme export --merged`.
    generate (model): Let a model write: continue prompts, or answer them.

Measure and plan:
    profile (plan): Measure each unit of a model: seconds forward and backward, bytes kept and sent.
    cluster: Servers, devices and links: find, measure and show them.
    plan: Find the fastest plan that fits: where to cut a model, on which devices, with which schedule.
    fit (plan): Answer whether a model fits machines, how fast it trains there, and what would help.
    place: Place the operators of a graph on accelerators and CPUs.
    doctor (coordinate): Check this machine, and the line to another one: all that keeps them from training
        together.

Look closer:
    schedule: Draw a schedule as a grid: one row per rank, time to the right.
    simulate: Predict the time and memory of a run's plan, or of a schedule with given costs.
    memory (plan): Trace a training iteration: what the peak consists of, which blocks are idle, what could be
        swapped.
    capabilities: Show which capabilities go together, or the keys of a run file that switch on some of them.
    bench: Measure Bireme on this machine and compare it with its limits and peers.
"""

import errno
import importlib
import io
import os
import sys
import traceback
from itertools import groupby
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from bireme import __version__
from bireme.cli.described import described, read
from bireme.errors import BiremeError, tell

VERBS = read(__doc__ or "")[1]
"""All verbs, each with the first line of its own help, and its file if that has another name."""
SUMMARIES = {name: verb.text for name, verb in VERBS.items()}

EXAMPLE = "Example: bireme init run.toml, then: bireme train run.toml"


class Verbs(TyperGroup):
    """The verbs as commands. To list them loads none, so that help comes at once."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands.update({name: TyperCommand(name, help=text) for name, text in SUMMARIES.items()})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The verb itself; None where there is none."""
        if cmd_name not in SUMMARIES:
            return None
        module = importlib.import_module(f"bireme.cli.{VERBS[cmd_name].value or cmd_name}")
        app = getattr(module, "app", None)
        if app is None:
            app = typer.Typer(add_completion=False)
            app.command(name=cmd_name)(described(getattr(module, cmd_name)))
        command = get_command(app)
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Plain text: to load what draws boxes takes longer than all else together."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        options = [line for one in self.get_params(ctx) if (line := one.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(options)
        for group, verbs in groupby(VERBS.items(), lambda item: item[1].section):
            with formatter.section(group):
                formatter.write_dl([(name, verb.text) for name, verb in verbs])
        formatter.write_paragraph()
        formatter.write_text(EXAMPLE)


PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
"""Errors that even a check whether a user's path exists can raise."""

app = typer.Typer(
    name="bireme",
    cls=Verbs,
    help="Train PyTorch models that do not fit on one device, on few, unequal machines with slow links.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bireme {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    del version


def main() -> None:
    """Run the command line. Exit status: 0 done, 2 wrong input by the user, 1 anything else."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter still gets the rest
    if not VERBS:
        tell("Commands are described in docstrings, which python -OO leaves out. Start Python without it.")
        sys.exit(2)
    # Torch warns on every start that addresses have no names, and prints C++ frames when a peer hangs up. Its
    # errors still come. Torch reads this when it is imported, in this process and in those that it starts.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        sys.exit(app(standalone_mode=False))
    except BiremeError as error:
        tell(str(error))
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output closed the pipe; leave nothing for the interpreter to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO):
            sys.exit(f"bireme: the output cannot be written: {error.strerror}")
        if isinstance(error, OSError) and error.errno in PATH_ERRORS and error.filename is not None:
            tell(f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}.")
            sys.exit(2)
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # a word typer does not know
            sentence = _usage(error)
            typer.echo(sentence, err=True, nl=bool(sentence))
            sys.exit(2)
        if isinstance(error, UnicodeEncodeError) and error.encoding == "utf-8":
            near = error.object[max(error.start - 40, 0) : error.end].splitlines()[-1]
            tell(f"A name or a text is not UTF-8: {near!a}. Rename the file or folder, or correct the text.")
            sys.exit(2)
        if "KeyboardInterrupt" in "".join(traceback.format_exception(error, limit=0)):
            sys.exit(130)  # a library put the interrupt into an error of its own
        traceback.print_exc()
        typer.echo("This is a bug in Bireme: please report it with the lines above.", err=True)
        sys.exit(1)


def _usage(error: Any) -> str:
    """Typer's error message as one sentence; the help if there were no arguments."""
    message = str(error.format_message()).strip()
    if not message or type(error).__name__ == "NoArgsIsHelpError":
        return message
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "bireme"
    option = getattr(error, "option_name", None)
    if option and context is not None and any(one.name == "set_" for one in context.command.params):
        from bireme.train.run_file.text import advice

        if hint := advice([option.lstrip("-").removeprefix("no-")]):
            return f"bireme: `{path}` has no option {option}. {hint} Set a key by --set KEY=VALUE."
    from pydantic import ValidationError  # here, for the help needs none of it

    cause = error.__cause__
    if isinstance(cause, ValidationError):
        message, given = message.replace("Value error, ", ""), repr(str(cause.errors()[0]["input"]))
        before, rule, after = message.partition("Input should be")
        if rule:
            message = f"{before}{given} should be{after.partition(', unable to')[0]}"
        elif given not in message:
            message = f"{message.rstrip('.')}, and is {given}"
    end = "" if message.endswith("?") else "."
    return f"bireme: {message.rstrip('.')}{end} See `{path} --help`."
