"""What the pool asks about a job of a sweep before it starts any."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config import components, composition, extensions
from lockstep.config.roles import identity_of, values_with
from lockstep.core.errors import InputError
from lockstep.core.fields import Role, leaves
from lockstep.core.tags import LOSS, monitor_of
from lockstep.job.resume import refuse_in_sweep
from lockstep.records.ledger import Ledger
from lockstep.records.runs import is_below
from lockstep.runtime.forking import can_fork, import_for_ranks
from lockstep.sweeps.devices import Needs
from lockstep.training.resolved_job import chosen_options


def kind(values: Mapping[str, Any]) -> str:
    """The values that decide how much memory a job takes."""
    deciding = values_with(values, Role.identity, Role.pixels, Role.rounding)
    return json.dumps(deciding, sort_keys=True, default=str)


def needs_of(composed: Any, machine: Needs, objects: Mapping[str, Any] | None = None) -> Needs:
    """The devices of a job on a `machine` that has these, and what it is.

    On the CPU a job has the cores that it would have alone: another number of threads would change its last bits.
    With fewer threads (`launcher.threads=1`), more jobs run at once. `objects` are those of a program, by group.
    """
    values = composition.to_dict(composed)
    job = components.build_job(values, objects)
    refuse_in_sweep(job.resume)
    launcher = job.launcher
    elsewhere = launcher.submits or not can_fork()
    of_program = not all(extensions.is_importable(type(option)) for option in chosen_options(job))
    if of_program and (elsewhere or composed.hydra.runtime.choices["hydra/launcher"] != "pool"):
        raise InputError(
            "only jobs that are forked on this machine have objects and classes of a program; put the classes into a "
            "package, as options (@lockstep.option), and choose them by their names"
        )
    built, ledger = components.plain(job), Ledger(Path(composed.hydra.sweep.dir))
    swept = ledger.identity().swept if ledger.exists else ()  # jobs that differ in any of these are not one job
    deciding = identity_of(built) | {key: value for key, value in leaves(built) if is_below(key, swept)}
    identity = frozenset(
        (key, str(value) if isinstance(value, list | dict) else value) for key, value in deciding.items()
    )
    metrics = components.metrics_of(job.task, job.metric)
    monitor, figures = monitor_of(job.monitor, job.task.monitor, metrics), [LOSS, *job.task.counted, *metrics]
    needs = Needs(identity=identity, monitor=str(monitor), figures=figures)
    if launcher.submits:
        return replace(needs, cores=0, submits=True)
    import_for_ranks(job)
    gpus = 0 if job.device == "cpu" else machine.gpus
    # A strategy that takes what is there gets one device: several jobs train more than one on several devices.
    ranks = 1 if job.strategy.adapts else job.strategy.ranks(gpus)
    ranks = ranks if launcher.ranks == "auto" else int(launcher.ranks)
    if gpus:
        shared = kind(values) if job.sweep.gpu_share else ""
        return replace(needs, gpus=job.strategy.devices(ranks, gpus), kind=shared)
    cores = machine.cores if launcher.threads == "auto" else ranks * int(launcher.threads)
    return replace(needs, cores=cores)
