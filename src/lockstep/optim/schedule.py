"""The learning rate as a pure function of the step and of the scores so far: a checkpoint need not save it."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from lockstep.config import components
from lockstep.config.options import class_path, classes_of, option
from lockstep.core.errors import InputError, did_you_mean, shown
from lockstep.core.fields import TEXT, choice, duration, in_config, parse_duration, ranged, ruled
from lockstep.core.plan import Plan
from lockstep.core.protocols import Schedule

Evaluations = Sequence[tuple[int, float]]  # step and gain, as `Schedule` in core/protocols.py describes them


@option("schedule")
class Constant(Schedule):
    """The base rate at every step.

    The warm-up is as in Goyal et al. 2017.
    """

    # length of the linear warm-up, which reaches the base rate at its last step
    warmup: int | str = duration(0, zero=True)

    def factor(self, step: int, plan: Plan, scores: Evaluations) -> float:
        warmup = plan.in_steps("schedule.warmup", self.warmup)
        if step <= warmup:
            return step / warmup
        return self.after(step - warmup, plan.total_steps - warmup, plan)

    def after(self, step: int, total: int, plan: Plan) -> float:
        """The factor at `step` (from 1) of the `total` steps after the warm-up."""
        return 1.0


@option("schedule")
class Cosine(Constant):
    """Half a cosine from the base rate to `final` times it, also with warm restarts (Loshchilov and Hutter 2017)."""

    warmup: int | str = in_config("5%", duration(0, zero=True))
    final: float = ranged(0.0, least=0, most=1e3)  # share of the base rate at the end
    restarts: int = ranged(0, least=0, most=100)  # how many times it begins again: 3 makes four cosines
    # each cosine is so many times as long as the one before (torch's `T_mult`)
    restart_mult: int = ranged(1, least=1, most=10)

    def after(self, step: int, total: int, plan: Plan) -> float:
        # In whole numbers of equal parts of a step, because a period need not end with a step.
        lengths = [self.restart_mult**period * total for period in range(self.restarts + 1)]
        position = (step - 1) * sum(lengths) // total
        for length in lengths:
            if position < length:
                break
            position -= length
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * position / length))


@option("schedule")
class Linear(Constant):
    """A straight line from the base rate to `final` times it."""

    warmup: int | str = in_config("5%", duration(0, zero=True))
    final: float = ranged(0.0, least=0, most=1e3)  # share of the base rate at the end

    def after(self, step: int, total: int, plan: Plan) -> float:
        return self.final + (1 - self.final) * (1 - (step - 1) / total)


@option("schedule")
class Polynomial(Linear):
    """From the base rate to `final` times it, with a power of the share that is left; as torch's `PolynomialLR`."""

    power: float = ranged(0.9, above=0, most=100)  # 1 is a straight line; more falls faster at first

    def after(self, step: int, total: int, plan: Plan) -> float:
        return float(self.final + (1 - self.final) * (1 - (step - 1) / total) ** self.power)


@option("schedule")
class Exponential(Constant):
    """The base rate, multiplied by `gamma` after each epoch; as torch's `ExponentialLR`."""

    gamma: float = ranged(0.9, above=0, most=1)  # factor after each epoch that follows the warm-up

    def after(self, step: int, total: int, plan: Plan) -> float:
        return float(self.gamma ** plan.epoch(step))


@option("schedule")
class Step(Constant):
    """The base rate, multiplied by `gamma` after each milestone."""

    # counted from the start of the run: `schedule.milestones=[5ep,10ep]`
    milestones: list[str] = duration(["33%", "66%"], zero=True)
    gamma: float = ranged(0.1, least=0, most=10)  # factor at each milestone

    def __post_init__(self) -> None:
        if not self.milestones:
            raise InputError("schedule.milestones is empty; use schedule=constant for a constant rate")

    def after(self, step: int, total: int, plan: Plan) -> float:
        run_step = plan.total_steps - total + step
        passed = sum(run_step > plan.in_steps("schedule.milestones", milestone) for milestone in self.milestones)
        return float(self.gamma**passed)


@option("schedule")
class Plateau(Constant):
    """The base rate, multiplied by `gamma` when `monitor` has stopped improving; as torch's `ReduceLROnPlateau`.
    Evaluations in the warm-up do not count.

    On values from 0 on, this is torch's `ReduceLROnPlateau` without its `eps`, with the mode `min` if less is better,
    and else `max`. Of values below 0, torch's relative threshold also takes slightly worse ones for better; this one
    does not. An evaluation acts from the next step on.
    """

    gamma: float = ranged(0.1, above=0, below=1)  # factor at each reduction (torch's `factor`)
    # after how many evaluations in a row without an improvement the next one reduces the rate
    patience: int = ranged(10, least=0, most=1_000_000)
    # by how much a value must be better than the best one to count
    threshold: float = ranged(1e-4, least=0, most=1e12)
    # `rel`: the threshold is a share of the best value; `abs`: a difference
    threshold_mode: str = choice("rel", "rel", "abs")
    cooldown: int = ranged(0, least=0, most=1_000_000)  # how many evaluations after a reduction do not count
    # the least share of the base rate (torch's `min_lr` over the base rate, because groups of parameters have rates
    # of their own)
    min_factor: float = ranged(0.0, least=0, most=1)

    def factor(self, step: int, plan: Plan, scores: Evaluations) -> float:
        warmup = plan.in_steps("schedule.warmup", self.warmup)
        factor, goal, bad, cooling = 1.0, -math.inf, 0, 0
        absolute, threshold = self.threshold_mode == "abs", self.threshold
        for _, gain in (item for item in scores if warmup < item[0] < step):
            if gain > goal:
                # the gain of a loss is below 0, so its relative threshold is a smaller distance from 0
                goal, bad = gain + threshold if absolute else gain * (1 + math.copysign(threshold, gain)), 0
            else:
                bad += 1
            if cooling > 0:
                cooling, bad = cooling - 1, 0
            if bad > self.patience:
                factor, cooling, bad = max(factor * self.gamma, self.min_factor), self.cooldown, 0
        return factor * super().factor(step, plan, scores)


@option("schedule")
class Chain(Constant):
    """Schedules one after the other, each for a part of the run; as torch's `SequentialLR`. The warm-up multiplies
    the first part.

    A part is `NAME:LENGTH`, then keys and values: `linear:20%:final:0.5`. The last part takes the rest; it may have a
    length if all have percentages, which add up to 100.
    """

    # `NAME:LENGTH` for each part, with keys and values after it:
    # `schedule.parts=[constant:60%,cosine:30%:final:0.1,step]`. The last part may have no length and takes the rest.
    # To a part, its length is the run's
    parts: list[str] = ruled(["constant:80%", "linear"], TEXT)

    def __post_init__(self) -> None:
        lengths = [part_of(text)[0] for text in self.parts]
        amounts = [parse_duration(length) or (0.0, "") for length in lengths]
        whole = {unit for _, unit in amounts} == {"%"} and math.isclose(sum(amount for amount, _ in amounts), 100)
        if "" in lengths[:-1] or not (lengths and (whole or lengths[-1] == "")):
            raise InputError(
                f"schedule.parts is {shown(self.parts)}, expected a length for each part but the last, which takes "
                "the rest of the run: schedule.parts=[linear:10%,constant:60%,cosine]"
            )

    def factor(self, step: int, plan: Plan, scores: Evaluations) -> float:
        laid_out = layout(tuple(self.parts), plan)
        begin, schedule, part = next(item for item in reversed(laid_out) if step > item[0])
        later = [(at - begin, gain) for at, gain in scores if at > begin]
        return super().factor(step, plan, scores) * schedule.factor(step - begin, part, later)


@functools.lru_cache(maxsize=64)  # called at every step, as `part_of`
def layout(parts: tuple[str, ...], plan: Plan) -> list[tuple[int, Schedule, Plan]]:
    """For each part of a `Chain`, the step before it, its schedule, and the plan that it sees. Raises InputError."""
    total = plan.total_steps
    steps = [plan.in_steps("schedule.parts", part_of(text)[0]) for text in parts[:-1]]
    if sum(steps) > total + len(parts):  # percentages of few steps are rounded
        raise InputError(
            f"schedule.parts has {sum(steps):,} steps before {parts[-1]!r}, but the run has {total:,}; shorten the "
            "parts, or remove one"
        )
    ends = [*(min(end, total) for end in itertools.accumulate(steps)), total]
    begins = [0, *ends[:-1]]
    return [
        (begin, part_of(text)[1], replace(plan, total_steps=end - begin))
        for text, begin, end in zip(parts, begins, ends, strict=True)
    ]


@functools.lru_cache(maxsize=64)
def part_of(text: str) -> tuple[str, Schedule]:
    """The length of a part of a `Chain`, empty without one, and its schedule. Raises InputError."""
    name, *words = text.split(":")
    length = words.pop(0) if len(words) % 2 else ""
    if (cls := classes_of("schedule").get(name)) is None:
        raise InputError(
            f"schedule.parts has {text!r}, expected a schedule before the colon: linear:10%"
            f"{did_you_mean(name, classes_of('schedule'))}"
        )
    values = dict(zip(words[::2], words[1::2], strict=True))
    try:
        return length, components.build("schedule", {"_target_": class_path(cls), **values}, name)
    except InputError as error:
        raise InputError(f"schedule.parts has {text!r}: {error}") from error
