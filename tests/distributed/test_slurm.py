"""Jobs of a real SLURM, whose daemons run here: submitted, as an array, by hand, stopped, queued again."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import slurm_cluster
from helpers import ROOT, command, first_on_path, losses, records, train, weights
from lockstep.config.commands import override
from lockstep.core.launch_env import adopt_srun, launched_place
from lockstep.core.run import State
from lockstep.job.worker import own_gpu
from lockstep.records.ledger import Ledger
from processes import JOB, ended, start, steps_done, summary, wait_for

pytestmark = pytest.mark.slow

STEPS = 6
STOPPED = r"stopped at step (\d+)"
ALWAYS = (*JOB, "launcher.threads=1", "device=cpu", "schedule=constant")
TWO = (*ALWAYS, "strategy=allreduce", "precision=fp64")
SLURM = ("launcher=slurm", "launcher.partition=main", "launcher.ranks=1")
LONG = ("steps=100000", "checkpoint.every=1000")
# A `sitecustomize` module, which every fresh interpreter imports: a job waits at each line of its log, so that those
# that run until they are stopped leave the cores to others.
PACED = """
import json, time
dumps = json.dumps
json.dumps = lambda value, **options: (time.sleep(0.05 * ("step" in value)), dumps(value, **options))[1]
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if why := slurm_cluster.missing():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("paced")
    (folder / "sitecustomize.py").write_text(PACED)
    with slurm_cluster.cluster() as variables:
        yield {**variables, "PYTHONPATH": first_on_path(folder)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job on one machine without SLURM."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    code, err = ended(start(folder, *TWO, f"steps={STEPS}", "launcher=spawn", "launcher.ranks=2"))
    assert code == 0, err
    return folder


@pytest.fixture(scope="module")
def limited(slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job whose time is over while the sweep runs: SLURM looks at the limits every 30 s."""
    words = (*ALWAYS, *LONG, "name=limited", "launcher.time=1min", "launcher.save_before=55s")
    return submitted(slurm, tmp_path_factory.mktemp("limited"), *words)


def queue(slurm: dict[str, str], name: str) -> list[str]:
    """The numbers of the jobs of a name that have not ended."""
    done = command("squeue", "--noheader", "--format=%i", f"--name={name}", **slurm)
    assert done.code == 0, done.err
    return done.out.split()


def cancel(slurm: dict[str, str], name: str) -> None:
    """Cancel a job, and wait until it has ended."""
    assert command("scancel", f"--name={name}", **slurm).code == 0
    wait_for(lambda: not queue(slurm, name))


def runs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if (path / "checkpoints").is_dir())


def submitted(slurm: dict[str, str], folder: Path, *overrides: str) -> Path:
    """The run folder of a job that was submitted."""
    done = train(*overrides, *SLURM, f"output_root={folder}", **slurm)
    assert done.code == 0, done.err
    (run,) = runs(folder)
    assert f": {run}" in done.out.replace("\n", "")
    return run


def ranks_of(folder: Path) -> list[int]:
    """The rank processes of a run on its first machine."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0")
            if {b"TORCHELASTIC_RUN_ID=lockstep", f"LOCKSTEP_RUN_FOLDER={folder}".encode()} <= {*variables}:
                pids.append(int(entry.name))
    return pids


def log_of(folder: Path) -> str:
    """What a job has said on its first machine."""
    return "".join(path.read_text() for path in (folder / "logs").glob("slurm-*-0.log"))


def each_step_once(folder: Path) -> bool:
    steps = [line["step"] for line in records(folder) if "loss/train" in line]
    return steps == list(range(1, len(steps) + 1))


def test_a_job_on_two_machines_outlives_a_killed_rank_makes_room_for_srun_by_hand_and_ends_when_it_is_cancelled(
    slurm: dict[str, str], alone: Path, tmp_path: Path
) -> None:
    words = ("name=two", "launcher.nodes=2", "launcher.cpus=4", "launcher.restarts=1")
    folder = submitted(slurm, tmp_path, *TWO, *LONG, *words)
    wait_for(lambda: ranks_of(folder))
    os.kill(ranks_of(folder)[0], signal.SIGKILL)
    wait_for(lambda: steps_done(folder) >= STEPS)
    assert log_of(folder).count("all were started again: restart 1") == 1

    by_hand = tmp_path / "by hand"
    srun = ("srun", "--partition=urgent", "--nodes=2", "--ntasks-per-node=1", "--exclusive", sys.executable)
    paths = (f"hydra.run.dir='{by_hand}'", f"output_root={tmp_path}")
    done = command(*srun, "train.py", *TWO, f"steps={STEPS}", *paths, cwd=ROOT, **slurm)
    assert done.code == 0, done.err
    stopped = int(re.findall(STOPPED, log_of(folder))[0])
    wait_for(lambda: steps_done(folder) > stopped)

    cancel(slurm, "two")
    assert each_step_once(folder)
    assert summary(folder)["status"] == "stopped"
    expected, actual = weights(alone), weights(by_hand)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert losses(folder)[:STEPS] == losses(by_hand) == losses(alone)


@pytest.mark.parametrize("words", [("--gpus-per-task=1",), ("--gpus-per-node=2",)], ids=["one each", "all"])
def test_each_task_of_srun_takes_another_gpu(
    slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """SLURM has device files in place of GPUs here, and how many of them torch would see is what it says."""
    names = ("SLURM_STEP", "SLURM_JOB_ID", "SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "CUDA_VISIBLE_DEVICES")
    show = f"import json, os; print(json.dumps({{k: v for k, v in os.environ.items() if k.startswith({names})}}))"
    done = command("srun", "--nodes=1", "--ntasks=2", *words, sys.executable, "-c", show, cwd=ROOT, **slurm)
    assert done.code == 0, done.err
    places = []
    for environment in map(json.loads, done.out.splitlines()):
        with monkeypatch.context() as task:
            for name, value in environment.items():
                task.setenv(name, value)
            visible = environment["CUDA_VISIBLE_DEVICES"].split(",")
            task.setattr(torch.cuda, "device_count", lambda visible=visible: len(visible))
            task.setenv("RANK", "")  # what `adopt_srun` sets is undone too
            task.delenv("RANK")
            adopt_srun()
            place = launched_place()
            places.append((place.rank, place.local_size, visible[own_gpu(place.local_rank)]))
    assert sorted(places) == [(0, 2, "0"), (1, 2, "1")]


def test_a_sweep_is_an_array(slurm: dict[str, str], limited: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "it's 100% a #sweep"
    words = (*JOB, *SLURM, "steps=2", "seed=0,1", override("hydra.sweep.dir", sweep), f"output_root={tmp_path}")
    words = (*words, 'name="it\'s #1"')
    done = train("-m", *words, "device=cpu", **slurm)
    assert done.code == 0, done.err
    number = done.out.split("submitted job ")[1].split("_")[0]
    assert all(f"submitted job {number}_{index} of SLURM" in done.out for index in (0, 1))
    assert "submitted job" not in train("-m", *words, "device=cpu", **slurm).out, "the jobs are in the queue already"
    wait_for(lambda: not queue(slurm, "it's #1"))
    assert [summary(folder)["status"] for folder in runs(sweep)] == ["completed"] * 2
    assert all((sweep / f"slurm-{number}_{index}.log").is_file() for index in (0, 1))
    assert [(record.state, record.submitted) for record in Ledger(sweep).records()] == [
        (State.done, f"{number}_{index}") for index in (0, 1)
    ]


def test_a_job_whose_time_is_over_is_saved_and_goes_on_where_it_was(slurm: dict[str, str], limited: Path) -> None:
    wait_for(lambda: re.search(STOPPED, log_of(limited)))
    stopped = int(re.findall(STOPPED, log_of(limited))[-1])
    wait_for(lambda: steps_done(limited) > stopped)
    cancel(slurm, "limited")
    assert each_step_once(limited)
