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
from lockstep.job.preparation import content_to_restore
from lockstep.job.run_folder import continued

SHOWN = 4
# Keys that are not compared: the run keeps its name, and the present command sets the output folder.
NOT_KEPT = ("name", "output_root")


def resumed_job(run_dir: RunDir, invocation: Invocation) -> tuple[dict[str, Any], list[str]]:
    """The composed config of a run with the overrides of the present command (`invocation`), and all overrides.

    Raises:
        InputError: an override does not fit.
    """
    stored, added = yaml_io.load_list(run_dir.overrides), _added(invocation)
    try:
        job = composition.to_dict(composition.recompose(stored, added, invocation.configs))
    except InputError as error:
        raise InputError(f"{error}{_missing_extensions(run_dir)}") from error
    if "name" not in map(messages.key_of, added):
        job["name"] = yaml_io.load(run_dir.config).get("name", job["name"])
    return job, [*stored, *added]


def launcher_node(job: dict[str, Any], invocation: Invocation) -> Mapping[str, Any]:
    """The launcher's node in the config of a job, or of the run that the job resumes.

    Raises:
        InputError: the run does not exist, or has no launcher.
    """
    if (resumed_folder := continued(job, invocation)) is not None:
        job, _ = resumed_job(RunDir(resumed_folder), invocation)
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
    installed = facts.get("extensions") if isinstance(facts, dict) else {}
    active = {extension.package for extension in extensions.active()}
    missing = (
        [f"{package} ({origin})" for package, origin in installed.items() if package not in active]
        if isinstance(installed, dict)
        else []
    )
    if not missing:
        return ""
    return f" The run had extensions that are not here: {', '.join(missing)}; install them, or use its own program."


def _added(invocation: Invocation) -> tuple[str, ...]:
    return tuple(override for override in invocation.overrides if messages.key_of(override) != "resume")


def check_kept_config(run_dir: RunDir, job: dict[str, Any], invocation: Invocation) -> None:
    """Check that the overrides of a run still give the config that its folder keeps.

    `job` comes from `resumed_job` for the same command. Keys that the present command overrides are not compared.

    Raises:
        InputError: the configs differ, because a line of the overrides was lost or a recipe has changed; or the file
            of the kept config cannot be replaced.
    """
    composed = run_dir.composed
    try:
        stored_values = dict(_leaves(yaml_io.load(composed)))
    except InputError as error:
        content_to_restore(composed)  # raises if the file cannot be replaced
        log.warn(f"{error}; it will be replaced, and the overrides of the run cannot be compared with it")
        return
    added = _added(invocation)
    stored = yaml_io.load_list(run_dir.overrides)
    composed_values = dict(
        _leaves(composition.to_dict(composition.recompose(stored, (), invocation.configs)) if added else job)
    )
    current_values, overridden = dict(_leaves(job)), [messages.key_of(override) for override in added]
    different = [
        key
        for key in stored_values | composed_values
        if (key not in composed_values or key not in stored_values or stored_values[key] != composed_values[key])
        and current_values.get(key) == composed_values.get(key)
        and key not in NOT_KEPT
        and not any(f"{key}.".startswith(f"{override_key}.") for override_key in overridden)
    ]
    if different:
        shown = ", ".join(
            f"{key} was {stored_values.get(key)!r} and is {composed_values.get(key)!r}" for key in different[:SHOWN]
        )
        more = f", and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        raise InputError(
            f"resume: {run_dir.overrides} no longer gives the config of its run ({shown}{more}); restore the lines "
            "that it lost, or set these keys on the command line"
        )


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a config with their full keys."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
