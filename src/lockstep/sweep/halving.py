"""Successive halving: all jobs train for a part of their steps, and the best go on with the rest.

Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter Optimization". A job that
goes on continues from its own checkpoint, to the bit the run that it would have been alone. So nothing is trained
twice, and who goes on follows from the logged scores alone: a line that was stopped anywhere finds its place again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.core.errors import Stopped
from lockstep.core.run import Run, State
from lockstep.runtime.signals import RUNG_END
from lockstep.sweep.ledger import Ledger
from lockstep.sweep.record import Direction, Record

if TYPE_CHECKING:
    from lockstep.sweep.pool import Pool, Task

# The score of an evaluation in `metrics.jsonl`, of the averaged weights where there are some: they decide the best.
SCORES = ("acc/val_ema_top1", "acc/val_top1")


def shares(jobs: int, factor: int) -> list[float]:
    """The share of its steps that each job of a round has done at the round's end; the last is 1."""
    rounds = int(math.log(jobs, factor) + 1e-9) if jobs else 0
    return [factor ** (number - rounds) for number in range(rounds + 1)]


def evaluations(ledger: Ledger, record: Record) -> list[tuple[float, float]]:
    """The evaluations of a job so far: the share of its steps that was done, and the score."""
    run = Run(ledger.folder / record.folder)
    total = run.summary.get("steps")
    return [(step / total, score) for step, score in run.series(*SCORES)] if total else []


def score_at(ledger: Ledger, record: Record, share: float, direction: Direction) -> float | None:
    """The best score until the first evaluation that comes at `share` of a job's steps or later; None before it."""
    values = []
    for done, value in evaluations(ledger, record):
        values.append(value)
        if done >= share:
            return max(values, key=direction.gain)
    return record.objective


def _judged_at(ledger: Ledger, record: Record, share: float) -> float:
    """The share of its steps at which a job is judged for a round; 0 if it has no evaluation there."""
    return next((done for done, _ in evaluations(ledger, record) if done >= share), 0.0)


def halve(pool: Pool, records: Sequence[Record], tasks: Mapping[int, Task], factor: int) -> None:
    """Run the rounds: after each, the best one of `factor` jobs goes on.

    Args:
        records: those of the line; jobs that were done or failed before take part with their scores.
        factor: how many times fewer jobs each round has.

    Raises:
        Stopped, Interrupted: as `Pool.run`; or a job was stopped alone, by a signal or a full disk, and has no score.
    """
    ledger, direction = pool.ledger, pool.ledger.identity().direction
    racing = [*dict.fromkeys(records)]  # a line may have a job twice
    rounds = shares(len(racing), factor)

    def runs(record: Record) -> bool:
        return record.number in tasks and record.state is not State.done

    for number, share in enumerate(rounds, 1):
        is_last, rung = share == 1, f"{number} of {len(rounds)}"
        racing = [ledger.write(replace(record, rung=rung)) if runs(record) else record for record in racing]

        def has_enough(record: Record, share: float = share, is_last: bool = is_last) -> bool:
            return not is_last and score_at(ledger, record, share, direction) is not None

        until = {} if is_last else {RUNG_END: repr(share)}
        started = [
            replace(tasks[record.number], record=record, environment=until)
            for record in racing
            if runs(record) and not has_enough(record)
        ]
        pool.run(started, enough=has_enough)
        racing = [ledger.read(record) for record in racing]
        scores = {record.number: score_at(ledger, record, share, direction) for record in racing}
        if stopped := [str(r.number) for r in racing if r.state is State.stopped and scores[r.number] is None]:
            raise Stopped(f"jobs were stopped in rung {rung}: {', '.join(stopped)}; the same line goes on with them")
        # One that failed after this round keeps its place here: the line typed again has the same rounds.
        racing = [r for r in racing if scores[r.number] is not None or (runs(r) and r.state is not State.failed)]
        if is_last or not racing:
            return
        gains = {key: -math.inf if value is None else direction.gain(value) for key, value in scores.items()}
        best_first = sorted(racing, key=lambda record: -gains[record.number])
        ahead = math.ceil(len(racing) / factor)
        for record in best_first[ahead:]:
            if runs(record):
                score_here = scores[record.number]
                ledger.write(replace(record, state=State.pruned, objective=score_here, exit_code=0, error=""))
        judged = max(_judged_at(ledger, record, share) for record in racing)
        if judged >= rounds[number]:
            pool.view.show(
                f"warning: rung {rung} was to end after {100 * share:.3g} % of the steps, and a job was first "
                f"evaluated after {100 * judged:.3g} %; "
                f"train.eval_every={100 * rounds[0]:.3g}% saves the steps in between"
            )
        pool.view.show(f"{ahead} of {len(racing)} jobs go on after {100 * share:.3g} % of their steps")
        racing = best_first[:ahead]
