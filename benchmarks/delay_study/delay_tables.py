"""The part of the study about delayed updates as tables of a document."""

from collections.abc import Iterator, Sequence
from itertools import product

from benchmarks.delay_study.clock import NetworkSpeed, Time, batch_time
from benchmarks.delay_study.law import LAWS, law
from benchmarks.delay_study.study import Cell
from benchmarks.delay_study.table import FIGURES, Row, table_lines, told
from bireme.plan.penalties import DEFAULT_DELAY_WARMUP, MEASURED, steps_for_one, unseen_share
from bireme.schedule.program import Rule

__all__ = ["delay_lines", "law_lines", "short_lines", "time_lines"]


def short_lines(found: Sequence[Row]) -> Iterator[str]:
    """The excess of each rule that the engine has."""
    heads = ("what the engine does, on four stages", "AdamW", "Muon", "SGD with momentum")
    yield from table_lines(heads, _short(found))


def _short(found: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    excesses = {row.cell: row.excess for row in found}
    for (rule, starts), name in LAWS.items():
        for m in (8,) if rule is Rule.DELAYED else (4, 8):
            cells = [
                told(excesses.get(Cell(name, one, num_microbatches=m))) for one in ("adamw", "muon", "sgd")
            ]
            schedule = "2bw" if rule is Rule.DELAYED else f"2bw-fresh, m = {'d' if m == 4 else '2d'}"
            start = ", after 20 % of the run under 1f1b" if starts else ""
            yield f"{schedule}{start}", *cells


def delay_lines(found: Sequence[Row]) -> Iterator[str]:
    """Every cell without codecs, of one replica."""
    plain = [row for row in found if row.cell.has_curve]
    yield from table_lines(
        ("rule", "optimizer", "d", "m", "model", "banks", "L", "steps", *FIGURES),
        ((*_shape(row.cell), *row.figures) for row in plain),
    )


def _shape(cell: Cell) -> tuple[object, ...]:
    shape = cell.num_stages, cell.num_microbatches, cell.size, cell.bank.value, cell.lookahead
    return cell.rule, cell.optimizer, *shape, cell.steps


def law_lines(found: Sequence[Row]) -> Iterator[str]:
    """What plans count, by rule, start and optimizer; tests hold `bireme.plan.penalties` to it."""
    yield from table_lines(("rule", "start", "optimizer", "steps for one"), _laws(found))


def _laws(found: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    for (rule, starts), name in LAWS.items():
        schedule = "2bw" if rule is Rule.DELAYED else "2bw-fresh"
        for optimizer in MEASURED[rule, starts]:
            steps = law(name, optimizer, found)
            start = "20 % without delay" if starts else "delayed from the first step"
            text = "?" if steps is None else f"{steps.seen:.2f}"
            if steps is not None and rule is Rule.FRESH:
                text += f" + {steps.unseen:.2f} · unseen"
            yield schedule, start, optimizer, text


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
    heads = ("schedule", "d", "m", "network", "lookahead", "batch", "steps for one", "time to the same loss")
    yield from table_lines(heads, _times())


def _times() -> Iterator[tuple[object, ...]]:
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
                name = f"{schedule}{' after 20 %' if starts else ''}"
                loss = f"{batch:.3f}", f"{steps:.2f}", f"{batch * steps:.2f}"
                yield name, num_stages, m, speed.name.lower(), time.lookahead, *loss
