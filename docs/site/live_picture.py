"""Draw the live view of a real run: `python docs/site/live_picture.py docs/pictures/run.svg train`.

The words after the file are those of `bireme`. The picture shows the terminal after 60 % of the steps.
"""

import os
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.text import Text

from bireme.report.live_view import EVENTS, LiveRun, event_in

WIDTH = 100
SHARE = 0.6
BAR = re.compile(r"\r|\x1b\[(?:\?25|\d*[AK])")
"""In lines of a progress bar, which is gone when the run begins."""
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def terminal_of(words: list[str]) -> list[Text]:
    """The lines of the terminal at the moment of the picture; the run goes on to its end."""
    more = {EVENTS: "1", "FORCE_COLOR": "1", "COLUMNS": str(WIDTH)}
    run, above, found = LiveRun(), list[Text](), list[Text]()
    command = [sys.executable, "-m", "bireme", *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | more
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = event_in(line)
            text = line.rstrip("\n") if event is None else run.take(event, monotonic())
            if text is not None and not BAR.search(text):
                above.append(Text.from_ansi(text.replace(str(Path.cwd()), "~")))
            if not found and event and event.kind == "train" and event.step >= SHARE * event.num_steps:
                found = [*above, Text(), *run.lines(WIDTH - 1, monotonic())]
    if process.returncode or not found:
        raise SystemExit("\n".join(line.plain for line in above))
    return found


def picture_of(lines: list[Text], title: str) -> str:
    """The lines as SVG, which loads no fonts."""
    console = Console(
        record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor"
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    svg = console.export_svg(title=title, unique_id="run")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"font-family: (?!arial)[^;]+;", f"font-family: {FONTS};", svg)


if __name__ == "__main__":
    file, *words = sys.argv[1:]
    svg = picture_of(terminal_of(words), f"bireme {' '.join(words)}")
    Path(file).write_text(svg, encoding="utf-8")
