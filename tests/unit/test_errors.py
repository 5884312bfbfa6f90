"""The exceptions and their exit codes."""

from __future__ import annotations

import pytest

from lockstep.core import errors
from lockstep.core.errors import BY_EXIT_CODE, did_you_mean, escaped


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


def test_a_misspelt_word_gets_suggestions() -> None:
    options = ["momentum", "moment", "weight_decay", "lr"]
    assert did_you_mean("momentun", options) == " Did you mean 'momentum', 'moment'?"
    assert did_you_mean("ADAM-W", ["adam", "adam_w", "adam_wide"]).startswith(" Did you mean 'adam_w', 'adam_wide'")
    assert did_you_mean("vit_base", ["gcvit_base", "vit_base_patch16_224"]).startswith(
        " Did you mean 'vit_base_patch"
    )
    assert did_you_mean("weigth_decay", options, prefix="optimizer.") == " Did you mean 'optimizer.weight_decay'?"
    assert did_you_mean("xyz", options) == ""
    assert did_you_mean("lr", []) == ""


# Escape, carriage return, backspace, delete, CSI of C1, two direction overrides, a line separator, a lone surrogate,
# NUL.
STEERING = "\x1b\r\b\x7f\x9b\u202e\u2066\u2028\udc80\0"


def test_nothing_that_steers_a_terminal_is_left_in_a_text() -> None:
    assert escaped(f"a{STEERING}b\tc\nd").replace("\n", "").replace("\t", "").isprintable()
    assert escaped("\x1b[31m\r") == r"\x1b[31m\r"
    assert escaped("naïve — 90 % 画像") == "naïve — 90 % 画像"
    assert escaped("one\ntwo") == "one\ntwo"
    assert escaped("one\ntwo", keep="") == r"one\ntwo"
    assert escaped(escaped(STEERING)) == escaped(STEERING)
