"""The numbers of runs as one JSON document, for programs; what is not known is null."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bireme.report.page.figures import StageFigures, headline, idle_share, stage_figures, state
from bireme.report.page.flows import Flow, flows
from bireme.report.page.run import Run
from bireme.timeline.timeline import Timeline


def runs_document(runs: Sequence[Run], now_s: float) -> dict[str, Any]:
    """Every run with its figures, its stages, its links and its events; `now_s` tells whether it runs."""
    return {"runs": [_run(run, now_s) for run in runs]}


def _run(run: Run, now_s: float) -> dict[str, Any]:
    figures, metrics = headline(run), run.metrics
    plan = None if run.plan is None else run.plan.plan
    found = state(run, now_s)
    return {
        "run_dir": str(run.folder),
        "name": run.name,
        "model": run.model or None,
        "state": found.word,
        "state_text": found.text,
        "written_s": run.written_s,
        "schedule": plan.schedule if plan else metrics.starts[-1].schedule if metrics.starts else None,
        "num_stages": plan.num_stages if plan else None,
        "width": plan.width if plan else None,
        "num_microbatches": plan.num_microbatches if plan else None,
        **_plain(asdict(figures)),
        "prediction_error": figures.prediction_error,
        "learns": asdict(run.learns),
        "absences": [_plain(asdict(one)) for one in metrics.absences()],
        "recoveries": [asdict(one) for one in metrics.recoveries],
        "num_lines": len(metrics.training),
        "num_skipped": int(sum(count for count in metrics.training.num_skipped if count > 0)),
        "num_resumed": max(len(metrics.starts) - 1, 0),
        "stages": [_stage(stage) for stage in stage_figures(run)],
        "links": [_link(flow) for flow in flows(run)],
        **_shared(run),
        "predicted_timeline": _timeline(run.predicted),
        "measured_timeline": _timeline(run.measured),
        "evaluations": [_plain(asdict(one)) for one in metrics.evaluations],
        "checkpoints": [_plain(asdict(one)) for one in metrics.checkpoints],
        "warnings": [_plain(asdict(one)) for one in metrics.warnings],
        "notes": list(run.notes),
    }


def _stage(stage: StageFigures) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "units": [stage.first_unit, stage.last_unit],
        "devices": list(stage.devices),
        "predicted_s": stage.predicted_s,
        "measured_s": stage.measured_s,
        "predicted_busy_share": stage.predicted_share,
        "busy_share": stage.measured_share,
        "predicted_peak_bytes": stage.predicted_bytes,
        "measured_peak_bytes": stage.measured_bytes,
        "limit_bytes": stage.limit_bytes,
        "bytes": {part.name: part.num_bytes for part in stage.parts},
    }


def _link(flow: Flow) -> dict[str, Any]:
    return {
        "source": flow.source.device,
        "destination": flow.destination.device,
        **_plain(
            {
                "forth_bytes": flow.forth_bytes,
                "back_bytes": flow.back_bytes,
                "used_bytes_per_s": flow.used_bytes_per_s,
                "most_bytes_per_s": flow.most_bytes_per_s,
                "share": flow.share,
            }
        ),
    }


def _shared(run: Run) -> dict[str, Any]:
    """What replicas that share an optimizer or weights have sent each other, where they do."""
    shared = None if run.summary is None else run.summary.sync.shared
    return {} if shared is None else {"shared": shared.model_dump()}


def _timeline(timeline: Timeline | None) -> dict[str, float] | None:
    if timeline is None:
        return None
    return {
        "num_batches": timeline.program.num_batches,
        "makespan_s": timeline.makespan_s,
        "steady_batch_s": timeline.steady_batch_s,
        "idle_share": idle_share(timeline),
    }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The values with null for what is no number, which JSON cannot say."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
