"""What the pool asks about a job of ours before any job starts: whether its config is right, and what it needs."""

import json
from collections.abc import Mapping
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lockstep.config import components, composition
from lockstep.core.fields import leaves
from lockstep.job.create import import_for_ranks
from lockstep.job.resume import refuse_in_sweep
from lockstep.sweep.devices import Needs
from lockstep.sweep.line import NOT_OF_SWEEP
from lockstep.sweep.runs import ELSEWHERE

# What does not change how much memory a job takes.
NOT_OF_MEMORY = ("seed", "steps", "epochs", "name", "schedule", "optimizer.lr", "optimizer.weight_decay")


def kind(values: Mapping[str, Any]) -> str:
    """The values that decide how much memory a job takes."""
    deciding = {key: value for key, value in leaves(values) if not key.startswith((*NOT_OF_MEMORY, *ELSEWHERE))}
    return json.dumps(deciding, sort_keys=True, default=str)


def plan(config: DictConfig, machine: Needs) -> Needs:
    """The devices of a job on a `machine` that has these, and what the job is: its built config.

    On the CPU a job has the cores that it would have alone: another number of threads would change its last bits.
    With fewer threads (`launcher.threads=1`), more jobs run at once.
    """
    # The name of a job refers to Hydra's choices. `set_config` would copy them first, which takes 3 ms for each job.
    HydraConfig.instance().cfg = config  # type: ignore[assignment]
    values = composition.to_dict(config)
    job = components.build_job(values)
    refuse_in_sweep(job.resume)
    launcher = job.launcher
    built = {key: value for key, value in components.plain(job).items() if key not in NOT_OF_SWEEP}
    identity = frozenset(
        (key, str(value) if isinstance(value, list | dict) else value) for key, value in leaves(built)
    )
    if launcher.submits:
        return Needs(cores=0, submits=True, identity=identity)
    import_for_ranks(job)
    gpus = 0 if job.device == "cpu" else machine.gpus
    # A strategy that takes what is there gets one device: several jobs train more than one on several devices.
    ranks = 1 if job.strategy.adapts else job.strategy.ranks(gpus)
    ranks = ranks if launcher.ranks == "auto" else int(launcher.ranks)
    if gpus:
        shared = kind(values) if job.sweep.gpu_share else ""
        return Needs(gpus=job.strategy.devices(ranks, gpus), kind=shared, identity=identity)
    cores = machine.cores if launcher.threads == "auto" else ranks * int(launcher.threads)
    return Needs(cores=cores, identity=identity)
