"""`lockstep lr-find`: the learning rate range test of a job, with a picture and a suggestion."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config import components
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.safe_write import write_atomic
from lockstep.job.prepare import job_of
from lockstep.telemetry.charts import svg
from lockstep.telemetry.progress import progress
from lockstep.training.parts import build_parts
from lockstep.training.range_test import EXPLODED, RangeTest, range_test

MOST_STEPS = 100_000
PICTURE = "lr-find.svg"


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
    job = job_of([*overrides, "launcher.ranks=1"])
    job = replace(job, steps=steps, resume=None, schedule=components.build_option("schedule", "constant"))
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
    log.show(f"a tenth of that: optimizer.lr={test.suggestion:g} (this job has {job.optimizer.lr:g})")
    log.show(f"wrote {file}")


def picture(test: RangeTest) -> bytes:
    """The loss over the rate as SVG, with a line at the suggestion."""

    def draw(axes: Any) -> None:
        axes.plot(test.rates, test.losses)
        axes.set(xlabel="learning rate", ylabel="loss, averaged", xscale="log")
        axes.axvline(test.suggestion, color="red", linestyle="--", label=f"{test.suggestion:g}")
        axes.legend(title="suggestion")

    return svg(draw, 6.4, 4.0)
