"""One run folder for ranks that another program started: under torchrun, each rank runs all of `train.py`."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from lockstep.core import log
from lockstep.core.errors import InputError, LockstepError, RankFailed, reason_of
from lockstep.core.launch_env import ATTEMPT, RUN_FOLDER, launched_place, store_address
from lockstep.core.run_dir import RunDir
from lockstep.launcher.processes import REACHED_S, in_thread, is_listening, wait
from lockstep.runtime import addresses, program

# Seconds to wait for main's message, which main sends after it has prepared the data; and for the other ranks.
WAIT_S, JOIN_S = 30 * 60.0, 10 * 60.0
READ_S = 60.0  # seconds to wait until the other ranks have read that main has failed
# Seconds for a file of another machine to become visible: NFS caches a folder for 3 to 60 s by default.
SEEN_S = 30.0
OK, FAILED = "ok", "failed"
ONLY = "0"  # the attempt of ranks that no agent starts again
# Keys of the store: who a rank of an attempt is, main's answer with the folder, and whether a rank sees the folder.
ARRIVED, ANSWER, SEEN = "lockstep/arrived/{}/{}", "lockstep/run_dir/{}", "lockstep/run_dir/{}/seen/{}"
# Keys of an agent's store: the name of a rank, the attempt that main invites a name to, the folder of all attempts.
NAME_KEY, INVITED_KEY, FOLDER_KEY = "lockstep/name/{}", "lockstep/invited/{}", "lockstep/folder"


class Followers:
    """The ranks that follow main, if any, and get its run folder; `earlier` is the one from before a restart."""

    def __init__(self, store: Any = None, attempt: str = "", size: int = 1) -> None:
        self.store, self.attempt, self.ranks = store, attempt, range(1, size)
        self.have_folder = False
        self.earlier = os.environ.get(RUN_FOLDER, "")

    def gather(self) -> None:
        """Wait until all ranks are there. Raises InputError for a rank of another job; RankFailed: one is missing."""
        for rank in self.ranks:
            _, size = _arrival(self.store, self.attempt, rank)
            if size != self.ranks.stop and not _agent_serves():
                raise InputError(
                    f"rank {rank} was started with WORLD_SIZE={size}, and rank 0 with WORLD_SIZE={self.ranks.stop}; "
                    "use the same for each"
                )
        find_local_ranks(self.store, self.attempt)
        self.earlier = _value(self.store, FOLDER_KEY) or self.earlier

    def send(self, run_dir: RunDir) -> None:
        """Send them the run folder. Raises InputError if a machine does not see it."""
        self.have_folder = True
        if self.ranks:
            self.store.set(FOLDER_KEY, str(run_dir.path))
            self.store.set(ANSWER.format(self.attempt), f"{OK} {run_dir.path}")
        for rank in self.ranks:
            look = partial(_value, self.store, SEEN.format(self.attempt, rank))
            if (seen := _wait_for_value(look, f"rank {rank} has ended")) != OK:
                raise InputError(seen)


@contextmanager
def leading() -> Iterator[Followers]:
    """The ranks that follow this process, which is the main of ranks that another program started.

    If the context fails before it has sent them a run folder, main shows the error before it tells them to leave. In
    another order, torchrun or srun could end main because another rank left first. Raises InputError if this process
    cannot be the rank that its variables say; RankFailed: the other ranks, or their store, are not there.
    """
    if (size := launched_place().size) == 1:
        yield Followers()
        return
    store, attempt = _store(serve=not _agent_serves()), uuid4().hex if _agent_serves() else ONLY
    _arrive(store, attempt)
    if (restart := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) != "0":
        log.warn(f"a rank has failed, and all were started again: restart {restart}")
    followers, key = Followers(store, attempt, size), ANSWER.format(attempt)
    try:
        followers.gather()
        yield followers
    except LockstepError as error:
        if followers.have_folder:
            raise
        program.explain(error)
        store.set(key, f"{FAILED} {error.exit_code}")
        if not _agent_serves():
            # The others would wait for a store again, if this one went before they have read that main leaves.
            wait(lambda: store.add(f"{key}/read", 0) >= size - 1, READ_S)
        raise SystemExit(error.exit_code) from error


@contextmanager
def following() -> Iterator[RunDir]:
    """The run folder that main has created. Raises as `leading`, and SystemExit if main dismisses this rank."""
    store = _store(serve=False)
    attempt = _invitation(store)
    _arrive(store, attempt)
    find_local_ranks(store, attempt)
    key = ANSWER.format(attempt)
    answer = _wait_for_value(partial(_value, store, key), "main has not created the run folder")
    status, _, text = answer.partition(" ")
    if status == FAILED:
        store.add(f"{key}/read", 1)
        raise SystemExit(int(text))
    run_dir, seen = RunDir(Path(text)), OK
    if not wait(run_dir.config.is_file, SEEN_S if run_dir.path.parent.is_dir() else 0.0):
        seen = (
            f"machine {socket.gethostname()} does not see the run folder {text}, which main has created; put it on a "
            "file system that all machines share: output_root=FOLDER"
        )
    store.set(SEEN.format(attempt, launched_place().rank), seen)
    if seen != OK:
        raise InputError(seen)
    yield run_dir


def _agent_serves() -> bool:
    """Whether torchrun's agent serves the store. Without it (srun), main does, and the process group uses it too.

    An agent numbers its ranks itself. It may start others in the same attempt, so what a rank says can be outdated.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _invitation(store: TCPStore) -> str:
    """The attempt to which main invites this rank: a name that all ranks of this start share, and no earlier one.

    An agent keeps its store, with what earlier ranks have written, and the agents of several machines count restarts
    differently. So each rank has a new name, which only the present main can answer.
    """
    if not _agent_serves():
        return ONLY
    name = uuid4().hex
    store.set(NAME_KEY.format(launched_place().rank), name)
    return _wait_for_value(partial(_value, store, INVITED_KEY.format(name)), "main has not asked this rank to join")


def _arrive(store: TCPStore, attempt: str) -> None:
    """Tell the other ranks of an attempt who this rank is, and refuse a RANK that another process has."""
    if attempt != ONLY:
        os.environ[ATTEMPT] = attempt
    place, key = launched_place(), ARRIVED.format(attempt, launched_place().rank)
    own = [addresses.machine(), os.getpid(), place.size]
    first = json.loads(store.compare_set(key, "", json.dumps(own)))
    if first[:2] != own[:2] and not _agent_serves():
        raise InputError(
            f"RANK={place.rank} was given to two processes, {first[1]} and {own[1]}; give each another RANK from 0 "
            f"to {place.size - 1}"
        )
    store.set(key, json.dumps(own))


def _arrival(store: TCPStore, attempt: str, rank: int) -> tuple[str, int]:
    """The machine and the WORLD_SIZE of a rank, when it is there."""

    def invited_and_there() -> str:
        if name := _value(store, NAME_KEY.format(rank)):
            store.set(INVITED_KEY.format(name), attempt)
        return _value(store, ARRIVED.format(attempt, rank))

    missing = f"rank {rank} of {launched_place().size} has not joined"
    text = _wait_for_value(invited_and_there, missing, JOIN_S, show=f"waiting for rank {rank}")
    machine, _, size = json.loads(text)
    return machine, size


def find_local_ranks(store: TCPStore, attempt: str) -> None:
    """Set LOCAL_RANK and LOCAL_WORLD_SIZE for ranks whose launcher does not set them."""
    if _agent_serves() or {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return
    place = launched_place()
    machines = [_arrival(store, attempt, rank)[0] for rank in range(place.size)]
    local_ranks = [rank for rank, machine in enumerate(machines) if machine == machines[place.rank]]
    os.environ.setdefault("LOCAL_RANK", str(local_ranks.index(place.rank)))
    os.environ["LOCAL_WORLD_SIZE"] = str(len(local_ranks))


def _store(*, serve: bool) -> TCPStore:
    """The store of the job's ranks, which this rank serves or which must answer soon."""
    seconds = REACHED_S if _agent_serves() else JOIN_S
    address, port = store_address()
    where = f"MASTER_ADDR={address} MASTER_PORT={port}"
    addresses.resolve_host(address, port)  # raises for an unknown name, instead of waiting for it
    try:
        if not wait(lambda: serve or is_listening(address, port), seconds, show=f"waiting for rank 0 at {where}"):
            raise DistNetworkError("it does not answer")
        timeout = timedelta(seconds=REACHED_S)
        # In a thread, because torch waits without a limit for another program's answer.
        store = in_thread(
            lambda: TCPStore(
                address, port, is_master=serve, timeout=timeout, wait_for_workers=False, multi_tenant=True
            )
        )
        if not wait(store.done, 2 * REACHED_S):
            raise DistNetworkError("what listens there does not answer as a store")
        return store.result()
    except (DistNetworkError, DistStoreError) as error:
        if "EADDRINUSE" in str(error):
            raise InputError(
                f"rank 0 cannot listen at {where}: another program does, or RANK=0 was started twice; choose a free "
                "MASTER_PORT, the same for all ranks"
            ) from error
        if serve and not addresses.is_own_address(address, port):
            raise InputError(
                f"MASTER_ADDR={address} does not lead to this machine, where RANK=0 was started; set it to the "
                "address of this machine, the same for all ranks"
            ) from error
        raise RankFailed(f"no store at {where}: {reason_of(error)}") from error


def _value(store: TCPStore, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _wait_for_value(look: Callable[[], str], otherwise: str, seconds: float = WAIT_S, *, show: str = "") -> str:
    """Look into the store until there is a value, and return it; `otherwise` says what it means if none comes."""
    try:
        if not (value := wait(look, seconds, show=show)):
            raise RankFailed(f"{otherwise} within {seconds:g} s; its output says why")
        return value
    except (DistNetworkError, DistStoreError) as error:
        raise RankFailed("the launcher, or the rank that serves its store, has ended") from error
