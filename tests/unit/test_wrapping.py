"""Sentences on a terminal: broken between words, but in no key, override, path or command."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.core.terminal import fill, width

SOURCE = Path(__file__).parents[2] / "src"
SAYS = {"warn", "show", "say", "note", "show_warning", "Finding", "InputError", "LockstepError", "StorageError"}
# What must stay on one line, found without the code under test.
COPIED = re.compile(
    r"`[^`]+`|[\w.]+=\S+|lockstep [a-z-]+(?: RUN)?(?: --?[a-z]+)*(?: \S+=\S+)*|pip install '\S+'|cd ~", re.ASCII
)


def messages() -> Iterator[str]:
    """Every sentence of the source, with a value of some length in each place of one."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "attr", getattr(getattr(node, "func", None), "id", ""))
            for part in node.args if isinstance(node, ast.Call) and name in SAYS else ():
                pieces = part.values if isinstance(part, ast.JoinedStr) else [part]
                texts = [getattr(piece, "value", "") for piece in pieces]
                text = "".join(text if isinstance(text, str) else "outputs/20260102" for text in texts)
                if len(text) > 40 and "\n" not in text:
                    yield f"lockstep: {text}"


@pytest.mark.parametrize(
    ("variable", "columns", "expected"),
    [("", 100, 100), ("", 0, 80), ("", None, 80), ("x", 0, 80), ("40", 100, 40), ("0", 100, 100), ("-5", 90, 90)],
)
def test_a_terminal_without_a_width_has_80_columns(
    monkeypatch: pytest.MonkeyPatch, variable: str, columns: int | None, expected: int
) -> None:
    def size(number: int) -> os.terminal_size:
        if columns is None:
            raise OSError("no terminal")
        return os.terminal_size((columns, 24))

    monkeypatch.setenv("COLUMNS", variable)
    monkeypatch.setattr(os, "get_terminal_size", size)
    assert width() == expected


@pytest.mark.parametrize("has", [(0, 1, 2), (1, 2), (2,), ()])
def test_the_width_is_that_of_the_first_standard_stream_that_is_a_terminal(
    monkeypatch: pytest.MonkeyPatch, has: tuple[int, ...]
) -> None:
    def size(number: int) -> os.terminal_size:
        if number not in has:
            raise OSError("no terminal")
        return os.terminal_size((100 + number, 24))

    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", size)
    assert width() == (100 + has[0] if has else 80)


def test_a_long_word_is_a_line_and_words_with_hyphens_are_whole() -> None:
    lines = ["one", f"   {'x' * 30}", "   a-word-with-hyphens", "   two"]
    assert fill(" ".join(map(str.strip, lines)), 20, 3).split("\n") == lines


@pytest.mark.parametrize("width", [80, 120])
def test_no_message_breaks_what_a_user_copies(width: int) -> None:
    sentences = [*messages()]
    assert len(sentences) > 300
    for sentence in sentences:
        lines = fill(sentence, width, 2).split("\n")
        assert " ".join([lines[0], *(line[2:] for line in lines[1:])]).split() == sentence.split()
        for line in lines:
            spaced = re.sub(r"`[^`]+`|lockstep .*|(?<!\w)['\"].+['\"]", "X", line.strip())
            assert len(line) <= width or " " not in spaced, line
        for copied in COPIED.findall(sentence):
            assert any(copied in line for line in lines), (copied, lines)


@pytest.mark.parametrize(
    "command",
    [
        "lockstep train -m model=resnet18,resnet50d 'train.sizes={0: 128, 50%: 192}' seed=1,2,3",
        "wandb sync outputs/20260102-030405-digits/wandb/offline-run-20260102_030405-abcdefgh",
        "python -m pip",
        "`a b c d`",
        "'train.sizes={0: 128, 50%: 192, 80%: 224}'",
        '"the class of a user"',
        "mlflow ui --backend-store-uri sqlite:///outputs/mlflow.db",
        "tensorboard --logdir outputs/20260102",
        "pip install 'lockstep[photos]'",
        "cd ~/my/project",
        "lockstep export RUN --to torch",
    ],
)
def test_a_command_moves_to_the_next_line_as_a_whole(command: str) -> None:
    text = f"the run stopped before its end; rerun it with {command} to continue"
    lines = fill(text, 56, 2).split("\n")
    assert any(command in line for line in lines)
    assert " ".join(line.strip() for line in lines) == text


def test_a_number_stays_with_its_percent_sign_and_an_apostrophe_within_a_word_begins_nothing() -> None:
    assert fill("a score of 98.5 % top-1", 16, 1) == "a score of\n 98.5 % top-1"
    assert fill("the run's best score and the user's", 16, 0) == "the run's best\nscore and the\nuser's"
