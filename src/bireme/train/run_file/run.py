"""`RunFile`: a whole run file, checked; and how it is read together with `--set` options.

The same object comes of a file, of settings alone and of Python.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import model_validator

from bireme.documents import read_toml, validated
from bireme.errors import BiremeError
from bireme.train.run_file.checks import check_together
from bireme.train.run_file.synonyms import advice
from bireme.train.run_file.tables import Tables
from bireme.train.settings import with_settings

__all__ = ["RunFile", "load_run_file"]


class RunFile(Tables):
    """What a run is to do. Its tables are attributes, their keys are attributes of theirs.

    To make one that contradicts itself is a `BiremeError`. `RunFile()` is the demonstration.
    """

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_together(self)
        return self


def load_run_file(path: Path | None = None, sets: Sequence[str] = ()) -> RunFile:
    """The run file at `path`, or an empty one, with each `table.key=value` of `sets` in its place.

    The last of several settings of a key counts. Every mistake is one `BiremeError` that names the file or
    the setting it is in.
    """
    given = {}
    if path is not None:
        if path.suffix in (".yaml", ".yml", ".json"):
            raise BiremeError(
                f"{path} is not a run file: run files are TOML. `bireme init {path.stem}.toml` writes one "
                "with every key explained."
            )
        if path.is_dir():
            raise BiremeError(
                f"{path} is a folder, not a run file. Name a .toml file, or continue the run that has this "
                f"folder with `bireme resume {path}`."
            )
        if not path.exists():
            raise BiremeError(f"There is no file {path}. `bireme init {path}` writes a run file.")
        # Keys that the file leaves out must stay out: some defaults give way to other keys.
        given = read_toml(path, Tables, advice).model_dump(exclude_unset=True, exclude_none=True)
    merged = with_settings(given, sets, Tables, advice)
    try:
        return validated(merged, RunFile, source="The run")
    except BiremeError as error:
        settings = " ".join(f"--set {text}" for text in sets)
        sources = [source for source in (str(path) if path is not None else "", settings) if source]
        raise BiremeError(f"{' with '.join(sources)}: {error}") from None
