"""What the engine is held to: each claim with the figure that was found and whether it is met."""

from collections.abc import Iterator
from dataclasses import dataclass

from bireme.bench.emulation import Row
from bireme.bench.engine import EngineReport

__all__ = ["Verdict", "verdicts"]

LEAST_SHARE = 0.95
"""Of the limit without a bubble that 2bw comes near."""
MOST_OVER_FLUSH = 1.03
"""Times the flush limit that 1f1b takes."""
LEAST_LEAD = 1.9
"""Times that 2bw is faster than torch's 1F1B with as many micro-batches as devices, of which there are 8."""
DEVICES_OF_LEAD = 8
MOST_OVERHEAD = 0.5
"""Of torch's overhead."""
MOST_ERROR = 0.05
"""Of the measured time, by which a prediction may be wrong."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A claim, what was found, and whether that is enough."""

    claim: str
    found: str
    is_met: bool


def verdicts(report: EngineReport) -> Iterator[Verdict]:
    """All claims that this report has figures for."""
    for row in report.rows:
        yield from _of_row(row)
    yield Verdict(
        f"a micro-batch's overhead is at most {MOST_OVERHEAD:g} of torch's",
        report.overhead.share.show(".2f"),
        report.overhead.share.median <= MOST_OVERHEAD,
    )
    received = report.counts.receive_bytes
    yield Verdict(
        "receive buffers do not grow with the number of micro-batches",
        ", ".join(f"m = {m}: {num_bytes:,} B" for m, num_bytes in received.items()),
        len(set(received.values())) == 1,
    )
    yield Verdict(
        "2bw keeps exactly one copy of the weights more than 1f1b",
        f"{report.counts.extra_copies:g} copies",
        report.counts.extra_copies == 1,
    )


def _of_row(row: Row) -> Iterator[Verdict]:
    where = f"{row.schedule}, {row.stages} stages, {row.microbatches} micro-batches"
    if row.schedule == "2bw":
        yield Verdict(
            f"{where}: at least {LEAST_SHARE:g} of the limit",
            f"{row.share_of_limit:.3f}",
            row.share_of_limit >= LEAST_SHARE,
        )
        if row.stages == row.microbatches == DEVICES_OF_LEAD:
            yield Verdict(
                f"{where}: at least {LEAST_LEAD:g} times as fast as torch's 1F1B",
                row.lead.show(".2f"),
                row.lead.median >= LEAST_LEAD,
            )
    if row.schedule == "1f1b":
        over = 1 / row.share_of_limit
        yield Verdict(
            f"{where}: at most {MOST_OVER_FLUSH:g} times the limit", f"{over:.3f}", over <= MOST_OVER_FLUSH
        )
        yield Verdict(
            f"{where}: faster than torch's {row.torch_schedule}", row.lead.show(".2f"), row.lead.median > 1
        )
    yield Verdict(
        f"{where}: predicted within {MOST_ERROR:.0%}", f"{row.error:+.1%}", abs(row.error) <= MOST_ERROR
    )
