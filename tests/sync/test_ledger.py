"""What the check of a ledger finds: nothing where all is well, else which samples are missing or doubled."""

import json
from pathlib import Path

import pytest

from bireme.runtime.coordinator_process import Ledger
from bireme.runtime.replicas.launch import LedgerTail
from bireme.sync.coordinator.ledger_check import check_ledger
from bireme.sync.coordinator.messages import TERM, SamplePlaces
from bireme.sync.coordinator.samples import LEDGER, Began, Committed
from tests.support.command import bireme

LATER = TERM + 1


def rounds(*members: tuple[int, ...]) -> list[Began | Committed]:
    """A run over ten samples, in batches of four; a replica has two of them."""
    lines: list[Began | Committed] = [Began(1, 0, 10, 0, ())]
    for batch, own in enumerate(members):
        first = 4 * batch
        samples = tuple((SamplePlaces(first + 2 * one, first + 2 * one + 2),) for one in own)
        lines.append(Committed(1, batch, 0, own, samples, first + 4, ()))
    return lines


def written(folder: Path, lines: list[Began | Committed]) -> Path:
    path = folder / LEDGER
    ledger = Ledger(path)
    ledger.append(lines)
    ledger.close()
    return path


def test_a_ledger_in_which_every_sample_counts_once_is_whole(tmp_path: Path) -> None:
    found = check_ledger(written(tmp_path, rounds((0, 1), (0, 1), (0, 1))))
    assert (found.is_whole, found.rounds, found.samples, found.num_finished) == (True, 3, 12, 1)


def test_samples_that_wait_to_be_dealt_again_keep_an_epoch_from_being_finished(tmp_path: Path) -> None:
    lost = SamplePlaces(6, 8)
    lines = [*rounds((0, 1)), Committed(1, 1, 0, (0,), ((SamplePlaces(4, 6),),), 8, (lost,))]
    lines.append(Committed(1, 2, 0, (0,), ((SamplePlaces(8, 12),),), 12, (lost,)))
    found = check_ledger(written(tmp_path, lines))
    assert (found.is_whole, found.num_finished) == (True, 0)
    found = check_ledger(
        written(tmp_path, [Committed(1, 3, 0, (0,), ((lost, SamplePlaces(12, 14)),), 14, ())])
    )
    assert (found.is_whole, found.num_finished) == (True, 1)


def test_the_verb_says_which_samples_are_missing_or_doubled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = rounds((0, 1), (0,), (0, 1))
    written(tmp_path, [*lines, Committed(1, 3, 0, (0,), ((SamplePlaces(2, 4),),), 12, ())])
    result = bireme(capsys, "ledger", str(tmp_path), "--json")
    document = json.loads(result.out)
    assert result.status == 1
    assert document["missing"] == [{"epoch": 0, "begin": 6, "end": 8}]
    assert document["doubled"] == [{"epoch": 0, "begin": 2, "end": 4}]


def test_what_a_later_coordinator_begins_from_undoes_what_is_written_after_it(tmp_path: Path) -> None:
    lines = rounds((0, 1), (0, 1))
    again: list[Began | Committed] = [
        Began(LATER, 1, 10, 8, (SamplePlaces(4, 8),)),
        Committed(LATER, 1, 0, (0,), ((SamplePlaces(4, 8),),), 8, ()),
    ]
    assert check_ledger(written(tmp_path, [*lines, *again])).is_whole


def test_a_start_cannot_say_that_samples_are_trained_which_no_line_tells_of(tmp_path: Path) -> None:
    lines = rounds((0, 1), (0,))
    found = check_ledger(written(tmp_path, [*lines, Began(LATER, 2, 10, 8, ())]))
    assert found.missing == (SamplePlaces(6, 8),)


def of_one_replica(*begins: int) -> list[Began | Committed]:
    """Batches of two samples of a replica that averages weights."""
    lines: list[Began | Committed] = [Began(1, 0, 10, 0, (), "groups")]
    for batch, begin in enumerate(begins):
        lines.append(Committed(1, batch, 0, (0,), ((SamplePlaces(begin, begin + 2),),), begin + 2, ()))
    return lines


def test_a_start_of_replicas_that_average_cannot_say_so_either(tmp_path: Path) -> None:
    found = check_ledger(written(tmp_path, [*of_one_replica(0, 4), Began(LATER, 0, 10, 6, (), "groups")]))
    assert found.missing == (SamplePlaces(2, 4),)


def test_batches_that_a_replica_numbers_by_itself_are_not_those_of_the_run(tmp_path: Path) -> None:
    """It may train more of them than the run has, which then goes on for a while without a coordinator."""
    found = check_ledger(written(tmp_path, [*of_one_replica(0, 2, 4), Began(LATER, 2, 10, 8, ())]))
    assert found.is_whole


def test_a_start_after_batches_without_a_coordinator_says_what_they_trained(tmp_path: Path) -> None:
    lines = [*rounds((0, 1)), Began(LATER, 3, 10, 12, ())]
    assert check_ledger(written(tmp_path, lines)).is_whole


def test_what_a_coordinator_writes_that_slept_while_another_one_took_up_does_not_count(
    tmp_path: Path,
) -> None:
    lines = rounds((0, 1), (0, 1))
    again: list[Began | Committed] = [
        Began(LATER, 1, 10, 4, ()),
        Committed(LATER, 1, 0, (1,), ((SamplePlaces(4, 8),),), 8, ()),
    ]
    found = check_ledger(written(tmp_path, [*lines[:2], *again, lines[2]]))
    assert (found.is_whole, found.rounds) == (True, 2)


def ahead(num_rounds: int, mode: str = "") -> list[Began | Committed]:
    """Batches of two samples, of which the next one is assigned when one is committed."""
    lines: list[Began | Committed] = [Began(1, 0, 100, 0, (), mode)]
    for batch in range(num_rounds):
        own, after = (SamplePlaces(2 * batch + first, 2 * batch + first + 2) for first in (0, 2))
        lines.append(Committed(1, batch, 0, (0,), ((own,),), after.end, (after,)))
    return lines


@pytest.mark.parametrize("num_left", [1, 2, 5])
@pytest.mark.parametrize(("mode", "batch"), [("", 5), ("groups", 0)])
def test_lines_that_were_lost_with_a_machine_are_made_good_by_what_the_others_know(
    tmp_path: Path, num_left: int, mode: str, batch: int
) -> None:
    """Every sample counted once, and the ledger that was left called those of its last line missing."""
    path = written(tmp_path, ahead(5, mode)[: 1 + num_left])
    start = Began(LATER, batch, 100, 12, (SamplePlaces(10, 12),), mode)
    ledger = Ledger(path)
    ledger.append([start], takes_up=True)
    ledger.append([Committed(LATER, 5, 0, (1,), ((SamplePlaces(10, 12),),), 12, ())])
    found = check_ledger(path)
    assert (found.is_whole, found.samples) == (True, 12)
    assert found.rounds == num_left + 1 + (num_left < 5)
    if mode:
        return
    tail = LedgerTail(path)
    tail._place = 0
    assert tail.read() == {1}
    assert tail.num_committed == 12


def test_a_coordinator_that_begins_after_a_checkpoint_makes_lost_lines_good(tmp_path: Path) -> None:
    path = written(tmp_path, ahead(3))
    Ledger(path).append([Began(LATER, 6, 100, 12, ())])
    assert check_ledger(path).is_whole
    Ledger(path).append([Began(2 * LATER, 6, 100, 14, ())])
    assert check_ledger(path).missing == (SamplePlaces(12, 14),), "no batch was lost"


def test_a_last_line_that_was_cut_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    path = written(tmp_path, rounds((0, 1), (0, 1)))
    path.write_bytes(path.read_bytes()[:-20])
    assert check_ledger(path).rounds == 1
    assert check_ledger(written(tmp_path, rounds((0, 1), (0, 1))[2:])).rounds == 2


def test_a_folder_without_a_ledger_is_the_user_s_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bireme(capsys, "ledger", str(tmp_path))
    assert result.status == 2
    assert "There is no ledger" in result.err
