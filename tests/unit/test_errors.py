"""The exceptions and their exit codes."""

import pytest

from lockstep.core import errors
from lockstep.core.errors import BY_EXIT_CODE, InputError, did_you_mean, escaped, masked


def test_every_error_has_the_exit_code_of_its_kind() -> None:
    codes = {"InputError": 2, "StorageError": 74, "Stopped": 75, "NumericalError": 76, "RankFailed": 70}
    for name, code in codes.items() | {("LockstepError", 70)}:
        error = getattr(errors, name)
        assert issubclass(error, errors.LockstepError)
        assert error.exit_code == code
        assert code == 70 or BY_EXIT_CODE[code] is error


def test_a_misspelt_word_gets_suggestions() -> None:
    options = ["momentum", "moment", "weight_decay", "lr"]
    assert did_you_mean("momentun", options) == " Did you mean 'momentum', 'moment'?"
    assert did_you_mean("ADAM-W", ["adam", "adam_w", "adam_wide"]).startswith(" Did you mean 'adam_w', 'adam_wide'")
    assert did_you_mean("vit_base", ["gcvit_base", "vit_base_patch16"]).startswith(" Did you mean 'vit_base_patch")
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


@pytest.mark.parametrize(
    "url",
    [
        *("postgresql://ann:SECRET@db/optuna", "postgresql+psycopg2://ann:SECRET@db:5432/optuna?sslmode=require"),
        *("mysql://ann:SEC@RET@db/x", "redis://:SECRET@db:6379/0", "s3://bucket/a?X-Amz-Signature=SECRET&part=1"),
        *("https://blob/a.tar?sp=r&sig=SECRET", "https://host/x?api_key=SECRET;b=1"),
        *("https://host/x?ACCESS_TOKEN=SECRET#top", "mysql://ann:SEC/RET@db/x"),
    ],
)
@pytest.mark.parametrize("sentence", ["{}", "the storage {} cannot be read", "storage='{}', mode=x", '"{}"'])
def test_no_text_that_is_shown_has_a_secret_of_a_url(url: str, sentence: str) -> None:
    text = sentence.format(url)
    for shown in (escaped(text), str(InputError(text)), masked(masked(text))):
        assert "SEC" not in shown
        assert "RET" not in shown
        assert "***" in shown
        assert shown.startswith(text[: text.index("://")])


@pytest.mark.parametrize(
    "text", ["sqlite:///a/b.db", "https://host:8080/a?page=2", "ann@host", "a: b@c", "tcp://[::1]:29500"]
)
def test_a_url_without_a_secret_is_shown_as_it_is(text: str) -> None:
    assert escaped(text) == text
    assert escaped("postgresql://ann@db/x") == "postgresql://ann@db/x"
