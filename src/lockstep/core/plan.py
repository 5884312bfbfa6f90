"""The plan of a run: the durations of the config, converted to steps in one place."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from lockstep.core.errors import InputError, shown
from lockstep.core.fields import TIME_CHECK, is_timed, parse_duration, parse_time

Event = Literal["log", "eval", "save"]
T = TypeVar("T")


def seconds(key: str, value: str | float) -> float:
    """A time such as `30s`, `10min` or `2h` in seconds; a bare number is seconds. Raises InputError."""
    parsed = parse_time(value)
    if parsed is None:
        raise InputError(f"{key} is {shown(value)}, expected {TIME_CHECK.expected}")
    return parsed


@functools.lru_cache(maxsize=1024)  # a schedule calls this at every step
def steps(key: str, value: int | str, *, steps_per_epoch: int, total_steps: int) -> int:
    """A duration in steps: `100` (steps), `"2ep"` (epochs), `"5%"` (of the whole run). Raises InputError."""
    parsed = parse_duration(value)
    if parsed is None:
        raise InputError(f"{key} is {shown(value)}, expected steps (100), epochs (2ep) or a share of the run (5%)")
    amount, unit = parsed
    if unit == "ep":
        return round(amount * steps_per_epoch)
    if unit == "%":
        return round(amount / 100 * total_steps)
    return int(amount)


def at_step(values: Mapping[int, T], step: int) -> T:
    """The value of a step, counted from 1, from values by the steps after which they begin, the first 0."""
    return values[max(start for start in values if start < step)]


def share(n: int, parts: int, part: int) -> slice:
    """The contiguous share of `part` when `n` items are cut into `parts`; sizes differ by one at most."""
    return slice(part * n // parts, (part + 1) * n // parts)


@dataclass(frozen=True)
class Averaging:
    """The steps whose weights are in a mean: those from `start` on that `every` divides, and `last`."""

    start: int
    every: int
    last: int

    def due(self, step: int) -> bool:
        return step >= self.start and (step % self.every == 0 or step == self.last)

    def until(self, step: int) -> set[int]:
        multiples = range(-(-self.start // self.every) * self.every, step + 1, self.every)
        return {*multiples, *([self.last] if self.start <= self.last <= step else [])}

    def check(self, start: int | str) -> None:
        """Raise InputError if a run with `train.swa_from=START` ends before its average begins."""
        if self.start > self.last:
            raise InputError(
                f"train.swa_from is {start}, step {self.start:,}, but the run has {self.last:,} steps, so nothing is "
                "averaged; use train.swa_from=75%"
            )

    def check_resumed(self, saved: "Averaging | int", step: int, start: int | str) -> None:
        """Raise InputError if a run with `train.swa_from=START` cannot continue the mean `saved` at `step`."""
        if remedies := self.remedies(saved, step):
            raise InputError(
                f"resume: a run of {self.last:,} steps averages other steps up to {step:,} by train.swa_from={start} "
                "than the checkpoint, whose average cannot be taken apart; use "
                f"{' to continue it, or '.join(remedies)}"
            )

    def remedies(self, saved: "Averaging | int", step: int) -> list[str]:
        """The overrides to resume from `step` with the mean `saved`; none for the same steps, or a later mean."""
        if (steps := self.until(step)) <= {step}:
            return []
        later = f"train.swa_from={step + 1}"
        if isinstance(saved, int):
            return [later] * (len(steps) != saved)
        if steps == saved.until(step):
            return []
        same = replace(saved, last=self.last)
        continues = same.until(step) == saved.until(step) and same.start <= self.last
        remedies = [f"train.swa_from={same.start} train.swa_every={same.every}"] * continues
        return remedies + [later] * (step < self.last)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The run in steps, counted from 1. `save_every_s` is set if checkpoints are saved by the clock."""

    examples: int
    batch: int
    total_steps: int
    micro_batches: int
    log_every: int
    eval_every: int
    save_every: int
    save_every_s: float | None = None

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """The steps of an epoch. The last global batch of an epoch may be short; it counts as a full step."""
        return math.ceil(self.examples / self.batch)

    @functools.cached_property
    def periods(self) -> dict[Event, int]:
        # A dictionary, because `getattr` is a call, and each step asks three times.
        return {"log": self.log_every, "eval": self.eval_every, "save": self.save_every}

    def due(self, event: Event, step: int) -> bool:
        """Whether `event` falls on `step`. Everything falls on the last step."""
        return step == self.total_steps or step % self.periods[event] == 0

    def in_steps(self, key: str, value: int | str) -> int:
        """The duration `value` of the config key `key`, in steps of this run. Raises InputError."""
        return steps(key, value, steps_per_epoch=self.steps_per_epoch, total_steps=self.total_steps)

    def epoch(self, step: int) -> int:
        """The epoch, counted from 0, that `step` belongs to."""
        return (step - 1) // self.steps_per_epoch

    def position(self, step: int) -> int:
        """The place of `step` in its epoch, counted from 0."""
        return (step - 1) % self.steps_per_epoch


def make_plan(
    *,
    examples: int,
    batch: int,
    epochs: int,
    total_steps: int | None,
    micro_batches: int,
    log_every: int | str,
    eval_every: int | str,
    save_every: int | str,
) -> Plan:
    """The plan of a run over `examples` training examples. `total_steps` overrides `epochs`. Raises InputError."""
    if examples == 0:
        raise InputError("the training split has no examples; use another data set, or other files of this one")
    if batch > examples:
        raise InputError(
            f"batch is {batch}, but the training split has {examples} examples; use batch={examples} or less"
        )
    if micro_batches > batch:
        raise InputError(
            f"train.micro_batches is {micro_batches}, but a global batch has {batch} examples; "
            f"use train.micro_batches={batch} or less"
        )
    per_epoch = math.ceil(examples / batch)
    total = total_steps if total_steps is not None else epochs * per_epoch

    def every(key: str, value: int | str) -> int:
        return max(1, steps(key, value, steps_per_epoch=per_epoch, total_steps=total))

    timed = is_timed(save_every)
    return Plan(
        examples=examples,
        batch=batch,
        total_steps=total,
        micro_batches=micro_batches,
        log_every=every("telemetry.interval", log_every),
        eval_every=every("train.eval_every", eval_every),
        save_every=total if timed else every("checkpoint.every", save_every),
        save_every_s=seconds("checkpoint.every", save_every) if timed else None,
    )
