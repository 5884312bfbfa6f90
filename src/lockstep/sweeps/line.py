"""From a sweep's command line to its folder: a new one, or the folder of the same sweep, which then resumes."""

import json
import re
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lockstep.config import commands, components, extensions
from lockstep.config.commands import STARTS, key_of, shell_command
from lockstep.config.composition import check_hydra_overrides
from lockstep.config.hydra_policy import as_typed
from lockstep.config.roles import role_of
from lockstep.config.schema import SweepBlock
from lockstep.core import log
from lockstep.core.errors import InputError, StorageError
from lockstep.core.fields import Role, problems
from lockstep.core.run import Code, Run, State
from lockstep.core.run_dir import LATEST, SWEEP, pointed, relative
from lockstep.core.safe_write import Lock, remove_empty
from lockstep.core.tags import Monitor, monitor_of
from lockstep.records.ledger import JOBS, SWEEPS, Identity, Ledger, resumed_sweep
from lockstep.records.record import OBJECTIVES, SCORE, checked_direction

FILES = ("multirun.yaml", SWEEP, "optuna.log")  # of a sweep before its first job: Hydra's, the ledger's, Optuna's
POOLS = ("pool", "ray")  # the launchers with a ledger
GRIDS = ("basic", "grid")  # the sweepers that run all combinations


def choose_folder(config: DictConfig) -> Ledger:
    """Set the folder and the jobs' overrides of a sweep in Hydra's config. Raises InputError if they do not fit."""
    of_hydra = as_typed(config.hydra.overrides.hydra)
    check_hydra_overrides(of_hydra, sweep=True)
    block = config.sweep
    values: Any = OmegaConf.to_container(block)
    for problem in problems(SweepBlock, values, "sweep."):
        raise InputError(problem)
    block.objectives = _objectives(config)
    launcher = config.hydra.runtime.choices["hydra/launcher"]
    of_pools = {"retry": str(block.retry).lower(), "halving": block.halving, "objectives": [*block.objectives]}
    of_pool = {"gpu_share": str(block.gpu_share).lower()} if launcher != "pool" else {}
    for key, value in {**(of_pools if launcher not in POOLS else {}), **of_pool}.items():
        if value not in (None, "false", [SCORE]):
            raise InputError(f"sweep.{key} is {value}, which hydra/launcher=pool does; use hydra/launcher=pool")
    _check_meaning(config, launcher)
    if "jsonl" not in config.logger:
        _check_needs_no_figures(config)
    typed = as_typed(config.hydra.overrides.task)
    words = [word for word in typed if not key_of(word).startswith("sweep.")]
    monitor = _monitor(config)
    identity = Identity(
        base=_base(config),
        swept=_swept([*params_of(config), *typed], of_hydra),
        words=tuple(words),
        of_hydra=tuple(word for word in of_hydra if re.match(r"\+*hydra[./]sweeper\b", word)),
        figure=monitor.name,
        direction=monitor.direction,
    )
    return _choose(config, identity, words)


def remove_refused(ledger: Ledger, new: list[Path]) -> None:
    """Remove what this process has created, of `new`, for a sweep that was refused before its first job."""
    folder = ledger.folder
    if not ledger.is_new or any((folder / JOBS).glob("*.json")):
        return
    with suppress(InputError, StorageError), closing(Lock()) as lock:
        lock.take(folder / ".lock")  # an InputError if another command already runs this sweep
        for path in {folder / name for name in FILES}.intersection(new):
            path.unlink(missing_ok=True)
    remove_empty(new)


def params_of(config: DictConfig) -> list[str]:
    """The words of `hydra.sweeper.params`. A job gives a `${KEY}` its value, escaped (for Hydra's sweeper) or not."""
    node: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=False)
    return [f"{key}={value}".replace(r"\${", "${") for key, value in (node.get("params") or {}).items()]


def _check_meaning(config: DictConfig, launcher: str) -> None:
    """Refuse settings that say nothing about jobs of ours, and settings that contradict each other."""
    share = "launcher.ranks and launcher.threads say what a job takes"
    useless = {"hydra.launcher.gpus": share, "hydra.launcher.cores": share}
    useless["hydra.sweep.subdir"] = f"hydra/launcher={launcher} names the folders of the jobs"
    direction = _monitor(config).direction
    # A file of an extension sets them without a word; 1 and `maximize` are the defaults.
    values = {"hydra.launcher.gpus": 1, "hydra.launcher.cores": 1, "hydra.sweeper.direction": "maximize"}
    composed = {key: OmegaConf.select(config, key) for key in values} if launcher in POOLS else {}
    of_files = [f"{key}={value}" for key, value in composed.items() if value not in (None, values[key])]
    for word in [*config.hydra.overrides.hydra, *of_files]:
        key, value = key_of(word), word.partition("=")[2]
        if launcher in POOLS and (reason := useless.get(key)):
            raise InputError(f"{word} has no effect: {reason}; remove it")
        if key.endswith(".direction") and checked_direction(value) is not direction:
            raise InputError(
                f"{word}, but the jobs are compared by monitor={config.monitor}, whose direction is {direction}; "
                "remove it, or choose another score with monitor=NAME"
            )
    block, batches = config.sweep, config.hydra.sweeper.get("max_batch_size")
    contradictions = {
        "sweep.retry=true runs jobs again that failed, and sweep.resume=new": block.retry and block.resume == "new",
        "sweep.gpu_share=true shares GPUs, and device=cpu": block.gpu_share and config.device == "cpu",
        "sweep.halving compares all jobs, and hydra.sweeper.max_batch_size": block.halving and batches,
    }
    for sentence, applies in contradictions.items():
        if applies:
            raise InputError(f"{sentence} prevents that; remove one of them")


def _objectives(config: DictConfig) -> list[str]:
    """The objectives of the line, figures as monitors are written. Raises InputError for none, or one twice."""
    names, score = [str(name) for name in config.sweep.objectives], str(_monitor(config))
    written = [name if name in OBJECTIVES else str(_monitor(config, name)) for name in names]
    written = [SCORE if text == score else text for text in written]
    if not names or len({*written}) < len(names):
        raise InputError(
            f"sweep.objectives is [{','.join(names)}], expected some of {', '.join(OBJECTIVES)} and figures of an "
            f"evaluation (loss, top1), each once; the score is {score}: sweep.objectives=[{SCORE}]"
        )
    return written


def _monitor(config: DictConfig, text: str = "") -> Monitor:
    """The figure by which the jobs of a sweep are compared, as `text`, or else the config, gives it."""
    metrics: Any = OmegaConf.to_container(config.metric, resolve=True) if config.metric else {}
    task = extensions.class_of("task", config.task["_target_"])
    chosen = components.build_many("metric", metrics)
    return monitor_of(text or str(config.monitor), task.monitor, components.metrics_of(task, chosen))


def _check_needs_no_figures(config: DictConfig) -> None:
    """Refuse what judges jobs by their `metrics.jsonl`, which only `logger=jsonl` writes."""
    pruner = config.hydra.sweeper.get("pruner", "none")
    judges = {
        f"sweep.halving={config.sweep.halving}": config.sweep.halving is not None,
        f"hydra.sweeper.pruner={pruner}": pruner != "none",
        "sweep.objectives=seconds": "seconds" in config.sweep.objectives,
    }
    for word, judges_jobs in judges.items():
        if judges_jobs:
            raise InputError(
                f"{word} needs metrics.jsonl of each job, and logger=[{','.join(config.logger)}] writes none; use "
                f"logger=[{','.join(['jsonl', *config.logger])}]"
            )


def _choose(config: DictConfig, identity: Identity, words: list[str]) -> Ledger:
    """Find or make the folder, and set it in Hydra's config."""
    block = config.sweep
    named = any(key_of(word) == "hydra.sweep.dir" for word in config.hydra.overrides.hydra)
    if block.resume in ("auto", "new"):
        ledger = Ledger(Path(config.hydra.sweep.dir).absolute())
        if block.resume == "auto" and not named:
            ledger = sweep_of_line(Path(config.output_root), identity) or ledger
    else:
        ledger = resumed_sweep(Path(config.output_root), str(block.resume))
        if named:
            raise InputError("sweep.resume names a sweep, and hydra.sweep.dir a folder; remove one of them")
    if ledger.exists:
        stored = ledger.identity()
        if block.resume == "new":
            raise InputError(
                f"sweep.resume=new, but {ledger.folder} has a sweep; name another folder with hydra.sweep.dir=FOLDER"
            )
        if difference := stored.difference(identity):
            command = shell_command([*stored.of_hydra, *stored.words])
            raise InputError(
                f"{ledger.folder} has another sweep: {difference}; type its line ({command}), or start anew with "
                "sweep.resume=new"
            )
        _say_what_goes_on(ledger)
    else:
        ledger.create(identity)
    words = _with_starts(config, words, ledger)
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.sweep.dir = str(ledger.folder)
        config.hydra.overrides.task = words
    return ledger


def _with_starts(config: DictConfig, words: list[str], ledger: Ledger) -> list[str]:
    """The words with the run that `latest` named when the sweep began, of all jobs the same."""
    pattern = re.compile(rf"(?<![\w./-]){LATEST}(?![\w./-])")
    starts = [word for word in words if key_of(word) in STARTS]
    keys = {key for key in STARTS if OmegaConf.select(config, key) == LATEST} - {*map(key_of, starts)}  # of a recipe
    if keys or any(map(pattern.search, starts)):
        if not (identity := ledger.identity()).latest:
            path = pointed(Path(LATEST), Path(config.output_root).expanduser(), f"{min(keys or STARTS)}={LATEST}")
            ledger.create(identity := replace(identity, latest=str(path)))
        run = commands.override("", identity.latest)[1:]
        words = [pattern.sub(lambda _: run, word) if word in starts else word for word in words]
    return [*words, *(f"{key}={run}" for key in sorted(keys))]


def _base(config: DictConfig) -> dict[str, Any]:
    """What all jobs of a sweep share: its config as composed, without interpolations resolved."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, Mapping)
    values = {str(key): value for key, value in plain.items() if key != "hydra"}
    if (sweeper := config.hydra.runtime.choices["hydra/sweeper"]) not in GRIDS:
        values["hydra/sweeper"] = sweeper
    return dict(json.loads(json.dumps(values, default=str)))


def _swept(words: list[str], of_hydra: list[str]) -> tuple[str, ...]:
    """The keys that a line sweeps. Raises InputError if a key that all jobs share has several values."""
    parsed = OverridesParser.create().parse_overrides(words)
    swept = {override.get_key_element(): override for override in parsed if override.is_sweep_override()}
    for key, override in swept.items():
        if _is_shared(key):
            raise InputError(f"{override.input_line}: all jobs of a sweep share {key}; give it one value")
    for word in (word for word in [*words, *of_hydra] if _is_shared(key_of(word))):
        if varied := sorted({*swept} & {*re.findall(r"\$\{\s*([\w./]+)", word)}):
            raise InputError(f"{word}: all jobs of a sweep share it, and {varied[0]} varies; give it one value")
    return tuple(sorted(swept))


def _is_shared(key: str) -> bool:
    """Whether all jobs of a sweep share a key: their folder is in one `output_root`."""
    return key == "output_root" or role_of(key) is Role.shared


def sweep_of_line(root: Path, identity: Identity) -> Ledger | None:
    """The newest sweep that this line began, or one with other values of the same keys; None if there is none."""
    for path in sorted((root / SWEEPS).glob("*/sweep.json"), reverse=True):
        ledger = Ledger(path.parent.absolute())
        try:
            if not ledger.identity().difference(identity):
                return ledger
        except InputError as error:
            log.show_warning(f"this sweep is not resumed: {str(error).rpartition(';')[0]}")
    return None


def _say_what_goes_on(ledger: Ledger) -> None:
    records = ledger.records()
    for record in records:
        if record.state is State.damaged:
            log.show_warning(record.error)
    done = sum(record.state is State.done for record in records)
    failed = sum(record.state is State.failed for record in records)
    retries = f", {failed} failed (sweep.retry=true tries them again)" if failed else ""
    if submitted := sum(record.runs_elsewhere for record in records):
        retries += f", {submitted} are with the cluster (sweep.retry=true submits them again)"
    log.show(
        f"resuming the sweep in {relative(ledger.folder)}: {done} of {len(records)} jobs are done{retries}; "
        "sweep.resume=new starts all again"
    )
    codes = {
        record.number: Run(ledger.folder / record.folder).code for record in records if record.state is State.done
    }
    if any(codes.values()):
        _say_other_code({number: code or {} for number, code in codes.items()})


def _say_other_code(codes: Mapping[int, Mapping[str, Code]]) -> None:
    """Name the jobs that are done with other code of the user than the present one; they had `codes`."""
    from lockstep.records.tables import job_numbers
    from lockstep.runtime import user_code  # imports torch, and few sweeps have code of the user

    here = user_code.code_here({package for code in codes.values() for package in code})
    changed = {number: user_code.changes(code, here) for number, code in codes.items()}
    if numbers := [number for number, packages in changed.items() if packages]:
        words = sorted({f"{name} ({files})" for packages in changed.values() for name, files in packages.items()})
        log.show_warning(
            f"trained with other code of {', '.join(words)}: job{'s' * (len(numbers) > 1)} {job_numbers(numbers)}; "
            "sweep.resume=new trains all again; to train one again, remove its folder"
        )
