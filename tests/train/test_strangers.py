"""A run that strangers call: malformed messages to all its listening sockets change nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.fuzz import MODES, fuzzed
from tests.support.copies import Copy
from tests.support.paced_samples import PACE
from tests.support.training import settings


def paced(words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Copy:
    """A run that takes few steps while strangers call; the one without them need not wait."""
    data = settings(data__source="tests.support.paced_samples:paced")
    pace_s = 0.05 if folder.name == "strangers" else 0.0
    return Copy([*words, *data], folder, variables={**variables, PACE: str(pace_s)})


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("mode", MODES)
def test_malformed_messages_to_every_listening_socket_of_a_run_change_nothing(
    tmp_path: Path, mode: str
) -> None:
    found = fuzzed(tmp_path, mode, 10, seed=5, start=paced, warm_steps=3)

    assert (found.status, found.ended, found.difference) == (0, 0, 0.0)
    assert found.steps > 0
    assert found.sent >= 30
    # A thread may be under way that asks ranks for their memory; those of strangers would be thirty.
    assert [row for row in found.rows if row.more_files > 0 or row.more_threads > 2] == []
    sockets = " ".join(row.sockets for row in found.rows)
    assert "(all)" not in sockets  # a run on one machine listens on its loopback alone
