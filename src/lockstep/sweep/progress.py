"""How far a running job of a sweep is, from the lines that it adds to its `metrics.jsonl`."""

import math
import time
from contextlib import suppress

from lockstep.core import safe_read
from lockstep.core.figures import STAMP, parsed_figures
from lockstep.core.run import Run
from lockstep.core.safe_read import UnreadableFile
from lockstep.sweep.record import Record
from lockstep.sweep.runs import JobRun


class JobProgress:
    """The progress of a job, as of the last `update`.

    Fields:
        rate: images per second at the last log point; 0 before it.
        best: the best score so far.
        duration: the seconds that all of its steps take at its pace; None before its first figures.
    """

    def __init__(self, job: JobRun) -> None:
        self.job, self.offset = job, 0
        self.step, self.steps, self.steps_per_epoch, self.rate = 0, 0, 0, 0.0
        self.best: float | None = None
        self.duration: float | None = None
        self.logged_at, self.share = 0.0, 1.0
        self._read()
        self.first = self.step  # where the job resumes

    def update(self, record: Record, share: float) -> None:
        """Read what the job has logged since the last call; it ends after this `share` of its steps."""
        self.share = share
        if not self.steps:
            summary = Run(self.job.folder).summary
            self.steps = int(summary.get("steps") or 0)
            self.steps_per_epoch = int(summary.get("steps_per_epoch") or 0)
        self._read()
        if self.step > self.first and record.started:
            self.duration = (self.logged_at - record.started) / (self.step - self.first) * self.steps

    def _read(self) -> None:
        try:
            with safe_read.opened(self.job.run_dir.metrics) as file:
                if file.seek(0, 2) < self.offset:  # a resume has cut it
                    self.offset = 0
                file.seek(self.offset)
                lines = file.read().rpartition(b"\n")[0]
        except (UnreadableFile, OSError):
            return
        self.offset += len(lines) + bool(lines)
        for line in lines.decode(errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                self.step, figures = parsed_figures(line)
                self.logged_at = figures.get(STAMP) or time.time()
                self.rate = figures.get("perf/img_per_s") or self.rate
                known = [score for score in (self.best, self.job.monitor.value_in(figures)) if score is not None]
                self.best = max(known, key=self.job.monitor.direction.gain, default=None)

    @property
    def epoch(self) -> str:
        """The epoch and the number of epochs; the share of the steps where these are not known."""
        if not self.steps:
            return ""
        if not self.steps_per_epoch:
            return f"{self.step / self.steps:.0%}"
        epochs = math.ceil(self.steps / self.steps_per_epoch)
        return f"{max(1, math.ceil(self.step / self.steps_per_epoch))}/{epochs}"

    def left(self) -> float | None:
        """The seconds until the job ends, which fall with the clock; None before its first figures."""
        if self.duration is None:
            return None
        steps = math.ceil(self.share * self.steps) - self.step
        return max(0.0, self.duration / self.steps * steps - (time.time() - self.logged_at))
