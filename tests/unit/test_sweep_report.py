"""The ledger, the messages and the report of the jobs of a sweep, run in this process."""

from __future__ import annotations

import atexit
import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from helpers import train_here
from lockstep.config.invocation import Invocation
from lockstep.core.errors import InputError, NumericalError, RankFailed
from lockstep.sweep.jobs import LEDGER, run_sweep_job
from lockstep.sweep.report import Report


def job_of(folder: Path, number: int = 0) -> Invocation:
    return Invocation(overrides=("seed=1",), command="", sweep=True, number=number, folder=folder, hydra="")


def fails(error: Exception) -> Any:
    def job() -> NoReturn:
        raise error

    return job


def settings(folder: Path) -> DictConfig:
    return OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}})


@pytest.fixture(autouse=True)
def _at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atexit, "register", lambda *_: None)


def test_a_failed_rank_of_a_sweep_keeps_its_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_sweep_job(fails(RankFailed("rank 1 failed: KeyError: 3", "Traceback ...\nKeyError: 3")), job_of(tmp_path, 7))
    assert capsys.readouterr().err == "Traceback ...\nKeyError: 3\nlockstep: job 7: rank 1 failed: KeyError: 3\n"
    assert json.loads((tmp_path / LEDGER).read_text())["error"] == "rank 1 failed: KeyError: 3"


@pytest.mark.parametrize("error", [InputError("no"), NumericalError("the loss is not finite", 3)])
def test_another_error_of_a_sweep_is_shown_with_its_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    run_sweep_job(fails(error), job_of(tmp_path))
    assert capsys.readouterr().err == f"lockstep: job 0: {error}\n"


def test_a_second_sweep_in_a_folder_reports_its_own_jobs_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = Report(), Report()
    first.on_multirun_start(settings(tmp_path))
    run_sweep_job(fails(InputError("the first one failed")), job_of(tmp_path))
    with pytest.raises(SystemExit) as left:
        first.on_multirun_end(settings(tmp_path))
    assert left.value.code == 2
    capsys.readouterr()
    second.on_multirun_start(settings(tmp_path))
    run_sweep_job(lambda: 90.0, job_of(tmp_path))
    second.on_multirun_end(settings(tmp_path))
    assert "the first one failed" not in capsys.readouterr().out
    assert len((tmp_path / LEDGER).read_text().splitlines()) == 2


def test_a_strict_job_leaves_its_deterministic_kernels_to_itself(tmp_path: Path) -> None:
    train_here(tmp_path / "strict", "repro=strict", "steps=1", "launcher.ranks=1")
    assert torch.are_deterministic_algorithms_enabled()
    train_here(tmp_path / "exact", "steps=1")
    assert not torch.are_deterministic_algorithms_enabled()
