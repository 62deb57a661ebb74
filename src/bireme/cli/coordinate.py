"""`bireme coordinate` and `bireme join`: train with machines that join, on both sides; `bireme doctor`."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bireme.cli.options import address_of, print_json
from bireme.errors import BiremeError, tell

if TYPE_CHECKING:
    from bireme.machines.admission import AdmissionToken
    from bireme.machines.findings import Finding
    from bireme.machines.orders import RunOffer
    from bireme.machines.own_machine import MachineFacts
    from bireme.train.coordination import Coordination


PORT = 29600
_WAIT_S = 30.0
_PATIENCE_S = 5.0
"""How long a machine may be lost before work that is no training begins again without it."""
_NOWHERE = "192.0.2.1"
"""An address on no network: the way there shows this machine's own address."""


def coordinate(
    run_file: Path | None = None,
    set_: list[str] | None = None,
    listen: str = "",
    machines: str = "",
    wait: Annotated[float | None, {"min": 0}] = None,
    no_devices: bool = False,
    deputy: list[str] | None = None,
    take_over: str = "",
    revoke: str = "",
    admit: str = "",
    no_discovery: bool = False,
    as_json: bool = False,
) -> None:
    """Wait for machines that type `bireme join`, and train a model with all of them.

    If machines come or go, the run is planned again over those that are there, and goes on from its newest
    state. The exit status is that of the run, as with `bireme train`. Ctrl-C stops the run in order on all
    machines.

    [dim]bireme coordinate run.toml --machines 3 --set sync.mode=quorum[/dim]

    Options:
        wait (SECONDS): With A..B: begin with at least A machines if no other comes for so long; by default
            30.
        no_devices: Take no part in the training with this machine, which --machines then does not count.
        deputy (NAME): A machine of the run that may coordinate it if this one is lost: a name or the
            beginning of a key; repeatable. It gets this coordinator's key, so trust it.
        take_over (RUN): Coordinate this run in the place of a coordinator that is lost and whose deputy this
            machine is.
        revoke (NAME): Let a machine take part no more, in a run on its way too, and end. A name or the
            beginning of a key.
        admit (NAME): Let a machine take part again that was revoked, and end.
        no_discovery: Do not answer machines of the local network that look for a
            coordinator. Answers give the address, the name of the run and the version of Bireme.
    """
    if revoke or admit:
        _change_list(revoke, admit)
        return
    if take_over and (run_file or set_ or no_devices):
        raise BiremeError("--take-over goes without a run file, --set and --no-devices: the run is known.")
    least, most = _counts(machines or "2")
    if most == 1 and not (no_devices or take_over):
        raise BiremeError("--machines counts this machine too, so that none would join. Use bireme train.")
    home, port, takes_part = None, PORT, not (no_devices or take_over)
    if take_over:
        from bireme.machines.handover import taken_over

        handed, home = taken_over(take_over)
        run, folder, port = handed.record.run, Path(handed.run), handed.record.port
        least, most = (least, most) if machines else handed.machines
    if wait is not None and least == most:
        raise BiremeError("--wait is for a range of machines, such as --machines 2..4.")
    if not take_over:
        run, folder = _run_offer(run_file, set_ or [], as_json=as_json)

    from bireme.report.live_view import live_view

    coordination = _listening(
        run,
        folder,
        listen,
        (least, most),
        port=port,
        wait_s=_WAIT_S if wait is None else wait,
        as_json=as_json,
        takes_part=takes_part,
        deputies=deputy or (),
        home=home,
        answers=not no_discovery,
    )
    with live_view():
        status = coordination.run()
    if as_json:
        print_json({"status": status, **coordination.document()})
    if status:
        raise typer.Exit(status)


def coordinate_work(
    verb: Literal["evaluate", "generate"],
    model: str,
    words: Sequence[str],
    listen: str,
    machines: str,
    answer: Callable[..., object],
) -> None:
    """Have machines that join do the work of `bireme VERB WORDS… MODEL` with this one. `answer` answers
    questions of its first process.
    """
    from bireme.machines.orders import RunOffer

    counts = _counts(machines or "2")
    if counts[1] == 1:
        raise BiremeError("--machines counts this machine too, so that none would join. Leave it out.")
    name = f"{verb}-{datetime.now():%Y%m%d-%H%M%S}"
    text = f'format = 1\n[log]\nname = "{name}"\nfolder = "runs"\n'
    path = Path(model.removeprefix("hf:")).expanduser().resolve()
    run = RunOffer(text, None, True, False, 0, _PATIENCE_S, verb=verb, words=(*words, str(path)))
    status = _listening(run, Path(name).absolute(), listen, counts, answer=answer).run()
    if status:
        raise typer.Exit(status)


def _listening(
    run: "RunOffer",
    folder: Path,
    listen: str,
    num_machines: tuple[int, int],
    *,
    port: int = PORT,
    wait_s: float = _WAIT_S,
    as_json: bool = False,
    takes_part: bool = True,
    **more: Any,
) -> "Coordination":
    """The coordination of a run, once its lines for the other machines are printed."""
    from bireme import __version__
    from bireme.machines.own_machine import MachineFacts, check_machine
    from bireme.train.attendance import failures
    from bireme.train.coordination import Coordination
    from bireme.wire.listener import address_towards, is_own_address

    facts = MachineFacts.own(__version__)
    if takes_part:
        refuse_failing(failures(list(check_machine(facts))))

    def out(stream: str, text: str) -> None:
        if stream == "err" or not as_json:
            typer.echo(text, err=stream == "err")

    address = address_of(listen) if listen else (address_towards(_NOWHERE) or "127.0.0.1", port)
    if not is_own_address(address[0]):
        tell(
            f"{address[0]} is no address of this machine: others reach it only if a router forwards all TCP "
            "ports to here. Without --listen it is the address that leads out of this machine."
        )
    found = Coordination(
        run, folder, address, num_machines, wait_s, facts, out, takes_part=takes_part, **more
    )
    found.listen()
    os.environ.setdefault("MASTER_ADDR", address[0])  # others call at this address
    _print_lines(found.where, found.tokens)
    return found


def _run_offer(run_file: Path | None, sets: list[str], *, as_json: bool) -> "tuple[RunOffer, Path]":
    """The run that is asked for, with a name and absolute paths, and its folder."""
    from bireme.machines.orders import RunOffer
    from bireme.train.folder import RunFolder, load_asked, tell_defaults
    from bireme.train.run_data import completed
    from bireme.train.run_file import to_toml

    asked = load_asked(run_file, sets)
    tell_defaults(asked, run_file)
    run = completed(asked)
    folder = RunFolder.named(run, datetime.now()).path
    with suppress(OSError):  # machines that share the folder are to see it; rank 0 says what is wrong
        folder.parent.mkdir(parents=True, exist_ok=True)
    run = run.with_keys("log", name=folder.name)
    uses_gpus = run.cluster.device != "cpu" and run.cluster.backend != "gloo"
    offer = RunOffer(
        to_toml(run),
        run.cluster.workers,
        uses_gpus,
        run.sync.is_coordinated,
        run.training.steps,
        run.elastic.patience_s,
        as_json,
        run.balance.replan,
        # Replicas that are whole on each machine get samples by their speed.
        by_speed=run.cluster.source is None and (not run.sync.is_coordinated or run.plan.width == 1),
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
        "A machine that has joined before needs no token. The folder of the run may be shared, or each "
        "machine has its own. Data and models are fetched by a machine that has nothing at their paths.",
        err=True,
    )


def _counts(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    if not first.isdecimal() or (dots and not last.isdecimal()):
        raise BiremeError(f"--machines is {text!r}: give a number such as 3, or a range such as 2..4.")
    least, most = int(first), int(last) if dots else int(first)
    if not 1 <= least <= most:
        raise BiremeError(
            f"--machines is {text!r}: give 1 or more machines, or a range that rises, such as 2..4."
        )
    return least, most


def _change_list(revoke: str, admit: str) -> None:
    from bireme.machines.admission import admissions_path, change_admissions

    if revoke and admit:
        raise BiremeError("Give --revoke or --admit, not both.")
    change_admissions(admissions_path(), lambda found: found.marked(revoke or admit, is_revoked=bool(revoke)))
    typer.echo(f"{revoke} may take part no more." if revoke else f"{admit} may take part again.")


# `bireme join`: take part in the run of a coordinator with this machine.

_INSTALL = (
    "Put this into ~/.config/systemd/user/bireme-join.service, and type: systemctl --user enable --now "
    "bireme-join; loginctl enable-linger"
)


def join(
    coordinator: str = "",
    token: str = "",
    name: str = "",
    devices: str = "",
    memory: str = "",
    rate: str = "",
    hours: str = "",
    service: bool = False,
    as_json: bool = False,
) -> None:
    """Take part in a run with this machine: check it and the line, wait for the others, train.

    It comes back by itself after a lost line. If it is killed, type it again. Ctrl-C stops the run in order,
    a second one ends the processes of this machine at once.

    [dim]bireme join 192.168.1.5:29600 --token TOKEN[/dim]

    Arguments:
        coordinator ([HOST:PORT]): The coordinator, as it prints its address. Without it, the one that answers
            in the local network.

    Options:
        token (TOKEN): The token that `bireme coordinate` prints; a machine that it knows needs none.
        name (NAME): This machine's name in the coordinator's list; by default its host name.
        devices (N,N… | none): The GPUs to lend, by their numbers from 0 on; with `none` it computes on the
            CPU.
        memory (BYTES): The memory of this machine to lend, such as 8GiB. Plans use no more.
        rate (RATE): The most to send over each line to another machine, such as 50Mbit/s. Plans count with
            it.
        hours (FROM-TO): Take part in these hours of the day only, such as 20-8 or 20:30-8:00 in local time.
            At their end the machine leaves, and it returns when they begin.
        service: Print a unit of systemd that joins with these options at every start, and end.
    """
    from bireme import __version__
    from bireme.machines.admission import AdmissionToken
    from bireme.runtime.processes import serve_from_here

    if service and not coordinator:
        raise BiremeError("--service needs the address of the coordinator: bireme join HOST:PORT --service")
    given = AdmissionToken.parse(token) if token else None
    named = address_of(coordinator) if coordinator else None
    if not service:
        serve_from_here("bireme.train.attendance")  # which needs no torch
        from bireme.train.joined_processes import get_ready

        get_ready()  # the server imports the rest while this process calls the coordinator

    from bireme.machines.keys import known_coordinator, own_key
    from bireme.machines.lending import DailyHours, service_unit, set_limits
    from bireme.machines.own_machine import MachineFacts, check_machine
    from bireme.report.live_view import live_view
    from bireme.train.attendance import Attendance, failures

    address = named or address_of(_found_address())
    own_hours = DailyHours.parse(hours) if hours else None
    limits = {"--devices": devices, "--memory": memory, "--rate": rate, "--hours": hours}
    options = {"--token": token, "--name": name, **limits}
    words = [word for option, value in options.items() if value for word in (option, value)]
    unit = service_unit(coordinator, [coordinator, *words]) if service else ""
    set_limits(memory, devices, rate)
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

    attendance.listen()
    attendance.wait_for_hours()
    found = attendance.call("" if given is None else given.secret)
    refuse_failing(failures(found))
    os.environ.setdefault("MASTER_ADDR", address[0])  # others call at the card that leads there
    tell(f"This machine offers {attendance.offer.sentence}. Waiting for the other machines.")
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


def _found_address() -> str:
    """The address of the coordinator that answers in the local network, if exactly one does."""
    from bireme.machines.discovery import find_coordinators

    found = find_coordinators()
    for one in found:
        tell(one.sentence)
    if not found:
        raise BiremeError(
            "No coordinator answers in the local network. Type the address that `bireme coordinate` prints: "
            "bireme join HOST:PORT"
        )
    if len(found) > 1:
        raise BiremeError(
            f"{len(found)} coordinators answer. Type the address of one: bireme join {found[0].address}"
        )
    return found[0].address


def refuse_failing(sentences: list[str]) -> None:
    """Raise the first as a user's mistake, after the others."""
    for sentence in sentences[1:]:
        tell(sentence)
    if sentences:
        raise BiremeError(sentences[0])


# `bireme doctor`: what keeps this machine from training with another one, and what to do about it.


def doctor(other: str = "", token: str = "", listen: str = "", as_json: bool = False) -> None:
    """Check this machine, and the line to another one: all that keeps them from training together.

    Exit status: 0 if all is well, 1 if something will fail.

    [dim]bireme doctor --listen 192.168.1.5:29600[/dim]

    Arguments:
        other ([HOST:PORT]): The other machine; by default only this one.

    Options:
        token (TOKEN): The token that `bireme doctor --listen` prints, or the BIREME_KEY of a run. By default
            the variable BIREME_KEY.
        listen (HOST:PORT): Answer other machines at this machine's address HOST, and print the line to type
            on them.
    """
    from bireme import __version__
    from bireme.machines.line import check_line
    from bireme.machines.own_machine import MachineFacts, check_machine
    from bireme.wire.listener import KEY

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
