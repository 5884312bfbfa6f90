"""Shows a sweep: its running jobs on a terminal, a line for each job elsewhere, and the table at its end."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lockstep.core import log, safe_read
from lockstep.core.errors import InputError, LockstepError, Stopped, StorageError, escaped
from lockstep.core.monitor import figure_text
from lockstep.core.run import Run, State
from lockstep.core.run_dir import relative
from lockstep.runtime.program import say
from lockstep.sweep.ledger import Ledger, output_of
from lockstep.sweep.record import (
    SCORE,
    Record,
    best_of,
    cells,
    columns_of,
    head,
    objectives_of,
    score_text,
    seeds_together,
    swept_keys,
    trade_offs,
    unmeasured,
    varied,
)
from lockstep.telemetry.progress import ALWAYS, FigureColumn, fitting, format_duration

OVER = (State.done, State.failed)
TAIL = 4096  # bytes of the end of a file of metrics: its last line is shorter


class SweepView:
    """The jobs of one call: live while they run, and as a table at the end.

    Fields:
        records: those of its line, also those that were done before.
        open: the numbers of the jobs that have not ended, or run again.
        left: the jobs of a search that are not known yet.
    """

    def __init__(
        self, ledger: Ledger, records: Sequence[Record] = (), waiting: Iterable[Record] = (), begun: str = "started"
    ) -> None:
        self.ledger, self.begun = ledger, begun
        self.records: dict[int, Record] = {}
        self.running: list[int] = []
        self.open: set[int] = set()
        self.began, self.ended_now = time.monotonic(), 0
        self.enter(records, waiting)
        # Drawn by `refresh` and not by a thread of its own, beside which no job could be forked.
        self.live = Live(
            console=log.Terminal(highlight=False),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> SweepView:
        if log.has_terminal():
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def enter(self, records: Sequence[Record], waiting: Iterable[Record], left: int = 0) -> None:
        """Take jobs, those `waiting` to run among them; `left` jobs of a search are not known yet."""
        self.records |= {record.number: record for record in records}
        self.open |= {record.number for record in records if record.state not in OVER}
        self.open |= {record.number for record in waiting}
        self.left = left
        identity = self.ledger.identity()
        self.swept = identity.swept or swept_keys(record.overrides for record in self.records.values())
        self.monitor = identity.monitor

    def started(self, record: Record) -> None:
        self.records[record.number] = record
        self.running.append(record.number)
        if not self.live.is_started:
            self.show(f"{self._name(record)}  {self.begun}")

    def ended(self, record: Record) -> None:
        self.records[record.number] = record
        self.running = [number for number in self.running if number != record.number]
        if record.state in OVER:
            self.open.discard(record.number)
            self.ended_now += 1
        state = "paused" if record.state is State.waiting else record.state  # others may be better
        ending = f"{state}: {record.error}" if record.error else f"{state} {self._score(record)}".rstrip()
        total = str(len(self.records) + self.left)
        position = f"{len(self.records) - len(self.open):>{len(total)}} of {total}"
        duration = f"  in {format_duration(record.ended - record.started)}" if record.started else ""
        self.show(f"{position}  {self._name(record)}  {ending}{duration}")
        # The line above has the sentence; on this terminal, a second one would be written into the live lines.
        is_failure = record.state is State.failed or record.exit_code == StorageError.exit_code
        if is_failure and not (self.live.is_started and sys.stderr.isatty()):
            say(LockstepError(*record.error.split("\n")), label=f"job {record.number}: ")

    def refresh(self) -> None:
        """Draw what runs, and how far the sweep is."""
        if not self.live.is_started:
            return
        for number in self.running:  # each job writes its own record
            self.records[number] = self.ledger.read(self.records[number])
        lines = [self._progress(self.records[number]) for number in self.running]
        self.live.update(Group(*lines, self._summary()), refresh=True)

    def _progress(self, record: Record) -> Text:
        columns = [FigureColumn("", self._name(record), "", ALWAYS)]
        if (progress := progress_of(self.ledger, record)) and progress["steps"] > 0:
            step, total, rate = progress["step"], progress["steps"], progress["rate"]
            columns.append(FigureColumn("", f"{100 * step / total:3.0f}", " %", 5))
            columns += [FigureColumn("", f"{rate:6,.0f}", " img/s", 4)] if rate else []
            if step and record.started:
                left = (time.time() - record.started) / step * (total - step)
                columns.append(FigureColumn("left", format_duration(left), "", ALWAYS))
        return fitting(columns, self.live.console.width)

    def _summary(self) -> Text:
        count = Counter(record.state for record in self.records.values())
        columns = [
            FigureColumn(state, f"{count[state]}", "", ALWAYS if state is State.done else 5)
            for state in State
            if count[state]
        ]
        if best := best_of(self.records.values(), self.monitor.direction):
            columns.append(FigureColumn("best", self._score(best), f" (job {best.number})", 6, "green"))
        if self.ended_now:
            seconds = (time.monotonic() - self.began) / self.ended_now * (len(self.open) + self.left)
            columns.append(FigureColumn("left", format_duration(seconds), "", ALWAYS))
        return fitting(columns, self.live.console.width)

    def _name(self, record: Record) -> str:
        words = " ".join(varied(record.overrides, self.swept)) or "as configured"
        return f"job {record.number:>{len(str(len(self.records) - 1))}}  {words}"

    def _score(self, record: Record) -> str:
        return score_text(record.objective, self.monitor.name)

    def show(self, text: str) -> None:
        """Print a sentence above the live lines, which stay whole."""
        self.live.console.print(Text(escaped(text, keep="")), soft_wrap=True)

    def show_table(self, names: Sequence[str] = (SCORE,)) -> None:
        """Print each job with its score and the other objectives, the seeds together, and why jobs failed."""
        folder, numbers = self.ledger.folder, self.records
        records = [record for record in self.ledger.records() if record.number in numbers]
        names = [SCORE, *(name for name in names if name != SCORE)]
        runs = {record.number: Run(folder / record.folder) for record in records}
        columns = [name for name in columns_of(runs.values()) if not {name, f"-{name}"} & {*names[1:]}] + names[1:]
        table = Table("job", "overrides", *(head(name, self.monitor.name) for name in columns), "ended")
        figures = {record.number: objectives_of(folder, record, names) for record in records}
        for record in records:
            ending = f"{record.state} ({record.exit_code})" if record.exit_code else record.state
            ending += f", rung {record.rung}" if record.rung and record.state is not State.done else ""
            known = dict(zip(names, figures[record.number], strict=False))
            texts = cells(
                {**runs[record.number].columns, **known, SCORE: record.objective}, columns, self.monitor.name
            )
            words = " ".join(varied(record.overrides, self.swept))
            table.add_row(str(record.number), words, *texts, ending)
        # Not as the table's title, which would be wrapped: a path on two lines cannot be copied.
        log.console.print(f"sweep in {relative(folder)}", soft_wrap=True)
        log.show_table(table)
        for line in self._conclusions(records, names, figures):
            log.console.print(line, soft_wrap=True)
        for record in records:
            if record.error:
                for line in record.error.split("\n"):
                    log.show(f"job {record.number}: {line}")
                if record.exit_code not in (InputError.exit_code, Stopped.exit_code):
                    output = relative(output_of(self.ledger, record))
                    log.console.print(f"    what it printed: {output}", soft_wrap=True)

    def _conclusions(
        self, records: Sequence[Record], names: Sequence[str], figures: Mapping[int, Sequence[float]]
    ) -> Iterator[str]:
        """The lines below the table: the seeds together, the trade-offs, and the best job."""
        yield from seeds_together(records, self.swept, self.monitor)
        known = {number: values for number, values in figures.items() if values}
        if len(names) > 1 and (best_ones := trade_offs(known, names, self.monitor.direction)):
            jobs = f"job{'s' * (len(best_ones) > 1)} {', '.join(map(str, best_ones))}"
            compared = " and ".join(head(name, self.monitor.name) for name in names)
            yield f"no other job is better in {compared} than {jobs}"
        yield from unmeasured(self.ledger.folder, records, names)
        if best := best_of(records, self.monitor.direction):
            self.ledger.mark_best()  # two jobs that ended at once may have named the worse one
            path = relative(self.ledger.folder / best.folder)
            yield f"best: job {best.number} with {figure_text(self.monitor.name, best.objective or 0.0)}, {path}"


def progress_of(ledger: Ledger, record: Record) -> Mapping[str, float]:
    """How far a job is, if it writes `summary.json` with `steps`, and `metrics.jsonl` with `step`; else empty."""
    run = Run(ledger.folder / record.folder)
    try:
        with safe_read.opened(run.run_dir.metrics) as file:
            start = max(0, file.seek(0, 2) - TAIL)
            file.seek(start)
            texts = file.read().decode(errors="replace").splitlines()[start > 0 :]  # without one that is cut
        lines = [safe_read.parsed_json(text) for text in texts]
        rates = [line["perf/img_per_s"] for line in lines if "perf/img_per_s" in line]  # of log points
        return {
            "step": float(lines[-1]["step"]) if lines else 0.0,
            "steps": float(run.summary["steps"]),
            "rate": float(rates[-1]) if rates else 0.0,
        }
    except (InputError, LookupError, TypeError, ValueError, AttributeError):
        return {}
