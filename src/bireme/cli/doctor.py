"""`bireme doctor`: what keeps this machine from training with another one, and what to do about it."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from bireme.cli.options import Json, address_of, print_json
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.machines.findings import Finding
    from bireme.machines.own_machine import MachineFacts


def doctor(
    other: Annotated[
        str, typer.Argument(metavar="[HOST:PORT]", help="The other machine; by default only this one.")
    ] = "",
    token: Annotated[
        str,
        typer.Option(
            metavar="TOKEN",
            help="The token that `bireme doctor --listen` prints, or the BIREME_KEY of a run. By default the "
            "variable BIREME_KEY.",
        ),
    ] = "",
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Answer other machines at this machine's address HOST, and print the line to type on them.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Check this machine, and the line to another one: all that keeps them from training together.

    Exit status: 0 if all is well, 1 if something will fail.

    [dim]bireme doctor --listen 192.168.1.5:29600[/dim]
    """
    from bireme import __version__
    from bireme.machines.line import check_line
    from bireme.machines.own_machine import MachineFacts, check_machine
    from bireme.runtime.stores import KEY

    own = MachineFacts.own(__version__)
    if listen:
        if other or token or as_json:
            raise BiremeError("--listen goes without another machine, --token and --json.")
        _listen(*address_of(listen), own)
        return
    if token and not other:
        raise BiremeError("--token is for another machine. Name it: bireme doctor HOST:PORT --token TOKEN")
    address = address_of(other) if other else None
    found = _shown(check_machine(own), is_quiet=as_json)
    if address is not None:
        found += _shown(check_line(address, token or os.environ.get(KEY, ""), own), is_quiet=as_json)
    num_fails = sum(one.verdict == "fails" for one in found)
    if as_json:
        print_json({"is_well": not num_fails, "findings": [one.document() for one in found]})
    else:
        typer.echo(
            f"{num_fails} of {len(found)} checks found what will fail." if num_fails else "All is well."
        )
    if num_fails:
        raise typer.Exit(1)


def _shown(findings: "Iterable[Finding]", *, is_quiet: bool) -> "list[Finding]":
    found = []
    for one in findings:
        if not is_quiet:
            typer.echo(one.line)
        found.append(one)
    return found


def _listen(host: str, port: int, own: "MachineFacts") -> None:
    """Answer until the user ends it."""
    from bireme.machines.line import DoctorListener
    from bireme.wire.listener import new_key

    token = new_key()
    listener = DoctorListener((host, port), token, own, typer.echo)
    where = f"[{host}]" if ":" in host else host
    typer.echo(f"On the other machine, type: bireme doctor {where}:{listener.port} --token {token}")
    typer.echo("Ctrl-C ends this.")
    with suppress(KeyboardInterrupt):
        while True:
            time.sleep(1.0)
    listener.close()
