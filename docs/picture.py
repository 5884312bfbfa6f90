"""Draw the default job's terminal next to its report: `python docs/picture.py [FILE]`, by default docs/run.svg.

The job runs in a terminal of 80 columns. The text is what the terminal shows; the charts are from `report.html`.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT, REPORT = 910.0, 450.0, 564.0


def shown(folder: str) -> list[str]:
    """The lines that stay on the terminal when the default job has trained in `folder`."""
    process, terminal = pty.fork()
    if not process:
        os.execv(sys.executable, [sys.executable, str(ROOT / "train.py"), f"hydra.run.dir={folder}/digits"])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    text = b"".join(chunks(terminal)).decode()
    assert not os.waitpid(process, 0)[1], text
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace(f"{folder}/", "outputs/")
    lines = (line.rstrip() for line in re.split(r"[\r\n]+", text))
    return [line for line in lines if line and line[0] not in "━─" and not line.startswith("loading torch")]


def chunks(terminal: int) -> Iterator[bytes]:
    try:
        while chunk := os.read(terminal, 65536):
            yield chunk
    except OSError:  # Linux's end of a terminal whose process has ended
        return


def picture(lines: list[str], report: str) -> str:
    """The SVG: on the left the lines, without the middle epochs, and on the right the report's verdict and curves."""
    epochs = [number for number, line in enumerate(lines) if line.startswith("epoch")]
    lines = ["$ python train.py", *lines[: epochs[2] + 1], "...", *lines[epochs[-1] :]]
    rows = (
        f'<text x="14" y="{48 + 15.5 * row:.1f}" textLength="{6.62 * len(line):.0f}">{unbroken(line)}</text>'
        for row, line in enumerate(itertools.takewhile(lambda line: "look at it" not in line, lines))
    )
    charts = re.findall(r"(?s)<figcaption>([^<]*)</figcaption>\s*<svg (.*?)</svg>(.*?)</figure>", report)
    parts = ""
    for top, (caption, drawn, legend) in zip((74, 262), charts, strict=False):
        drawn = re.sub(r"(?s)<circle.*?</circle>", "", drawn)  # the values under the pointer
        for colour, label in re.findall(r'background: (#\w+)"></i>(training|validation)<', legend):
            caption += f'<tspan fill="{colour}">\u00a0\u00a0{label}</tspan>'
        parts += f'<text x="{REPORT + 12}" y="{top}" class="caption">{caption}</text>'
        parts += f'<svg x="{REPORT + 8}" y="{top + 4}" width="318" height="172" {drawn}</svg>'
    verdict = re.findall(r"learning: <strong>([^<(,]*)", report)[0]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" xml:space="preserve">
<style>.l {{ font: 11px monospace; fill: #d4d9df }} .caption {{ font: 12px sans-serif; fill: #444 }}
.title {{ font: bold 14px sans-serif; fill: #111 }} polyline {{ fill: none; stroke-width: 1.5 }}
.grid {{ stroke: #e4e4e4 }} svg svg text {{ font: 11px sans-serif; fill: #595959 }}</style>
<rect width="550" height="{HEIGHT}" rx="8" fill="#1b2027"/>
<circle cx="18" cy="16" r="5" fill="#f26419"/><circle cx="34" cy="16" r="5" fill="#f6ae2d"/>
<circle cx="50" cy="16" r="5" fill="#55a630"/>
<g class="l">{"".join(rows)}</g>
<rect x="{REPORT}" y="1" width="{WIDTH - REPORT - 1}" height="{HEIGHT - 2}" rx="8" fill="#fff" stroke="#ccc"/>
<text x="{REPORT + 12}" y="26" class="title">report.html: {escape(verdict)}</text>
<text x="{REPORT + 12}" y="46" class="caption">with the confusion matrix, the worst images, the time</text>
{parts}</svg>
"""


def unbroken(line: str) -> str:
    """A line whose spaces stay as they are: a viewer of SVG may take several as one."""
    return escape(line).replace(" ", "\u00a0")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        lines = shown(folder)
        subprocess.run([sys.executable, "-m", "lockstep", "report", f"{folder}/digits"], check=True)
        report = Path(folder, "digits", "report.html").read_text()
    Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "run.svg").write_text(picture(lines, report))
