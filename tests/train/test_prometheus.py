"""The figures of a run for Prometheus: its text format, its names, and who may read them."""

import re
import socket
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bireme.train.run_log import CONTENT_TYPE, MetricsLog, Prometheus

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (\S+)")
TRAINED: dict[str, Any] = {
    "loss": 2.5,
    "grad_norm": 0.5,
    "learning_rate": 3e-4,
    "tokens_per_s": None,
    "samples_per_s": 12.5,
    "seconds": 0.25,
    "num_skipped": 2,
    "memory_bytes": [1 << 30, None],
    "sent_bytes": [7, None],
}


def parsed(text: str) -> dict[str, dict[str, float]]:
    """The samples of each metric, by their labels. Checks the rules of the format on the way."""
    found: dict[str, dict[str, float]] = {}
    kinds: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in found, "the lines of a metric stand together"
            found[name] = {}
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert list(found)[-1] == name, "HELP before TYPE before samples"
            kinds[name] = kind
        else:
            sample = SAMPLE.fullmatch(line)
            assert sample is not None, line
            assert list(found)[-1] == sample[1]
            found[sample[1]][sample[2] or ""] = float(sample[3])
    for name, kind in kinds.items():
        assert (kind == "counter") == name.endswith("_total")
        assert found[name]
    assert kinds.keys() == found.keys()
    return found


def noted(tracker: Prometheus) -> None:
    start = {"devices": ["a/cpu0", "a/cpu1"], "version": "1", "schedule": "1f1b", "predicted_batch_s": 0.2}
    tracker.note("start", 0, start)
    for step in (10, 20):
        tracker.note("train", step, TRAINED)
        tracker.note("checkpoint", step, {"stall_s": 0.5, "write_s": 1.0, "num_bytes": 3})
    tracker.note("evaluation", 20, {"loss": float("nan")})
    tracker.note("membership", 20, {"event": "gone", "replica": 1})
    tracker.note("warning", 20, {"text": "late"})


def test_figures_have_the_names_and_units_of_prometheus() -> None:
    tracker = Prometheus("127.0.0.1", 0, 'a "run"\\', 100)
    noted(tracker)
    found = parsed(tracker.text())
    tracker.close()
    assert found["bireme_run_info"] == {'run="a \\"run\\"\\\\",version="1",schedule="1f1b"': 1.0}
    assert found["bireme_step"] == {"": 20.0}
    assert found["bireme_planned_steps"] == {"": 100.0}
    assert found["bireme_step_seconds"] == {"": 0.25}
    assert found["bireme_predicted_step_seconds"] == {"": 0.2}
    assert found["bireme_skipped_steps_total"] == {"": 4.0}
    assert found["bireme_checkpoints_total"] == {"": 2.0}
    assert found["bireme_checkpoint_pause_seconds_total"] == {"": 1.0}
    assert found["bireme_replicas_lost_total"] == found["bireme_warnings_total"] == {"": 1.0}
    assert found["bireme_memory_peak_bytes"] == {'rank="0",device="a/cpu0"': float(1 << 30)}
    assert found["bireme_sent_bytes_total"] == {'rank="0",device="a/cpu0"': 7.0}
    assert found["bireme_evaluation_loss"][""] != found["bireme_evaluation_loss"][""]
    assert "bireme_tokens_per_second" not in found


def test_ranks_of_a_replica_that_may_die_have_their_numbers_in_the_run() -> None:
    tracker = Prometheus("127.0.0.1", 0, "run", 100)
    noted(tracker)
    own = {"replica": 1, "memory_bytes": [5], "sent_bytes": [6]}
    tracker.note("train", 30, TRAINED | own)
    found = parsed(tracker.text())
    tracker.close()
    assert found["bireme_memory_peak_bytes"] == {'rank="1",device="a/cpu1"': 5.0}


def read(port: int, path: str) -> tuple[int, str, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.status, answer.getheader("Content-Type") or "", answer.read().decode()
    connection.close()
    return found


def test_figures_are_served_until_the_log_of_the_run_is_closed(tmp_path: Path) -> None:
    tracker = Prometheus("127.0.0.1", 0, "run", 100)
    assert tracker.server is not None
    port = tracker.server.port
    log = MetricsLog(tmp_path / "metrics.jsonl", trackers=[tracker])
    log.note("train", 10, **TRAINED)
    status, kind, text = read(port, "/metrics")
    assert (status, kind) == (200, CONTENT_TYPE)
    assert parsed(text)["bireme_loss"] == {"": 2.5}
    assert read(port, "/")[0] == 404
    log.close()
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        tracker = Prometheus("127.0.0.1", taken.getsockname()[1], "run", 100)
    log = MetricsLog(tmp_path / "metrics.jsonl", trackers=[tracker])
    log.note("train", 10, **TRAINED)
    log.close()
    assert log.tracker_failures == {"Prometheus": "Address already in use"}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
