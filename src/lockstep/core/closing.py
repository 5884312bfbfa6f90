"""The end of a run's parts: every one is closed, and the first error is the one that the run ends with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.core import log
from lockstep.core.errors import Interrupted


@contextmanager
def closing(*closes: Callable[[], object]) -> Iterator[None]:
    """Call each of `closes` in turn when the context ends, however it ends and whichever of them raise.

    The first error, that of the context before any other, is raised: it says why the run ended, and the exit code is
    its. Each later one is a warning. (An `ExitStack` raises the last one.)
    """
    first: BaseException | None = None
    try:
        yield
    except BaseException as error:
        first = error
    for close in closes:
        try:
            close()
        except Interrupted:  # asked for twice: nothing is waited for any more
            raise
        except Exception as error:
            if first is None:
                first = error
            else:
                log.warn(f"at its end the run also met this: {type(error).__name__}: {error}")
    if first is not None:
        raise first
