"""Work on one or several ranks that is no run, such as an evaluation. Main has its result."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lockstep.config import components, composition
from lockstep.core.errors import InputError, Interrupted, RankFailed, Stopped
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.job.resolve import resolve_launcher
from lockstep.job.worker import RankWork, entry_of
from lockstep.runtime import forking
from lockstep.runtime.signals import STOPPED


def on_ranks(call: Callable[..., object], overrides: Sequence[str], device: str | None) -> None:
    """Call `call` on the ranks that overrides of the launcher and the device ask for; without any, in this process.

    It gets the world, and as `threads` the number of `launcher.threads`, None if nobody has typed one. Raises
    LockstepError: the error of the first rank that failed. The folder of its log is kept.
    """
    if not overrides:
        call(World.solo(device or ("cuda" if torch.cuda.is_available() else "cpu")), threads=None)
        return
    values = composition.composed([*overrides, *([f"device={device}"] if device else []), "name=ranks"])
    typed = components.build("launcher", values["launcher"])
    typed.check()
    if typed.submits or typed.node_range[1] > 1:
        name = type(typed).__name__.lower()
        raise InputError(f"launcher={name}: this command starts its ranks on one machine alone; use launcher=auto")
    launcher, device = resolve_launcher(typed, values["device"])
    threads = None if typed.threads == "auto" else int(typed.threads)
    if not launcher.starts_ranks:
        call(World.solo(device), threads=threads)
        return
    launcher = replace(launcher, threads=threads or torch.get_num_threads())  # as one rank computes: for its bits
    work = RankWork(launcher, device, partial(call, threads=threads))
    folder, is_kept = Path(tempfile.mkdtemp(prefix="lockstep-ranks-")), False
    forking.keep_one_thread()
    try:
        launcher.launch(entry_of(work, (work,), remedy="use fewer ranks"), RunDir.at(folder))
    except (Stopped, Interrupted) as error:
        raise Stopped(STOPPED) from error
    except RankFailed:
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)
