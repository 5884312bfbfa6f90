"""The exceptions and their exit codes."""

from __future__ import annotations

import pytest

from lockstep import errors
from lockstep.errors import BY_EXIT_CODE, did_you_mean


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("LockstepError", 70),
        ("InputError", 2),
        ("StorageError", 74),
        ("Stopped", 75),
        ("NumericalError", 76),
        ("RankFailed", 70),
    ],
)
def test_every_error_has_the_exit_code_of_its_kind(name: str, code: int) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.LockstepError)
    assert error.exit_code == code
    assert code == 70 or BY_EXIT_CODE[code] is error


def test_a_failed_rank_brings_its_traceback() -> None:
    error = errors.RankFailed("rank 1 failed", "Traceback ...")
    assert str(error) == "rank 1 failed"
    assert error.details == "Traceback ..."


def test_a_misspelt_word_is_met_with_those_close_to_it() -> None:
    options = ["momentum", "moment", "weight_decay", "lr"]
    assert did_you_mean("momentun", options) == " Did you mean 'momentum', 'moment'?"
    assert did_you_mean("weigth_decay", options, prefix="optimizer.") == " Did you mean 'optimizer.weight_decay'?"
    assert did_you_mean("xyz", options) == ""
    assert did_you_mean("lr", []) == ""
