"""A plan as one JSON document, for programs that read what the command line found."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bireme.plan.explain import Help
from bireme.plan.forecast import Answer, Candidate
from bireme.plan.summary import Summary, headroom_bytes, summarize
from bireme.profile.profile import Profile

__all__ = ["explanation_document", "plan_document"]


def plan_document(answer: Answer, profile: Profile, planning_s: float) -> dict[str, Any]:
    """The best plan, what it promises of each stage and device, all candidates, and where it comes from."""
    best = answer.best
    short = summarize(best)
    return {
        "model": profile.model,
        **_candidate(short),
        "lookahead": best.plan.lookahead,
        "num_sliced": best.plan.num_sliced,
        "stages_per_rank": best.plan.stages_per_rank,
        "planning_s": planning_s,
        "num_tried": answer.num_tried,
        "stages": _stages(best, profile),
        "headroom_bytes": headroom_bytes(best),
        "candidates": [_candidate(summarize(candidate)) for candidate in answer.candidates],
        "origin": asdict(answer.origin),
    }


def explanation_document(answer: Answer, helps: Sequence[Help]) -> dict[str, Any]:
    """What limits the candidates stands with them; this is what would help, with `gain` in samples' worth."""
    return {
        "helps": [
            {"with": one.words, "gain": one.gain, **_candidate(summarize(one.candidate))} for one in helps
        ],
        "candidates_headroom_bytes": [headroom_bytes(candidate) for candidate in answer.candidates],
    }


def _candidate(short: Summary) -> dict[str, Any]:
    """A candidate in short, under the names that documents have for what is predicted and counted."""
    plain = asdict(short)
    names = {"batch_s": "predicted_batch_s", "num_microbatches": "num_micro_batches"}
    return {
        **{names.get(name, name): value for name, value in plain.items()},
        "micro_batch_size": max(short.micro_batch_sizes),
    }


def _stages(best: Candidate, profile: Profile) -> list[dict[str, Any]]:
    return [
        {
            "units": list(range(stage.begin, stage.end)),
            "names": [unit.name for unit in profile.units[stage.begin : stage.end]],
            "devices": list(stage.devices),
            "recompute": stage.recompute,
            "predicted_busy_s": stage.busy_s,
            "peak_bytes": stage.peak_bytes,
            "limit_bytes": stage.limit_bytes,
            "headroom_bytes": stage.limit_bytes - stage.peak_bytes,
        }
        for stage in best.forecast.stages
    ]
