"""A pipeline of three hosts, each with the only first copy of its stage, loses one of them.

The model and the hosts are those of the home lab: network namespaces with slow links if they can be made
here, else groups of processes that share the loopback. All processes of a host are killed at once, and the
host is started again in the same way. Nothing of it is left but the copies at the keeper of the next host.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common.command import log
from benchmarks.common.verdicts import Verdict, at_most, exactly
from benchmarks.home.lab_run import END_S, MEGABITS_PER_S, Lab, Launcher, made_lab, said
from bireme.documents import read_json_object
from bireme.errors import BiremeError
from bireme.sync.coordinator.ledger_check import check_ledger
from bireme.train.checkpoint.checkpoint import find_checkpoints, open_checkpoint

HOSTS = 3
PATIENCE_S = 300.0
"""For each wait; nothing is measured by it."""
POLL_S = 0.01
BEFORE, AFTER = 12, 10
"""Batches before the kill at least, and between training again and the end."""
MOST_S = 10.0
"""Until training goes on, besides the time that the bytes of a stage take over a link."""
MOST_DIFFERENCE = 1e-6
_REST = f"""
[plan]
schedule = "1f1b"
depth = {HOSTS}
width = 1
microbatches = 4

[sync]
mode = "quorum"
lease_s = 4.0

[memory]
copies = 1

[checkpoint]
every_steps = 0
"""


class _Run:
    """A run over the hosts of a lab, and what its log has."""

    def __init__(self, lab: Lab) -> None:
        self.folder = lab.folder / "runs" / "run"
        self.launchers = [Launcher(lab, number, 0) for number in range(HOSTS)]

    def lines(self) -> list[dict[str, Any]]:
        """The whole lines of the log."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def trained(self, start: int) -> list[dict[str, Any]]:
        """The lines of batches since that start of the run, counted from 0."""
        lines = self.lines()
        starts = [place for place, line in enumerate(lines) if line["kind"] == "start"]
        own = lines[starts[start] :] if len(starts) > start else []
        return [line for line in own if line["kind"] == "train"]

    def wait_for(self, start: int, batches: int, *, copied: bool = False) -> list[dict[str, Any]]:
        """Until that many batches are trained since that start, if `copied` with a second copy."""
        ends_s = time.monotonic() + PATIENCE_S
        while True:
            found = self.trained(start)
            if len(found) >= batches and (not copied or found[-1]["copy_age"] is not None):
                return found
            if time.monotonic() > ends_s or any(one.poll() is not None for one in self.launchers):
                raise BiremeError(f"The run does not go on. The hosts said:\n{said(self.launchers)}")
            time.sleep(POLL_S)

    def close(self) -> None:
        """End all processes of all hosts."""
        for one in self.launchers:
            one.close()


def last_copy_rows(is_quick: bool) -> list[dict[str, Any]]:
    """A run for each host that is lost: the last one, and the first one too, which coordinates."""
    return [_row(lost) for lost in ((HOSTS - 1,) if is_quick else (HOSTS - 1, 1, 0))]


def _row(lost: int) -> dict[str, Any]:
    more = {"steps": 1_000_000, "batch": 16, "held_out": 0.0}
    with (
        TemporaryDirectory() as scratch,
        made_lab(Path(scratch) / "lab", _REST, [(1, 1.0)] * HOSTS, is_paced=False, **more) as lab,
        closing(_Run(lab)) as run,
    ):
        run.wait_for(0, BEFORE, copied=True)
        run.launchers[lost].kill()
        killed_s, before = time.time(), run.trained(0)
        run.launchers[lost] = Launcher(lab, lost, 1)
        run.wait_for(1, 1)
        again_s = time.time() - killed_s
        run.wait_for(1, AFTER)
        os.kill(run.launchers[(lost + 1) % HOSTS].pid, signal.SIGTERM)
        ends_s = time.monotonic() + END_S
        statuses = [one.wait(max(ends_s - time.monotonic(), 0.0)) for one in run.launchers]
        if any(statuses):
            log(said(run.launchers))
        row = {"lost_host": lost, "links": lab.about, **_figures(run, before, lost), "again_s": again_s}
        row |= {"statuses": statuses, "is_slow": bool(lab.hosts)}
        log(str(row))
        return row


def _figures(run: _Run, before: list[dict[str, Any]], lost: int) -> dict[str, Any]:
    """What was lost, by the last line before the kill, and what came of it."""
    *_, newest = find_checkpoints(run.folder / "checkpoints")
    sizes = {file.name: file.num_bytes for file in open_checkpoint(newest).manifest.files}
    losses, after = {line["step"]: line["loss"] for line in before}, run.trained(1)
    again = next(line["step"] for line in run.lines()[::-1] if line["kind"] == "start")
    twice = [abs(line["loss"] / losses[line["step"]] - 1) for line in after if line["step"] in losses]
    rank = _rank_on(run.folder, lost)
    return {
        "step": before[-1]["step"],
        "age_in_last_line": before[-1]["copy_age"],
        "lost_batches": before[-1]["step"] - again,
        "trained_twice": len(twice),
        "greatest_difference_of_losses": max(twice, default=0.0),
        "stage_bytes": sizes[f"rank-{rank:04d}.safetensors"],
        "state_bytes": sum(sizes.values()),
        "ledger_is_whole": check_ledger(run.folder / "ledger.jsonl").is_whole,
    }


def _rank_on(folder: Path, host: int) -> int:
    """The rank of the pipeline that a host has: servers are in the order of hosts."""
    devices = read_json_object(folder / "plan.json")["plan"]["devices"]
    names = [row[0] for row in devices]
    return names.index(sorted(names)[host])


def last_copy_verdicts(rows: list[dict[str, Any]]) -> Iterator[Verdict]:
    """Whether each run did what second copies promise."""
    for row in rows:
        name = f"host {row['lost_host']} of {HOSTS} lost"
        link_s = row["stage_bytes"] * 8e-6 / MEGABITS_PER_S if row["is_slow"] else 0.0
        yield exactly(f"{name}: statuses other than 0", sum(map(bool, row["statuses"])), 0)
        yield at_most(f"{name}: batches lost, by the last line", row["lost_batches"], row["age_in_last_line"])
        yield at_most(f"{name}: s until it trains again", row["again_s"], MOST_S + link_s)
        yield exactly(f"{name}: the ledger has each sample once", row["ledger_is_whole"], True)
        yield at_most(
            f"{name}: losses of batches trained twice, difference",
            row["greatest_difference_of_losses"],
            MOST_DIFFERENCE,
        )
