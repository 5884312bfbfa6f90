"""The job of a resumed run: the overrides of its first command, then the overrides of the present command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.config import composition, extensions, messages, yaml_io
from lockstep.config.invocation import Invocation
from lockstep.core import log
from lockstep.core.errors import InputError
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile, read_json
from lockstep.job.preparation import content_to_keep
from lockstep.job.run_folder import continued

SHOWN = 4
# Keys that are not compared: the run keeps its name, and the present command sets the output folder.
NOT_KEPT = ("name", "output_root")


def resumed_job(run_dir: RunDir, today: Invocation) -> tuple[dict[str, Any], list[str]]:
    """The composed config of a run with the overrides of the present command (`today`), and all overrides.

    Raises:
        InputError: an override does not fit.
    """
    stored, added = yaml_io.load_list(run_dir.overrides), _added(today)
    try:
        job = composition.to_dict(composition.recompose(stored, added, today.configs))
    except InputError as error:
        raise InputError(f"{error}{_missing_extensions(run_dir)}") from error
    if "name" not in map(messages.key_of, added):
        job["name"] = yaml_io.load(run_dir.config).get("name", job["name"])
    return job, [*stored, *added]


def launcher_node(job: dict[str, Any], today: Invocation) -> Mapping[str, Any]:
    """The launcher's node in the config of a job, or of the run that the job resumes.

    Raises:
        InputError: the run does not exist, or has no launcher.
    """
    if (earlier := continued(job, today)) is not None:
        job, _ = resumed_job(RunDir(earlier), today)
    node = job["launcher"]
    if not isinstance(node, Mapping):
        raise InputError(f"launcher is {node!r}, expected one of the group's options: launcher=NAME")
    return node


def _missing_extensions(run_dir: RunDir) -> str:
    """The end of a sentence that names the extensions of a run that are not installed here; empty if all are."""
    try:
        facts = read_json(run_dir.environment)
    except UnreadableFile:
        return ""
    had = facts.get("extensions") if isinstance(facts, dict) else {}
    here = {extension.package for extension in extensions.active()}
    missing = (
        [f"{package} ({origin})" for package, origin in had.items() if package not in here]
        if isinstance(had, dict)
        else []
    )
    if not missing:
        return ""
    return f" The run had extensions that are not here: {', '.join(missing)}; install them, or use its own program."


def _added(today: Invocation) -> tuple[str, ...]:
    return tuple(override for override in today.overrides if messages.key_of(override) != "resume")


def check_kept_config(run_dir: RunDir, job: dict[str, Any], today: Invocation) -> None:
    """Check that the overrides of a run still give the config that its folder keeps.

    `job` comes from `resumed_job` for the same command. Keys that the present command overrides are not compared.

    Raises:
        InputError: the configs differ, because a line of the overrides was lost or a recipe has changed; or the file
            of the kept config cannot be replaced.
    """
    composed = run_dir.composed
    try:
        before = dict(_leaves(yaml_io.load(composed)))
    except InputError as error:
        content_to_keep(composed)  # raises if the file cannot be replaced
        log.warn(f"{error}; it is written anew, and the overrides of the run cannot be compared with it")
        return
    added = _added(today)
    stored = yaml_io.load_list(run_dir.overrides)
    here = dict(_leaves(composition.to_dict(composition.recompose(stored, (), today.configs)) if added else job))
    now, told = dict(_leaves(job)), [messages.key_of(override) for override in added]
    different = [
        key
        for key in before | here
        if (key not in here or key not in before or before[key] != here[key])
        and now.get(key) == here.get(key)
        and key not in NOT_KEPT
        and not any(f"{key}.".startswith(f"{override_key}.") for override_key in told)
    ]
    if different:
        shown = ", ".join(f"{key} was {before.get(key)!r} and is {here.get(key)!r}" for key in different[:SHOWN])
        rest = f", and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        raise InputError(
            f"resume: {run_dir.overrides} no longer gives the config of its run ({shown}{rest}); put back the lines "
            "that it lost, or say on the command line what these are to be"
        )


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a config with their full keys."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
