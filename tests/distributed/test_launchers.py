"""The launchers, their signals and their deaths, with the real command and real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import ROOT, command, losses, records, weights

STEPS = 40
JOB = ("batch=300", "optimizer=sgd", "telemetry.interval=1", "telemetry.tensorboard=false", "model.dropout=0")
TWO = ("strategy=ddp", "launcher.ranks=2", "launcher.threads=1")


def start(folder: Path, *overrides: str, launch: tuple[str, ...] = (sys.executable,)) -> subprocess.Popen[str]:
    """`train.py` in the background, its run folder at `folder`."""
    arguments = [*launch, "train.py", *JOB, f"hydra.run.dir={folder}", f"output_root={folder.parent}", *overrides]
    return subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Poll until `condition` holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.05)


def steps_done(folder: Path) -> int:
    return records(folder)[-1]["step"] if (folder / "metrics.jsonl").exists() and records(folder) else 0


def processes(folder: Path) -> dict[int, str]:
    """The living processes whose command names the run folder."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            continue
        if str(folder) in line and alive and int(entry.name) != os.getpid():
            found[int(entry.name)] = line
    return found


def ranks(folder: Path) -> list[int]:
    """The process numbers of the ranks under the elastic launcher."""
    return [number for number, line in processes(folder).items() if "lockstep.worker" in line]


def summary(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that every other launcher must give too: two ranks by the elastic launcher."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    process = start(folder, *TWO, f"steps={STEPS}")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "ranks  2 by DDP" in out
    return folder


@pytest.mark.parametrize("how", ["spawn", "torchrun"])
def test_every_launcher_gives_the_same_run(reference: Path, tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    process = (
        start(folder, *TWO, f"steps={STEPS}", "launcher=spawn")
        if how == "spawn"
        else start(folder, "strategy=ddp", "launcher.threads=1", f"steps={STEPS}", launch=launch)
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert losses(folder) == losses(reference)
    assert all((tensor == weights(reference)[name]).all() for name, tensor in weights(folder).items())
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank0.log", "rank1.log"]


def test_torchrun_makes_one_run_folder_for_all_ranks(tmp_path: Path) -> None:
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = command(*launch, "train.py", *JOB, "steps=1", "launcher.threads=1", f"output_root={tmp_path}")
    assert done.code == 0, done.err
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def test_torchrun_says_a_mistake_once(tmp_path: Path) -> None:
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = command(*launch, "train.py", "batch=100000", f"output_root={tmp_path}")
    assert done.code != 0
    assert done.err.count("batch is 100000") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "overrides"),
    [
        (signal.SIGTERM, TWO),
        (signal.SIGUSR1, TWO),
        (signal.SIGINT, (*TWO, "launcher=spawn")),
        (signal.SIGTERM, ("launcher=inline",)),
        (signal.SIGUSR1, ("launcher=inline",)),
    ],
)
def test_a_signal_saves_and_a_resume_goes_on(
    reference: Path, tmp_path: Path, number: signal.Signals, overrides: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    process = start(folder, *overrides, "epochs=1000", "schedule=constant")
    wait_for(lambda: steps_done(folder) >= 3)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "saved" in err
    assert "Traceback" not in err
    assert summary(folder)["status"] == "stopped"
    assert not processes(folder)
    stopped = steps_done(folder)
    again = command(sys.executable, "train.py", "resume=latest", f"steps={stopped + 2}", f"output_root={tmp_path}")
    assert again.code == 0, again.err
    assert [line["step"] for line in records(folder) if "loss/train" in line] == list(range(1, stopped + 3))
    assert summary(folder)["status"] == "completed"


def test_a_killed_rank_ends_the_job_with_a_word_and_leaves_nothing_alive(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, *TWO, "epochs=1000")
    wait_for(lambda: steps_done(folder) >= 3)
    os.kill(max(ranks(folder)), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 70
    assert "rank" in err
    assert summary(folder)["status"] == "failed"
    wait_for(lambda: not processes(folder), 6)


def test_restarts_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, *TWO, "launcher=elastic", "launcher.restarts=1", "steps=60", "checkpoint.every=5")
    wait_for(lambda: steps_done(folder) >= 12)
    os.kill(max(ranks(folder)), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert [line["step"] for line in records(folder) if "loss/train" in line] == list(range(1, 61))


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, *TWO, "epochs=1000")
    wait_for(lambda: steps_done(folder) >= 3)
    process.kill()
    process.communicate()
    wait_for(lambda: not processes(folder), 6)


@pytest.mark.slow
def test_six_jobs_at_once_get_a_port_each(tmp_path: Path) -> None:
    jobs = [
        start(tmp_path / str(number), *TWO, "steps=1", *(("launcher=spawn",) if number % 2 else ()))
        for number in range(6)
    ]
    for process in jobs:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
