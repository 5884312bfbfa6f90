"""A job on two machines, which are network namespaces: real links that are cut, real processes that are killed."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers import losses, records, weights
from namespaces import Machine, Unavailable, two_machines
from processes import TORCHRUN, Process, background, ended, processes, start, steps_done, wait_for

pytestmark = pytest.mark.slow

STEPS = 40
JOB = (
    *("strategy=allreduce", "launcher.threads=1", "device=cpu", "precision=fp64", "train.eval_every=1000"),
    *(f"steps={STEPS}", "checkpoint.every=5", "schedule=constant"),
)


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    try:
        with two_machines() as two:
            yield two
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job on one machine, whose weights are expected of the others."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    code, err = ended(start(folder, *JOB, "launcher=spawn", "launcher.ranks=2"))
    assert code == 0, err
    return folder


def begin(machine: Machine, main: Machine, folder: Path, *overrides: str) -> Process:
    """The command of a job of two machines on one of them."""
    place = (f"launcher.rendezvous={main.address}:29500", "launcher=elastic", "launcher.ranks=1")
    return start(folder, *JOB, *place, "launcher.nodes=2", *overrides, launch=machine.copy)


def assert_done(main: Process, other: Process, folder: Path) -> None:
    ends = [ended(process) for process in (main, other)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert [line["step"] for line in records(folder) if "loss/train" in line] == list(range(1, STEPS + 1))
    wait_for(lambda: not processes(folder))


def test_a_cut_link_and_a_machine_that_dies_and_returns_leave_the_run_as_on_one_machine(
    machines: tuple[Machine, Machine], alone: Path, tmp_path: Path
) -> None:
    one, two = machines
    """test_slurm.py kills a rank of two machines."""
    folder, overrides = tmp_path / "run", ("launcher.restarts=1", "launcher.timeout=60s")
    numbered = "launcher.node_rank=1"
    main, other = (
        begin(one, one, folder, *overrides, "launcher.node_rank=0"),
        begin(two, one, folder, *overrides, numbered),
    )
    wait_for(lambda: steps_done(folder) >= 6)
    one.cut()
    time.sleep(2)
    cut_at = steps_done(folder)
    assert cut_at < STEPS
    one.mend()
    wait_for(lambda: steps_done(folder) > cut_at)
    one.cut()  # the machine loses its power: nobody is told that its processes have ended
    for pid in two.pids():
        os.kill(pid, signal.SIGKILL)
    assert other.wait() == -signal.SIGKILL
    one.mend()
    assert_done(main, begin(two, one, folder, *overrides, numbered), folder)
    expected = weights(alone)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(folder).items())


def test_a_machine_may_come_later_and_go_earlier(
    machines: tuple[Machine, Machine], alone: Path, tmp_path: Path
) -> None:
    one, two = machines
    folder, overrides = tmp_path / "run", ("launcher.nodes=1:2", "launcher.restarts=1", "steps=100000")
    main = begin(one, one, folder, *overrides)
    wait_for(lambda: steps_done(folder) >= 3)
    other = begin(two, one, folder, *overrides)
    wait_for(lambda: len(two.pids()) > 2)  # the agent, what it forks ranks from, and a rank
    came_at = steps_done(folder)
    wait_for(lambda: steps_done(folder) > came_at)
    os.kill(other.pid, signal.SIGTERM)
    assert ended(other)[0] == 75
    left_at = steps_done(folder)
    wait_for(lambda: steps_done(folder) > left_at + 2)
    os.kill(main.pid, signal.SIGTERM)
    assert ended(main)[0] == 75
    pairs = list(zip(losses(folder), losses(alone), strict=False))
    assert len(pairs) > 5
    assert all(math.isclose(loss, expected, rel_tol=1e-10) for loss, expected in pairs)


def test_a_machine_that_does_not_see_the_run_folder_says_so_on_both(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    one, two = machines
    shared, overrides = tmp_path / "shared" / "runs", ("launcher=elastic", "launcher.nodes=2", "launcher.ranks=1")
    shared.parent.mkdir()
    command = (
        "train.py",
        *overrides,
        f"launcher.rendezvous={one.address}:29500",
        "device=cpu",
        f"output_root={shared}",
    )
    hide = "import subprocess, sys; subprocess.run(['mount', '-t', 'tmpfs', 'none', sys.argv[1]], check=True); "
    hidden = ("-c", hide + "import forks; forks.run(sys.path, *sys.argv[2:])", str(shared.parent))
    main = background(shared, *one.copy, *command)
    other = background(shared, *two.copy, *hidden, *command)
    for process in (main, other):
        code, err = ended(process)
        assert code == 2, err
        assert "put it on a file system that all machines share: output_root=FOLDER" in err
    assert not shared.exists()


C10D = ("--rdzv-backend=c10d",)


@pytest.mark.parametrize(
    "launch",
    [
        # By itself torchrun does not know the address as one of a machine whose own name is 127.0.1.1.
        (*TORCHRUN[1:], "--nnodes=2", "--rdzv-endpoint={main}:29500", *C10D, "--rdzv-conf=is_host={hosts}"),
        ("RANK={node}", "WORLD_SIZE=2", "MASTER_ADDR={main}", "MASTER_PORT=29500"),
    ],
    ids=["torchrun", "by hand"],
)
def test_ranks_that_others_start_on_two_machines_give_the_run_of_one(
    machines: tuple[Machine, Machine], alone: Path, tmp_path: Path, launch: tuple[str, ...]
) -> None:
    folder, started = tmp_path / "run", []
    for node, machine in enumerate(machines):
        words = [word.format(node=node, hosts=1 - node, main=machines[0].address) for word in launch]
        variables = dict(word.split("=") for word in words if word[0].isupper())
        launched = (*machine.copy, *(word for word in words if not word[0].isupper()))
        started.append(start(folder, *JOB, "steps=4", launch=launched, **variables))
    for process in started:
        code, err = ended(process)
        assert code == 0, err
    assert losses(folder) == losses(alone)[:4]
    wait_for(lambda: not processes(folder))
