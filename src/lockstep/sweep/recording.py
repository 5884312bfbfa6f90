"""Runs a job of a sweep in this process, and keeps its record in the ledger. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.config.messages import translate
from lockstep.core.errors import Interrupted, Stopped, StorageError, as_known
from lockstep.runtime import signals
from lockstep.runtime.program import JobError
from lockstep.runtime.signals import StopNow
from lockstep.sweep.ledger import Ledger
from lockstep.sweep.record import Record, State


def recorded(ledger: Ledger, record: Record, function: Callable[[], float | None]) -> float | None:
    """Run a job, and keep its record.

    Raises:
        LockstepError, Exception: what the job raised, if that is not a stop.
        Stopped: the job was stopped.
    """
    record = ledger.start(record)
    try:
        objective = function()
    except BaseException as raised:
        error = raised.error if isinstance(raised, JobError) else raised
        if isinstance(error, StopNow | KeyboardInterrupt):
            error = Stopped(signals.NOT_BEGUN)
        translated = translate(error) if isinstance(error, Exception) else None
        known = translated or as_known(error)
        # A full disk is no fault of the job: the same line goes on with it.
        state = State.stopped if isinstance(known, Stopped | Interrupted | StorageError) else State.failed
        ledger.end(record, state, exit_code=known.exit_code, error=str(known))
        raise (translated or error) from None
    ledger.end(record, State.done, objective=objective)
    return objective
