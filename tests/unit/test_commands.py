"""Commands in messages: a shell and Hydra read them as they were meant."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config.commands import override, shell_command


@given(st.text(alphabet="ab1e.=,'\" \\[](){}:~$%é/#&;!*-_", min_size=1, max_size=12))
def test_every_text_comes_back_through_the_shell_and_hydra(text: str) -> None:
    (word,) = shlex.split(shell_command([override("resume", text)]))
    value = OverridesParser.create().parse_override(word).value()
    assert (value.text if isinstance(value, QuotedString) else value) == text


@pytest.mark.parametrize("text", ["outputs/1-digits", "photos/a_b.c"])
def test_a_plain_path_stays_plain(text: str) -> None:
    assert shell_command([override("resume", text)]) == f"resume={text}"


@pytest.mark.parametrize("text", ["null", "1e3", "true", "[a]", "a=b,c", "it's", 'say "x"', "a\\"])
def test_bash_reads_the_words_that_were_meant(text: str) -> None:
    words = ["python", "train.py", override("resume", text)]
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {shell_command(words)}"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == words
