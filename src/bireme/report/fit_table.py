"""The answers of `bireme fit`: a table for people, and one JSON document for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from bireme.bounds import bytes_text, counted
from bireme.plan.fit import Fit, FitHelp, MachinesFit, Range
from bireme.plan.forecast import summarize
from bireme.report.terminal import columns

_HOUR_S = 3600.0
_UNITS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


def fit_document(found: Fit, tokens: float) -> dict[str, Any]:
    """All answers; `hours` are for `tokens`, from the least to the most."""
    question = found.question
    return {
        "model": question.shape.name,
        "num_parameters": question.shape.num_parameters,
        "num_active": question.shape.num_active,
        "train": str(question.trained),
        "length": question.length,
        "batch_size": question.batch_size,
        "tokens": tokens,
        "rows": [_row(row, tokens) for row in found.rows],
        "helps": [asdict(one) for one in found.helps],
        "no_help": list(found.no_help),
        "not_tried": list(found.untried),
        "notes": list(found.notes),
        "took_s": found.took_s,
    }


def _row(row: MachinesFit, tokens: float) -> dict[str, Any]:
    best = row.candidate
    return {
        "machines": row.words,
        "num_devices": row.num_devices,
        "fits": row.fits,
        "offloads": row.offloads,
        "host_bytes": row.host_bytes,
        "is_best_so_far": row.is_stopped,
        "device": row.device,
        "left_bytes": row.left_bytes,
        "limit_bytes": row.limit_bytes,
        "plan": None if best is None else asdict(summarize(best)),
        "cuts": None if best is None else list(best.plan.cuts),
        "tokens_per_s": None if row.tokens_per_s is None else asdict(row.tokens_per_s),
        "hours": None if row.tokens_per_s is None else _hours(row.tokens_per_s, tokens),
    }


def _hours(rate: Range, tokens: float) -> dict[str, float]:
    return {
        "least": tokens / rate.high / _HOUR_S,
        "likely": tokens / rate.likely / _HOUR_S,
        "most": tokens / rate.low / _HOUR_S,
    }


def _amount(number: float, digits: int = 4) -> str:
    """Such as `100M`."""
    unit, size = next(((unit, size) for unit, size in _UNITS if number >= size), ("", 1.0))
    return f"{number / size:.{digits}g}{unit}"


def print_fit(found: Fit, tokens: float, console: Console) -> None:
    """A row for each machine and for all together, the fastest plan in words, what would help, and notes."""
    question = found.question
    shape = question.shape
    active = f" ({_amount(shape.num_active, 3)} active)" if shape.is_mixture else ""
    console.print(
        f"[bold]{escape(shape.name)}[/bold], {_amount(shape.num_parameters, 3)} parameters{active}, "
        f"{question.trained}; batches of {counted(question.batch_size, 'sequence')} of "
        f"{counted(question.length, 'token')}\n"
    )
    headings = ("machines", "fits", "tightest device", "tokens/s", f"hours for {_amount(tokens)}")
    table = columns(headings, words=("machines", "fits", "tightest device"), wrapped=("machines",))
    for row in found.rows:
        fits = "host" if row.offloads else "yes" if row.fits else "no"
        table.add_row(escape(row.words), fits, _memory(row), *_pace(row, tokens))
    console.print(table)
    row = found.rows[-1]
    console.print()
    console.print(_plan_words(row), markup=False)
    _print_helps(found.helps, found.no_help, found.untried, console)
    for note in found.notes:
        console.print(note, style="dim", markup=False)


def _memory(row: MachinesFit) -> str:
    """By how much it fits, or does not."""
    much = "left" if row.left_bytes >= 0 else "missing"
    return f"{bytes_text(abs(row.left_bytes))} {much} of {bytes_text(row.limit_bytes)}"


def _pace(row: MachinesFit, tokens: float) -> tuple[str, str]:
    rate = row.tokens_per_s
    if rate is None:
        return "–", "–"
    hours = _hours(rate, tokens)
    return (f"{rate.low:,.0f} to {rate.high:,.0f}", f"{hours['least']:,.3g} to {hours['most']:,.3g}")


def _plan_words(row: MachinesFit) -> str:
    """The fastest plan in words."""
    if row.candidate is None:
        return f"No plan fits; {row.device} lacks most."
    plan, short = row.candidate.plan, summarize(row.candidate)
    parts = plan.stages_per_rank or 1
    in_parts = f"in {counted(parts, 'part')} that run their forwards again" if parts > 1 else ""
    if plan.num_ranks == 1:
        (device,) = plan.devices[0]
        where = f"on {device} alone"
        where += f", {in_parts}" if in_parts else ""
    else:
        replicas = f", {counted(plan.width, 'replica')}" if plan.width > 1 else ""
        where = f"as a pipeline of {counted(plan.num_stages, 'stage')}{replicas} under {plan.schedule}"
        if plan.num_stages == 1:
            where = f"on {counted(plan.width, 'replica')}"
    if row.host_bytes:
        where += f", with offloading, at most {bytes_text(row.host_bytes)} to a host"
    again = f"; {counted(short.num_recomputed, 'stage')} recomputed" if short.num_recomputed else ""
    steps = f" It takes {short.penalty:.2f} steps for one synchronous step." if short.penalty > 1 else ""
    size = max(short.micro_batch_sizes)
    later = " It is the best so far: a larger --within may find a faster one." if row.is_stopped else ""
    least = "has the least free memory" if not row.offloads else "lacks most without offloading"
    return (
        f"The fastest way: {where}, {counted(short.num_microbatches, 'micro-batch')} of "
        f"{counted(size, 'sequence')}{again}. {short.bottleneck} limits the pace; devices are busy "
        f"{short.busy_share:.0%} of the time. {row.device} {least}.{steps}{later}"
    )


def _print_helps(
    helps: Sequence[FitHelp], no_help: Sequence[str], untried: Sequence[str], console: Console
) -> None:
    console.print("\n[bold]What would help[/bold]")
    table = columns(("with", "gain", "tokens/s"), words=("with",), wrapped=("with",))
    for one in helps:
        host = f" ({bytes_text(one.host_bytes)} of host memory)" if one.host_bytes else ""
        gain = "it fits" if one.gain is None else f"{one.gain:.2f}×"
        table.add_row(escape(one.words + host), gain, f"{one.tokens_per_s:,.0f}")
    if helps:
        console.print(table)
    if no_help:
        console.print(f"No help: {escape('; '.join(no_help))}.", style="dim")
    if untried:
        console.print(f"Not tried, for lack of time (--within): {escape('; '.join(untried))}.", style="dim")
    console.print()
