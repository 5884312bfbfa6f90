"""The functions for other programs, where they refuse at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

import lockstep


def test_a_thread_cannot_train() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(lockstep.InputError, match="was called in a thread"):
        pool.submit(lockstep.train).result()


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [({"RANK": "1", "WORLD_SIZE": "2"}, "one of 2 ranks.* each would train alone"), ({"WORLD_SIZE": "2"}, "no RANK")],
    ids=["torchrun", "half of it"],
)
def test_a_rank_that_others_started_cannot_train_as_a_script(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], sentence: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(lockstep.InputError, match=sentence):
        lockstep.train()
