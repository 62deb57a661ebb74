"""Profiles as tables in the terminal: a row for each kind of unit, the kinds in the order they come."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bireme.bounds import bytes_text, seconds_text
from bireme.codec.description import CodecRate
from bireme.profile.profile import Profile, UnitCost, UnitProfile
from bireme.profile.stages import stage_cost
from bireme.report.terminal import GAP, columns

_LEAST_NAME = 12
"""Letters of a unit's name, however narrow the terminal is."""


def print_profile(profile: Profile, console: Console) -> None:
    """What the units of a model cost, at every micro-batch size that the profile knows."""
    kinds = sum(unit.same_as is None for unit in profile.units)
    threads = f", {profile.num_threads} threads" if profile.num_threads else ""
    how = "measured on" if profile.is_measured else "seconds estimated for"
    console.print(f"[bold]{escape(profile.model)}[/bold]", highlight=False)
    console.print(
        f"{profile.num_operators} operators in {len(profile.units)} units of {kinds} kinds, "
        f"{bytes_text(profile.parameter_bytes)} of parameters",
        highlight=False,
    )
    console.print(f"{how} {escape(profile.device)}{threads}", style="dim", highlight=False)
    console.print(f"with {profile.versions}", style="dim", highlight=False)
    for micro_batch in profile.micro_batches:
        console.print(f"\nA micro-batch of {micro_batch}", style="bold", highlight=False)
        console.print(_table(profile, micro_batch, console.width))
    if profile.codecs:
        console.print("\nCodecs, for a million values", style="bold", highlight=False)
        console.print(_codecs(profile.codecs))


def _codecs(rates: Sequence[CodecRate]) -> Table:
    headings = ("codec", "encode", "decode", "encode gradient", "decode gradient")
    table = columns(headings, words=("codec",))
    for rate in rates:
        seconds = (rate.encode_s, rate.decode_s, rate.back_encode_s, rate.back_decode_s)
        table.add_row(escape(rate.codec), *(seconds_text(1e6 * one) for one in seconds))
    return table


def _table(profile: Profile, micro_batch: int, width: int) -> Table:
    whole = stage_cost(profile, 0, len(profile.units), micro_batch)
    headings = ["forward", "backward", "weights", "saved", "sends"]
    footers = [
        seconds_text(whole.forward_s),
        seconds_text(whole.backward_s),
        bytes_text(whole.parameter_bytes),
        bytes_text(whole.saved_bytes),
        "",
    ]
    if profile.is_measured:
        headings.append("±")
        footers.append("")
    names, rows = [], []
    for index, unit in enumerate(profile.units):
        if unit.same_as is None:
            times = 1 + sum(other.same_as == index for other in profile.units)
            names.append((unit.name, f" ×{times}" if times > 1 else ""))
            rows.append(_row(unit, unit.at(micro_batch))[: len(headings)])
    wide = (max(map(len, cells)) for cells in zip(headings, footers, *rows, strict=True))
    left = width - sum(GAP + letters for letters in wide)
    table = columns(("unit", *headings), words=("unit",))
    table.show_footer, table.footer_style = True, "bold"
    for column, footer in zip(table.columns, (f"all ×{len(profile.units)}", *footers), strict=True):
        column.footer = footer
    for (name, suffix), row in zip(names, rows, strict=True):
        table.add_row(escape(_shortened(name, max(_LEAST_NAME, left - len(suffix)))) + suffix, *row)
    return table


def _row(unit: UnitProfile, cost: UnitCost) -> list[str]:
    return [
        seconds_text(cost.forward_s),
        seconds_text(cost.backward_s),
        bytes_text(unit.parameter_bytes),
        bytes_text(cost.saved_bytes),
        bytes_text(cost.boundary_bytes),
        f"{cost.spread / 2:.0%}",
    ]


def _shortened(name: str, longest: int) -> str:
    """What is too long has its first words as one letter each: numbers and the end say most about a unit."""
    words = name.split(".")
    for place, word in enumerate(words[:-1]):
        if len(".".join(words)) > longest and not word.isdecimal():
            words[place] = word[:1]
    short = ".".join(words)
    return short if len(short) <= longest else f"{short[: longest - 1]}…"
