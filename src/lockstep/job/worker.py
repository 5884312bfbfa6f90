"""Starting a job, and one rank of it, which has its place from the environment.

A rank in the starting process gets the job; another one reads it from the run folder, once. The rank joins the
process group and runs the experiment. It writes an error to `logs/rank<N>.error.json` for the launcher. Ranks of our
launchers begin in `lockstep.runtime.child`.
"""

import json
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import current_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

from lockstep.config import components, extensions
from lockstep.core import log, plan
from lockstep.core.errors import InputError, LockstepError, RankFailed, Stopped, StorageError, as_known, out_of_memory
from lockstep.core.launch_env import ATTEMPT, Place, is_launched, launched_place, store_address
from lockstep.core.observer import Callback
from lockstep.core.protocols import Entry, Launcher, Strategy
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import full_disk, write_atomic
from lockstep.core.terminal import forgive_output, impatient
from lockstep.core.world import World
from lockstep.runtime import program, watchdog
from lockstep.runtime.forking import Fork
from lockstep.runtime.signals import LAUNCHER, StopRequest, leave, listen, stop_signals
from lockstep.strategy.base import Single
from lockstep.training import experiment
from lockstep.training.resolved_job import ResolvedJob, chosen_options, load_job

if TYPE_CHECKING:
    from lockstep.runtime.user_code import UserCode

SPARE_FILES = 512  # files that a rank may have open besides its connections


def start_job(run_dir: RunDir, job: ResolvedJob, callbacks: Mapping[str, Callback] | None = None) -> float | None:
    """Run a job, with a program's `callbacks`, in all its ranks; returns its objective. Raises LockstepError."""
    if job.launcher.node_range[1] > 1:
        raise InputError(
            f"launcher.nodes requests {job.launcher.node_range[1]} machines, which only the command line "
            "can do; use lockstep train, or launcher.nodes=1"
        )
    with impatient():
        objective = job.launcher.launch(entry_of(job, objects_of(job, callbacks)), run_dir)
    forgive_output()  # train.log has what is shown
    return objective


@dataclass(frozen=True)
class RankWork:
    """What ranks do that is no run, with the launcher and the device of a job."""

    launcher: Launcher
    device: str
    call: Callable[[World], object]
    repro: ClassVar[str] = "exact"
    strategy: ClassVar[Strategy] = Single()


def entry_of(job: ResolvedJob | RankWork, objects: tuple[Any, ...], remedy: str = Entry.remedy) -> Entry:
    """What a rank of a job does; `objects` are the arguments of `run_rank` for a rank in another process."""
    return Entry(lambda path: run_rank(path, *objects or [job]), objects, remedy)


def objects_of(job: ResolvedJob, callbacks: Mapping[str, Callback] | None) -> tuple[Any, ...]:
    """What a rank in another process cannot read from the run folder, with its code: a job of a program's parts."""
    if not callbacks and all(extensions.is_importable(type(option)) for option in chosen_options(job)):
        return ()
    from lockstep.runtime import user_code  # few jobs have parts of a program
    from lockstep.training.objects import code_parts

    parts = code_parts(job, (callbacks or {}).values())
    return job, callbacks, user_code.code_of(components.plain(job), parts)


def run_rank(
    path: Path,
    job: ResolvedJob | RankWork | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    code: Mapping[str, "UserCode"] | None = None,
) -> None:
    """Run a rank of a job, by default of `path`, with `code` that only its program can read. Raises its error."""
    run_dir = RunDir(path)
    errors = RankErrorFile(run_dir, launched_place().rank)
    with (
        log.rank_logging(run_dir, errors.rank, separate=is_launched()),
        watchdog.dump_stacks_on_crash(run_dir.rank_log(errors.rank)) as stacks,
        errors.record_exception(),
        full_disk(run_dir.path),
    ):
        job, stop = job or load_job(run_dir.config), StopRequest()
        stop.saved = Run(path).saved
        if job.repro == "strict":  # cuBLAS reads the variable when it starts
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        timeout = plan.seconds("launcher.timeout", job.launcher.timeout)
        with (
            # A process of ours exits after this. It keeps its handlers: a late signal has no effect.
            stop_signals(stop, restore=not (is_launched() or isinstance(current_process(), Fork))),
            watchdog.Watchdog(
                errors.rank, timeout=timeout, stop=stop, file=stacks, record_error=errors.record_hang
            ) as dog,
            join(
                device=job.device,
                backend=job.launcher.backend,
                timeout=watchdog.GROUP_TIMEOUT_S,
                threads=job.launcher.threads,
                alone=job.strategy.joins_alone,
            ) as joined,
        ):
            dog.local_peer_pids = joined.local_peer_pids
            if isinstance(job, RankWork):
                job.call(joined)
                return
            experiment.run(job, run_dir, joined, stop=stop, heartbeat=dog.heartbeat, callbacks=callbacks, code=code)


class RankErrorFile:
    """The error file of a rank for the launcher. It has the time, so that the launcher finds the first error."""

    def __init__(self, run_dir: RunDir, rank: int) -> None:
        self.run_dir = run_dir
        self.rank = rank
        run_dir.rank_error(rank).unlink(missing_ok=True)

    @contextmanager
    def record_exception(self) -> Iterator[None]:
        """Write the error that the context raises. One of a lack of memory is explained."""
        try:
            yield
        except Exception as error:
            if (explained := out_of_memory(error)) is None:
                self._write(error)
                raise
            explained.__cause__ = error
            self._write(explained)
            raise explained from error

    def record_hang(self, error: LockstepError, places: Mapping[int, str]) -> None:
        """Write an error in the watchdog's thread, which then ends the process; show it if there is no launcher."""
        if isinstance(error, RankFailed):
            error = RankFailed(f"{error}; the stacks are in {self.run_dir.logs}/rank*.log")
        else:  # after a stop, it does not matter where each rank was
            places = {}
        self._write(error, places)
        if LAUNCHER not in os.environ:
            error = type(error)("; ".join([str(error), *(f"rank {rank} {place}" for rank, place in places.items())]))
            self.run_dir.write_ending(error)
            program.explain(error)

    def _write(self, error: Exception, places: Mapping[int, str] | None = None) -> None:
        known = as_known(error)
        facts = {
            "time": time.time(),
            "rank": self.rank,
            "exit_code": known.exit_code,
            "known": known is error,
            "sentence": str(known),
            "places": places or {},
            "traceback": "".join(traceback.format_exception(error)),
        }
        with suppress(StorageError):  # on a full disk, the launcher only gets the exit code
            write_atomic(self.run_dir.rank_error(self.rank), json.dumps(facts, indent=2) + "\n")
        log.logger.error("rank %d: %s\n%s", self.rank, facts["sentence"], facts["traceback"])


def exit_as_rank(path: Path, *objects: Any) -> NoReturn:
    """Run `run_rank` in a process that only serves as this rank, and exit with the code of its error."""
    code = 0
    try:
        run_rank(path, *objects)
    except Exception as error:  # the error file has the traceback; the launcher shows it
        code = as_known(error).exit_code
    listen(signal.SIG_IGN)
    leave(code)


@contextmanager
def join(*, device: str, backend: str, timeout: float, threads: int, alone: bool = False) -> Iterator[World]:
    """Become a rank of the job: set the device and the threads, and join the process group of several ranks.

    `alone` says whether the lone rank of a launcher joins one, too. The group is destroyed at the end and after a
    saved stop, when all ranks have just met. After an error it is not destroyed: another rank may hang in a
    collective, and waiting for that rank would hide the error. `timeout` is in seconds; a collective that takes
    longer is an error. Raises InputError without a GPU, for wrong variables, or if too few files may be open.
    """
    torch.set_num_threads(threads)
    place = launched_place()
    if place.size == 1 and not (alone and is_launched()):  # a group would take 20 ms, and more with NCCL
        yield World.solo(torch.device(device, 0) if device == "cuda" else device)
        return
    from lockstep.runtime import addresses  # imported late: a single rank has no connections

    on_device = torch.device(device, own_gpu(place.local_rank)) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(on_device)
    addresses.choose_interface(one_machine=place.local_size == place.size)
    allow_connections(place.size)
    _init_process_group(backend, timedelta(seconds=timeout), on_device, place)
    control: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    own = (addresses.machine(), os.getpid())
    processes = [own] * place.size
    dist.all_gather_object(processes, own, group=control)
    peers = {rank: pid for rank, (machine, pid) in enumerate(processes) if machine == own[0] and pid != own[1]}
    try:
        yield World(**vars(place), device=on_device, control=control, local_peer_pids=peers)
    except Stopped:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()  # not reached after another error, which is raised at the yield


def own_gpu(local_rank: int) -> int:
    """The index of a rank's GPU among those of its process, which may be shown one alone. Raises InputError."""
    visible = torch.cuda.device_count()
    if visible > 1 and local_rank >= visible:
        raise InputError(
            f"local rank {local_rank} has no GPU: its process sees {visible}; start at most {visible} ranks on this "
            "machine, or show each one its own (srun --gpus-per-task=1)"
        )
    return local_rank if visible > 1 else 0


def allow_connections(ranks: int) -> None:
    """Raise the limit on open files to what two gloo groups of `ranks` ranks need. Raises InputError."""
    needed = 2 * ranks + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"each of {ranks} ranks opens up to {needed} files and connections, and the system allows {hard}; raise "
            f"its limit before the launch: ulimit -n {needed}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _init_process_group(backend: str, timeout: timedelta, device: torch.device, place: Place) -> None:
    store = None  # the one at MASTER_ADDR
    if attempt := os.environ.get(ATTEMPT):  # torchrun's store also has the addresses of earlier attempts
        served = dist.TCPStore(*store_address(), is_master=False, wait_for_workers=False, timeout=timeout)
        store = dist.PrefixStore(attempt, served)
    bound = device if backend == "nccl" else None
    try:
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout, device_id=bound
        )
    except RuntimeError as error:
        if "Duplicate GPU" not in str(error):
            raise
        raise InputError(
            f"several ranks have the same GPU ({device}), which NCCL does not allow; start as many ranks on this "
            "machine as it has GPUs, or use launcher.backend=gloo"
        ) from error
