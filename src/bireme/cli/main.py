"""The command `bireme`. Verbs live in files of their own and import what they need when they run."""

import errno
import io
import os
import sys
import traceback
from typing import Annotated, Any

import typer

from bireme import __version__
from bireme.cli.verbs import Verbs
from bireme.errors import BiremeError

__all__ = ["app", "main"]

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
    # Torch warns on every start that addresses have no names, and prints C++ frames when a peer hangs up. Its
    # errors still come. Torch reads this when it is imported, in this process and in those that it starts.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        sys.exit(app(standalone_mode=False))
    except BiremeError as error:
        typer.echo(f"bireme: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        # The reader of our output closed the pipe; leave nothing for the interpreter to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO):
            sys.exit(f"bireme: the output cannot be written: {error.strerror}")
        if isinstance(error, OSError) and error.errno in PATH_ERRORS and error.filename is not None:
            typer.echo(f"bireme: {os.fsdecode(error.filename)} cannot be used: {error.strerror}.", err=True)
            sys.exit(2)
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # a word typer does not know
            sentence = _usage(error)
            typer.echo(sentence, err=True, nl=bool(sentence))
            sys.exit(2)
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
    from pydantic import ValidationError  # here, for the help needs none of it

    cause = error.__cause__
    if isinstance(cause, ValidationError):  # which does not say what was given
        message = f"{message.rstrip('.')}, and is {str(cause.errors()[0]['input'])!r}"
    end = "" if message.endswith("?") else "."
    return f"bireme: {message.rstrip('.')}{end} See `{path} --help`."
