"""`bireme coordinate`: wait for machines that join, and train with them."""

import json
import signal
import socket
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from bireme.cli.join import refuse_failing
from bireme.cli.options import Json, RunToml, Sets, address_of, print_json
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.machines.admission import AdmissionList, AdmissionToken
    from bireme.machines.gathering import RunOffer

PORT = 29600
_TOKEN_S = 24 * 3600.0
_LOOK_S, _PARTING_S = 0.1, 3.0
_PROBE = ("192.0.2.1", 9)
"""An address on no network, to which nothing is sent: the way there shows this machine's own address."""


def coordinate(
    run_file: RunToml = None,
    set_: Sets = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help=f"This machine's address for the others. By default that of its network card, port {PORT}.",
            show_default=False,
        ),
    ] = "",
    machines: Annotated[
        str,
        typer.Option(metavar="N | A..B", help="Machines to wait for, with this one unless --no-devices."),
    ] = "2",
    wait: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="With A..B: begin with at least A machines if no other comes for so long; by default 30.",
            show_default=False,
        ),
    ] = None,
    no_devices: Annotated[
        bool, typer.Option("--no-devices", help="Take no part in the training with this machine.")
    ] = False,
    revoke: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Let a machine take part no more, in a run on its way too, and end. A name or the beginning "
            "of a key.",
            show_default=False,
        ),
    ] = "",
    admit: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Let a machine take part again that was revoked, and end.",
            show_default=False,
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Wait for machines that type `bireme join`, and train a model with all of them.

    If machines come or go, the run is planned again over those that are there, and goes on from its newest
    state. The exit status is that of the run, as with `bireme train`. Ctrl-C stops the run in order on all
    machines.

    [dim]bireme coordinate run.toml --machines 3 --set sync.mode=quorum[/dim]
    """
    if revoke or admit:
        _change_list(revoke, admit)
        return
    least, most = _counts(machines)
    if wait is not None and least == most:
        raise BiremeError("--wait is for a range of machines, such as --machines 2..4.")
    num_others = most - (not no_devices)
    if not num_others:
        raise BiremeError("--machines counts this machine too, so that none would join. Use bireme train.")
    run, folder = _run_offer(run_file, set_ or [], as_json=as_json)
    host, port = address_of(listen) if listen else (_own_host(), PORT)

    from bireme import __version__
    from bireme.machines.gathering import Gathering, GatheringListener, RecordedMachine
    from bireme.machines.keys import own_key
    from bireme.machines.own_machine import MachineFacts, check_machine
    from bireme.machines.run_record import RunRecord, read_record, record_path, write_record
    from bireme.report.terminal import tell
    from bireme.train.attendance import Attendance, failures

    facts = MachineFacts.own(__version__)
    if not no_devices:
        refuse_failing(failures(list(check_machine(facts))))
    own, path = own_key(), record_path(folder)
    record = read_record(path, run)
    gathering = Gathering(run, own, host, (least, most), 30.0 if wait is None else wait, _list_path(), tell)
    if record is not None:
        gathering.take_up(record.newest, record.machines)
        known = next((one.address for one in record.machines if one.public == own.public), host)
        if known != host and not no_devices:
            tell(f"{host} takes no part in the training: the run knows this machine as {known}.")
            no_devices = True
    listener = GatheringListener(gathering, (host, port or (record.port if record else 0)), own, facts)
    tokens = [] if record is not None else _issue(own.public, num_others + (not no_devices))

    def keep(newest: int, phase_machines: tuple[RecordedMachine, ...]) -> None:
        is_first = not path.exists()
        try:
            write_record(path, RunRecord(newest, listener.port, phase_machines))
        except (BiremeError, OSError) as error:
            tell(f"If this command is killed, it cannot take the run up: {error}")
        else:
            if is_first:
                tell(f"If this command is killed, type it again with --set log.name={folder.name}.")

    gathering.keep = keep

    def out(stream: str, text: str) -> None:
        if stream == "err" or not as_json:
            typer.echo(text, err=stream == "err")

    attendance, taking_part = None, None
    if not no_devices:
        here = host if host.startswith("127.") else "127.0.0.1"
        attendance = Attendance((here, listener.port), own, own.public, facts, facts.name, tell, out)
        secret = tokens.pop().secret if tokens else ""

        def take_part() -> None:
            try:
                attendance.call(secret)
                attendance.offer = replace(attendance.offer, line="")  # it leads to itself
                attendance.run()
            except BiremeError as error:
                tell(f"This machine takes no part: {error}")

        taking_part = threading.Thread(target=take_part, name="bireme own machine", daemon=True)
    num_interrupts, wake = 0, threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal num_interrupts
        num_interrupts += 1 if number == signal.SIGINT or not num_interrupts else 0
        wake.set()

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    where = f"[{host}]:{listener.port}" if ":" in host else f"{host}:{listener.port}"
    _print_lines(where, tokens)
    with closing(listener):
        try:
            if taking_part is not None:
                taking_part.start()
            while not gathering.has_ended and num_interrupts < 2:
                gathering.turn()
                if num_interrupts and not gathering.has_begun:
                    break
                if num_interrupts:
                    gathering.stop()
                wake.wait(_LOOK_S)
                wake.clear()
        finally:
            if gathering.has_ended:
                path.unlink(missing_ok=True)
            gathering.end()
            _withdraw(tokens)
        if num_interrupts > 1 and attendance is not None:
            attendance.interrupt(is_urgent=True)
            attendance.interrupt(is_urgent=True)
        if taking_part is not None:
            taking_part.join(_PARTING_S)
        time.sleep(0.0 if num_interrupts > 1 else 1.2)  # each machine asks once a second
    status = 130 if num_interrupts > 1 or not gathering.has_begun else gathering.status
    if as_json:
        document = None
        with suppress(ValueError):
            document = json.loads(gathering.document)
        print_json({"status": status, "machines": gathering.machines(), "run": document})
    if status:
        raise typer.Exit(status)


def _run_offer(run_file: Path | None, sets: list[str], *, as_json: bool) -> "tuple[RunOffer, Path]":
    """The run that is asked for, with a name and absolute paths, and its folder."""
    from bireme.machines.gathering import RunOffer
    from bireme.train.choices import check_mode
    from bireme.train.folder import RunFolder, load_asked
    from bireme.train.run_file import to_toml

    run = load_asked(run_file, sets)
    check_mode(run)
    folder = RunFolder.named(run, datetime.now()).path
    with suppress(OSError):  # machines that share the folder are to see it; rank 0 says what is wrong
        folder.parent.mkdir(parents=True, exist_ok=True)
    run = run.model_copy(update={"log": run.log.model_copy(update={"name": folder.name})})
    uses_gpus = run.cluster.device != "cpu" and run.cluster.backend != "gloo"
    offer = RunOffer(
        to_toml(run),
        run.cluster.workers,
        uses_gpus,
        run.sync.is_coordinated,
        run.training.steps,
        run.elastic.patience_s,
        as_json,
    )
    return offer, folder.absolute()


def _print_lines(where: str, tokens: "list[AdmissionToken]") -> None:
    """The lines to type on the other machines, all of which have joined before if there are no tokens."""
    if not tokens:
        typer.echo("On a machine of the run whose bireme join has ended, type:", err=True)
        typer.echo(f"  bireme join {where}", err=True)
        return
    each = "this line" if len(tokens) == 1 else "one of these lines, each once"
    typer.echo(f"On each other machine, type {each}, within a day:", err=True)
    for token in tokens:
        typer.echo(f"  bireme join {where} --token {token}", err=True)
    typer.echo(
        "A machine that has joined before needs no token. All machines must see the data under the same "
        "paths. The folder of the run may be shared, or each machine has its own.",
        err=True,
    )


def _counts(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    if not first.isdecimal() or (dots and not last.isdecimal()):
        raise BiremeError(f"--machines is {text!r}: give a number such as 3, or a range such as 2..4.")
    least, most = int(first), int(last) if dots else int(first)
    if not 1 <= least <= most:
        raise BiremeError(f"--machines is {text!r}: the range must rise, from 1 on.")
    return least, most


def _own_host() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_PROBE)
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
    return address


# The list of machines, which is one for all runs that this user coordinates here.


def _list_path() -> Path:
    from bireme.machines.keys import key_path

    return key_path().with_name("admitted.json")


def _issue(public: str, count: int) -> "list[AdmissionToken]":
    """New tokens, one for each machine."""
    from bireme.machines.admission import AdmissionToken, change_admissions

    secrets: list[str] = []

    def change(found: "AdmissionList") -> "AdmissionList":
        for _ in range(count):
            found, secret = found.with_token(time.time(), _TOKEN_S)
            secrets.append(secret)
        return found

    change_admissions(_list_path(), change)
    return [AdmissionToken(public, secret) for secret in secrets]


def _withdraw(tokens: "list[AdmissionToken]") -> None:
    """Take back the tokens that have admitted no machine."""
    from bireme.machines.admission import change_admissions, digest_of

    digests = {digest_of(token.secret) for token in tokens}
    change_admissions(
        _list_path(),
        lambda found: replace(
            found, tokens=tuple(one for one in found.tokens if one.used_by or one.digest not in digests)
        ),
    )


def _change_list(revoke: str, admit: str) -> None:
    from bireme.machines.admission import change_admissions

    if revoke and admit:
        raise BiremeError("Give --revoke or --admit, not both.")
    change_admissions(
        _list_path(), lambda found: found.revoke(revoke) if revoke else found.admit_again(admit)
    )
    typer.echo(f"{revoke} may take part no more." if revoke else f"{admit} may take part again.")
