"""`lockstep doctor`: says before a long run whether it would start, what to change, and how long it would take."""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.text import Text

from lockstep.config import components, composition
from lockstep.config.commands import shell_command
from lockstep.config.composition import check_hydra_overrides, jobs_of
from lockstep.config.hydra_policy import is_of_hydra
from lockstep.config.messages import translate
from lockstep.config.roles import values_with
from lockstep.core import console, log
from lockstep.core.errors import InputError, as_known
from lockstep.core.fields import Role
from lockstep.core.table import show_json
from lockstep.diagnostics import examination
from lockstep.diagnostics.inspection import Finding, Level, inspect
from lockstep.job.prepare import checked_job, fitted_to_images
from lockstep.job.resume import Resume, decide_resume
from lockstep.telemetry.progress import format_duration, progress
from lockstep.training.resolved_job import ResolvedJob

LOOK_S = 16.0  # the most seconds for the images of a data set
STYLES = {Level.ok: "green", Level.warning: "yellow", Level.error: "red"}
ON_OTHER_MACHINES = "the job runs on other machines: check one of them with srun lockstep doctor launcher=auto"
Findings = Iterable[Finding]


def doctor(overrides: Sequence[str], *, multirun: bool, everything: bool, form: str) -> None:
    """Examine the job of a line, or all jobs with `multirun`, and show a line for each finding, or JSON.

    Images are checked for a limited time, unless `everything` is set.
    """
    checkup = Checkup(look_s=float("inf") if everything else LOOK_S)
    checkup.examine(overrides, multirun=multirun)
    if form == "json":
        findings = [{**asdict(finding), "jobs": jobs} for finding, jobs in checkup.findings.items()]
        show_json({"jobs": checkup.jobs, "findings": findings})
    else:
        for finding, jobs in checkup.findings.items():
            columns = f"{finding.level:<9}{finding.check:<9}"
            line = Text(log.wrapped(f"{columns}{finding.text}{checkup.named(jobs)}", len(columns)))
            line.stylize(STYLES[finding.level], 0, len(finding.level))
            console.terminal.print(line, soft_wrap=True)
    if errors := sum(finding.level is Level.error for finding in checkup.findings):
        raise InputError(f"a run would not start: {errors} error{'s' * (errors != 1)}")


@dataclass(kw_only=True)
class Checkup:
    """What is found out about the jobs of a line.

    Fields:
        look_s: the most seconds for the images of a data set.
        free: returns the free bytes of the disk of a folder.
        findings: the numbers of the jobs that have a finding.
        results: the findings of checks that several jobs share, by what they depend on.
    """

    look_s: float = LOOK_S
    free: Callable[[Path], float] = lambda path: shutil.disk_usage(path).free
    jobs: list[list[str]] = field(default_factory=list)
    findings: dict[Finding, list[int]] = field(default_factory=dict)
    results: dict[str, list[Finding]] = field(default_factory=dict)

    def examine(self, words: Sequence[str], *, multirun: bool) -> None:
        """Examine the jobs one after another, and then what they need together."""
        self.jobs = [list(words)]
        if multirun and self.check([0], "keys", lambda: self.split(words)):
            return
        needs: defaultdict[Path, float] = defaultdict(float)
        seconds = {}
        with progress("examining", len(self.jobs) if len(self.jobs) > 1 else None) as advance:
            for number, overrides in enumerate(self.jobs):
                root, findings = self.examine_job(number, overrides, sweep=multirun)
                amounts = {finding.check: finding.amount for finding in findings}
                seconds[number] = amounts.get("time", 0.0)
                if "files" in amounts:
                    needs[root] += amounts["files"]
                advance(1)
        for root, need in needs.items():
            self.check(seconds, "disk", partial(examination.folder, root, need, self.free))
        if (total := sum(seconds.values())) and len(seconds) > 1:
            text = f"{format_duration(total)} for the jobs that were tried, one after another"
            self.findings[Finding("time", text, amount=total)] = [*seconds]

    def split(self, words: Sequence[str]) -> Findings:
        """Split a sweep's command line into its jobs. Checks that its overrides of Hydra compose, too."""
        check_hydra_overrides(words, sweep=True)
        of_hydra = [word for word in words if is_of_hydra(word)]
        of_jobs = [word for word in words if word not in of_hydra]
        with composition.composing() as loader:
            self.jobs = jobs_of(of_jobs, loader, searches="hydra/sweeper=optuna" in words)
        composition.composed(of_hydra)
        return []

    def examine_job(self, number: int, overrides: Sequence[str], *, sweep: bool) -> tuple[Path, list[Finding]]:
        """The folder for the runs of a job, and its findings; one that fails ends those that need it."""
        composed: list[tuple[ResolvedJob, Resume, bool]] = []

        def keys() -> Findings:
            composed.append(_composed(overrides, sweep=sweep))
            yield Finding("keys", "the config is complete, and its parts fit together")
            if composed[0][-1]:
                yield Finding("devices", ON_OTHER_MACHINES, Level.warning)

        findings = self.check([number], "keys", keys)
        if not composed:
            return Path(), findings
        job, resume, elsewhere = composed[0]
        root = Path(job.output_root)
        if not elsewhere:
            place = f"{job.device} {job.launcher}"
            findings += self.check([number], "devices", lambda: examination.devices(job), place)
            findings += self.check([number], "port", lambda: [Finding("port", job.launcher.try_address())])
        data = self.check([number], "data", lambda: inspect(job.dataset, self.look_s), str(job.dataset))
        if any(finding.check == "data" for finding in data):
            return root, findings
        job = fitted_to_images(job, resume)
        plan = self.check([number], "plan", lambda: examination.batches(job, resume))
        if not elsewhere and not any(finding.level is Level.error for finding in (*data, *plan)):
            # What the time, the memory and the price of the steps depend on.
            timed = values_with(components.plain(job), Role.identity, Role.pixels, Role.rounding, Role.limit)
            key = f"{timed} {job.epochs} {job.steps}"
            findings += self.check([number], "step", lambda: examination.step(job), key)
        return root, findings + plan

    def check(self, jobs: Iterable[int], name: str, action: Callable[[], Findings], key: str = "") -> list[Finding]:
        """Note the findings of a check, or why it fails, for some jobs. One with a `key` is made once."""
        findings = self.results.get(key, [])
        if not findings:
            try:
                for finding in action():
                    findings.append(finding)
            except Exception as error:  # a model or a data set of the user's may raise anything
                known = as_known(translate(error) or error)
                findings += [Finding(name, sentence, Level.error) for sentence in str(known).splitlines()]
        if key:
            self.results[key] = findings
        for finding in findings:
            self.findings.setdefault(finding, []).extend(jobs)
        return findings

    def named(self, jobs: list[int]) -> str:
        """Which jobs of several a finding is about; empty for all."""
        if len(jobs) == len(self.jobs):
            return ""
        if len(jobs) > 1:
            return f" (jobs {', '.join(map(str, jobs))})"
        own = [word for word in self.jobs[jobs[0]] if not all(word in job for job in self.jobs)]
        return f" (job {jobs[0]}: {shell_command(own)})"


def _composed(overrides: Sequence[str], *, sweep: bool) -> tuple[ResolvedJob, Resume, bool]:
    """The job of a command, checked without its data, and what it resumes.

    The last value is whether another system runs it on other machines; it is then taken for one rank here.
    """
    with composition.invoked(list(overrides)) as (values, invocation):
        resume = decide_resume(values, replace(invocation, sweep=sweep))
        elsewhere = resume.job.launcher.submits
        if elsewhere:
            launcher = replace(components.build_option("launcher", "auto"), ranks=1)
            here = {"launcher": launcher, "strategy": components.build_option("strategy", "auto")}
            nodes = {group: components.node(option) for group, option in here.items()}
            resume = replace(resume, values={**resume.values, **nodes})
        return checked_job(resume), resume, elsewhere
