"""No command line ends otherwise than by starting or by a sentence: a short part of the fuzz in `benchmarks`."""

from __future__ import annotations

import re

from helpers import forked


def test_no_command_line_ends_in_a_traceback_or_leaves_something_behind() -> None:
    done = forked("benchmarks/reliability/fuzz_command_line.py", "--overrides", "60", "--seed", "0")
    assert done.code == 0, done.out + done.err
    counts = re.match(r"(\d+) overrides in (\d+) command lines, .* 0 end otherwise\n$", done.out)
    assert counts is not None, done.out
    assert int(counts[1]) >= 60
