"""What the engine is held to: each claim with its limit and the figure that was found."""

from collections.abc import Iterator, Sequence

from bireme.bench.document import Verdict, at_least, at_most, exactly
from bireme.bench.emulation import EmulationRow
from bireme.bench.engine import EngineReport
from bireme.bench.small_gpt import GptRow

__all__ = ["verdicts"]

LEAST_SHARE, LEAST_SHARES = 0.95, {4: 0.93}
"""Of the limit without a bubble that 2bw comes near: in general, and by the number of stages."""
MOST_OVER_FLUSH = 1.03
"""Times the flush limit that 1f1b takes."""
LEAST_OVER_TORCH = 1.02
"""Times that our 1f1b is faster than torch's best of the same kind."""
LEAST_LEAD = 1.9
"""Times that 2bw is faster than torch's 1F1B with as many micro-batches as devices, of which there are 8."""
DEVICES_OF_LEAD = 8
MOST_OVERHEAD = 0.3
"""Of torch's overhead."""
MOST_ERROR = 0.05
"""Of the measured time, by which a prediction may be wrong."""
GPT_PEER = "Schedule1F1B"
LEAST_GPT_LEADS = {("1f1b", 4): 1.05, ("1f1b", 8): 1.05, ("2bw", 4): 1.35, ("2bw", 8): 1.15}
"""Times that a schedule of ours trains the small GPT faster than `GPT_PEER`, by its micro-batches."""


def verdicts(report: EngineReport) -> Iterator[Verdict]:
    """All claims that this report has figures for."""
    for row in report.rows:
        yield from _of_row(row)
    overhead = report.overhead
    yield at_most(
        "overhead of a micro-batch / torch's",
        overhead.share.median,
        MOST_OVERHEAD,
        overhead.share.least,
        overhead.others_share,
    )
    received = list(report.counts.receive_bytes.values())
    yield exactly("receive buffers, most / least micro-batches", max(received) / min(received), 1.0)
    yield exactly("copies of the weights that 2bw keeps more than 1f1b", report.counts.extra_copies, 1.0)
    yield from _of_gpt(report.gpt)


def _of_row(row: EmulationRow) -> Iterator[Verdict]:
    where = f"{row.schedule}, {row.stages} stages, {row.microbatches} micro-batches"
    best_share, lead, others = row.limit_s / row.measured_s.least, row.lead, row.others_share
    if row.schedule == "2bw":
        least = LEAST_SHARES.get(row.stages, LEAST_SHARE)
        yield at_least(f"{where}: share of the limit", row.share_of_limit, least, best_share, others)
        if row.stages == row.microbatches == DEVICES_OF_LEAD:
            name = f"{where}: times as fast as torch's 1F1B"
            yield at_least(name, lead.median, LEAST_LEAD, lead.greatest, others)
    if row.schedule == "1f1b":
        name = f"{where}: times the limit"
        yield at_most(name, 1 / row.share_of_limit, MOST_OVER_FLUSH, 1 / best_share, others)
        name = f"{where}: times as fast as torch's {row.torch_schedule}"
        yield at_least(name, lead.median, LEAST_OVER_TORCH, lead.greatest, others)
    name = f"{where}: error of the prediction"
    yield at_most(name, abs(row.error), MOST_ERROR, abs(row.best_error), others)


def _of_gpt(rows: Sequence[GptRow]) -> Iterator[Verdict]:
    for row in rows:
        limit = LEAST_GPT_LEADS.get((row.name, row.num_microbatches))
        if limit is not None:
            name = f"small GPT, {row.name}, {row.num_microbatches} micro-batches: times torch's {GPT_PEER}"
            lead = row.over_1f1b
            yield at_least(name, lead.median, limit, lead.greatest, row.others_share)
