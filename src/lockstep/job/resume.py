"""Decides what a command resumes, with which config, or says why it cannot."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.config import components, composition, extensions, history
from lockstep.config.commands import key_of, latest_starts, override, parsed, refusal, shell_command, with_starts
from lockstep.config.composition import ConfigFiles, Invocation
from lockstep.config.roles import role_of
from lockstep.config.schema import Job, SweepBlock
from lockstep.core import log
from lockstep.core.errors import InputError, first_of, shown
from lockstep.core.fields import FOLDER, SHELL, Role, is_inside, leaves, personal_values, problems
from lockstep.core.formats import NewerFormat
from lockstep.core.observer import Callback
from lockstep.core.run import Run, read_overrides
from lockstep.core.run_dir import MANIFEST, SWEEP, RunDir, pointed
from lockstep.core.safe_read import read_if_exists

MOST_KEYS = 4


@dataclass(frozen=True, kw_only=True)
class Resume:
    """What a command continues, and the config of its job."""

    invocation: Invocation  # the command
    composed: Mapping[str, Any]  # the config of the command, or of the run that it continues with its overrides
    # The same with the batch that the job has, if an override says `batch=auto`, and with the checkpoint that
    # `resume=` names, as an absolute path, or null.
    values: Mapping[str, Any]
    overrides: tuple[str, ...]  # which give `composed`
    run: Path | None  # the folder that `resume=` names; None if it names a checkpoint or nothing
    # The folder of the job: of this run, or the one that the command names, or that it had before a restart of ranks;
    # None for a new one.
    folder: Path | None
    # Whether missing data may be downloaded. Not to a folder that only the run folder names: somebody else may have
    # written that.
    may_fetch: bool
    typed: tuple[str, ...] = ()  # the overrides of the command, with the runs that `latest` names
    hydra: str = ""  # Hydra's own config of `composed`, as YAML, with the options of the job
    # The values that the command has without the files of strangers, by key; None if there are no such files.
    own: Mapping[str, Any] | None = None
    objects: Mapping[str, Any] = field(default_factory=dict)  # of a program, by group, for which options stand
    callbacks: Sequence[Callback] = ()  # of a program

    def check_personal(self, component: Any, prefix: str = "") -> None:
        """Raise InputError if a file of strangers says where a run writes or sends, or any file what a shell runs."""
        refused = []
        for key, role, value, default in personal_values(component, prefix):
            typed = [parsed(word) for word in self.invocation.own_words if key_of(word) == key]
            if role == SHELL:  # a function in the override may add to the lines of a file
                is_own = value in [[*map(str, lines)] if isinstance(lines, list) else lines for lines in typed]
            else:
                is_own = bool(typed) or self.own is None or self.own.get(key) == value
            places = [str(self.run), self.values["output_root"]] if self.run else []
            if not (is_own or value == default or (role == FOLDER and is_inside(value, *places))):
                refused.append((key, role, value, default))
        if refused:
            raise InputError(refusal(*refused))

    @property
    def has_several_machines(self) -> bool:
        """Whether torch's agents start the ranks, on each of several machines. Builds no job, which imports torch."""
        node = self.values["launcher"]
        return isinstance(node, Mapping) and str(node.get("nodes", 1)) not in ("1", "1:1")

    @cached_property
    def job(self) -> Job:
        """The job of `values`; a resumed run keeps what it did before newer keys. Raises InputError."""
        job = components.build_job(self.values, self.objects)
        if self.checkpoint is not None:
            with suppress(InputError):  # a checkpoint that was copied on its own
                config = components.read_config(RunDir(self.checkpoint.parents[1]).config)
                job = history.as_before(job, config, {*map(key_of, self.overrides)})
        return job

    @cached_property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint of the folder, or the one of `resume=`. Raises InputError if all are damaged."""
        from lockstep.checkpoint.reading import newest_of_run  # needs torch, which nothing else here does

        newest = None
        if self.folder is not None:  # silent about damaged checkpoints: the ranks search again, when there is a log
            newest = newest_of_run(RunDir(self.folder), say=lambda sentence: None)
        named = self.values["resume"]
        return Path(named) if newest is None and named is not None else newest


def decide_resume(values: dict[str, Any], invocation: Invocation, earlier: str = "") -> Resume:
    """What the command with the composed config `values` continues, which torchrun may have restarted.

    `earlier`, from before the restart, is continued if no other folder is. Writes nothing. Raises InputError.
    """
    if not invocation.sweep and values["sweep"] != vars(SweepBlock()):
        raise InputError("sweep.* applies only to sweeps; add -m, or remove it")
    (run, start), named = _named(values, invocation), invocation.folder
    if run is not None and named is not None and named.resolve() != run:
        raise InputError(f"resume continues in {run}, but hydra.run.dir names {named}; remove one of them")
    if values["resume"] is not None and values["init_from"] is not None:
        raise InputError("resume has the weights of its checkpoint, and init_from names others; remove one of them")
    overrides, hydra = invocation.overrides, invocation.hydra
    own = {} if invocation.configs.are_foreign else dict(leaves(values)) if run is not None else None
    typed = {*map(key_of, invocation.own_words)}
    data_root = values["data_root"] if own or "data_root" in typed else Job.data_root
    if run is not None:
        of_run, overrides = _values_of_run(RunDir(run), invocation)
        hydra = composition.of_hydra()
        # Somebody else may have written the run folder, so only the present command may name another output folder.
        values = {**of_run, "output_root": values["output_root"]}
        # What it was started from is in its config as an absolute path, and may be gone when the run has checkpoints.
        start = components.read_config(RunDir(run).config).get("resume")
    folder = (named or (Path(earlier) if earlier else None)) if run is None else run
    starts = latest_starts(values, None if folder is None else Run(folder).composed)
    for key, path in starts.items():
        if folder is not None and Path(path).resolve() == folder.resolve():
            raise InputError(f"{key}=latest is {path}, the run itself; name another one with {key}=RUN")
        block, _, name = key.rpartition(".")
        values = {**values, **({block: {**values[block], name: path}} if block else {name: path})}
    overrides = tuple(with_starts(overrides, starts))
    # The folder to which missing data is downloaded; None for data that is not downloaded.
    root = values["dataset"].get("root") if isinstance(values["dataset"], Mapping) else None
    return Resume(
        invocation=invocation,
        composed=values,
        values={**_without_auto_batch(values, overrides, invocation.configs), "resume": start},
        overrides=overrides,
        typed=tuple(with_starts(invocation.overrides, starts)),
        run=run,
        folder=folder,
        may_fetch=own is None or "dataset.root" in typed or root in (None, data_root),
        hydra=hydra,
        own=own,
    )


def _without_auto_batch(
    values: Mapping[str, Any], overrides: Sequence[str], configs: ConfigFiles
) -> Mapping[str, Any]:
    """Replace `batch=auto` by the batch without this override: it must not depend on a machine's memory."""
    remaining = [word for word in overrides if key_of(word) != "batch" or "auto" not in word]
    if values["batch"] != "auto" or len(remaining) == len(overrides):  # a recipe cannot say it: `resolve` refuses it
        return values
    if values["train"]["micro_batches"] not in (1, "auto"):
        raise InputError(
            f"batch=auto chooses train.micro_batches, which is {values['train']['micro_batches']}; remove one of them"
        )
    batch = composition.recompose(remaining, (), configs)["batch"]
    return {**values, "batch": batch, "train": {**values["train"], "micro_batches": "auto"}}


def refuse_in_sweep(named: str | None) -> None:
    """Refuse a job of a sweep that names something to resume."""
    if named is not None:
        raise InputError("resume continues one run, so it cannot be combined with a sweep; remove -m")


def refuse_resume(words: Sequence[str], who: str) -> None:
    """Refuse a run to continue: without its overrides the other words would be another job."""
    if resumes := [word for word in words if key_of(word) == "resume"]:
        raise InputError(f"{resumes[0]}: {who}; remove it, and type the overrides of the run")


def _named(values: Mapping[str, Any], invocation: Invocation) -> tuple[Path | None, str | None]:
    """The run folder that `resume=` names, or else the checkpoint; None for what it does not name."""
    if values["resume"] is None:
        return None, None
    for problem in problems(Job, {key: values[key] for key in ("resume", "output_root")}):
        raise InputError(problem)
    if invocation.sweep:
        refuse_in_sweep(values["resume"])
    try:
        path = pointed(Path(values["resume"]).expanduser(), Path(values["output_root"]), f"resume={values['resume']}")
    except InputError as error:
        ends = str(error).endswith("?") or isinstance(error, NewerFormat)
        raise InputError(f"{error}{'' if ends else ' with resume=PATH'}") from error
    if (path / MANIFEST).is_file():
        return None, str(path.absolute())
    if RunDir(path).overrides.is_file():
        return path.resolve(), None
    remedy = "name one with resume=PATH, or the newest run with resume=latest"
    if (path / SWEEP).is_file():
        remedy = f"it is a sweep, which continues with -m {shell_command([override('sweep.resume', path)])}"
    elif path.is_file():
        remedy = f"a new run starts from a file's weights with {shell_command([override('init_from', path)])}"
    raise InputError(f"resume: {path} is neither a run folder nor a checkpoint; {remedy}")


def _values_of_run(run_dir: RunDir, invocation: Invocation) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The config of a run with the overrides of the present command, and all overrides."""
    stored, configs = history.present_words(read_overrides(run_dir.overrides)), invocation.configs
    added = tuple(text for text in invocation.overrides if key_of(text) != "resume")
    try:
        own = composition.recompose(stored, (), configs)
        fitting = composition.overrides_that_fit(stored, added, configs)
        values = composition.recompose(fitting, added, configs) if added else {**own}
    except InputError as error:
        raise InputError(f"{error}{_missing_extensions(run_dir)}") from error
    if dropped := [text for text in stored if text not in fitting]:
        words = " ".join(dropped)
        log.show_warning(f"resume: {words} of the run is dropped: the options of this command do not take it")
    if "name" not in map(key_of, added):
        values["name"] = components.read_config(run_dir.config).get("name", values["name"])
    _check_kept_config(run_dir, own, values, [key_of(text) for text in added])
    return values, (*composition.without_replaced(fitting, added), *added)


def _missing_extensions(run_dir: RunDir) -> str:
    """The end of a sentence that names the extensions of a run that are not installed here; empty if all are."""
    match Run(run_dir.path).environment:
        case {"extensions": dict(installed)}:
            active = {extension.package for extension in extensions.active()}
            if missing := [f"{package} ({origin})" for package, origin in installed.items() if package not in active]:
                names = ", ".join(missing)
                return f" The run had extensions that are not here: {names}; install them, or use its own program."
    return ""


def _check_kept_config(run_dir: RunDir, own: dict[str, Any], values: dict[str, Any], overridden: list[str]) -> None:
    """Check that the config `own`, of the run's overrides alone, is the one that the run's folder keeps.

    They differ if a line of the overrides was lost, or a recipe has changed. What the command changes in `values`, by
    the keys `overridden`, is not compared, and no key that makes the same run.
    """
    try:
        stored_values = dict(leaves(history.present_values(components.read_config(run_dir.composed))))
    except InputError as error:
        read_if_exists(run_dir.composed)  # raises if the file cannot be replaced
        log.warn(f"{error}; it will be replaced, and the overrides of the run cannot be compared with it")
        return
    own_values, current_values = dict(leaves(own)), dict(leaves(values))
    different = [
        key
        for key in stored_values  # without the keys that are newer than the run, which have their defaults
        if stored_values[key] != own_values.get(key)
        and current_values.get(key) == own_values.get(key)
        and (role_of(key, own).makes_another_run or role_of(key, own) is Role.rounding)
        and not any(f"{key}.".startswith(f"{override_key}.") for override_key in overridden)
    ]
    if different:
        changes = [f"{key} was {shown(stored_values[key])} and is {shown(own_values.get(key))}" for key in different]
        listed = ", ".join(first_of(changes, MOST_KEYS))
        settable = [key for key in different if key in own_values and not key.endswith("_target_")]
        words = shell_command(override(key, stored_values[key]) for key in settable)
        raise InputError(
            f"resume: {run_dir.overrides} no longer composes to its config ({listed}); restore the lines that it lost"
            f"{', or add what had another default then: ' * bool(words)}{words}"
        )
