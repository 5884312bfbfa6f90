"""`hydra/launcher=ray`: the jobs of a sweep on a cluster of two nodes, of which one is lost."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers import losses, train_here
from hydra_plugins.lockstep.sweeps import RAY_CONFIG
from lockstep.core.errors import InputError
from lockstep.records.ledger import Ledger
from lockstep.records.record import Record
from lockstep.sweeps.devices import Needs
from lockstep.sweeps.pool import SweepJob
from lockstep.sweeps.ray_launcher import RayLauncher, RayTask
from processes import PATIENCE, background, close, ended, processes, wait_for

JOB = ("model=linear", "optimizer=sgd", "device=cpu", "steps=1500", "schedule=constant", "launcher.threads=1")
JOB = (*JOB, "telemetry.interval=50", "logger=jsonl")
LINE = ("-m", "seed=1,2", *JOB, "checkpoint.every=50", "hydra/launcher=ray")


def records(root: Path) -> list[Any]:
    return [record for folder in root.glob("sweeps/*") for record in Ledger(folder).records()]


def both_held(root: Path, *, after: float = 0.0) -> bool:
    """Suspend each job once it has saved a checkpoint since a time, so that it cannot end; whether both are."""
    saved = {path.parent.parent.name: path.lstat().st_mtime for path in root.glob("sweeps/*/*/checkpoints/last")}
    held = [record.pid for record in records(root) if saved.get(record.folder, 0.0) > after]
    for pid in held:
        os.kill(pid, signal.SIGSTOP)
    return len(held) == 2


def asked_to_stop(pid: int) -> bool:
    """Whether a suspended process has a SIGTERM to act on."""
    (pending,) = re.findall(r"ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


def release(root: Path) -> None:
    for record in records(root):
        with suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGCONT)


@pytest.fixture
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    # What a script starts in its background ignores Ctrl-C, and so do the tasks of such a cluster.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes.lost = nodes.add_node(num_cpus=1)
    finally:
        signal.signal(signal.SIGINT, before)
    yield nodes
    nodes.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_stopped_line_goes_on_and_the_job_of_a_lost_node_goes_on_elsewhere(tmp_path: Path, cluster: Any) -> None:
    words = ("train.py", *LINE, f"output_root={tmp_path}", f"hydra.launcher.address='{cluster.address}'")
    process = background(tmp_path, sys.executable, *words)
    try:
        wait_for(lambda: both_held(tmp_path))
        os.kill(process.pid, signal.SIGINT)
        wait_for(lambda: all(asked_to_stop(record.pid) for record in records(tmp_path)))
        release(tmp_path)
        code, err = ended(process)
        if "An unexpected system state has occurred" in err:  # Ray cancels a task at the moment of its end
            pytest.skip("the driver of Ray aborted, as in its issues #54116 and #54798")
        assert code == 75, err
        assert [record.state for record in records(tmp_path)] == ["stopped", "stopped"]
        assert processes(tmp_path) == set()
        stopped = max(record.ended for record in records(tmp_path))
        process = background(tmp_path, sys.executable, *words)
        wait_for(lambda: both_held(tmp_path, after=stopped))
        before = [record.pid for record in records(tmp_path)]
        cluster.remove_node(cluster.lost, allow_graceful=False)
        release(tmp_path)
        _, err = process.communicate(timeout=PATIENCE)
        assert process.wait() == 0, err
    finally:
        close([process])
    assert [record.state for record in records(tmp_path)] == ["done", "done"]
    (moved,) = (record for record, pid in zip(records(tmp_path), before, strict=True) if record.pid != pid)
    (folder,) = tmp_path.glob(f"sweeps/*/{moved.folder}")
    alone = train_here(tmp_path / "alone", *JOB, f"seed={moved.number + 1}")
    assert losses(folder) == losses(alone)


def launcher(**settings: Any) -> RayLauncher:
    return RayLauncher(**{key: value for key, value in {**RAY_CONFIG, **settings}.items() if key != "_target_"})


def test_without_ray_the_sentence_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"not installed; install it with pip install 'lockstep\[ray\]'"):
        launcher()._launch(Ledger(tmp_path), [["seed=1"]], 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_is_not_there_is_named_at_once(tmp_path: Path, address: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(InputError, match=rf"Ray cannot be reached at {address} \(.*refused.*ray start --head"):
        launcher(address=address)._launch(Ledger(tmp_path), [["seed=1"]], 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("gpus", "least"), [(0, {"num_gpus": 0, "num_cpus": 3}), (1, {"num_gpus": 1, "num_cpus": 1})]
)
def test_a_task_has_the_devices_the_retries_and_the_name_of_its_job(
    gpus: int, least: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[dict[str, Any]] = []

    def remote(**options: Any) -> Any:
        tasks.append(options)
        return lambda function: SimpleNamespace(remote=lambda *arguments: "sentinel")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(remote=remote))  # type: ignore[arg-type]
    for wanted_gpus in (gpus, 4 * gpus):  # no job gets more than the largest node has
        record = Record(number=0, overrides=(), folder="000-a")
        job = SweepJob(record, Needs(gpus=wanted_gpus, cores=9), lambda: None, ())
        RayTask(Ledger(tmp_path), job, Needs(gpus=1, cores=3), 7)
    assert tasks == [{**least, "max_retries": 7, "name": "000-a"}] * 2
