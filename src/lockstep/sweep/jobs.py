"""One job of a sweep. If it fails, the error is shown at once, and the sweep goes on."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lockstep.config import invocation, messages
from lockstep.core.errors import Interrupted, LockstepError, Stopped, as_known, escaped
from lockstep.runtime import program

LEDGER = "jobs.jsonl"


@dataclass(frozen=True)
class Outcome:
    """How a job of a sweep ended."""

    number: int
    overrides: tuple[str, ...]
    objective: float | None
    exit_code: int
    error: str = ""


def run_sweep_job(job: Callable[[], float | None], invocation: invocation.Invocation) -> float | None:
    """Run a job. If a job of a sweep fails, show the error and return NaN, so that the sweep goes on."""
    if not invocation.sweep or invocation.folder is None:
        with program.bypass_hydra_errors():
            return job()
    error: LockstepError | None = None
    objective: float | None = None
    try:
        objective = job()
    except Exception as raised:
        error = messages.translate(raised)
        if error is None:
            sys.stderr.write(escaped(traceback.format_exc()))
            error = as_known(raised)
        program.say(error, label=f"job {invocation.number}: ")
    outcome = Outcome(
        number=invocation.number,
        overrides=invocation.overrides,
        objective=objective,
        exit_code=error.exit_code if error else 0,
        error=str(error) if error else "",
    )
    with (invocation.folder / LEDGER).open("a") as ledger:
        ledger.write(json.dumps(asdict(outcome)) + "\n")
    if isinstance(error, (Stopped, Interrupted)):
        # A stop ends the whole sweep, not only this job.
        sys.exit(error.exit_code)
    return float("nan") if objective is None else objective
