"""Many devices in few words: server0/gpu0…3, or server0…127/gpu0, 2 for two of each of many equal servers."""

from collections.abc import Iterable, Sequence
from itertools import groupby

__all__ = ["device_ranges"]


def device_ranges(names: Iterable[str]) -> str:
    """The names in the order given; those of a server, and equal ones of several, are drawn together."""
    by_server = [
        (server, _ranges([name.rpartition("/")[2] for name in group]))
        for server, group in groupby(names, key=lambda name: name.rpartition("/")[0])
    ]
    found = []
    for devices, servers in groupby(by_server, key=lambda pair: pair[1]):
        for run in _runs([server for server, _ in servers]):
            found.append(f"{run}/{devices}" if run else devices)
    return ", ".join(found)


def _ranges(names: Sequence[str]) -> str:
    """Such as gpu0…3, 5: what begins as the one before it is only a number."""
    parts: list[str] = []
    stem = ""
    for run in _runs(names):
        own = _stem(run.partition("…")[0])
        is_number = parts and own == stem and own != run
        parts.append(run.removeprefix(own) if is_number else run)
        stem = own
    return ", ".join(parts)


def _runs(names: Sequence[str]) -> list[str]:
    """Such as gpu0…3 and gpu5, of names that follow each other by number."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return [run[0] if len(run) == 1 else f"{run[0]}…{run[-1].removeprefix(_stem(run[-1]))}" for run in runs]


def _follows(one: str, other: str) -> bool:
    stem = _stem(one)
    number = one.removeprefix(stem)
    return bool(number) and other == f"{stem}{int(number) + 1}" and number == str(int(number))


def _stem(name: str) -> str:
    return name.rstrip("0123456789")
