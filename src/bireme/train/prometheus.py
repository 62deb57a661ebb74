"""A run's figures for Prometheus: `http://HOST:PORT/metrics`, in its text format.

Names follow the conventions of Prometheus: base units (seconds, bytes), `_total` for counters. Collectors of
OpenTelemetry read the same format.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bireme.train.trackers import Tracker
from bireme.wire.text_server import HttpServer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Sample = tuple[Mapping[str, str], float]
"""Labels and a value."""

_HELP = {
    "bireme_run_info": "The run, as labels; the value is 1.",
    "bireme_step": "Steps that the run has trained.",
    "bireme_planned_steps": "Steps that the run is to train.",
    "bireme_loss": "Loss of the newest logged step.",
    "bireme_gradient_norm": "Norm of the gradient of the newest logged step.",
    "bireme_learning_rate": "Learning rate of the newest logged step.",
    "bireme_step_seconds": "Mean seconds of a step since the logged step before.",
    "bireme_predicted_step_seconds": "Seconds of a step that the plan predicts.",
    "bireme_tokens_per_second": "Tokens trained per second since the logged step before.",
    "bireme_samples_per_second": "Samples trained per second since the logged step before.",
    "bireme_evaluation_loss": "Loss of the newest evaluation.",
    "bireme_memory_peak_bytes": "Most memory that a rank has had.",
    "bireme_sent_bytes_total": "Bytes that a rank has sent to other ranks since this start of the run.",
    "bireme_skipped_steps_total": "Steps skipped since this start of the run.",
    "bireme_checkpoints_total": "Checkpoints written since this start of the run.",
    "bireme_checkpoint_step": "Step of the newest checkpoint.",
    "bireme_checkpoint_pause_seconds_total": "Seconds that training stood still for checkpoints since this "
    "start of the run.",
    "bireme_replicas_lost_total": "Losses of replicas since this start of the run.",
    "bireme_warnings_total": "Warnings since this start of the run.",
}

_TRAINING = {
    "loss": "bireme_loss",
    "grad_norm": "bireme_gradient_norm",
    "learning_rate": "bireme_learning_rate",
    "seconds": "bireme_step_seconds",
    "tokens_per_s": "bireme_tokens_per_second",
    "samples_per_s": "bireme_samples_per_second",
}
"""Gauges by the names that they have in the log."""


class Prometheus(Tracker):
    """Keeps the newest figures of a run, and serves them while the run trains."""

    title, extra = "Prometheus", ""

    def __init__(self, host: str, port: int, run: str, num_steps: int) -> None:
        super().__init__()
        self._found: dict[str, list[_Sample]] = {
            "bireme_run_info": [({"run": run}, 1.0)],
            "bireme_planned_steps": [({}, float(num_steps))],
        }
        for name in _HELP:
            if name.endswith("_total") and name != "bireme_sent_bytes_total":
                self._set(name, 0.0)
        self._run, self._devices = run, list[str]()
        self.server: HttpServer | None = None
        """None if the port is taken."""
        try:
            self.server = HttpServer(host, port, self._answered)
        except OSError as error:
            self._fail(error)
        else:
            threading.Thread(target=self.server.serve_forever, name="bireme prometheus", daemon=True).start()

    def text(self) -> str:
        """All figures, in the text format of Prometheus."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for name, help_text in _HELP.items():
            samples = self._found.get(name)
            if not samples:
                continue
            yield f"# HELP {name} {help_text}"
            yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
            for labels, value in samples:
                inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
                yield f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"

    def _note(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind in ("start", "train"):
            self._set("bireme_step", step)
        match kind:
            case "start":
                self._devices = list(values.get("devices") or ())
                labels = {
                    "run": self._run,
                    **{key: str(values.get(key, "")) for key in ("version", "schedule")},
                }
                self._found["bireme_run_info"] = [(labels, 1.0)]
                self._set("bireme_predicted_step_seconds", values.get("predicted_batch_s"))
            case "train":
                for key, name in _TRAINING.items():
                    self._set(name, values.get(key))
                self._add("bireme_skipped_steps_total", values["num_skipped"])
                first = values.get("replica", 0) * len(values["memory_bytes"])
                self._of_ranks("bireme_memory_peak_bytes", values["memory_bytes"], first)
                self._of_ranks("bireme_sent_bytes_total", values.get("sent_bytes") or (), first)
            case "evaluation":
                self._set("bireme_evaluation_loss", values["loss"])
            case "checkpoint":
                self._add("bireme_checkpoints_total", 1)
                self._set("bireme_checkpoint_step", step)
                self._add("bireme_checkpoint_pause_seconds_total", values["stall_s"])
            case "membership" if values["event"] == "gone":
                self._add("bireme_replicas_lost_total", 1)
            case "warning":
                self._add("bireme_warnings_total", 1)

    def _close(self) -> None:
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    def _answered(self, _host: str, path: str) -> tuple[int, str, str]:
        is_known = path.split("?")[0] == "/metrics"
        text = self.text() if is_known else "The figures are at /metrics.\n"
        return 200 if is_known else 404, text, CONTENT_TYPE

    def _set(self, name: str, value: float | None) -> None:
        self._found[name] = [] if value is None else [({}, float(value))]

    def _add(self, name: str, more: float) -> None:
        self._set(name, self._found[name][0][1] + more)

    def _of_ranks(self, name: str, values: Sequence[float | None], first: int) -> None:
        """A sample for each rank whose value is known. The first value is of rank `first`."""
        self._found[name] = [
            ({"rank": str(rank), "device": self._devices[rank] if rank < len(self._devices) else ""}, value)
            for rank, value in enumerate(values, first)
            if value is not None
        ]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    text = f"{value:.17g}"
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text, text)
