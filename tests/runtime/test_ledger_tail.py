"""The ledger as the launcher reads it: only what was added, whole lines, and nothing that was undone."""

import json
from pathlib import Path
from typing import Any

from bireme.runtime.replicas.launch import LedgerTail


def line(kind: str, batch: int, epoch: int = 1, *, known: int = 0, **more: Any) -> str:
    """A line after which so many samples count, and four more are open."""
    more |= {"fresh": known + 4, "open": [[known, known + 4]]}
    return json.dumps({"kind": kind, "batch": batch, "epoch": epoch, **more}) + "\n"


def committed(batch: int, *members: int, epoch: int = 1, returned: int = 0, known: int = 0) -> str:
    samples = [[[8 * batch + 4 * one, 8 * batch + 4 * one + 4]] for one in members]
    members_and_samples = {"members": list(members), "samples": samples}
    return line("round", batch, epoch, known=known, returned=returned, **members_and_samples)


def test_what_is_added_to_a_ledger_is_counted_once_and_what_is_undone_is_not(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(committed(0, 0, 1))
    tail = LedgerTail(path)

    with path.open("a") as file:
        file.write(line("start", 1, known=8) + committed(1, 0, 1, known=16))
        file.write(committed(2, 1, epoch=2, returned=4, known=20))
        file.write('{"kind": "rou')
    assert tail.read() == {1}
    assert (tail.num_rounds, tail.num_committed, tail.num_redone, tail.num_epochs) == (2, 12, 4, 2)
    assert tail.read() == set()

    text = path.read_text()
    again = line("start", 2, 1_000_001, known=16)
    again += committed(2, 0, epoch=1_000_001, returned=3, known=20)
    path.write_text(text[: text.rfind("{")] + again)
    assert tail.read() == {0}
    assert (tail.num_rounds, tail.num_committed, tail.num_redone) == (2, 12, 3)


def test_an_epoch_in_which_nothing_came_to_count_is_an_epoch_too(tmp_path: Path) -> None:
    """As where a replica of two dies and is back before the other one's batches count."""
    path = tmp_path / "ledger.jsonl"
    path.touch()
    tail = LedgerTail(path)
    path.write_text(line("start", 0) + committed(0, 0, 1) + committed(1, 0, 1, epoch=3))
    tail.read()
    assert tail.num_epochs == 3

    with path.open("a") as file:
        file.write(line("start", 2, 1_000_001) + committed(2, 0, epoch=1_000_002))
    tail.read()
    assert tail.num_epochs == 5


def test_lines_of_single_replicas_count_whatever_their_numbers_are(tmp_path: Path) -> None:
    """Each replica numbers its own batches. A coordinator that takes up keeps what others have weights of."""
    path = tmp_path / "ledger.jsonl"
    tail = LedgerTail(path, averages=True)
    path.write_text(committed(3, 0, known=28) + committed(3, 1, returned=2, known=32))
    assert tail.read() == {0, 1}
    with path.open("a") as file:
        file.write(line("start", 0, 1_000_001, known=36) + committed(5, 0, epoch=1_000_001, known=40))
    assert tail.read() == {0}
    assert (tail.num_rounds, tail.num_committed, tail.num_redone) == (3, 16, 2)


def test_half_a_line_that_was_there_before_is_passed_over_once_the_coordinator_has_cut_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(committed(0, 0, 1) + '{"kind": "round", "batch": 1, "epo')
    tail = LedgerTail(path)
    path.write_text(committed(0, 0, 1) + line("start", 1) + committed(1, 0, 1))

    assert tail.read() == {0, 1}
    assert tail.num_rounds == 1
