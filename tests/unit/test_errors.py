"""The exceptions and their exit codes."""

import pytest

from lockstep.core import errors
from lockstep.core.errors import (
    BY_EXIT_CODE,
    INSTALL,
    BrokenImage,
    InputError,
    as_unicode,
    check_installed,
    close_to,
    collecting,
    did_you_mean,
    escaped,
    first_of,
    masked,
    out_of_memory,
    percent,
    reason_of,
)
from lockstep.core.formats import NewerFormat


def test_every_error_has_the_exit_code_of_its_kind() -> None:
    codes = {"InputError": 2, "StorageError": 74, "Stopped": 75, "NumericalError": 76, "RankFailed": 70}
    codes["Interrupted"] = 130  # as a shell says it of a program that SIGINT has ended
    for name, code in codes.items() | {("LockstepError", 70)}:
        error = getattr(errors, name)
        assert issubclass(error, errors.LockstepError)
        assert error.exit_code == code
        assert code == 70 or BY_EXIT_CODE[code] is error


def test_an_error_keeps_what_else_is_known_of_it() -> None:
    assert [errors.NumericalError("nan", step).step for step in (3, 0, None)] == [3, 0, None]
    assert errors.NumericalError("nan").step is None
    assert [errors.RankFailed("died", "Traceback").details, errors.RankFailed("died").details] == ["Traceback", ""]
    assert str(errors.Interrupted()).startswith("interrupted twice: stopped at once")
    kinds = {errors.LockstepError, errors.RankFailed, *BY_EXIT_CODE.values()}
    assert {str(kind("its own sentence")) for kind in kinds} == {"its own sentence"}, "as another process has told it"


def test_a_mistake_is_one_line_whatever_is_in_it() -> None:
    assert str(InputError("a\nb\tc\x1b[2K", "d")) == "a\\nb\\tc\\x1b[2K\nd"


def test_a_misspelt_word_gets_suggestions() -> None:
    options = ["momentum", "moment", "weight_decay", "lr"]
    assert did_you_mean("momentun", options) == " Did you mean 'momentum', 'moment'?"
    assert did_you_mean("ADAM-W", ["adam", "adam_w", "adam_wide"]).startswith(" Did you mean 'adam_w', 'adam_wide'")
    assert did_you_mean("vit_base", ["gcvit_base", "vit_base_patch16"]).startswith(" Did you mean 'vit_base_patch")
    assert did_you_mean("weigth_decay", options, prefix="optimizer.") == " Did you mean 'optimizer.weight_decay'?"
    assert did_you_mean("momentun", options, prefix="o.") == " Did you mean 'o.momentum', 'o.moment'?"
    assert did_you_mean("xyz", options) == ""
    assert did_you_mean("lr", []) == ""
    assert close_to("a_b_c_d", ["A-B-C-D"]) == ["A-B-C-D"]
    assert close_to("abcd", ["abc1", "abc2", "abc3", "abc4"]) == ["abc4", "abc3", "abc2"], "three at most"
    begin = "a" * 12  # of 20 letters 13 are alike, or 12
    assert close_to(f"{begin}abbbbbbb", [f"{begin}accccccc"]) == [f"{begin}accccccc"]
    assert close_to(f"{begin}bbbbbbbb", [f"{begin}cccccccc"]) == []


# Escape, carriage return, backspace, delete, CSI of C1, two direction overrides, a line separator, a lone surrogate,
# NUL.
STEERING = "\x1b\r\b\x7f\x9b\u202e\u2066\u2028\udc80\0"


def test_nothing_that_steers_a_terminal_is_left_in_a_text() -> None:
    assert escaped(f"a{STEERING}b\tc\nd").replace("\n", "").replace("\t", "").isprintable()
    assert escaped("\x1b[31m\r") == r"\x1b[31m\r"
    assert escaped("naïve — 90 % 画像") == "naïve — 90 % 画像"
    assert escaped("one\ntwo") == "one\ntwo"
    assert escaped("one\ntwo", keep="") == r"one\ntwo"
    assert (escaped("one\ttwo"), escaped("one\ttwo", keep="\n")) == ("one\ttwo", r"one\ttwo")
    assert escaped(escaped(STEERING)) == escaped(STEERING)


def test_two_names_that_differ_in_bytes_that_are_no_text_still_differ() -> None:
    assert [as_unicode(name) for name in ("ow\udcffl", "ow\udcfel", "画像")] == ["ow\\udcffl", "ow\\udcfel", "画像"]


@pytest.mark.parametrize(
    "url",
    [
        *("postgresql://ann:SECRET@db/optuna", "postgresql+psycopg2://ann:SECRET@db:5432/optuna?sslmode=require"),
        *("mysql://ann:SEC@RET@db/x", "redis://:SECRET@db:6379/0", "s3://bucket/a?X-Amz-Signature=SECRET&part=1"),
        *("https://blob/a.tar?sp=r&sig=SECRET", "https://host/x?api_key=SECRET;b=1"),
        *("https://host/x?ACCESS_TOKEN=SECRET#top", "mysql://ann:SEC/RET@db/x"),
        *(f"https://host/x?n=1;my-{name}.2=SECRET" for name in ("token", "secret", "passw", "pwd", "key", "sig")),
        *("https://host/x?password=SECRET;pwd=SECRET", "https://host/x?X-Amz-Credential=SECRET&pwd=SECRET"),
    ],
)
@pytest.mark.parametrize(
    "sentence", ["{}", "the storage {} cannot be read", "storage='{}', mode=x", '"{}"', "{} \x1b[2K"]
)
def test_no_text_that_is_shown_has_a_secret_of_a_url(url: str, sentence: str) -> None:
    text = sentence.format(url)
    for shown in (escaped(text), str(InputError(text)), masked(masked(text))):
        assert "SEC" not in shown
        assert "RET" not in shown
        assert "***" in shown
        assert shown.startswith(text[: text.index("://")])


@pytest.mark.parametrize(
    "text",
    [
        "really?token=1",
        "a;key=2&pwd=3",
        "sqlite:///a/b.db",
        "https://host:8080/a?page=2",
        "ann@host",
        "a: b@c",
        "tcp://[::1]:29500",
    ],
)
def test_a_url_without_a_secret_is_shown_as_it_is(text: str) -> None:
    assert escaped(text) == text
    assert escaped("postgresql://ann@db/x") == "postgresql://ann@db/x"
    assert escaped("https://host/x?a=1&key=K;b=2&sig=S") == "https://host/x?a=1&key=***;b=2&sig=***", "and beside one"


def test_every_secret_of_a_text_is_hidden() -> None:
    text = "mysql://ann:{}@db/x is no copy of mysql://bob:{}@db/x, https://a/b?sig={} or https://a/c?sig={}"
    assert escaped(text.format("PA", "PB", "SA", "SB")) == text.format(*["***"] * 4)


def test_three_words_at_most_are_close_and_the_shortest_that_is_begun_comes_first() -> None:
    names = ["resnet50_wide", "resnet50", "resnet5", "resnet50d", "vit"]
    assert close_to("resnet50", names) == ["resnet50", "resnet50d", "resnet50_wide"]
    assert close_to("vit", ["vit_large", "vit_b"]) == ["vit_b", "vit_large"], "three letters begin a word"
    assert close_to("vi", ["vit_large_patch16"]) == [], "two do not"
    assert close_to("Batch-Size", ["batch_size", "BATCH"]) == ["batch_size", "BATCH"]


NO_MEMORY = (MemoryError(), RuntimeError("can't start new thread"), OSError(12, "Cannot allocate memory"))
NO_MEMORY += (
    ImportError("failed to map segment from shared object"),
    RuntimeError("error code 12 (Cannot allocate memory)"),
)
NO_MEMORY += (OSError(11, "Resource temporarily unavailable"), ImportError("cannot allocate memory in static TLS"))


@pytest.mark.parametrize("error", NO_MEMORY, ids=str)
def test_whatever_says_that_the_host_has_no_memory_or_thread_is_one_sentence(error: Exception) -> None:
    for place, where in ((None, ""), ("a file", " while a file was read")):
        assert str(out_of_memory(error, place)).startswith(f"out of memory{where} ({type(error).__name__}")
    several = RuntimeError("can't start new thread\n\n  in a pool")
    assert " (RuntimeError can't start new thread in a pool); allow more" in str(out_of_memory(several))


def test_another_error_says_nothing_of_memory() -> None:
    for error in (ValueError("Cannot allocate memory"), OSError(2, "No such file"), RuntimeError("a bug")):
        assert out_of_memory(error) is None


def test_the_reason_of_an_error_is_its_first_line_with_words_or_its_type() -> None:
    reasons = {"a reason\nmore": "a reason", "\n\n  late\nmore": "late", "": "ValueError", " \n ": "ValueError"}
    assert {text: reason_of(ValueError(text)) for text in reasons} == reasons


def test_all_lines_of_all_mistakes_are_collected_and_no_other_error() -> None:
    problems = ["first"]
    for mistake in (InputError("a", "b"), NewerFormat("c")):
        with collecting(problems):
            raise mistake
    with collecting(problems):
        pass
    assert problems == ["first", "a", "b", "c"]
    with pytest.raises(ValueError, match="bug"), collecting(problems):
        raise ValueError("bug")


def test_a_broken_image_may_be_skipped_unless_this_machine_lacks_a_package_for_it() -> None:
    says = "dataset: image 3, a\\n.png, cannot be decoded ({})"
    skip = "; remove or replace the file, or skip up to N of them with {}; `lockstep doctor` looks for all of them"
    broken = BrokenImage(3, "a\n.png", "truncated")
    assert str(broken) == says.format("truncated") + skip.format("dataset.skip=N")
    assert broken.told("--skip N") == says.format("truncated") + skip.format("--skip N")
    lacks = BrokenImage(3, "a\n.png", f"HEIC; {INSTALL} 'lockstep[photos]'")
    assert str(lacks) == says.format(f"HEIC; {INSTALL} 'lockstep[photos]'")
    assert [broken.needs_package, lacks.needs_package] == [False, True]
    assert not BrokenImage(3, f"{INSTALL}.png", "truncated").needs_package, "the reason says it, and no name"


def test_values_are_shown_as_they_are_typed_and_those_of_a_list_too() -> None:
    values = {"a": "'a'", 1: "1", 0.5: "0.5", None: "null", False: "false"}
    assert {value: errors.shown(value) for value in values} == values
    text = "['a', 1, 0.5, null, false, ['b'], a number of more than 30 digits]"
    assert errors.shown([*values, ["b"], 10**30]) == text
    assert errors.shown([1] * 40) == f"[{'1, ' * 25}1...", "cut at 80 characters"


def test_shares_and_many_mistakes_are_told_in_short() -> None:
    assert [percent(0.126), percent(0.5), percent(1), percent(0.126, ".1f")] == ["13 %", "50 %", "100 %", "12.6 %"]
    assert first_of(["a"] * 1005) == ["a"] * 5 + ["and 1,000 more"]


def test_a_package_that_is_absent_is_named_with_the_extra_that_has_it() -> None:
    check_installed("json", "metric=x", "photos")
    for extra, name in (("", "no_such_package"), ("photos", "photos")):
        with pytest.raises(InputError) as caught:
            check_installed("no_such_package", "metric=x", extra)
        says = "metric=x needs the package no_such_package, which is not installed; "
        assert str(caught.value) == f"{says}install it with pip install 'lockstep[{name}]'"


def test_a_host_without_memory_is_told_all_that_needs_less() -> None:
    error = out_of_memory(MemoryError("no  room"), "a file")
    assert str(error) == (
        "out of memory while a file was read (MemoryError no room); allow more (ulimit -v unlimited, ulimit -u), "
        "or use a smaller batch, loader.workers=0 or launcher.threads=1"
    )
    assert type(error) is errors.LockstepError, "nothing that the user typed is wrong"


def test_each_code_that_is_not_that_of_a_defect_is_of_one_kind_of_error() -> None:
    assert sorted(BY_EXIT_CODE) == [2, 74, 75, 76, 130]
    known = [InputError("a"), errors.Stopped("b")]
    assert [*map(errors.as_known, known)] == known
    unknown = errors.as_known(KeyError("a"))
    assert (type(unknown), str(unknown)) == (errors.LockstepError, "KeyError: 'a'")


@pytest.mark.parametrize("sign", [*"\n\r\t\0\x1b\x85\x9b", *"\u2028\u2029\u200e\u202e\ufeff", "\udc80"], ids=ascii)
def test_a_line_has_no_end_and_no_direction_in_it_but_joiners(sign: str) -> None:
    assert [errors.is_one_line(text) for text in (f"a{sign}", f"{sign}a", f"a{sign}b", sign)] == [False] * 4
    assert [*map(errors.is_one_line, ("", "a b", "a\u200cb", "\u200d", "a\u00a0b"))] == [True] * 5
