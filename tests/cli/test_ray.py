"""`hydra/launcher=ray`: the jobs of a sweep on a cluster of two nodes, of which one is lost."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from helpers import losses, train_here, view_of
from hydra_plugins.lockstep.sweeps import RAY_CONFIG
from lockstep.core.errors import InputError
from lockstep.records.ledger import Identity, Ledger
from lockstep.records.record import Record
from lockstep.runtime.host import VISIBLE
from lockstep.sweeps import ray_launcher
from lockstep.sweeps.devices import Needs, Share
from lockstep.sweeps.pool import SweepJob
from lockstep.sweeps.pool_launcher import PoolLauncher
from lockstep.sweeps.ray_launcher import Cluster, RayLauncher, RayTask, run_on_node
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
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")  # on a busy machine the tasks would wait for all others

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
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in before} == {os.getpriority(os.PRIO_PROCESS, 0)}
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
    monkeypatch.setitem(sys.modules, "ray", None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"not installed; install it with pip install 'lockstep\[ray\]'"):
        launcher()._launch(Ledger(tmp_path), [["seed=1"]], 0)
    assert not list(tmp_path.iterdir())


def test_a_ray_of_this_machine_counts_nothing_and_does_not_yield_to_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=lambda *_, **__: None))  # type: ignore[arg-type]
    launcher(address=None)._connect()
    assert os.environ == {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_is_not_there_is_named_at_once(tmp_path: Path, address: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(InputError, match=rf"Ray cannot be reached at {address} \(.*refused.*ray start --head"):
        launcher(address=address)._launch(Ledger(tmp_path), [["seed=1"]], 0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("gpus", "largest", "least"),
    [
        (0, 1, {"num_gpus": 0, "num_cpus": 3}),
        (1, 1, {"num_gpus": 1, "num_cpus": 1}),
        (1, 0, {"num_gpus": 0, "num_cpus": 3}),
    ],
)
def test_a_task_has_the_devices_the_retries_and_the_name_of_its_job(
    gpus: int, largest: int, least: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[dict[str, Any]] = []

    def remote(**options: Any) -> Any:
        tasks.append(options)
        return lambda function: SimpleNamespace(remote=lambda *arguments: "sentinel")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(remote=remote))  # type: ignore[arg-type]
    for wanted_gpus in (gpus, 4 * gpus):  # no job gets more than the largest node has
        record = Record(number=0, overrides=(), folder="000-a")
        job = SweepJob(record, Needs(gpus=wanted_gpus, cores=9), lambda: None, ())
        RayTask(Ledger(tmp_path), job, Needs(gpus=largest, cores=3), 7)
    assert tasks == [{**least, "max_retries": 7, "name": "000-a"}] * 2


def test_the_jobs_of_a_line_are_tasks_with_at_most_the_devices_of_the_largest_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ray(monkeypatch)
    tasks: list[tuple[object, ...]] = []
    monkeypatch.setattr(ray_launcher, "RayTask", lambda *facts: tasks.append(facts))
    ledger, cluster = Ledger(tmp_path), Cluster(["0", "1"], 8)
    ledger.create(Identity(swept=("seed",)))
    of_ray = launcher(retries=4)
    pool = of_ray._pool(ledger, cluster, view_of(ledger))
    job = SweepJob(Record(number=0, overrides=(), folder="000-a"), Needs(gpus=9, cores=99), lambda: None, ())
    pool.start(ledger, job, Share())
    assert tasks == [(ledger, job, Needs(2, 8), of_ray.retries)]


class Ray(ModuleType):
    """A Ray that notes what it is asked for: `results` are those of its tasks, by the tasks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, results: dict[str, Any] | None = None) -> None:
        super().__init__("ray")
        self.results, self.calls, self.listed = results or {}, list[Any](), list[dict[str, Any]]()
        error = type("RayError", (Exception,), {})
        self.exceptions = SimpleNamespace(RayError=error, TaskCancelledError=type("TaskCancelledError", (error,), {}))
        monkeypatch.setitem(sys.modules, "ray", self)

    def init(self, address: str, **options: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        self.calls.append((address, options))

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def nodes(self) -> list[dict[str, Any]]:
        return self.listed

    def wait(self, tasks: list[str], timeout: float) -> tuple[list[str], list[str]]:
        self.calls.append((tasks, timeout))
        ready = [task for task in tasks if task in self.results]
        return ready, [task for task in tasks if task not in ready]

    def get(self, task: str) -> Any:
        if isinstance(self.results[task], Exception):
            raise self.results[task]
        return self.results[task]

    def cancel(self, task: str) -> None:
        self.calls.append(f"cancel {task}")

    def remote(self, **options: Any) -> Any:
        return lambda function: SimpleNamespace(remote=lambda *arguments: "task")


@pytest.mark.parametrize("address", [None, "127.0.0.1:{}", "ray://127.0.0.1:{}", "auto"])
def test_a_cluster_is_joined_and_one_that_starts_here_has_no_dashboard(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, before = Ray(monkeypatch), signal.signal(signal.SIGTERM, lambda number, frame: None)
    own = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("RAY_worker_niceness", "5")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            place = address and address.format(server.getsockname()[1])
            launcher(address=place)._connect()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    usual = {"log_to_driver": False, "logging_level": "ERROR"}
    assert ray.calls == [(place or "local", {**usual, **({} if address else {"include_dashboard": False})})]
    assert [value for name, value in os.environ.items() if name.endswith("_niceness")] == ["5"], "as the user says"


def test_ray_ends_with_the_line_also_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        ray.calls.append(arguments[1:])
        raise KeyError

    ray = Ray(monkeypatch)
    monkeypatch.setattr("lockstep.sweeps.ray_launcher.check_installed", lambda *_: None)
    monkeypatch.setattr(PoolLauncher, "_launch", fails)
    ledger = Ledger(tmp_path)
    with pytest.raises(KeyError):
        launcher()._launch(ledger, [["seed=1"]], 3)
    assert ray.calls[1:] == [(ledger, [["seed=1"]], 3), "shutdown"]


def test_a_cluster_is_as_large_as_its_largest_node_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(monkeypatch)
    assert Cluster.of_nodes().all == Needs(0, 0)
    kinds = ({"CPU": 4.0, "GPU": 2.0}, {"CPU": 8.0}, {"GPU": 1.0, "CPU": 1.0}, {"CPU": 64.0, "GPU": 8.0})
    ray.listed = [{"Resources": kind, "Alive": number < 3} for number, kind in enumerate(kinds)]
    cluster = launcher()._devices()
    assert (cluster.gpus, cluster.cores, cluster.all) == (["0", "1"], 8, Needs(2, 8))
    for _ in range(3):
        assert cluster.take(Needs(gpus=2)) == Share(), "Ray shares out the devices"
    cluster.give_back(Share(), "kind", 3)
    assert (cluster.gpus, cluster.of_kind) == (["0", "1"], {})


def test_the_tasks_of_ray_are_the_processes_of_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Ray(monkeypatch)
    devices: Any = SimpleNamespace(all=Needs(0, 4))
    job = SweepJob(Record(number=0, overrides=(), folder="000-a"), Needs(cores=1), lambda: None, ())
    pool = launcher(jobs=3)._pool(Ledger(tmp_path), devices, "view")  # type: ignore[arg-type]
    assert (pool.most, pool.devices, pool.view) == (3, devices, "view")
    pool.wait([], 0.5)
    assert ray.calls == [], "Ray refuses to wait for nothing"
    pool.wait(["task"], 0.5)
    assert ray.calls.pop() == (["task"], 0.5)

    def ended(result: Any) -> Any:
        ray.results = {}
        task: Any = pool.start(Ledger(tmp_path), job, Share())
        assert task.exitcode is None
        ray.results = {"task": result}
        return task.exitcode

    assert (ended(0), ended(76), ended(ray.exceptions.TaskCancelledError())) == (0, 76, 75)
    (tmp_path / "jobs").mkdir()
    assert ended(ray.exceptions.RayError("the node is lost")) == -signal.SIGKILL
    assert (tmp_path / "jobs" / "000.log").read_text() == "the node is lost\n"
    ray.results, ray.calls = {}, []
    task: Any = pool.start(Ledger(tmp_path), job, Share())
    for number in (signal.SIGCONT, signal.SIGKILL, signal.SIGSTOP):
        task.send_signal(number)
    assert task.exitcode is None
    assert "cancel task" not in ray.calls
    task.send_signal(signal.SIGTERM)
    task.send_signal(signal.SIGCONT)
    assert "cancel task" not in ray.calls, "not in the handler of a signal"
    assert [task.exitcode, task.exitcode] == [None, None]
    assert ray.calls.count("cancel task") == 1
    task.join()


@pytest.mark.parametrize("visible", [None, "3"])
def test_a_node_runs_the_command_of_a_job_on_its_own_devices_and_passes_a_stop_on(
    visible: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh(*arguments: Any, **options: Any) -> Any:
        started.append((arguments, options))
        return process

    def sleep(seconds: float) -> None:
        if len(sleeps) == 2:
            process.exitcode = 75
        sleeps.append(seconds)
        if len(sleeps) == 2:
            raise KeyboardInterrupt

    started, sent, sleeps = list[Any](), list[int](), list[float]()
    before = signal.getsignal(signal.SIGINT)
    process: Any = SimpleNamespace(exitcode=None, send_signal=sent.append)
    monkeypatch.setattr(
        "lockstep.sweeps.pool.fresh", lambda *given_on, **options: fresh(*given_on, **options) and process
    )
    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.delenv(VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ledger, job = Ledger(tmp_path), SweepJob(Record(number=0, overrides=(), folder="a"), Needs(), lambda: None, ())
    try:
        assert run_on_node(ledger, job, {"A": "b"}, "folder") == 75
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    share = Share(gpus=() if visible is None else (visible,))
    assert started == [((ledger, job, share, {"A": "b"}), {"cwd": "folder"})]
    assert sent == [signal.SIGTERM]
