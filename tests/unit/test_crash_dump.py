"""The crash dump of a run with a numerical error, and how the run ends if the dump cannot be written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from helpers import train_here
from lockstep.checkpoint.writing import Checkpointer
from lockstep.core.errors import NumericalError, StorageError
from lockstep.core.run_dir import RunDir
from lockstep.telemetry import sinks
from lockstep.telemetry.meter import Telemetry

DIVERGING = ("optimizer=sgd", "optimizer.lr=1e6", "steps=8", "train.eval_every=100%", "checkpoint.every=100%")


def test_a_crash_dump_without_room_on_the_disk_is_a_warning_and_leaves_nothing(
    tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]], capsys: pytest.CaptureFixture[str]
) -> None:
    with full_disk(20_000), pytest.raises(NumericalError):  # enough for the batch, too little for the weights
        train_here(tmp_path / "run", *DIVERGING)
    assert "incident could not be written" in capsys.readouterr().out
    assert not RunDir(tmp_path / "run").incident.exists()


def test_a_numerical_end_stays_one_when_closing_the_files_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed = []

    def failing(sink: sinks.JsonLines) -> None:
        sink.file.close()
        raise StorageError(f"{sink.path} cannot be written")

    def close(part: Telemetry | Checkpointer, whole: Callable[..., None]) -> None:
        closed.append(type(part).__name__)
        whole(part)

    for part in (Telemetry, Checkpointer):
        monkeypatch.setattr(part, "close", lambda self, whole=part.close: close(self, whole))
    monkeypatch.setattr(sinks.JsonLines, "close", failing)
    with pytest.raises(NumericalError):
        train_here(tmp_path / "run", *DIVERGING)
    assert closed == ["Checkpointer", "Telemetry"]
    assert "metrics.jsonl cannot be written" in capsys.readouterr().out
    assert (RunDir(tmp_path / "run").incident / "incident.json").is_file()
