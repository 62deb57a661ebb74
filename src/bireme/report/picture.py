"""A timeline as a picture in a file: SVG with nothing installed, PNG with `bireme[viz]`."""

from pathlib import Path

from bireme.errors import BiremeError
from bireme.files import write_bytes_atomically, write_text_atomically
from bireme.report.layout import laid_out
from bireme.report.png import png
from bireme.report.svg import svg
from bireme.timeline.timeline import Timeline

__all__ = ["write_picture"]


def write_picture(timeline: Timeline, path: Path) -> None:
    """Draw who computed what when; the suffix of `path` says in which format."""
    match path.suffix.lower():
        case ".svg":
            write_text_atomically(path, svg(laid_out(timeline)))
        case ".png":
            write_bytes_atomically(path, png(laid_out(timeline)))
        case suffix:
            kind = f"ends in {suffix}" if suffix else "has no ending"
            raise BiremeError(f"{path} {kind}, but a picture can only be .svg or .png. Name such a file.")
