"""A report of the engine's benchmark as plain data, for --json."""

from dataclasses import asdict
from typing import Any

from bireme.bench.document import verdict_documents
from bireme.bench.emulation import EmulationRow
from bireme.bench.engine import EngineReport
from bireme.bench.spread import Spread
from bireme.bench.verdicts import verdicts

__all__ = ["engine_document"]


def engine_document(report: EngineReport) -> dict[str, Any]:
    """Medians under plain names; `..._spread` has the least and the greatest, `others_share` the share of the
    cores that other programs had.
    """
    overhead, counts = report.overhead, report.counts
    document: dict[str, Any] = {
        "rows": [_row(row) for row in report.rows],
        "verdicts": verdict_documents(list(verdicts(report))),
        "overhead_s": overhead.ours_s.median,
        "overhead_s_spread": _spread(overhead.ours_s),
        "torch_overhead_s": overhead.peers_s[overhead.best_peer].median,
        "torch_overhead_schedule": overhead.best_peer,
        "torch_overheads_s": {name: spread.median for name, spread in overhead.peers_s.items()},
        "overhead_share": overhead.share.median,
        "overhead_share_spread": _spread(overhead.share),
        "overhead_others_share": overhead.others_share,
        "receive_buffer_bytes": counts.receive_bytes,
        "torch_receive_buffer_bytes": counts.torch_receive_bytes,
        "weight_bytes": {"1f1b": counts.flush_weight_bytes, "2bw": counts.delayed_weight_bytes},
        "parameter_bytes": counts.parameter_bytes,
        "extra_weight_copies": counts.extra_copies,
    }
    if report.gpt:
        document["small_gpt"] = [
            {
                "name": row.name,
                "microbatches": row.num_microbatches,
                "tokens_per_s": row.tokens_per_s.median,
                "tokens_per_s_spread": _spread(row.tokens_per_s),
                "over_torch": row.over_torch.median,
                "over_torch_1f1b": row.over_1f1b.median,
                "over_torch_1f1b_spread": _spread(row.over_1f1b),
                "over_one_process": row.over_alone.median,
                "others_share": row.others_share,
            }
            for row in report.gpt
        ]
    if report.footprint:
        document["peak_resident_bytes"] = [asdict(one) for one in report.footprint]
    if report.replicas is not None:
        document["replicas"] = _replicas(report)
    return document


def _row(row: EmulationRow) -> dict[str, Any]:
    return {
        "schedule": row.schedule,
        "stages": row.stages,
        "microbatches": row.microbatches,
        "measured_s": row.measured_s.median,
        "measured_s_spread": _spread(row.measured_s),
        "predicted_s": row.predicted_s,
        "limit_s": row.limit_s,
        "torch_s": row.torch_s.median,
        "torch_schedule": row.torch_schedule,
        "torch_over_ours": row.lead.median,
        "torch_over_ours_spread": _spread(row.lead),
        "share_of_limit": row.share_of_limit,
        "prediction_error": row.error,
        "others_share": row.others_share,
    }


def _replicas(report: EngineReport) -> dict[str, Any]:
    found = report.replicas
    assert found is not None
    if found.skipped is not None:
        return {"skipped": found.skipped}
    return {
        "megabits_per_s": found.megabits_per_s,
        "sum_s": found.sum_s,
        "rows": [
            {
                "schedule": row.schedule,
                "with_sum_s": row.with_sum_s.median,
                "without_sum_s": row.without_sum_s.median,
                "hidden_share": row.hidden_share.median,
                "hidden_share_spread": _spread(row.hidden_share),
            }
            for row in found.rows
        ],
    }


def _spread(spread: Spread) -> list[float]:
    return [spread.least, spread.greatest]
