"""Commands in new processes: the runs of `lockstep prove` and the rungs of `lockstep ladder`."""

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from lockstep.runtime.program import LONGEST_LINE
from lockstep.runtime.signals import PARENT

KEPT = 2**16  # bytes of the end of a stream


def ending(code: int, err: str) -> str:
    """How a program has ended: its sentence if it is Lockstep, or the last line of its errors that has words."""
    lines = [line.strip() for line in err.splitlines() if re.search(r"\w", line)]
    own = [line.removeprefix("lockstep: ") for line in lines if line.startswith("lockstep: ")]
    how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
    return (own or lines or [f"it ended with {how}"])[-1][:LONGEST_LINE]


class Command(subprocess.Popen[bytes]):
    """A command that has started in new processes, in its own session. The end of its output is kept."""

    streams: tuple[IO[bytes], IO[bytes]]

    def communicate(self) -> tuple[str, str]:  # type: ignore[override]
        """Wait until the command has ended, and end the processes that it has left; the ends of its streams."""
        self.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        out, err = (
            os.pread(file.fileno(), KEPT, max(0, os.fstat(file.fileno()).st_size - KEPT)) for file in self.streams
        )
        return out.decode(errors="replace"), err.decode(errors="replace")


@contextmanager
def running(command: list[str], *, capture: bool = False) -> Iterator[Command]:
    """A running command. All its processes are killed at the end of the context.

    Its errors are kept for `communicate`. With `capture`, it is a script of the user: what it prints is kept too, and
    it imports the modules next to it, which Lockstep's own processes do not.
    """
    # Files, because a script can print more than fits into memory, and leave processes that hold its streams.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = Command(
            command,
            # `command_line` has set HYDRA_FULL_ERROR for this process; the run must fail with its sentence only.
            env={name: value for name, value in os.environ.items() if not (capture and name == "PYTHONSAFEPATH")}
            | ({"HYDRA_FULL_ERROR": "0"} if capture else {"HYDRA_FULL_ERROR": "0", PARENT: str(os.getpid())}),
            stdin=subprocess.DEVNULL,
            stdout=out if capture else subprocess.DEVNULL,
            stderr=err,
            start_new_session=True,
        )
        process.streams = out, err
        try:
            yield process
        finally:
            if process.returncode is None:  # nobody has waited for it: its number is still its own
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
