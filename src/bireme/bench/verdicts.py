"""What the engine is held to: each claim with its limit and the figure that was found."""

from collections.abc import Iterator, Sequence

from bireme.bench.document import Verdict, at_least, at_most, exactly
from bireme.bench.emulation import Row
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
    yield at_most("overhead of a micro-batch / torch's", report.overhead.share.median, MOST_OVERHEAD)
    received = list(report.counts.receive_bytes.values())
    yield exactly("receive buffers, most / least micro-batches", max(received) / min(received), 1.0)
    yield exactly("copies of the weights that 2bw keeps more than 1f1b", report.counts.extra_copies, 1.0)
    yield from _of_gpt(report.gpt)


def _of_row(row: Row) -> Iterator[Verdict]:
    where = f"{row.schedule}, {row.stages} stages, {row.microbatches} micro-batches"
    if row.schedule == "2bw":
        least = LEAST_SHARES.get(row.stages, LEAST_SHARE)
        yield at_least(f"{where}: share of the limit", row.share_of_limit, least)
        if row.stages == row.microbatches == DEVICES_OF_LEAD:
            yield at_least(f"{where}: times as fast as torch's 1F1B", row.lead.median, LEAST_LEAD)
    if row.schedule == "1f1b":
        yield at_most(f"{where}: times the limit", 1 / row.share_of_limit, MOST_OVER_FLUSH)
        name = f"{where}: times as fast as torch's {row.torch_schedule}"
        yield at_least(name, row.lead.median, LEAST_OVER_TORCH)
    yield at_most(f"{where}: error of the prediction", abs(row.error), MOST_ERROR)


def _of_gpt(rows: Sequence[GptRow]) -> Iterator[Verdict]:
    for row in rows:
        limit = LEAST_GPT_LEADS.get((row.name, row.num_microbatches))
        if limit is not None:
            name = f"small GPT, {row.name}, {row.num_microbatches} micro-batches: times torch's {GPT_PEER}"
            yield at_least(name, row.over_1f1b.median, limit)
