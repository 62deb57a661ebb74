"""Data and model files that this machine has fetched from others, whole or the pieces that it needs.

    root-0/model.safetensors   the header, then the tensors of the stages of this machine
    root-1/tokens.bin          the samples of the next batches

A file lies below the folder of the run, which lists the machines that serve it. In the background each
machine fetches its part of what it does not need: so the loss of one machine takes no piece away.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import nn

from bireme.bounds import bytes_text, seconds_text
from bireme.errors import Tell, tell
from bireme.files import free_bytes
from bireme.model.graph import Graph
from bireme.model.weights import header_bytes, weight_ranges
from bireme.pieces import PIECE_BYTES, Came, PieceFile, partial_files
from bireme.runtime.copies.folder_server import fetch_pieces
from bireme.runtime.copies.keeper import KeeperAddress, RateLimit
from bireme.train.checkpoint.checkpoint import MACHINES, noted_machines

WHOLE_BYTES = 32 << 20
"""Smaller files are fetched whole."""
_BY_NEED = ".safetensors", ".npy", ".bin"
"""Files of which processes read parts only through `bring`."""
_TIMEOUT_S, _TOLD_S = 60.0, 5.0
_COPIED_BYTES = 4 << 20
"""Copies that are kept for the loss of a machine are of this size."""


def _machines(path: Path) -> tuple[int, tuple[KeeperAddress, ...]]:
    """The index of this machine in the run whose folder has a file, and the addresses of the others."""
    run = next((one for one in path.absolute().parents if (one / MACHINES).is_file()), None)
    note = None if run is None else noted_machines(run)
    return (0, ()) if note is None else (note.own, note.others)


def bring(
    path: Path,
    ranges: Iterable[tuple[int, int]] | None = None,
    *,
    limit: RateLimit | None = None,
    came: Came = lambda _address, _num_bytes: None,
) -> None:
    """Fetch the pieces with bytes of these ranges, or of the whole file, that this machine lacks."""
    if (file := PieceFile.at(path)) is None or not (pieces := file.missing(ranges)):
        return
    own, others = _machines(path)
    # Each machine begins elsewhere, so that machines with the same needs have pieces for each other.
    first = own * len(pieces) // (len(others) + 1)
    turned = [*pieces[first:], *pieces[:first]]
    fetch_pieces(file, turned, lambda: _machines(path)[1], _TIMEOUT_S, limit=limit, came=came)


def is_by_need(file: PieceFile) -> bool:
    """Whether pieces of a file are fetched when they are needed."""
    return file.identity.num_bytes > WHOLE_BYTES and file.path.suffix in _BY_NEED


def bring_first(files: Sequence[PieceFile], progress: "FetchProgress") -> None:
    """Fetch what has to be here before anyone opens files: all of each, or the header of a large one."""
    first = {file.path: [(0, PIECE_BYTES)] if is_by_need(file) else None for file in files}
    progress.expect(first)
    for path, ranges in first.items():
        bring(path, ranges, came=progress)
        if ranges is not None and path.suffix == ".safetensors":
            with path.open("rb") as opened:
                bring(path, [(0, header_bytes(opened.read(PIECE_BYTES)))], came=progress)


def bring_weights(
    graph: Graph,
    names: Sequence[str],
    folder: Path,
    *,
    model: nn.Module | None = None,
    progress: "FetchProgress | None" = None,
) -> None:
    """Fetch the bytes of a folder that these parameters and buffers are made from."""
    if not any(partial_files(folder)):
        return
    places, told = weight_ranges(graph, names, folder, model=model), progress or FetchProgress(tell, {})
    told.expect(places)
    for path, ranges in places.items():
        bring(path, ranges, came=told)


def bring_copies(
    paths: Iterable[Path], copies: int, limit: RateLimit | None, *, room_bytes: int
) -> Iterator[None]:
    """Fetch this machine's part of partial files, a little at a time: each piece is on `copies` machines
    besides the first one. It ends if less than `room_bytes` of the disk would be left.
    """
    for file in (one for path in paths for one in partial_files(path)):
        own, others = _machines(file.path)
        kept = {(own - 1 - back) % len(others) for back in range(min(copies, len(others)))} if own else set()
        for group, begin in enumerate(range(0, file.identity.num_bytes, _COPIED_BYTES)):
            if group % len(others or (0,)) in kept:
                free = free_bytes(file.path.parent)
                if free is not None and free < room_bytes + _COPIED_BYTES:
                    tell(
                        f"The disk of {file.path} has {bytes_text(free)} free, which checkpoints need. So "
                        "this machine copies no more of the data: free space there, or the run may not go on "
                        "without its first machine."
                    )
                    return
                bring(file.path, [(begin, begin + _COPIED_BYTES)], limit=limit)
                yield


class FetchProgress:
    """Tells people what this machine fetches before it begins, from whom, and how much is left. `names` are
    those of the machines by their addresses.
    """

    def __init__(self, tell: Tell, names: Mapping[str, str]) -> None:
        self.tell, self._names = tell, names
        self._began_s = self._told_s = time.monotonic()
        self._expected_bytes = 0
        self.from_machines: dict[str, int] = {}

    def expect(self, places: Mapping[Path, Iterable[tuple[int, int]] | None]) -> None:
        """What is not here of these ranges of files is fetched now."""
        files = {path: PieceFile.at(path) for path in places}
        self._expected_bytes += sum(one.num_missing_bytes(places[path]) for path, one in files.items() if one)

    def __call__(self, address: str, num_bytes: int) -> None:
        """Count bytes that have come from the machine at an address, and report the progress now and then."""
        name = self._names.get(address) or address.partition(" ")[0]
        self.from_machines[name] = self.from_machines.get(name, 0) + num_bytes
        took_s, done = time.monotonic() - self._began_s, sum(self.from_machines.values())
        if time.monotonic() - self._told_s > _TOLD_S:
            self._told_s = time.monotonic()
            left = max(self._expected_bytes - done, 0)
            self.tell(
                f"{bytes_text(done)} of data and model files have come from {self._sources}; "
                f"{bytes_text(left)} are left, about {seconds_text(left * took_s / done)}."
            )

    @property
    def _sources(self) -> str:
        every = sorted(self.from_machines.items(), key=lambda one: -one[1])
        return ", ".join(f"{name} ({bytes_text(num_bytes)})" for name, num_bytes in every)

    def finish(self, files: Iterable[PieceFile]) -> None:
        """All that is needed at first is here; `files` are partial."""
        if self.from_machines:
            took = seconds_text(time.monotonic() - self._began_s)
            self.tell(f"Data and model files have come from {self._sources} in {took}.")
        left = {file.path.name: file.num_missing_bytes() for file in files}
        if left:
            names = ", ".join(f"{name} ({bytes_text(num_bytes)})" for name, num_bytes in [*left.items()][:3])
            more = ", …" if len(left) > 3 else ""
            total = bytes_text(sum(left.values()))
            self.tell(f"{total} more are fetched if this machine needs them: {names}{more}.")
