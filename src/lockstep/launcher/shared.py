"""One run folder for ranks that exist already: under torchrun each rank runs the whole of `train.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from lockstep.errors import LockstepError
from lockstep.rundir import RunDir
from lockstep.world import launched_rank

WAIT = timedelta(minutes=30)
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
    rank = launched_rank()
    if rank is None:
        yield make()
        return
    # torchrun's agent serves a store; without one (srun) main serves it, and shares it with the process group.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0 and not served,
        timeout=WAIT,
        wait_for_workers=False,
        multi_tenant=True,
    )
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
    status, _, word = store.get(key).decode().partition(" ")
    if status == FAILED:
        raise SystemExit(int(word))
    yield RunDir(Path(word))
