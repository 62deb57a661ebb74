"""What the documents of the benchmarks of codecs have: their rows' fields, and what is judged.

What takes long there, to simulate and to train, is left out: it says some number at once.
"""

from argparse import Namespace
from typing import Any

import pytest
from examples.recommender import Trained

from benchmarks import links, principal, recommender, sums
from benchmarks.common.command import Found
from bireme.wire.encryption import VARIABLE

pytestmark = pytest.mark.slow  # imports the engine

QUICK = Namespace(quick=True, seeds=1, steps=20, mbit=100.0)


def rows_of(found: Found) -> list[dict[str, Any]]:
    """The rows of a document, each section's with the same fields; its verdicts are as they should be."""
    document = found.document()
    assert document.keys() == {"rows", "verdicts"}
    assert document["verdicts"]
    for verdict in document["verdicts"]:
        assert verdict.keys() == {"name", "limit", "value", "ok"}
    rows: list[dict[str, Any]] = document["rows"]
    for section in {row.get("section") for row in rows}:
        assert len({tuple(row) for row in rows if row.get("section") == section}) == 1
    return rows


def test_each_row_of_links_has_what_its_time_to_the_loss_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"none": 8.0, "int8": 4.0}
    monkeypatch.setattr(links, "bandwidth", lambda: 1e6)
    monkeypatch.setattr(links, "step", lambda schedule, codec: (seconds.get(codec, 1.0), 7))
    rows = rows_of(links.measure(Namespace(quick=True, section="times")))
    wanted = {"schedule", "codec", "bits", "steps", "step_s", "T", "T_dense_over_T"}
    assert all(wanted <= row.keys() for row in rows)
    of = {(row["schedule"], row["codec"]): row for row in rows}
    dense, ended = of["1f1b", "none"], of["1f1b", "topk:0.25:8, then int8"]
    assert (dense["steps"], dense["bits"], dense["T_dense_over_T"]) == (links.STEPS, 16, 1.0)
    assert all(row["T_dense_over_T"] == dense["T"] / row["T"] for row in rows)
    # The ending counts with its own seconds, the delay warm-up with those of 1f1b.
    mean_s = (1 - links.ENDING) * 1.0 + links.ENDING * seconds["int8"]
    assert ended["T"] == pytest.approx(ended["steps"] * mean_s)


def test_rows_of_sums_say_loss_seconds_and_bytes_beside_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trained = {"steps": 20, "loss": 2.0, "step_s": 0.1, "processor_s": 0.1, "network_bytes": 10}
    monkeypatch.setattr(
        sums,
        "_run",
        lambda _mbit, seeds, _steps: [
            {"codec": codec, "times_fewer": None if codec.startswith("torch") else 4.0, **trained}
            for codec in sums.CODECS
            for _ in seeds
        ],
    )
    rows = rows_of(sums.measure(QUICK))
    assert [row["codec"] for row in rows] == [*sums.CODECS]
    assert {"loss", "loss_over_dense", "step_s", "network_bytes_per_step", "times_fewer"} <= rows[0].keys()


def test_encryption_is_measured_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "WARM", 5)
    monkeypatch.setenv(VARIABLE, "")
    found = links.measure(Namespace(quick=True, section="encryption")).document()
    assert [row["encrypted"] for row in found["rows"]] == [False, True, False, True]
    assert all(value > 0 for row in found["rows"] for name, value in row.items() if name != "encrypted")


def test_rows_of_the_recommender_say_auc_and_bytes_of_both_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(_train: Any, num_ranks: int, *words: Any, **_more: Any) -> Any:
        return [Trained(words[1], words[2], 0.75, 10, 100, 20, 200)] * num_ranks

    monkeypatch.setattr("benchmarks.recommender.bireme.launch", launched)
    monkeypatch.setattr(recommender, "recommender", lambda: None)
    rows = rows_of(recommender.measure(Namespace(quick=False, seeds=2, steps=20)))
    assert [(row["boundary"], row["sums"]) for row in rows] == [*recommender.WAYS]
    assert all(row["boundary_times_fewer"] == row["sum_times_fewer"] == 10 for row in rows)
    assert rows[1]["boundary_bytes"] == 4 * 10
    assert rows[1]["auc_over_dense"] == 0


def test_rows_of_principal_say_errors_accuracies_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = {"rate": 0.3, "loss": 0.1, "accuracy": 0.97, "gradient_bytes": 100}
    monkeypatch.setattr(principal, "_trained", lambda *_: dict(trained))
    monkeypatch.setattr(principal, "_digits", lambda: (None, None))
    monkeypatch.setattr(principal, "NUM_PAIRS", 64)
    rows = rows_of(principal.measure(QUICK))
    errors = [row for row in rows if "after_6" in row]
    assert {(row["rank"], row["piece"]) for row in errors} == {
        (rank, piece) for rank in principal.RANKS for piece in principal.PIECES
    }
    assert all(row["kept_bytes"] == 4 * row["rank"] * (40 + 60 + 1) for row in errors)
    networks = [row for row in rows if "network" in row]
    assert {(row["network"], row["form"]) for row in networks} >= {
        (network, form) for network in ("fully connected", "convolutional") for form in principal.FORMS
    }
