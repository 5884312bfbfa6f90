"""Where words go."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep import log
from lockstep.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.at(tmp_path / "run")


def test_main_logs_to_the_run_and_to_its_own_file(run: RunDir) -> None:
    with log.rank_logging(run, 0, separate=False):
        log.logger.info("a word")
    log.logger.info("a word too late")
    for path in (run.log, run.rank_log(0)):
        (line,) = path.read_text().splitlines()
        assert line.endswith(" INFO a word")


def test_another_rank_logs_to_its_own_file_only(run: RunDir) -> None:
    with log.rank_logging(run, 1, separate=False):
        log.logger.info("a word")
    assert "a word" in run.rank_log(1).read_text()
    assert not run.log.exists()


def test_what_is_said_and_warned_is_one_line_as_it_stands_and_kept(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    long = " ".join(["[bold]word[/bold]"] * 30)
    with log.rank_logging(run, 0, separate=False):
        log.say(long)
        log.warn("careful")
    assert capsys.readouterr().out.splitlines() == [long, "warning: careful"]
    kept = run.log.read_text().splitlines()
    assert kept[0].endswith(f"INFO {long}")
    assert kept[1].endswith("WARNING careful")
