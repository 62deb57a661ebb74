"""Verbs whose options are described in their docstrings."""

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from bireme.cli.described import described


def draw(
    context: typer.Context,
    name: str,
    width: Annotated[int, {"min": 1, "words": "1 to 9"}] = 4,
    source: Path | None = None,
    quick: bool = False,
    as_json: bool = False,
) -> None:
    """Draw a thing.

    It is drawn once.

    Arguments:
        name (NAME): What to draw.

    Options:
        source (--source, -s FILE.txt): Where the words are,
            one on each line.
        quick: Take less care.

    How large it is:
        width (N): Its width, {}.
    """
    typer.echo(f"{name} {width} {source} {quick} {as_json}")


def test_a_docstring_describes_the_words_the_values_and_the_panels_of_options() -> None:
    app = typer.Typer()
    app.command()(described(draw))
    command: Any = get_command(app)
    assert command.help == "Draw a thing.\n\nIt is drawn once."
    found = {one.name: one for one in command.params}
    assert (found["name"].metavar, found["name"].required) == ("NAME", True)
    assert (found["source"].opts, found["source"].metavar) == (["--source", "-s"], "FILE.txt")
    assert found["source"].help == "Where the words are, one on each line."
    assert (found["quick"].opts, found["quick"].secondary_opts) == (["--quick"], [])
    assert (found["width"].help, found["width"].rich_help_panel) == ("Its width, 1 to 9.", "How large it is")
    assert found["as_json"].opts == ["--json"], "described for all verbs"
    assert CliRunner().invoke(app, ["cat", "-s", "a", "--quick"]).output == "cat 4 a True False\n"
    assert CliRunner().invoke(app, ["cat", "--width", "0"]).exit_code == 2


def test_a_parameter_that_is_described_nowhere_is_a_mistake_of_the_verb() -> None:
    def verb(height: int = 1) -> None:
        """Do something."""

    with pytest.raises(KeyError, match="height"):
        described(verb)
