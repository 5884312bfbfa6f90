"""From what a command resumes to a run folder: the values of its config become a `Job`, and the `Job` a
`ResolvedJob`, which is checked whole. Until then nothing is written but data and published weights that are missing.
The folder is locked, created once the job is checked, and undone if a rank refuses the job.
"""

import multiprocessing
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from lockstep.checkpoint import files
from lockstep.checkpoint.reading import check_fingerprint
from lockstep.config import components, composition, extensions
from lockstep.config.commands import OF_RUN, RUN_FOLDERS, key_of, override
from lockstep.core import log
from lockstep.core.data_protocols import Source
from lockstep.core.errors import InputError, StorageError
from lockstep.core.observer import Callback
from lockstep.core.plan import Plan
from lockstep.core.run import Run
from lockstep.core.run_dir import PathBelow, RunDir, check_folder, relative
from lockstep.core.safe_read import UnreadableFile, read_if_exists
from lockstep.core.safe_write import Lock, check_names, remove_empty, write_atomic
from lockstep.job import auto_training
from lockstep.job.resolve import resolve
from lockstep.job.resume import Resume, decide_resume
from lockstep.job.validate import check_job
from lockstep.job.validate_with_data import check_plan
from lockstep.runtime import forking
from lockstep.training.resolved_job import Decisions, ResolvedJob, averaging_of, decisions, fingerprint, train_longer


def create_run(resume: Resume, lock: Lock) -> tuple[AbstractContextManager[RunDir], ResolvedJob]:
    """The context of a job's run folder, and the job; takes `lock`. Raises InputError; nothing is written then."""
    if resume.folder is not None:
        lock_run_folder(resume.folder, lock)
    job = prepare(resume)
    if job.launcher.can_fork():
        forking.import_for_ranks(job)
    run_dir, new = RunDir.provide(resume.folder, Path(job.output_root), job.name)
    lock.take(run_dir.lock)
    texts = {
        run_dir.config: components.dump(components.plain(job)),
        run_dir.command: replace(resume.invocation, overrides=resume.typed).command + "\n",
        run_dir.hydra / "hydra.yaml": resume.hydra,
        run_dir.overrides: components.dump(resume.overrides),
        run_dir.composed: components.dump(resume.composed),
    }
    return job_folder(run_dir, texts, new), job


def prepare(resume: Resume) -> ResolvedJob:
    """The job of a command, resolved, and checked with its data. Raises InputError if the job does not fit."""
    forking.keep_one_thread()
    # A job of the pool has its own process; Hydra's basic launcher runs the jobs of a sweep in one.
    sweep = resume.invocation.sweep and multiprocessing.parent_process() is None
    job = checked_job(resume, sweep=sweep)
    job.launcher.try_address()
    fetch_data(resume, job.dataset)
    job = fitted_to_images(job, resume)
    plan = check_plan(job)
    if resume.checkpoint is None:
        job.model.prepare()
    check_resumable(resume, job, plan)
    return job


def job_of(overrides: Sequence[str]) -> ResolvedJob:
    """The job of the words of a command that makes no run folder, resolved and checked; its data is there."""
    words = composition.without_keys(overrides, RUN_FOLDERS, "no run folder is made")
    with composition.invoked(words) as (values, invocation):
        job = checked_job(resume := decide_resume(values, invocation))
        fetch_data(resume, job.dataset)
        return fitted_to_images(job, resume)


def job_here(overrides: Sequence[str], who: str, unused: Collection[str] = ()) -> ResolvedJob:
    """The job of a command, which `who` describes, on one device in this process, without what only a run uses."""
    words = composition.without_keys(overrides, {"strategy", "strategy.", *OF_RUN, *unused}, who)
    return job_of([*words, "launcher=inline", "launcher.ranks=1"])


def checked_job(resume: Resume, *, sweep: bool = False) -> ResolvedJob:
    """The job of a command, resolved, and checked without data; `sweep`: other jobs run in this process."""
    resume.check_personal(resume.job)
    if extensions.arguments_of(parts := vars(resume.job)):
        from lockstep.training.objects import check_given  # few jobs have objects of a program

        check_given(parts)
    resolved = resolve(resume.job, sweep=sweep, resumed=resume.checkpoint)
    if resume.job.repro == "exact" and "repro=exact" in resume.overrides and resolved.strategy.fixed_order:
        raise InputError("strategy=strict belongs to repro=strict, but repro=exact is given; remove one of them")
    check_job(resolved)
    return resolved


def fitted_to_images(job: ResolvedJob, resume: Resume) -> ResolvedJob:
    """The job with what its number of images decides; a batch that nobody has typed is at most the split."""
    images = len(job.dataset.train())
    fitted = auto_training.fitted(job, resume.job, images)
    has_typed = any(key_of(word) == "batch" and "auto" not in word for word in resume.overrides)
    if not has_typed and 0 < images < job.batch:
        log.note(f"batch is {images}, all images of the training split; it would be {job.batch} with more images")
        lr = resume.job.optimizer.at_batch(images, trained=job.starts_trained).lr
        fitted = replace(fitted, batch=images, optimizer=replace(job.optimizer, lr=lr))
    if fitted != job:
        check_job(fitted)
    for note in auto_training.notes(resume.job, fitted, images):
        log.note(note)
    return fitted


def fetch_data(resume: Resume, dataset: Source) -> None:
    """Download what is missing of the data, if the command may. Raises InputError if it cannot be had or read."""
    if resume.may_fetch:
        dataset.prepare()
        return
    try:
        dataset.train()
        dataset.eval()
    except InputError as error:
        only = "nothing is downloaded to a folder that only the run or a config file names"
        raise InputError(f"{error}; {only}: name it with data_root=FOLDER") from error


def check_resumable(resume: Resume, job: ResolvedJob, plan: Plan) -> None:
    """Raise InputError if the checkpoint to resume is of another run, or no steps are left to do."""
    if (resumed := resume.checkpoint) is None:
        return
    try:  # after its last step, a run that was stopped has its last evaluation left; a checkpoint alone has not
        ended = resume.folder is None or RunDir(resume.folder).read_summary().get("status") == "completed"
    except UnreadableFile as error:
        log.show_warning(f"{error}; it will be replaced")
        ended = False
    facts = check_fingerprint(fingerprint(job, plan.examples), resumed)
    step, total, state = facts["progress"]["step"], plan.total_steps, ""
    if step > total:
        state = f"stands at step {step}, and this job would end at step {total}"
    elif step == total and ended:
        state = f"has finished step {step} of {total}, so nothing is left to do"
    if state:
        raise InputError(f"resume: {resumed} {state}; train longer with {train_longer(job, plan, step)}")
    check_code(job, resumed, resume.callbacks)
    saved: Decisions = facts["progress"].get("decisions", {})  # an earlier version has none
    if job.train.swa_from is not None:
        mean = averaging_of(saved) if saved else int(files.read_state(resumed)["ema_updates"])
        averaging_of(decisions(job, plan)).check_resumed(mean, step, job.train.swa_from)
    if saved:
        note_changes(job, plan, saved, step)


def check_code(job: ResolvedJob, resumed: Path, callbacks: Sequence[Callback]) -> None:
    """Say which of the user's code has changed since the checkpoint's run last began. Raises InputError if strict."""
    folder = resumed.parents[1]
    if not (recorded := Run(folder).code):
        return
    from lockstep.runtime import user_code  # few jobs have code of the user
    from lockstep.training.objects import code_parts

    code = user_code.code_of(components.plain(job), code_parts(job, callbacks))
    changed = user_code.changes(recorded, code)
    words = ", ".join(f"{package} ({files})" for package, files in changed.items())
    sentence = f"resume: code has changed since the run last began: {words}"
    if words and job.repro == "strict":
        raise InputError(
            f"{sentence}, and repro=strict continues with the same code; restore it (env.json has its commit, and "
            f"code.diff what that lacks), or take only the weights with {override('init_from', relative(folder))}"
        )
    if words:
        log.note(sentence)


def note_changes(job: ResolvedJob, plan: Plan, saved: Decisions, step: int) -> None:
    """Say what the steps up to `step`, whose plan decided `saved`, would not have with this plan from the start."""
    here = decisions(job, plan)
    changes = [
        f"{key} {here.get(key, 'null')} (not {saved.get(key, 'null')})"
        for key in {**here, **saved}
        if key != "steps" and any(begin < step for begin in {*here.get(key, ())} ^ {*saved.get(key, ())})
    ]
    earlier, sampled = replace(plan, total_steps=saved["steps"][0]), range(1, step + 1, 1 + step // 1000)
    with suppress(InputError):  # the parts of a `chain` may not fit into the earlier plan
        if any(job.schedule.factor(at, plan, ()) != job.schedule.factor(at, earlier, ()) for at in sampled):
            changes.append("another learning rate")
    if changes:
        log.note(
            f"resume: a run of {plan.total_steps:,} steps would have had until step {step:,}, in steps: "
            f"{', '.join(changes)}; the steps so far stay as they were trained, and an average follows the new plan"
        )


def lock_run_folder(folder: Path, lock: Lock) -> None:
    """Lock the folder of a job. Raises InputError if the job cannot run in it, or another job does."""
    run_dir = RunDir(folder)
    lock.take(run_dir.lock)
    check_folder(folder)
    if not run_dir.overrides.is_file() and not run_dir.only_prepared:
        raise InputError(
            f"hydra.run.dir: {folder} has files in it that are not of a run; name a new folder with "
            "hydra.run.dir=FOLDER"
        )
    _check_kinds(run_dir)


def _check_kinds(run_dir: RunDir) -> None:
    """Refuse links, pipes and devices in a run folder, which somebody else may have written, and misplaced files."""
    checkpoints = run_dir.checkpoints.glob("step-*")
    folders = {run_dir.hydra, run_dir.logs, run_dir.checkpoints, run_dir.incident, *checkpoints}
    known = {run_dir.path / path.name for path in vars(RunDir).values() if isinstance(path, PathBelow)}
    globs = ("logs/rank*.*", "events.out.tfevents.*", ".hydra/*.yaml")
    files = (known - folders).union(*map(run_dir.path.glob, globs))
    check_names(run_dir.path, "**/*")
    for path in sorted(run_dir.path.rglob("*")):
        present, expected = ("a folder", "a file") if path.is_dir() else ("a file", "a folder")
        if path in (files if path.is_dir() else folders):
            raise InputError(f"{path} is {present}, expected {expected}; move it")


@contextmanager
def job_folder(run_dir: RunDir, texts: Mapping[Path, str], new: Sequence[Path] = ()) -> Iterator[RunDir]:
    """The folder of a job with the files `texts`, which describe the job. The summary says how the job ended.

    All is as before, without the folders `new` (deepest first), after StorageError, or a refusal before training.
    """
    others = (run_dir.summary, run_dir.environment, run_dir.code_diff, *run_dir.rank_errors())
    before: dict[Path, bytes | int | None] = {path: path.stat().st_size for path in run_dir.log_files()}
    before |= {path: read_if_exists(path) for path in (*texts, *others)}
    try:
        # A resume compares the overrides with this file. Remove it first, so that a kill between the writes does
        # not leave it next to the overrides of another command.
        run_dir.composed.unlink(missing_ok=True)
        for path, text in texts.items():
            write_atomic(path, text)
    except StorageError:
        _undo(run_dir, before, new)
        raise
    try:
        yield run_dir
    except BaseException as error:
        has_started = run_dir.began
        with suppress(UnreadableFile):
            has_started &= read_if_exists(run_dir.summary) != before[run_dir.summary]
        if has_started or not isinstance(error, InputError):
            run_dir.write_ending(error)
        else:
            with suppress(OSError, StorageError, UnreadableFile):
                _undo(run_dir, before, new)
        raise


def _undo(run_dir: RunDir, before: Mapping[Path, bytes | int | None], new: Sequence[Path]) -> None:
    """Remove what a job has created; restore files, and sizes of logs, as they were `before`. Raises StorageError."""
    for path, content in {**dict.fromkeys(run_dir.log_files()), **before}.items():
        if content is None:
            path.unlink(missing_ok=True)
        elif isinstance(content, int):
            os.truncate(path, content)
        elif content != read_if_exists(path):  # launchers remove error files
            write_atomic(path, content)
    if run_dir.path in new:  # this process holds the lock
        run_dir.lock.unlink(missing_ok=True)
    remove_empty(new)
