"""The launchers give the same run, and a signal saves it: with the real command and real processes."""

from __future__ import annotations

import signal
import socket
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch

from helpers import as_ranks, command, forked, losses, records, train, weights
from lockstep.runtime.forking import Fork
from lockstep.runtime.signals import leave
from processes import (
    ELASTIC,
    FRESH,
    JOB,
    PATIENCE,
    TORCHRUN,
    TWO,
    background,
    children,
    ended,
    processes,
    send,
    start,
    steps_done,
    stopped,
    summary,
    wait_for,
)

STEPS = 40


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that every other launcher must give too: two ranks by the elastic launcher."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    process = start(folder, *ELASTIC, f"steps={STEPS}")
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "ranks  2 processes on the CPU by AllReduce" in out
    return folder


@pytest.mark.slow
def test_forked_ranks_give_the_run_of_fresh_ones(reference: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, err = ended(start(folder, *FRESH, f"steps={STEPS}", "launcher=spawn"))
    assert code == 0, err
    assert_same(folder, reference)


def test_a_fork_leaves_what_its_parent_has_to_remove_at_its_end() -> None:
    assert forked("test_launchers:fork_beside_a_temporary_folder").out == "0 True\n"


def fork_beside_a_temporary_folder() -> None:
    folder = tempfile.TemporaryDirectory()
    fork = Fork(lambda: leave(0))
    fork.start()
    fork.join()
    print(fork.exitcode, Path(folder.name).is_dir(), flush=True)


@pytest.mark.slow
def test_ranks_import_nothing_of_ours_after_the_fork(tmp_path: Path) -> None:
    script = """
        import sys
        import lockstep
        import lockstep.job.worker, lockstep.runtime.guest  # of the call, before the fork
        from lockstep.job.prepare import job_of
        from lockstep.runtime.forking import import_for_ranks
        words = sys.argv[1:]
        import_for_ranks(job_of(words))
        before = set(sys.modules)
        lockstep.train(words)
        new = set(sys.modules) - before
        print(sorted(name for name in new if name.startswith(("lockstep", "tensorboard"))))
    """
    words = ("device=cpu", "steps=1", "telemetry.report=never", f"output_root={tmp_path}")
    done = command(sys.executable, "-c", textwrap.dedent(script), *words)
    assert done.out.endswith("\n[]\n"), done.err or done.out


@pytest.mark.slow
def test_torchrun_whose_rank_is_killed_gives_the_run_of_elastic_in_one_folder(
    reference: Path, tmp_path: Path
) -> None:
    """With forked ranks; test_signals.py has fresh ones."""
    torchrun = ("processes:agent", *TORCHRUN[1:], "--standalone", "--max-restarts=1", "--nproc-per-node=2")
    words = (*JOB, f"steps={STEPS}", "checkpoint.every=3", "strategy=allreduce", "launcher.threads=1")
    process = background(tmp_path, *torchrun, "train.py", *words, f"output_root={tmp_path}")

    def folder() -> Path:
        return next(tmp_path.glob("2*"), tmp_path)

    wait_for(lambda: process.poll() is not None or steps_done(folder()) >= 10)
    assert process.poll() is None, process.communicate()
    (parent,) = children(process.pid)
    send(signal.SIGKILL, min(children(parent)))
    code, err = ended(process)
    assert code == 0, err
    assert [path.name for path in tmp_path.iterdir() if path.name != "latest"] == [folder().name]
    assert_same(folder(), reference)


def assert_same(folder: Path, reference: Path) -> None:
    """The same losses and weights to the bit, and the log of either rank."""
    assert losses(folder) == losses(reference)
    actual, expected = weights(folder), weights(reference)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert sorted(path.name for path in (folder / "logs").iterdir()) == ["rank0.log", "rank1.log"]


def test_ranks_of_torchrun_say_a_mistake_once(tmp_path: Path) -> None:
    done = as_ranks("batch=100000", f"output_root={tmp_path}")
    assert [rank.code for rank in done] == [2, 2]
    assert [rank.err.count("batch is 100000") for rank in done] == [1, 0]
    assert not list(tmp_path.iterdir())


def test_the_lone_rank_of_a_launcher_steps_through_ddp_and_takes_the_steps_of_one_process(tmp_path: Path) -> None:
    one, launched = tmp_path / "one", tmp_path / "launched"
    words = (*JOB, "strategy=ddp", "launcher.ranks=1", "launcher.threads=1", "steps=5", f"output_root={tmp_path}")
    assert train(*words, f"hydra.run.dir={one}").code == 0
    (done,) = as_ranks(*words, f"hydra.run.dir={launched}", ranks=1)
    assert "1 process on the CPU by DDP" in " ".join(done.out.split()), done.err
    assert losses(launched) == losses(one)
    expected = weights(one)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(launched).items())


def test_a_signal_saves_and_a_resume_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, *TWO, "epochs=1000", "schedule=constant")
    wait_for(lambda: steps_done(folder) >= 3)
    assert "saved" in stopped(process)
    done = steps_done(folder)
    assert (summary(folder)["status"], summary(folder)["step"]) == ("stopped", done)
    assert not processes(folder)
    again = train("resume=latest", f"steps={done + 2}", f"output_root={tmp_path}")
    assert again.code == 0, again.err
    assert [line["step"] for line in records(folder) if "loss/train" in line] == list(range(1, done + 3))
    assert summary(folder)["status"] == "completed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "signal_to", "expected"),
    [
        (("steps=100000",), 1, 75),
        (("optimizer.lr=1e6", "precision=fp32", "steps=1000"), None, 76),
    ],
    ids=["stopped on the other", "not finite"],
)
def test_every_machine_of_a_job_ends_with_the_code_of_the_job(
    tmp_path: Path, overrides: tuple[str, ...], signal_to: int | None, expected: int
) -> None:
    folder = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"launcher.rendezvous=127.0.0.1:{server.getsockname()[1]}"
    job = (*FRESH, "launcher=elastic", "launcher.ranks=1", "launcher.nodes=2", place, f"steps={STEPS}", *overrides)
    words = [(*job, f"launcher.node_rank={number}") for number in (0, 1)]
    machines = [start(folder, *line, launch=("processes:agent",)) for line in words]
    if signal_to is not None:
        wait_for(lambda: steps_done(folder) >= 3)
        machines[signal_to].send_signal(signal.SIGUSR1)
    ends = [ended(process) for process in machines]
    assert [code for code, _ in ends] == [expected, expected], ends
    assert not any("Traceback" in err for _, err in ends), ends
    wait_for(lambda: not processes(folder))
