"""Closing the parts of a run: all of them are closed, and the first error is raised."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lockstep.core import log
from lockstep.core.errors import Interrupted


@contextmanager
def closing(*closes: Callable[[], object]) -> Iterator[None]:
    """Call each of `closes` in turn when the context ends, even if the body or some of `closes` raise.

    The first error is raised, because it says why the run ended and sets the exit code. Later errors become warnings.
    (An `ExitStack` would raise the last error.)
    """
    first: BaseException | None = None
    try:
        yield
    except BaseException as error:
        first = error
    for close in closes:
        try:
            close()
        except Interrupted:  # the user interrupted twice: do not wait for the remaining calls
            raise
        except Exception as error:
            if first is None:
                first = error
            else:
                log.warn(f"another error at the end of the run: {type(error).__name__}: {error}")
    if first is not None:
        raise first
