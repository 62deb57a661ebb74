"""The part of the study about delayed updates as tables of a document."""

from collections.abc import Iterator, Sequence
from itertools import product

from benchmarks.delay_study.clock import NetworkSpeed, Time, batch_time
from benchmarks.delay_study.law import LAWS, law
from benchmarks.delay_study.study import Cell
from benchmarks.delay_study.table import Row, told
from bireme.plan.penalties import DEFAULT_DELAY_WARMUP, MEASURED, steps_for_one, unseen_share
from bireme.schedule.rule import Rule

__all__ = ["delay_lines", "law_lines", "short_lines", "time_lines"]


def short_lines(found: Sequence[Row]) -> Iterator[str]:
    """The excess of each rule that the engine has."""
    yield "| what the engine does, on four stages | AdamW | Muon | SGD with momentum |"
    yield "|---|---|---|---|"
    excesses = {row.cell: row.excess for row in found}
    for (rule, starts), name in LAWS.items():
        for m in (8,) if rule is Rule.DELAYED else (4, 8):
            cells = [
                told(excesses.get(Cell(name, one, num_microbatches=m))) for one in ("adamw", "muon", "sgd")
            ]
            schedule = "2bw" if rule is Rule.DELAYED else f"2bw-fresh, m = {'d' if m == 4 else '2d'}"
            start = ", a fifth of the run before it under 1f1b" if starts else ""
            yield f"| {schedule}{start} | {' | '.join(cells)} |"


def delay_lines(found: Sequence[Row]) -> Iterator[str]:
    """Every cell without codecs, of one replica."""
    yield "| rule | optimiser | d | m | model | banks | L | steps | rate | loss | excess | seeds | penalty |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for row in found:
        if row.cell.codec == row.cell.sums == "none" and row.cell.agreement == "all":
            yield _row_text(row)


def _row_text(row: Row) -> str:
    cell = row.cell
    shape = (
        f"{cell.num_stages} | {cell.num_microbatches} | {cell.size} | {cell.bank.value} | {cell.lookahead}"
    )
    text = f"{row.told_rate} | {row.loss:.3f} | {told(row.excess)} | {row.num_seeds} | {row.told_penalty}"
    return f"| {cell.rule} | {cell.optimizer} | {shape} | {cell.steps} | {text} |"


def law_lines(found: Sequence[Row]) -> Iterator[str]:
    """What plans count, by rule, start and optimiser; tests hold `bireme.plan.penalties` to it."""
    yield "| rule | start | optimiser | steps for one |"
    yield "|---|---|---|---|"
    for (rule, starts), name in LAWS.items():
        schedule = "2bw" if rule is Rule.DELAYED else "2bw-fresh"
        for optimizer in MEASURED[rule, starts]:
            steps = law(name, optimizer, found)
            start = "a fifth without delay" if starts else "delayed from the first step"
            text = "?" if steps is None else f"{steps.seen:.2f}"
            if steps is not None and rule is Rule.FRESH:
                text += f" + {steps.unseen:.2f} · unseen"
            yield f"| {schedule} | {start} | {optimizer} | {text} |"


RULES = {
    "1f1b": Rule.SYNCHRONOUS,
    "zb-h1": Rule.SYNCHRONOUS,
    "2bw": Rule.DELAYED,
    "2bw-fresh": Rule.FRESH,
}


def time_lines() -> Iterator[str]:
    """How long each schedule takes to a loss with AdamW: its batches, and those of a start under 1f1b, times
    the steps that plans count.
    """
    yield "| schedule | d | m | network | lookahead | batch | steps for one | time to the same loss |"
    yield "|---|---|---|---|---|---|---|---|"
    for speed, num_stages, of_stages in product(NetworkSpeed, (4, 8), (1, 2, 4)):
        m = of_stages * num_stages

        def time_of(schedule: str, speed: NetworkSpeed = speed, d: int = num_stages, m: int = m) -> Time:
            return batch_time(schedule, d, m, speed, may_look_ahead=speed is NetworkSpeed.SLOW)

        drained = time_of("1f1b").batch
        for schedule, rule in RULES.items():
            time = time_of(schedule)
            for starts in (False, True) if rule is not Rule.SYNCHRONOUS else (False,):
                unseen = unseen_share(num_stages, m, time.lookahead)
                steps = steps_for_one(
                    rule, "adamw", delay_warmup=DEFAULT_DELAY_WARMUP if starts else 0.0, unseen=unseen
                )
                batch = (
                    (1 - DEFAULT_DELAY_WARMUP) * time.batch + DEFAULT_DELAY_WARMUP * drained
                    if starts
                    else time.batch
                )
                yield (
                    f"| {schedule}{' from a fifth on' if starts else ''} | {num_stages} | {m} "
                    f"| {speed.name.lower()} | {time.lookahead} | {batch:.3f} | {steps:.2f} "
                    f"| {batch * steps:.2f} |"
                )
