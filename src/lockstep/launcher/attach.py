"""One run folder for ranks that exist already: under torchrun each rank runs the whole of `train.py`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from lockstep.core.errors import LockstepError, RankFailed
from lockstep.core.launched import is_launched, launched
from lockstep.core.run_dir import RunDir

# For main's word, which comes when the data is there; and for the store of an agent, which is there before its ranks.
WAIT_S, REACHED_S, POLL_S = 30 * 60.0, 15.0, 0.1
OK, FAILED = "ok", "failed"


@contextmanager
def once(make: Callable[[], RunDir], say: Callable[[LockstepError], None]) -> Iterator[RunDir]:
    """The run folder that `make` gives: called by main only, its path told to the other ranks.

    Where `make` fails, main says why before the others are told to leave, so that the launcher above them
    does not end main for a rank that left first.

    Args:
        make: makes the folder.
        say: shows an error to the user.
    """
    if not is_launched():
        yield make()
        return
    rank = launched().rank
    # torchrun's agent serves a store; without one (srun) main serves it, and shares it with the process group.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _store(serve=rank == 0 and not served, seconds=REACHED_S if served else WAIT_S)
    key = f"lockstep/run_dir/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        try:
            run_dir = make()
        except LockstepError as error:
            say(error)
            store.set(key, f"{FAILED} {error.exit_code}")
            raise SystemExit(error.exit_code) from error
        store.set(key, f"{OK} {run_dir.path}")
        yield run_dir
        return
    status, _, word = _awaited(store, key).partition(" ")
    if status == FAILED:
        raise SystemExit(int(word))
    yield RunDir(Path(word))


def _store(*, serve: bool, seconds: float) -> TCPStore:
    """The store of the job's ranks.

    Raises:
        RankFailed: it is not there, and does not come within so many seconds; or its port is taken.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    until = time.monotonic() + seconds
    try:
        # Waited for here: in the store's own wait no signal is heard.
        while not (serve or _answers(address, port)):
            if time.monotonic() > until:
                raise DistNetworkError("it does not answer")
            time.sleep(POLL_S)
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


def _answers(address: str, port: int) -> bool:
    """Whether anybody listens at a port."""
    try:
        socket.create_connection((address, port), timeout=REACHED_S).close()
    except OSError:
        return False
    return True


def _awaited(store: TCPStore, key: str) -> str:
    """What the store has at `key`, once it is there. Polled, because no signal would be heard in a wait."""
    until = time.monotonic() + WAIT_S
    try:
        while not store.check([key]):
            if time.monotonic() > until:
                raise RankFailed(f"main has made no run folder in {WAIT_S:g} s; see what it says")
            time.sleep(POLL_S)
        return store.get(key).decode()
    except (DistNetworkError, DistStoreError) as error:
        raise RankFailed("the launcher, or the rank that serves its store, has ended") from error
