"""What `telemetry.report` says: the report of a run is written at its end if the run was long enough."""

from collections.abc import Mapping
from typing import Any

from lockstep.config.commands import shell_command
from lockstep.core import log
from lockstep.core.observer import Observer, RunInfo
from lockstep.core.run import Run
from lockstep.core.run_dir import relative

LONG_S = 30  # a report of a shorter run would take a noticeable part of it


class Listener(Observer):
    """Writes the report of a run that is long enough, and shows where it is, or the command that writes it."""

    def __init__(self, run: RunInfo) -> None:
        self.run = run

    def completed(self, summary: Mapping[str, Any]) -> None:
        report = shell_command(["lockstep", "report", relative(self.run.folder)])
        if is_due(self.run.config["telemetry"]["report"], summary["seconds"]):
            from lockstep.report.run_page import write_report  # imported late: a short run writes none

            try:
                report = str(relative(write_report(Run(self.run.folder))))
            except Exception as error:  # a plotting library can raise anything, and the run is done
                log.warn(f"report.html could not be written ({type(error).__name__}: {error})")
        log.say_command("report", report)


def is_due(when: str, seconds: float) -> bool:
    """Whether a run or a sweep that took `seconds` ends with a report, by `telemetry.report`."""
    return when == "always" or (when == "auto" and seconds >= LONG_S)
