"""The samples before a step that a run has left to train, by the ledger of its coordinator."""

from pathlib import Path
from typing import Any

from bireme.documents import read_json_lines
from bireme.errors import BiremeError
from bireme.sync.coordinator.ledger_line import in_force
from bireme.sync.coordinator.messages import SamplePlaces
from bireme.sync.coordinator.samples import united
from bireme.train.folder import RunFolder
from bireme.train.run_file import RunFile

__all__ = ["check_none_left", "left_at"]


def left_at(ledger: Path, step: int, batch_size: int) -> tuple[int, tuple[SamplePlaces, ...]]:
    """The first sample that nobody was given before a step, and those before it that do not count yet."""
    fresh, waiting = step * batch_size, tuple[SamplePlaces, ...]()
    records = read_json_lines(ledger, start="start").records if ledger.exists() else {}
    averages = False
    for record in in_force(records).values():
        if record.get("kind") == "start":
            averages = "mode" in record
        if averages:  # each line is of one replica's batch, and all that was dealt before a meeting counts
            if record["fresh"] <= step * batch_size:
                fresh, waiting = step * batch_size, _before(record, step * batch_size)
        elif record.get("kind") == "round" and record.get("batch") == step - 1:
            fresh, waiting = record["fresh"], tuple(SamplePlaces(*pair) for pair in record["open"])
    return fresh, waiting


def _before(record: dict[str, Any], end: int) -> tuple[SamplePlaces, ...]:
    """The places below `end` that do not count after a line."""
    return united(
        (
            *(SamplePlaces(*pair) for pair in record["open"]),
            *((SamplePlaces(record["fresh"], end),) if record["fresh"] < end else ()),
        )
    )


def check_none_left(run: RunFile, folder: RunFolder, step: int) -> None:
    """Refuse to go on without a coordinator where only that knows which samples are left before a step."""
    if run.sync.mode != "all":
        return
    end = step * run.training.batch_size
    fresh, waiting = left_at(folder.ledger, step, run.training.batch_size)
    num_left = max(end - fresh, 0) + sum(max(min(one.end, end) - one.begin, 0) for one in waiting)
    if num_left:
        raise BiremeError(
            f'sync.mode is "{run.sync.mode}", which continues with sample {end} of the run, but {num_left} '
            "samples before it were dealt to replicas that died and are not trained. Set sync.mode to "
            '"quorum", which trains them first.'
        )
