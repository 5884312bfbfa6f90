"""One run folder for ranks that another program started: under torchrun, each rank runs all of `train.py`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from lockstep.core import network
from lockstep.core.errors import LockstepError, RankFailed
from lockstep.core.launched import is_launched, launched, store_address
from lockstep.core.run_dir import RunDir
from lockstep.launcher.processes import POLL_S
from lockstep.runtime import program

# Seconds to wait for main's message, which main sends after it has prepared the data, and for an agent's store, which
# exists before its ranks.
WAIT_S, REACHED_S = 30 * 60.0, 15.0
READ_S = 60.0  # seconds to wait until the other ranks have read that main has failed
OK, FAILED = "ok", "failed"


@contextmanager
def create_on_main(make: Callable[[], AbstractContextManager[RunDir]]) -> Iterator[RunDir]:
    """The run folder. Main creates and closes it, and sends its path to the other ranks.

    If `make` fails, main shows the error before it tells the other ranks to leave. In another order, torchrun or srun
    could end main because another rank left first.

    `make` creates the folder, and returns the context in which it is used. Only main calls it.
    """
    if not is_launched() or launched().size == 1:
        with make() as run_dir:
            yield run_dir
        return
    rank = launched().rank
    # torchrun's agent serves a store. Without it (srun), main serves a store, which the process group uses too.
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _store(serve=rank == 0 and not agent_serves, seconds=REACHED_S if agent_serves else WAIT_S)
    if not agent_serves:
        _find_local_ranks(store)
    key = f"lockstep/run_dir/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        try:
            context = make()
        except LockstepError as error:
            program.say(error)
            store.set(key, f"{FAILED} {error.exit_code}")
            if not agent_serves:
                # The others would wait for a store again, if this one went before they have read that main leaves.
                wait(lambda: store.add(f"{key}/read", 0) >= launched().size - 1, READ_S)
            raise SystemExit(error.exit_code) from error
        with context as run_dir:
            store.set(key, f"{OK} {run_dir.path}")
            yield run_dir
        return
    status, _, text = _wait_for_value(store, key, "main has not created the run folder").partition(" ")
    if status == FAILED:
        store.add(f"{key}/read", 1)
        raise SystemExit(int(text))
    yield RunDir(Path(text))


def _find_local_ranks(store: TCPStore) -> None:
    """Set LOCAL_RANK and LOCAL_WORLD_SIZE for ranks whose launcher does not set them."""
    place = launched()
    key = "lockstep/machine/{}"
    store.set(key.format(place.rank), network.machine())
    if {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return
    machines = [_wait_for_value(store, key.format(rank), f"rank {rank} has not joined") for rank in range(place.size)]
    local_ranks = [rank for rank, machine in enumerate(machines) if machine == machines[place.rank]]
    os.environ.setdefault("LOCAL_RANK", str(local_ranks.index(place.rank)))
    os.environ["LOCAL_WORLD_SIZE"] = str(len(local_ranks))


def _store(*, serve: bool, seconds: float) -> TCPStore:
    """The store of the job's ranks, which must answer within `seconds`."""
    address, port = store_address()
    network.addresses(address, port)  # raises for an unknown name, instead of waiting for it
    try:
        if not wait(lambda: serve or is_listening(address, port), seconds):
            raise DistNetworkError("it does not answer")
        return TCPStore(
            address,
            port,
            is_master=serve,
            timeout=timedelta(seconds=REACHED_S),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (DistNetworkError, DistStoreError) as error:
        reason = str(error).splitlines()[0]
        raise RankFailed(f"no store at MASTER_ADDR={address} MASTER_PORT={port}: {reason}") from error


def is_listening(address: str, port: int) -> bool:
    """Whether anybody listens at a port."""
    try:
        socket.create_connection((address, port), timeout=REACHED_S).close()
    except OSError:
        return False
    return True


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds, at most so long; returns whether it does.

    Polls, because signal handlers do not run while a store or a socket waits.
    """
    until = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return holds


def _wait_for_value(store: TCPStore, key: str, otherwise: str) -> str:
    """Wait until `key` is set in the store, and return its value; `otherwise` says what it means if none comes."""
    try:
        if not wait(lambda: store.check([key]), WAIT_S):
            raise RankFailed(f"{otherwise} within {WAIT_S:g} s; its output says why")
        return store.get(key).decode()
    except (DistNetworkError, DistStoreError) as error:
        raise RankFailed("the launcher, or the rank that serves its store, has ended") from error
