"""The jobs of one `-m`: a failing one is said at once and ends nothing, and a table closes the sweep."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.table import Table

from lockstep import config, log
from lockstep.errors import LockstepError, Stopped

LEDGER = "jobs.jsonl"


@dataclass(frozen=True)
class Outcome:
    """How a job of a sweep ended."""

    number: int
    overrides: tuple[str, ...]
    objective: float | None
    exit_code: int
    error: str = ""


def guarded(job: Callable[[], float | None], invocation: config.Invocation) -> float | None:
    """Run a job; one of a sweep that fails is reported and gives NaN, so that the sweep goes on."""
    if not invocation.sweep or invocation.folder is None:
        return job()
    try:
        objective, outcome = job(), None
    except Stopped as error:
        config.say(error)
        sys.exit(error.exit_code)
    except Exception as error:
        known = config.translate(error)
        if known is None:
            traceback.print_exc()
            known = LockstepError(f"{type(error).__name__}: {error}")
        sentence = f"job {invocation.number}: {known}"
        config.say(type(known)(sentence, *known.args[1:]))
        objective = None
        outcome = Outcome(invocation.number, invocation.overrides, None, known.exit_code, str(known))
    outcome = outcome or Outcome(invocation.number, invocation.overrides, objective, 0)
    with (invocation.folder / LEDGER).open("a") as ledger:
        ledger.write(json.dumps(asdict(outcome)) + "\n")
    return float("nan") if objective is None else objective


class Report(Callback):
    """Hydra's callback that closes a sweep: a table of its jobs, and the exit code of the first that failed."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        ledger = folder / LEDGER
        if not ledger.is_file():
            return
        outcomes = [Outcome(**json.loads(line)) for line in ledger.read_text().splitlines()]
        table = Table("job", "overrides", "top-1 %", "ended", title=f"sweep in {folder}", title_justify="left")
        for each in outcomes:
            table.add_row(
                str(each.number),
                " ".join(each.overrides),
                "" if each.objective is None else f"{each.objective:.2f}",
                "done" if each.exit_code == 0 else f"failed ({each.exit_code})",
            )
        log.console.print(table)
        failed = [each for each in outcomes if each.exit_code]
        if failed:
            sys.exit(failed[0].exit_code)
