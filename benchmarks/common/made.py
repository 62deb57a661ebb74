"""Where and when figures were made, and which tables of docs/benchmarks.md are of old code.

    python -m benchmarks.common.made

lists the sections of docs/benchmarks.md whose newest commit is more than 200 commits old or not known, and
those with a table of figures and no commit. It warns: its status is 0.
"""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
MOST_COMMITS = 200
_COMMIT = re.compile(r"\bcommits? `?([0-9a-f]{7,40})\b")
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
_FIGURE = re.compile(r"^\|.*\| *[+-]?\d.*\|$", re.MULTILINE)


def commit() -> str:
    """The commit of this checkout; empty outside of one."""
    return _git("rev-parse", "--short=8", "HEAD")


def made_text() -> str:
    """The line that belongs above figures that are made now."""
    name = Path(sys.argv[0]).name
    words = " ".join([f"python benchmarks/{name}", *sys.argv[1:]])
    date = datetime.now(UTC).date().isoformat()
    return (
        f"`{words}`, commit {commit() or 'unknown'}, {date}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, torch {version('torch')}"
    )


@dataclass(frozen=True, slots=True)
class Stale:
    """A section of a page with old figures, and why they are thought to be old."""

    heading: str
    why: str


def stale(page: str, most: int = MOST_COMMITS) -> Iterator[Stale]:
    """The sections of a page whose newest commit is older than `most` commits, or whose tables have none."""
    found = [*_HEADING.finditer(page)]
    ends = [one.start() for one in found[1:]] + [len(page)]
    for heading, end in zip(found, ends, strict=True):
        text = page[heading.end() : end]
        commits = _COMMIT.findall(text)
        ages = {one: age for one in commits if (age := age_of(one)) is not None}
        if ages:
            newest = min(ages, key=lambda one: ages[one])
            if ages[newest] > most:
                yield Stale(heading[1], f"its newest commit, {newest}, is {ages[newest]} commits old")
        elif commits:
            yield Stale(heading[1], f"this repository does not have its commit {commits[0]}")
        elif _FIGURE.search(text):
            yield Stale(heading[1], "it has figures and names no commit")


def age_of(name: str) -> int | None:
    """The commits since the one of that name; None if this checkout does not have it."""
    count = _git("rev-list", "--count", f"{name}..HEAD")
    return int(count) if count else None


def _git(*words: str) -> str:
    done = subprocess.run(("git", "-C", str(ROOT), *words), capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    for one in stale(PAGE.read_text(encoding="utf-8")):
        sys.stdout.write(f"{one.heading}: {one.why}\n")
