"""`lockstep lr-find`: the learning rate range test of a job, with a picture and a suggestion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.config import components, composition
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.safe_write import write_atomic
from lockstep.job.resolve import resolve
from lockstep.job.validate import check_job
from lockstep.telemetry.progress import progress
from lockstep.training.parts import build_parts
from lockstep.training.range_test import EXPLODED, RangeTest, range_test

MOST_STEPS = 100_000
PICTURE = "lr-find.svg"
WIDTH, HEIGHT, MARGIN = 640, 400, 50  # of the picture, in pixels


def lr_find(overrides: Sequence[str], *, steps: int, low: float, high: float, out: str | None) -> None:
    """Train with rising learning rates, write the picture to `out` or beside the runs, and print a suggestion.

    Raises:
        InputError: the job or the rates are wrong, or the loss falls at no rate.
        StorageError: the picture cannot be written.
    """
    if not 2 <= steps <= MOST_STEPS:
        raise InputError(f"--steps is {steps}, expected from 2 to {MOST_STEPS:,}: --steps=100")
    if not 0 < low < high < math.inf:
        raise InputError(f"--low is {low:g} and --high is {high:g}, expected 0 < low < high: --low=1e-6 --high=10")
    if out is not None and not Path(out).parent.is_dir():
        raise InputError(f"--out is {out}, expected a file in a folder that exists")
    values = composition.composed([*overrides, "launcher.ranks=1"])
    job = resolve(components.build_job(values), sweep=False)
    job = replace(job, steps=steps, resume=None, schedule=components.build_option("schedule", "constant"))
    check_job(job)
    with progress("trying", steps) as advance:
        test = range_test(build_parts(job), low, high, advance)
    file = Path(job.output_root) / PICTURE if out is None else Path(out)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, picture(test))
    lowest, tried = test.lowest, len(test.rates)
    early = f" of {steps}, since the next one's loss was more than {EXPLODED:g} times the lowest" * (tried < steps)
    log.show(
        f"{tried} steps{early}, from {test.rates[0]:.2g} to {test.rates[-1]:.2g}: the loss is lowest, "
        f"{test.losses[lowest]:.4g}, at {test.rates[lowest]:.2g}"
    )
    log.show(f"a tenth of that: optimizer.lr={test.suggestion:g} (this job has {float(job.optimizer.lr):g})")
    log.show(f"wrote {file}")


def picture(test: RangeTest) -> str:
    """The loss over the rate as SVG, with a line at the suggestion."""
    first, last = math.log10(test.rates[0]), math.log10(test.rates[-1])
    least, most = min(test.losses), max(test.losses)

    def x(rate: float) -> float:
        return MARGIN + (math.log10(rate) - first) / (last - first) * (WIDTH - 2 * MARGIN)

    def y(loss: float) -> float:
        return MARGIN + (most - loss) / ((most - least) or 1.0) * (HEIGHT - 2 * MARGIN)

    top, bottom = MARGIN, HEIGHT - MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for power in range(math.ceil(first), math.floor(last) + 1):
        at = x(10.0**power)
        lines += [
            f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{bottom}" stroke="#ddd"/>',
            f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{10.0**power:g}</text>',
        ]
    for loss in (least, most):
        lines.append(f'<text x="{MARGIN - 6}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.3g}</text>')
    points = " ".join(f"{x(rate):.1f},{y(loss):.1f}" for rate, loss in zip(test.rates, test.losses, strict=True))
    lines.append(f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="2"/>')
    if test.suggestion >= test.rates[0]:
        at = x(test.suggestion)
        lines += [
            f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{bottom}" stroke="#d62728" stroke-dasharray="4"/>',
            f'<text x="{at + 4:.1f}" y="{top + 12}" fill="#d62728">{test.suggestion:g}</text>',
        ]
    lines += [
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">learning rate</text>',
        f'<text x="{WIDTH / 2}" y="{MARGIN - 20}" text-anchor="middle">loss, averaged</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
