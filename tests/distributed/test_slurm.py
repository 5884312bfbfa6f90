"""Jobs of a real SLURM, whose daemons run here: submitted, as an array, by hand, stopped, queued again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import slurm_cluster
from helpers import ROOT, command, records, train, weights
from processes import JOB, ended, start, steps_done, summary, wait_for

pytestmark = pytest.mark.slow

STEPS = 6
TWO = (*JOB, "strategy=ddp", "launcher.threads=1", "device=cpu", "precision=fp64")
SLURM = ("launcher=slurm", "launcher.partition=main", "launcher.ranks=1")


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    if why := slurm_cluster.missing():
        pytest.skip(why)
    with slurm_cluster.cluster() as variables:
        yield variables


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job on one machine without SLURM."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    code, err = ended(start(folder, *TWO, f"steps={STEPS}", "launcher=spawn", "launcher.ranks=2"))
    assert code == 0, err
    return folder


def assert_same(folder: Path, alone: Path) -> None:
    expected = weights(alone)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(folder).items())


def queue(slurm: dict[str, str], *words: str) -> str:
    done = command("squeue", "--noheader", "--format", "%i %T", *words, **slurm)
    return done.out.strip()


def runs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if (path / "checkpoints").is_dir())


def test_a_job_on_two_machines_and_srun_by_hand_give_the_run_of_one(
    slurm: dict[str, str], alone: Path, tmp_path: Path
) -> None:
    told = (*TWO, f"steps={STEPS}")
    done = train(*told, *SLURM, "launcher.nodes=2", f"output_root={tmp_path}", **slurm)
    assert done.code == 0, done.err
    (folder,) = runs(tmp_path)
    assert f": {folder}" in done.out.replace("\n", "")
    by_hand = tmp_path / "by hand"
    words = ("srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "train.py")
    done = command(*words, *told, f"hydra.run.dir='{by_hand}'", f"output_root={tmp_path}", cwd=ROOT, **slurm)
    assert done.code == 0, done.err
    wait_for(lambda: not queue(slurm))
    assert_same(by_hand, alone)
    assert_same(folder, alone)
    assert (folder / "logs" / "slurm-1-1.log").is_file()  # of the second machine


def test_a_sweep_is_an_array(slurm: dict[str, str], tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    told = (*JOB, *SLURM, "steps=2", "seed=0,1", f"hydra.sweep.dir={sweep}", f"output_root={tmp_path}")
    done = train("-m", *told, "device=cpu", **slurm)
    assert done.code == 0, done.err
    number = done.out.split("submitted job ")[1].split("_")[0]
    assert all(f"submitted job {number}_{index} of SLURM" in done.out for index in (0, 1))
    wait_for(lambda: not queue(slurm))
    assert [summary(folder)["status"] for folder in runs(sweep)] == ["completed"] * 2


def test_a_job_that_makes_room_goes_on_where_it_was_and_a_cancelled_one_ends(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    told = (*JOB, *SLURM, "steps=100000", "schedule=constant", "checkpoint.every=1000", "launcher.cpus=4")
    done = train(*told, "launcher.nodes=2", "strategy=ddp", "device=cpu", f"output_root={tmp_path}", **slurm)
    assert done.code == 0, done.err
    (folder,) = runs(tmp_path)
    wait_for(lambda: steps_done(folder) >= 3)
    urgent = command("srun", "--partition=urgent", "--nodes=2", "--exclusive", "true", **slurm)
    assert urgent.code == 0, urgent.err
    stopped = steps_done(folder)
    assert summary(folder)["status"] == "stopped"
    wait_for(lambda: steps_done(folder) > stopped)
    steps = [line["step"] for line in records(folder) if "loss/train" in line]
    assert steps == list(range(1, len(steps) + 1))
    assert command("scancel", queue(slurm).split()[0], **slurm).code == 0
    wait_for(lambda: not queue(slurm))
    assert summary(folder)["status"] == "stopped"
