"""Numbers for people: seconds and bytes in the unit that fits."""

from bireme.bounds import bytes_text

__all__ = ["against_predicted", "bytes_text", "counted", "rate_text", "seconds_text"]


def seconds_text(seconds: float) -> str:
    """Such as `240 ms` or `1.92 s`: four digits are more than anyone compares."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.4g} ns"


def rate_text(bytes_per_s: float) -> str:
    """Such as `25 GB/s` or `1.2 MB/s`, in powers of ten as makers of links count."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.4g} {unit}/s"
    return f"{bytes_per_s:.4g} B/s"


def against_predicted(measured: float | None, predicted: float | None, *, is_time: bool) -> str:
    """Such as `+3.2% slower`: the measured value relative to the predicted one; "" if one is unknown.

    Everything that compares the two for people says it with this sign and these words.
    """
    if measured is None or not predicted:
        return ""
    change = measured / predicted - 1
    text = f"{change:+.{0 if abs(change) >= 0.0995 else 1}%}".replace("-", "−")
    if float(text[1:-1]) == 0:
        return "equal"
    more, less = ("slower", "faster") if is_time else ("more", "less")
    return f"{text} {more if change > 0 else less}"


def counted(number: int, what: str) -> str:
    """Such as `1 stage`, `4 stages` or `1,024 batches`."""
    ending = "" if number == 1 else "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{ending}"
