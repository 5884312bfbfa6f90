"""Fixtures of the unit tests."""

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from hypothesis import settings

# No deadline: on a busy machine an example is sometimes slow, whatever the code does.
# 50 examples instead of 100: each run of the tests draws new ones.
settings.register_profile("lockstep", deadline=None, max_examples=50)
settings.load_profile("lockstep")


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which no file of this process can grow beyond `size` bytes: writes fail as on a full disk."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited
