"""A report of the engine's benchmark as tables for a terminal."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.common.verdicts import Spread, print_verdicts, verdict_documents
from benchmarks.engine_bench.emulation import EmulationRow
from benchmarks.engine_bench.report import EngineReport, verdicts
from bireme.bounds import bytes_text

# A report of the engine's benchmark as plain data, for --json.


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


def print_engine_report(report: EngineReport, console: Console, *, with_verdicts: bool = True) -> None:
    """All of it; figures are medians with the least and the greatest."""
    _print_rows(report, console)
    _print_overhead(report, console)
    _print_bytes(report, console)
    if report.gpt:
        _print_gpt(report, console)
    if report.replicas is not None:
        _print_replicas(report, console)
    if with_verdicts:
        print_verdicts(list(verdicts(report)), console)


def _print_rows(report: EngineReport, console: Console) -> None:
    table = _table(
        "Emulated devices: milliseconds for a batch of m micro-batches",
        "schedule", "stages", "m", "ours", "limit", "of it", "simulated", "error",
        "torch", "torch / ours",
    )  # fmt: skip
    for row in report.rows:
        table.add_row(
            row.schedule,
            str(row.stages),
            str(row.microbatches),
            f"{row.measured_s.median * 1e3:.1f}",
            f"{row.limit_s * 1e3:.0f}",
            f"{row.share_of_limit:.2f}",
            f"{row.predicted_s * 1e3:.0f}",
            f"{row.error:+.1%}",
            f"{row.torch_s.median * 1e3:.1f}",
            row.lead.show(".2f"),
        )
    console.print(table)


def _print_overhead(report: EngineReport, console: Console) -> None:
    table = _table(
        "Overhead: microseconds for a micro-batch of a tiny layer, two ranks", "runtime", "", "ours / this"
    )
    table.add_row("ours", _microseconds(report.overhead.ours_s), "")
    for name, spread in report.overhead.peers_s.items():
        share = report.overhead.share.show(".2f") if name == report.overhead.best_peer else ""
        table.add_row(f"torch {name}", _microseconds(spread), share)
    console.print(table)


def _print_bytes(report: EngineReport, console: Console) -> None:
    counts = report.counts
    table = _table("Receive buffers of two ranks, 1f1b", "micro-batches", "ours", "torch")
    for m, num_bytes in counts.receive_bytes.items():
        table.add_row(str(m), bytes_text(num_bytes), bytes_text(counts.torch_receive_bytes[m]))
    console.print(table)
    console.print(
        f"Weights and optimizer state with AdamW: 1f1b {bytes_text(counts.flush_weight_bytes)}, 2bw "
        f"{bytes_text(counts.delayed_weight_bytes)}; the difference is {counts.extra_copies:g} copies of the "
        "parameters.\n",
        highlight=False,
    )
    if report.footprint:
        table = _table(
            "Small GPT: what training adds to a rank's peak resident set",
            "schedule", "rank", "measured", "predicted", "measured / predicted",
        )  # fmt: skip
        for one in report.footprint:
            table.add_row(
                one.schedule,
                str(one.rank),
                bytes_text(one.measured_bytes),
                bytes_text(one.predicted_bytes),
                f"{one.measured_bytes / one.predicted_bytes:.2f}",
            )
        console.print(table)


def _print_gpt(report: EngineReport, console: Console) -> None:
    table = _table(
        "Small GPT, two ranks of one thread",
        "runtime", "micro-batches", "tokens/s", "times torch's best", "times its 1F1B", "times one process",
    )  # fmt: skip
    for row in report.gpt:
        table.add_row(
            row.name,
            str(row.num_microbatches),
            row.tokens_per_s.show(",.0f"),
            row.over_torch.show(".2f"),
            row.over_1f1b.show(".2f"),
            row.over_alone.show(".2f"),
        )
    console.print(table)


def _print_replicas(report: EngineReport, console: Console) -> None:
    found = report.replicas
    assert found is not None
    if found.skipped is not None:
        console.print(f"Two replicas over a slow link: left out, because {escape(found.skipped)}.\n")
        return
    table = _table(
        f"Two replicas over {found.megabits_per_s:g} Mbit/s; the sum alone takes {found.sum_s * 1e3:.0f} ms",
        "schedule", "batch with it", "without", "share hidden",
    )  # fmt: skip
    for row in found.rows:
        table.add_row(
            row.schedule,
            _milliseconds(row.with_sum_s),
            _milliseconds(row.without_sum_s),
            row.hidden_share.show(".0%"),
        )
    console.print(table)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 else "right")
    return table


def _milliseconds(seconds: Spread) -> str:
    return Spread(seconds.median * 1e3, seconds.least * 1e3, seconds.greatest * 1e3).show(".1f")


def _microseconds(seconds: Spread) -> str:
    return Spread(seconds.median * 1e6, seconds.least * 1e6, seconds.greatest * 1e6).show(".0f")
