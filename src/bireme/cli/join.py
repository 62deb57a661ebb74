"""`bireme join`: take part in the run of a coordinator with this machine."""

import os
import signal
from types import FrameType
from typing import Annotated

import typer

from bireme.cli.options import Json, address_of, print_json, tell
from bireme.errors import BiremeError

_INSTALL = (
    "Put this into ~/.config/systemd/user/bireme-join.service, and type: systemctl --user enable --now "
    "bireme-join; loginctl enable-linger"
)


def join(
    coordinator: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="The coordinator, as it prints its address.")
    ],
    token: Annotated[
        str,
        typer.Option(
            metavar="TOKEN",
            help="The token that `bireme coordinate` prints; a machine that it knows needs none.",
        ),
    ] = "",
    name: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="This machine's name in the coordinator's list; by default its host name."
        ),
    ] = "",
    devices: Annotated[
        str,
        typer.Option(
            metavar="N,N… | none",
            help="The GPUs to lend, by their numbers from 0 on; with `none` it computes on the CPU.",
        ),
    ] = "",
    memory: Annotated[
        str,
        typer.Option(
            metavar="BYTES", help="The memory of this machine to lend, such as 8GiB. Plans use no more."
        ),
    ] = "",
    rate: Annotated[
        str,
        typer.Option(
            metavar="RATE",
            help="The most to send over each line to another machine, such as 50Mbit/s. Plans count with it.",
        ),
    ] = "",
    hours: Annotated[
        str,
        typer.Option(
            metavar="FROM-TO",
            help="Take part in these hours of the day only, such as 20-8 or 20:30-8:00 in local time. At "
            "their end the machine leaves, and it returns when they begin.",
        ),
    ] = "",
    service: Annotated[
        bool,
        typer.Option(
            "--service", help="Print a unit of systemd that joins with these options at every start, and end."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Take part in a run with this machine: check it and the line, wait for the others, train.

    It comes back by itself after a lost line. If it is killed, type it again. Ctrl-C stops the run in order,
    a second one ends the processes of this machine at once.

    [dim]bireme join 192.168.1.5:29600 --token TOKEN[/dim]
    """
    from bireme import __version__
    from bireme.machines.admission import AdmissionToken
    from bireme.machines.keys import own_key
    from bireme.machines.lending import DailyHours, service_unit, set_limits
    from bireme.machines.own_machine import MachineFacts, check_machine
    from bireme.report.live_view import live_view
    from bireme.train.attendance import Attendance, failures, known_coordinator, note_coordinator
    from bireme.train.joined_processes import get_ready

    address = address_of(coordinator)
    own_hours = DailyHours.parse(hours) if hours else None
    limits = {"--devices": devices, "--memory": memory, "--rate": rate, "--hours": hours}
    options = {"--token": token, "--name": name, **limits}
    words = [word for option, value in options.items() if value for word in (option, value)]
    unit = service_unit(coordinator, [coordinator, *words]) if service else ""
    set_limits(memory, devices, rate)
    given = AdmissionToken.parse(token) if token else None
    facts = MachineFacts.own(__version__)
    own = list(check_machine(facts))
    refuse_failing(failures(own))
    public = known_coordinator(address) if given is None else given.coordinator
    if service:
        typer.echo(unit, nl=False)
        typer.echo(_INSTALL, err=True)
        return

    def out(stream: str, text: str) -> None:
        attended = attendance.orders
        if stream == "out" and attended is not None and attended.run.as_json:
            return  # the coordinator's document
        typer.echo(text, err=as_json or stream == "err")

    attendance = Attendance(address, own_key(), public, facts, name or facts.name, tell, out, own_hours)

    def interrupt(number: int, frame: FrameType | None) -> None:
        attendance.interrupt(is_urgent=number == signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, lambda *_: attendance.leave())
    attendance.wait_for_hours()
    found = attendance.call("" if given is None else given.secret)
    refuse_failing(failures(found))
    if given is not None and found:
        note_coordinator(address, public)
    os.environ.setdefault("MASTER_ADDR", address[0])  # others call at the card that leads there
    tell(f"This machine offers {attendance.offer.sentence}. Waiting for the other machines.")
    get_ready()
    with live_view():
        status = attendance.run()
    if as_json:
        orders = attendance.orders
        print_json(
            {
                "status": status,
                "number": None if orders is None else orders.number,
                "findings": [one.document() for one in (*own, *found)],
            }
        )
    if status:
        raise typer.Exit(status)


def refuse_failing(sentences: list[str]) -> None:
    """Raise the first as a user's mistake, after the others."""
    for sentence in sentences[1:]:
        tell(sentence)
    if sentences:
        raise BiremeError(sentences[0])
