"""`lockstep lr-find`: the learning rate range test of a job, with a picture and a suggestion.

Smith 2017, "Cyclical Learning Rates for Training Neural Networks".
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.config import components
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.run_dir import relative
from lockstep.core.safe_write import check_out, storing, write_atomic
from lockstep.core.table import show_json
from lockstep.job.prepare import job_here
from lockstep.telemetry.pictures import svg
from lockstep.telemetry.progress import progress
from lockstep.training.experiment import Parts, build_parts
from lockstep.training.train_step import set_learning_rate

MOST_TEST_STEPS = 100_000
PICTURE = "lr-find.svg"
SMOOTHING = 0.9  # the share of the earlier losses in the average that is judged
EXPLODED = 4.0  # the test ends at an average of this many times the lowest one
OF_TEST = ("steps", "epochs", "schedule", "schedule.")  # what the test sets itself
SETTLED = 10  # steps after which an average no longer rests on the first few losses
# A fall counts from this many times the median second difference of the averages: in simulations of 40 to 200 steps
# without a trend, 95 % of the largest falls stay below 10.8 to 13.5 times.
CLEAR = 14.0
SUGGESTED_SHARE = 0.1  # the suggestion is this share of the rate with the lowest loss


def lr_find(
    overrides: Sequence[str], *, steps: int, low: float, high: float, out: str | None, form: str = "table"
) -> None:
    """Train with rising learning rates, write the picture to `out` or next to the runs, and print a suggestion."""
    if not 2 <= steps <= MOST_TEST_STEPS:
        raise InputError(f"--steps is {steps}, expected from 2 to {MOST_TEST_STEPS:,}: --steps=100")
    if not 0 < low < high < math.inf:
        raise InputError(f"--low is {low:g} and --high is {high:g}, expected 0 < low < high: --low=1e-6 --high=10")
    if out is not None:
        check_out(Path(out), ".svg")
    job = job_here(overrides, f"lr-find trains --steps={steps} steps at rising rates", OF_TEST)
    # Twice the steps, because the short batches at the ends of epochs are skipped.
    job = replace(job, steps=2 * steps, resume=None, schedule=components.build_option("schedule", "constant"))
    with progress("trying", steps) as advance:
        test = range_test(build_parts(job), steps, low, high, advance)
    file = Path(job.output_root) / PICTURE if out is None else Path(out)
    with storing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, loss_chart(test, job.optimizer.lr))
    if form == "json":
        facts = {"lowest": test.rates[test.lowest], "suggestion": test.suggestion, "lr": job.optimizer.lr}
        show_json({**facts, "picture": str(relative(file)), "rates": test.rates, "losses": test.losses})
        return
    lowest, tried, own = test.lowest, len(test.rates), f"{job.optimizer.lr:.3g}"
    early = f" of {steps}, since the next one's loss was more than {EXPLODED:g} times the lowest" * (tried < steps)
    log.show(
        f"{tried} steps{early}, from {test.rates[0]:.2g} to {test.rates[-1]:.2g}: the loss is lowest, "
        f"{test.losses[lowest]:.4g}, at {test.rates[lowest]:.2g}"
    )
    if test.suggestion is None:
        log.show(f"no suggestion: no fall is larger than the noise; more --steps may show one (this job has {own})")
    else:
        log.show(f"a tenth of that: optimizer.lr={test.suggestion:g} (this job has {own})")
    log.show(f"wrote {relative(file)}")


@dataclass(frozen=True, kw_only=True)
class RangeTest:
    """The exponential average of the loss at each step, without the bias towards the start, while the rate rises."""

    rates: list[float]
    losses: list[float]

    @property
    def lowest(self) -> int:
        """The step with the lowest loss, counted from 0."""
        return min(range(len(self.losses)), key=self.losses.__getitem__)

    @property
    def suggestion(self) -> float | None:
        """A learning rate to train with, of two digits; None if it was not tried, or no fall exceeds the noise."""
        tenth, averages = float(f"{SUGGESTED_SHARE * self.rates[self.lowest]:.1e}"), self.losses[SETTLED:]
        before = averages[: max(0, self.lowest - SETTLED)]
        if not before or len(averages) < 3 or tenth < self.rates[0]:
            return None
        curvature = [abs(a - 2 * b + c) for a, b, c in zip(averages, averages[1:], averages[2:], strict=False)]
        is_clear = max(before) - self.losses[self.lowest] > CLEAR * statistics.median(curvature)
        return tenth if is_clear else None


def range_test(parts: Parts, steps: int, low: float, high: float, advance: Callable[[int], None]) -> RangeTest:
    """Take steps on whole batches, while the rate rises from `low` to `high` by a constant factor.

    Ends early if the loss explodes or is not finite. `advance` is called after each step, with 1.
    """
    test, average = RangeTest(rates=[], losses=[]), 0.0
    parts.model.train()
    for shard in parts.transforms.train(parts.loader.train(after=0)):
        if shard.count < parts.plan.batch:  # the loss of a few images says little
            continue
        if (step := len(test.rates) + 1) > steps:
            break
        rate = low * (high / low) ** ((step - 1) / max(1, steps - 1))
        parts.set_learning_rate(shard.step)
        set_learning_rate(parts.optimizer, rate)
        average = SMOOTHING * average + (1 - SMOOTHING) * parts.loss_of_step(shard)
        smoothed = average / (1 - SMOOTHING**step)
        if not math.isfinite(smoothed) or (test.losses and smoothed > EXPLODED * min(test.losses)):
            break
        test.rates.append(rate)
        test.losses.append(smoothed)
        advance(1)
    if len(test.losses) < 2:
        raise InputError(f"lr-find: the loss explodes at {low:g} already; use a lower --low")
    return test


def loss_chart(test: RangeTest, rate: float) -> bytes:
    """The loss over the rate as SVG, with its lowest point, the job's own `rate` and the suggestion."""

    def draw(axes: Any) -> None:
        axes.plot(test.rates, test.losses)
        axes.set(xlabel="learning rate", ylabel="loss, averaged", xscale="log")
        axes.plot(test.rates[test.lowest], test.losses[test.lowest], "o", label="lowest")
        axes.axvline(rate, color="grey", linestyle=":", label=f"this job: {rate:.3g}")
        if test.suggestion is not None:
            axes.axvline(test.suggestion, color="red", linestyle="--", label=f"suggestion: {test.suggestion:g}")
        axes.legend()

    return svg(draw, 6.4, 4.0)
