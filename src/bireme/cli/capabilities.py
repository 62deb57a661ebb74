"""`bireme capabilities`: what a run can use, and which two of them exclude each other."""

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from bireme.cli.options import print_json
from bireme.errors import BiremeError

if TYPE_CHECKING:
    from bireme.capabilities import Capability


def capabilities(names: list[str] | None = None, markdown: bool = False, as_json: bool = False) -> None:
    """Show which capabilities go together, or the keys of a run file that switch on some of them.

    [dim]bireme capabilities quorum boundary-codec[/dim]

    Arguments:
        names ([NAME]...): Capabilities to switch on together. By default all are listed.

    Options:
        markdown: Print docs/composition.md.
    """
    from bireme.capabilities import CAPABILITIES, capability_named, refuse_excluded
    from bireme.report.composition import (
        command_of,
        composition_document,
        composition_lines,
        composition_page,
    )

    asked = [capability_named(name) for name in dict.fromkeys(names or ())]
    if markdown:
        if asked or as_json:
            raise BiremeError("The page lists all capabilities. Leave out --markdown, or everything else.")
        typer.echo(composition_page(), nl=False)
        return
    refuse_excluded({one.name: one.name for one in asked})
    if as_json:
        print_json(composition_document(_with_places(asked or list(CAPABILITIES.values()))))
    elif asked:
        typer.echo(command_of(_with_places(asked)))
    else:
        for line in composition_lines():
            typer.echo(line)


def _with_places(found: "list[Capability]") -> "list[Capability]":
    """The same with the name of this machine, and data that it has, in the settings."""
    import sysconfig
    from pathlib import Path

    from bireme.capabilities import FOLDER, HOST, ROWS
    from bireme.cluster.machine import discover

    library = Path(sysconfig.get_path("stdlib"))
    rows = next((path for path in (library / "LICENSE.txt", *library.rglob("*.txt")) if path.is_file()), ROWS)
    places = {
        HOST: discover(1).cluster.servers[0].name,
        FOLDER: str(library / "json"),
        ROWS: str(rows),
    }
    return [
        replace(one, settings={key: _placed(value, places) for key, value in one.settings.items()})
        for one in found
    ]


def _placed(value: str | int, places: dict[str, str]) -> str | int:
    for name, place in places.items() if isinstance(value, str) else ():
        value = str(value).replace(name, place)
    return value
