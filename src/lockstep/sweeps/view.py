"""Shows a sweep: its running jobs on a terminal, or else a line for each job, and the table at its end."""

import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Self

from rich.console import Group
from rich.live import Live
from rich.text import Text

from lockstep.core import console, log, safe_read
from lockstep.core.errors import InputError, LockstepError, Stopped, StorageError, percent
from lockstep.core.figures import STAMP, parsed_figures
from lockstep.core.run import Run, State
from lockstep.core.run_dir import relative
from lockstep.core.safe_read import UnreadableFile
from lockstep.core.table import Column, column_of_settings, lines_of, shortened
from lockstep.core.tags import RATE
from lockstep.records.ledger import Ledger, output_of
from lockstep.records.record import (
    SCORE,
    Record,
    best_of,
    columns_of,
    directions_of,
    head,
    score_text,
    swept_keys,
    trade_offs,
    unmeasured,
    varied,
)
from lockstep.records.runs import JobRun, Row, groups
from lockstep.records.tables import errors_of, job_numbers, show_groups
from lockstep.runtime.program import explain
from lockstep.telemetry.progress import ALWAYS, FigureColumn, format_duration, in_line


class JobProgress:
    """How far a job is, from the lines that it adds to its `metrics.jsonl`, as of the last `update`."""

    def __init__(self, job: JobRun) -> None:
        self.job, self.offset = job, 0
        self.step, self.steps, self.steps_per_epoch = 0, 0, 0
        self.rate = 0.0  # images per second at the last log point
        self.best: float | None = None
        self.duration: float | None = None  # seconds that all of its steps take at its pace
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
            with safe_read.open_plain(self.job.run_dir.metrics) as file:
                if file.seek(0, 2) < self.offset:  # a resume has cut it
                    self.offset, self.best = 0, None
                file.seek(self.offset)
                lines = file.read().rpartition(b"\n")[0]
        except (UnreadableFile, OSError):
            return
        self.offset += len(lines) + bool(lines)
        for line in lines.decode(errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                self.step, figures = parsed_figures(line)
                self.logged_at = figures.get(STAMP) or time.time()
                self.rate = figures.get(RATE) or self.rate
                known = [score for score in (self.best, self.job.monitor.value_in(figures)) if score is not None]
                self.best = max(known, key=self.job.monitor.direction.gain, default=None)

    @property
    def epoch(self) -> str:
        """The epoch and the number of epochs; the share of the steps where these are not known."""
        if not self.steps:
            return ""
        if not self.steps_per_epoch:
            return percent(self.step / self.steps)
        epochs = math.ceil(self.steps / self.steps_per_epoch)
        return f"{max(1, math.ceil(self.step / self.steps_per_epoch))}/{epochs}"

    def left(self) -> float | None:
        """The seconds until the job ends, which fall with the clock; None before its first figures."""
        if self.duration is None:
            return None
        steps = math.ceil(self.share * self.steps) - self.step
        return max(0.0, self.duration / self.steps * steps - (time.time() - self.logged_at))


class SweepView:
    """The jobs of one call, also those that were done before: live while they run, and as a table at the end."""

    def __init__(self, ledger: Ledger, begun: str = "started") -> None:
        self.ledger, self.begun = ledger, begun
        self.records: dict[int, Record] = {}
        self.running: dict[int, JobProgress] = {}
        self.open: set[int] = set()  # the jobs that have not ended, or run again
        # With halving: the share of its steps that each job has done at the end of the present round, the share that
        # it does in this round, and the work of the later rounds, in jobs that train all of their steps.
        self.share, self.portion, self.later = 1.0, 1.0, 0.0
        self.errors: dict[str, int] = {}  # the sentences that this call has shown, each with its first job
        self.durations: list[float] = []  # of the jobs of this call that have ended, as if with all of their steps
        # Drawn by `refresh` and not by a separate thread: a process with two threads cannot fork a job.
        self.live = Live(
            console=console.Terminal(highlight=False),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        if log.has_terminal():
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def enter(self, records: Sequence[Record], waiting: Iterable[Record], left: int = 0) -> None:
        """Take jobs, those `waiting` to run among them; `left` jobs of a search are not known yet."""
        self.records |= {record.number: record for record in records}
        self.open |= {record.number for record in records if not record.has_ended}
        self.open |= {record.number for record in waiting}
        self.left = left
        identity = self.ledger.identity()
        self.swept = identity.swept or swept_keys(record.overrides for record in self.records.values())
        self.monitor = identity.monitor

    def started(self, record: Record) -> None:
        is_first = not (self.running or self.durations)
        self.records[record.number] = record
        self.running[record.number] = JobProgress(JobRun(self.ledger, record, self.monitor))
        if is_first or not self.live.is_started:
            where = f"; its log: {relative(output_of(self.ledger, record))}" if is_first else ""
            self.show(f"{self._name(record)}  {self.begun}{where}")

    def ended(self, record: Record) -> None:
        self.records[record.number] = record
        self.running.pop(record.number, None)
        if record.has_ended:
            self.open.discard(record.number)
        if record.state in (State.done, State.waiting) and record.started:
            self.durations.append((record.ended - record.started) / self.portion)
        status = JobRun(self.ledger, record, self.monitor).status
        state = "paused" if record.state is State.waiting else status  # others may be better
        is_done, score = record.state is State.done, score_text(record.objective, self.monitor.name)
        first = self.errors.setdefault(record.error, record.number) if record.error else record.number
        reason = f": {record.error}" if first == record.number else f" for the same reason as job {first}"
        ending = f"{state}{reason}" if record.error else f"{state} {score * is_done}".rstrip()
        total = str(len(self.records) + self.left)
        position = f"{len(self.records) - len(self.open):>{len(total)}} of {total}"
        duration = f"  in {format_duration(record.ended - record.started)}" if record.started else ""
        self.show(f"{position}  {self._name(record)}  {ending}{duration}")
        # The line above has the sentence; on this terminal, a second one would be written into the live lines.
        is_failure = record.state is State.failed or record.exit_code == StorageError.exit_code
        if is_failure and first == record.number and not (self.live.is_started and sys.stderr.isatty()):
            explain(LockstepError(*record.error.split("\n")), label=f"job {record.number}: ")

    def refresh(self, waiting: int = 0) -> None:
        """Draw what runs, and how far the sweep is; `waiting` jobs are to start in this round."""
        if not self.live.is_started:
            return
        for number, progress in self.running.items():  # each job writes its own record
            self.records[number] = self.ledger.read(self.records[number])
            progress.update(self.records[number], self.share)
        width = self.live.console.width
        table = lines_of([*self._columns()], width, second_lines=False) if self.running else ()
        self.live.update(Group(*table, self._summary(waiting)), refresh=True)

    def _columns(self) -> Iterator[Column]:
        records = [self.records[number] for number in self.running]
        yield Column("job", [str(record.number) for record in records])
        yield from (column_of_settings(key, [record.values.get(key, "") for record in records]) for key in self.swept)
        yield Column("epoch", [progress.epoch for progress in self.running.values()])
        scores = [score_text(progress.best, self.monitor.name) for progress in self.running.values()]
        yield Column(head(SCORE, self.monitor.name, {}), scores)
        yield Column("img/s", [f"{job.rate:,.0f}" if job.rate else "" for job in self.running.values()])
        left = [job.left() for job in self.running.values()]
        yield Column("left", ["starting" if seconds is None else format_duration(seconds) for seconds in left])

    def _summary(self, waiting: int) -> Text:
        count = Counter(record.state for record in self.records.values())
        total = len(self.records) + self.left
        columns = [FigureColumn("done", f"{len(self.records) - len(self.open)} of {total}", "", ALWAYS)]
        states = [state for state in State if count[state] and state not in (State.done, State.waiting)]
        columns += [FigureColumn(state, f"{count[state]}", "", 5) for state in states]
        if best := best_of(self.records.values(), self.monitor.direction):
            score = score_text(best.objective, self.monitor.name)
            columns.append(FigureColumn("best", score, f" (job {best.number})", 6, "green"))
        if (seconds := self.seconds_left(waiting)) is not None:
            form = "%H:%M" if seconds < 12 * 3600 else "%a %H:%M"
            columns.append(FigureColumn("left", format_duration(seconds), "", ALWAYS))
            columns.append(FigureColumn("ends", time.strftime(form, time.localtime(time.time() + seconds)), "", 7))
        return in_line(columns, self.live.console.width)

    def seconds_left(self, waiting: int) -> float | None:
        """The seconds to the sweep's end, at least as many as any running job has left; None if no pace is known."""
        running = [*self.running.values()]
        known = self.durations or [job.duration for job in running if job.duration is not None]
        if not known:
            return None
        usual, places = statistics.mean(known), max(1, len(running))
        lefts = [usual * self.portion if (left := job.left()) is None else left for job in running]
        of_round = (sum(lefts) + (waiting + self.left) * usual * self.portion) / places
        return max([of_round, *lefts]) + self.later * usual / places

    def _name(self, record: Record) -> str:
        words = shortened(" ".join(varied(record.overrides, self.swept))) or "as configured"
        return f"job {record.number:>{len(str(len(self.records) - 1))}}  {words}"

    def show(self, text: str) -> None:
        """Print a sentence above the live lines, which stay whole."""
        self.live.console.print(Text(log.wrapped(text)), soft_wrap=True)

    def show_table(self, names: Sequence[str] = (SCORE,)) -> None:
        """Print the jobs with their scores and the other objectives, the seeds together, and why jobs failed."""
        folder = self.ledger.folder
        records = [record for record in self.ledger.records() if record.number in self.records]
        names = [SCORE, *(name for name in names if name != SCORE)]
        runs = [JobRun(self.ledger, record, self.monitor) for record in records]
        columns = [name for name in columns_of(runs) if not {name, f"-{name}"} & {*names[1:]}] + names[1:]
        # Not as the table's title, which would be wrapped: a path on two lines cannot be copied.
        log.show(f"sweep in {relative(folder)}")
        show_groups(runs, rows := groups(runs, names=columns), columns)
        for line in self._conclusions(rows, runs, names):
            log.show(line)
        self.ledger.mark_best()  # two jobs that ended at once may have named the worse one
        for record, lines in errors_of(records):
            for line in lines:
                log.show(line)
            if record.exit_code not in (InputError.exit_code, Stopped.exit_code):
                log.show(f"    what it printed: {relative(output_of(self.ledger, record))}")

    def _conclusions(self, rows: Sequence[Row], runs: Sequence[JobRun], names: Sequence[str]) -> Iterator[str]:
        """The lines about several objectives: the trade-offs, and what was not measured."""
        complete = (row for row in rows if all(row.get(name) is not None for name in names))
        known = {job_numbers(row["jobs"]): [row[name] for name in names] for row in complete}
        if len(names) > 1 and (best_ones := ", ".join(trade_offs(known, names, self.monitor.direction))):
            compared = " and ".join(head(name, self.monitor.name, directions_of(runs)) for name in names)
            yield f"no other job is better in {compared} than job{'s' * (not best_ones.isdecimal())} {best_ones}"
        yield from unmeasured(self.ledger.folder, [run.record for run in runs], names)
