"""What the training command does before and around a job or a sweep; each part that it calls only notes it."""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from lockstep.cli import callbacks, run, sweep, train
from lockstep.cli import main as command
from lockstep.cli.arguments import parsers
from lockstep.config.commands import program_words
from lockstep.config.hydra_policy import TRUSTED
from lockstep.config.hydra_versions import trusting
from lockstep.config.schema import CONF
from lockstep.core import terminal
from lockstep.core.errors import InputError, LockstepError, Stopped
from lockstep.core.launch_env import RUN_FOLDER, SWEEP_FOLDER
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import Lock
from lockstep.launcher import Elastic, Slurm
from lockstep.records.ledger import Identity, Ledger
from lockstep.runtime import signals
from lockstep.runtime.pickled import unpacked
from lockstep.runtime.program import JobError
from lockstep.sweeps.pool_launcher import WrongJob

Calls = list[Any]


@pytest.fixture(autouse=True)
def _of_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is the console command, whatever another test was started as."""
    monkeypatch.setattr("lockstep.config.commands._WORDS", ["lockstep", "train"])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What the command has called, without Hydra."""
    done: Calls = []

    @contextmanager
    def command_line(**options: Any) -> Iterator[None]:
        done.append(options)
        yield

    def main(**options: Any) -> Callable[[Any], Callable[[], None]]:
        return lambda task: lambda: done.append((options, task.objects, sys.argv[1:]))

    monkeypatch.setattr(train.program, "command_line", command_line)
    monkeypatch.setattr(train, "main", main)
    monkeypatch.setattr(train.gc, "freeze", lambda: None)
    monkeypatch.setattr(train, "own_hydra", nullcontext)
    monkeypatch.setattr(train, "adopt_srun", lambda: done.append("srun"))
    monkeypatch.setattr(train.extensions, "use", lambda packages: done.append(packages))
    monkeypatch.setattr("lockstep.records.ledger.words_of_sweep", lambda words: [*words, "of=sweep"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return done


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--cfg", "job", "seed=1"], ["seed=1", "--cfg", "job"]),
        (["-m", "seed=1,2", "sweep.resume=latest"], ["seed=1,2", "sweep.resume=latest", "of=sweep", "-m"]),
        (["resume=x", "model.width=3"], ["resume=x", "++model.width=3"]),
    ],
)
def test_a_line_is_read_before_hydra_has_it(
    words: list[str], left: list[str], calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    train.train_command(["mine"], objects={"a": 1}, says=print)
    options = {"config_path": str(CONF), "config_name": "config", **trusting(TRUSTED)}
    assert calls == [{"says": print}, "srun", ["mine"], (options, {"a": 1}, left)]


def test_a_line_that_is_answered_or_refused_runs_nothing(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--version"])
    train.train_command()
    assert calls[1:] == ["srun", ()]
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=1"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="WORLD_SIZE=2, but no RANK"):
        train.train_command()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sys, "argv", ["train.py", "--local-rank=1", "seed=1"])
    train.train_command()
    assert calls[-1][1:] == (None, ["seed=1"])


@dataclass
class Decided:
    has_several_machines: bool = False
    objects: Any = None


@pytest.mark.parametrize("objects", [None, {"model": "net"}], ids=str)
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_job_is_run_here_or_led_or_followed(
    objects: Any, several: bool, rank: int | None, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_job(resume: Any, lock: Lock) -> Any:
        lock.take(tmp_path / "lock")
        return "run", resume

    def lead(values: str, invocation: str, lock: Lock) -> Any:
        lock.take(tmp_path / "lock")
        return "lead", values, invocation

    def decide(values: str, invocation: str) -> Decided:
        calls.append("decided")
        return Decided(several)

    monkeypatch.setattr(train, "configure_native_threads", lambda: calls.append("threads"))
    monkeypatch.setattr(train.composition.Invocation, "current", classmethod(lambda cls: "invocation"))
    monkeypatch.setattr(train.composition, "of_command", lambda composed: f"values of {composed}")
    monkeypatch.setattr("lockstep.job.resume.decide_resume", decide)
    monkeypatch.setattr(run, "run_job", run_job)
    monkeypatch.setattr(run, "lead", lead)
    monkeypatch.setattr(run, "follow", lambda: "follow")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    if rank is not None:
        for name, value in {"RANK": str(rank), "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
    ended = train.Training(objects)("config")  # type: ignore[arg-type]
    if rank is None:
        assert ended == ("run", Decided(several, objects))
    else:
        assert ended == (("lead", "values of config", "invocation") if rank == 0 else "follow")
    assert not (tmp_path / "lock").exists(), "another job may take the folder"
    assert calls == ["decided"] * (rank is None) + ["threads"]
    assert os.environ.get("TORCH_CPP_LOG_LEVEL") == ("ERROR" if several or rank is not None else None)
    monkeypatch.setattr("lockstep.cli.needs.needs_of", lambda *arguments: arguments)
    assert train.Training(objects).needs("config", "machine") == ("config", "machine", objects)  # type: ignore[arg-type]


def test_ranks_of_others_continue_in_the_folder_of_before_and_get_mains(monkeypatch: pytest.MonkeyPatch) -> None:
    done: Calls = []
    followers = SimpleNamespace(earlier="before", send=done.append)
    monkeypatch.setattr("lockstep.launcher.attach.leading", lambda: nullcontext(followers))
    monkeypatch.setattr("lockstep.launcher.attach.following", lambda: nullcontext(SimpleNamespace(config="config")))
    monkeypatch.setattr(run, "decide_resume", lambda *arguments: arguments)
    monkeypatch.setattr(run, "create_run", lambda resume, lock: (nullcontext("folder"), (resume, lock)))
    monkeypatch.setattr(run, "start_job", lambda run_dir, job: done.append("started") or (run_dir, job))
    monkeypatch.setattr(run, "load_job", lambda config: f"job of {config}")
    lock = Lock()
    assert run.lead({"a": 1}, "invocation", lock) == ("folder", (({"a": 1}, "invocation", "before"), lock))  # type: ignore[arg-type, comparison-overlap]
    assert done == ["folder", "started"], "the others wait for the folder"
    assert run.follow()[1] == "job of config"  # type: ignore[index]


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_an_agent_starts_this_command_again_on_each_machine(
    is_host: bool, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_agent(launcher: Elastic, command: list[str]) -> None:
        started.append((command, os.environ.get(RUN_FOLDER), os.environ["HYDRA_FULL_ERROR"]))
        if fails:
            raise Stopped("stopped")
        if is_host:
            RunDir(Path(os.environ[RUN_FOLDER])).write_summary(objective=3.0)

    started: Calls = []
    monkeypatch.setattr(Elastic, "run_agent", run_agent)
    monkeypatch.setattr(Elastic, "is_host", is_host)
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-O", "train.py", "seed=1"])
    monkeypatch.setattr(run, "forgive_output", lambda: None)
    monkeypatch.delenv(RUN_FOLDER, raising=False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    job = SimpleNamespace(launcher=Elastic(nodes=2), output_root=str(tmp_path / "runs"), name="mine")
    monkeypatch.setattr(run, "prepare", lambda resume: job)
    resume: Any = SimpleNamespace(
        invocation=SimpleNamespace(sweep=False), folder=None, values={"launcher": {"nodes": "2:3"}}
    )
    if fails:
        with pytest.raises(Stopped):
            run._run_agent(resume)
    else:
        assert run._run_agent(resume) == (3.0 if is_host else None)
    ((command, folder, full_errors),) = started
    assert (command, full_errors) == ([sys.executable, "-O", "train.py", "seed=1"], "0")
    assert (folder is not None) is is_host
    assert [*tmp_path.glob("runs/*")] == ([Path(folder)] if is_host and not fails else [])
    resume.invocation.sweep = True
    with pytest.raises(InputError, match=r"^launcher\.nodes is 2:3, but the jobs of a sweep run on one machine, or"):
        run._run_agent(resume)
    assert len(started) == 1


def test_a_job_of_slurm_is_submitted_outside_of_one_and_runs_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.job.slurm.submission", lambda resume, launcher, lock: ("submitted", launcher))
    monkeypatch.setattr(run, "_run_here", lambda resume, lock: "here")
    monkeypatch.setattr(run, "_run_agent", lambda resume: "agent")
    usual = {"has_several_machines": False, "folder": None, "invocation": SimpleNamespace(sweep=False)}
    resume: Any = SimpleNamespace(job=SimpleNamespace(launcher=Slurm()), **usual)
    assert run.run_job(resume, Lock()) == ("submitted", Slurm())
    monkeypatch.setattr(run, "is_submitted", lambda: True)
    assert run.run_job(resume, Lock()) == "here"
    resume.has_several_machines = True
    assert run.run_job(resume, Lock()) == "agent"


class Process:
    """The process of a sweep, which has done what it does when it starts."""

    does: Callable[[list[str], dict[str, str]], int]

    def __init__(self, words: list[str], environment: dict[str, str], **options: Any) -> None:
        self.options, self.sentinel, self.words, self.environment = options, -1, words, environment
        self.exitcode: int | None = type(self).does(words, environment)
        STARTED.append(self)

    def join(self) -> None: ...

    def send_signal(self, number: int) -> None: ...


STARTED: list[Process] = []


@pytest.mark.parametrize("verbose", [True, False])
def test_a_sweep_of_a_program_runs_in_a_process_of_its_own_which_names_its_folder(
    verbose: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def does(words: list[str], environment: dict[str, str]) -> int:
        held.append(unpacked(Path(words[4])))
        Path(environment[SWEEP_FOLDER]).write_text(str(tmp_path / "sweep"))
        return 0

    held: Calls = []
    STARTED.clear()
    monkeypatch.setattr(Process, "does", staticmethod(does), raising=False)
    monkeypatch.setattr(sweep, "Fresh", Process)
    monkeypatch.setattr(sweep.extensions, "of_program", lambda: {("loss", "mine"): dict})
    monkeypatch.setenv("OF_THE_USER", "yes")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)
    assert sweep.run_sweep(["seed=1,2"], {"model": 3}, verbose=verbose) == tmp_path / "sweep"
    (process,) = STARTED
    assert process.words[:3] == [sys.executable, "-m", "lockstep.cli.sweep"]
    assert (process.words[3], process.words[5:]) == (str(os.getpid()), ["seed=1,2"])
    assert process.environment.items() >= {"PYTHONSAFEPATH": "1", "OF_THE_USER": "yes"}.items()
    assert process.options == {"stdin": subprocess.DEVNULL, "stdout": None if verbose else subprocess.DEVNULL}
    assert held == [({"model": 3}, {("loss", "mine"): dict}, "script.py")]
    assert not Path(process.words[4]).exists()


def test_a_signal_that_comes_while_the_process_of_a_sweep_starts_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def does(words: list[str], environment: dict[str, str]) -> int:
        Path(environment[SWEEP_FOLDER]).write_text(str(tmp_path))
        signal.raise_signal(signal.SIGTERM)
        return 0

    numbers: list[int] = []
    monkeypatch.setattr(Process, "does", staticmethod(does), raising=False)
    monkeypatch.setattr(Process, "send_signal", lambda process, number: numbers.append(number))
    monkeypatch.setattr(sweep, "Fresh", Process)
    assert sweep.run_sweep(["seed=1,2"], {}, verbose=True) == tmp_path
    assert numbers == [signal.SIGTERM, signal.SIGKILL], "what still runs at the end is killed"


@pytest.mark.parametrize(
    ("error", "folder", "sentence"),
    [
        (InputError("one", "two"), True, "one\ntwo"),
        (Stopped("saved"), True, "saved"),
        (None, False, "the process of the sweep ended with exit code 70, and nothing says why"),
        (None, True, "the process of the sweep ended with exit code 70, and nothing says why"),
    ],
    ids=repr,
)
def test_a_sweep_of_a_program_ends_with_the_error_that_its_process_wrote(
    error: LockstepError | None, folder: bool, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def does(words: list[str], environment: dict[str, str]) -> int:
        if folder:
            Path(environment[SWEEP_FOLDER]).write_text(str(tmp_path))
        if error is not None:
            sweep._write(Path(words[4]).with_name(sweep.ERROR_FILE), error)
        return 70

    Ledger(tmp_path).create(Identity())
    monkeypatch.setattr(Process, "does", staticmethod(does), raising=False)
    monkeypatch.setattr(sweep, "Fresh", Process)
    with pytest.raises(LockstepError) as raised:
        sweep.run_sweep(["seed=1,2"], {}, verbose=True)
    assert str(raised.value) == sentence
    assert type(raised.value) is type(error or LockstepError(""))


def test_an_error_is_written_for_a_program_as_one_of_the_public_classes(tmp_path: Path) -> None:
    sweep._write(tmp_path / "error", WrongJob("job 0: one", "job 0: two"))
    error = pickle.loads((tmp_path / "error").read_bytes())
    assert (type(error), error.args) == (InputError, ("job 0: one", "job 0: two"))
    sweep._write(tmp_path / "error", Stopped("saved"))
    assert type(pickle.loads((tmp_path / "error").read_bytes())) is Stopped


def test_jobs_are_submitted_by_launcher_and_their_records_have_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def submit(submissions: Any, folder: Path | None) -> list[tuple[str, Path]]:
        submitted.append(([waiting.name for waiting in submissions], folder))
        return [(f"17_{number}", tmp_path / waiting.name) for number, waiting in enumerate(submissions)]

    submitted: Calls = []
    ledger = Ledger(tmp_path)
    ledger.create(Identity())
    (record,) = ledger.enter([(["seed=1"], "a")])
    RunDir.at(tmp_path / record.folder)
    monkeypatch.setattr("lockstep.job.slurm.submit", submit)
    monkeypatch.setattr(
        "lockstep.job.slurm.preview", lambda submissions, folder: f"{len(submissions)} in {folder}\n#"
    )
    small, large, dry = Slurm(cpus=1), Slurm(cpus=2), Slurm(dry_run=True)
    waiting: Any = [
        SimpleNamespace(name=name, launcher=launcher)
        for name, launcher in (
            (record.folder, small),
            ("b", small),
            ("c", dry),
            ("d", dry),
            ("e", large),
            ("f", small),
        )
    ]
    callbacks.submit_all(waiting, tmp_path)
    assert submitted == [([record.folder, "b"], tmp_path), (["e"], tmp_path), (["f"], tmp_path)]
    assert ledger.read(record).submitted == "17_0"
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        f"submitted job 17_0 of SLURM: {tmp_path / record.folder}",
        f"submitted job 17_1 of SLURM: {tmp_path}/b",
    ]
    assert lines[2] == f"2 in {tmp_path}"
    callbacks.submit_all([], tmp_path)
    assert len(submitted) == 3


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What is registered for the exit of the process."""
    registered: Calls = []
    monkeypatch.setattr(atexit, "register", lambda *arguments: registered.append(arguments))
    return registered


@pytest.mark.parametrize(("sweeper", "follows"), [("grid", False), ("optuna", False), ("optuna", True)])
def test_one_job_is_no_search_and_its_folder_is_checked_before_hydra_writes_into_it(
    sweeper: str,
    follows: bool,
    at_exit: Calls,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checked: Calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=1", "name=a b"])
    monkeypatch.setattr(callbacks, "follows", lambda: follows)
    monkeypatch.setattr(callbacks, "check_names", lambda *arguments: checked.append(arguments))
    for folder in (".", "new/run"):
        node = {"runtime": {"choices": {"hydra/sweeper": sweeper}}, "run": {"dir": folder}}
        callbacks.SweepCallbacks().on_run_start(OmegaConf.create({"hydra": node}))
    assert checked == [(tmp_path / "new" / "run", "*", "*/*")], "the current folder is the user's"
    assert at_exit == [
        (callbacks.remove_empty, []),
        (callbacks.remove_empty, [tmp_path / "new" / "run", tmp_path / "new"]),
    ]
    warning = (
        "hydra/sweeper=optuna has no effect on one job; add -m for the search: lockstep train -m seed=1 'name=a b'"
    )
    assert capsys.readouterr().out.count(warning) == 2 * (sweeper == "optuna" and not follows)


@pytest.mark.parametrize("named", [True, False])
def test_a_sweep_has_a_checked_folder_which_goes_if_the_sweep_is_refused(
    named: bool, at_exit: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: Calls = []
    ledger = Ledger(tmp_path / "of line")
    monkeypatch.setattr(callbacks, "check_names", lambda *arguments: checked.append(arguments))
    monkeypatch.setattr(callbacks, "configure_native_threads", lambda: checked.append("threads"))
    monkeypatch.setattr("lockstep.sweeps.line.choose_folder", lambda config: ledger)
    monkeypatch.delenv(SWEEP_FOLDER, raising=False)
    if named:
        monkeypatch.setenv(SWEEP_FOLDER, str(tmp_path / "folder"))
    callbacks.SweepCallbacks().on_multirun_start(OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path / "x")}}}))
    assert checked == [(tmp_path / "x", "*", "*/*"), "threads", (ledger.folder, "*", "*/*")]
    ((function, of_ledger, new),) = at_exit
    assert (function.__name__, of_ledger) == ("remove_refused", ledger)
    assert {path.name for path in new} == {"x", "jobs", "multirun.yaml", "sweep.json", "optuna.log"}
    assert (tmp_path / "folder").exists() is named
    assert not named or (tmp_path / "folder").read_text() == str(ledger.folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sweep_of_ranks_is_refused_by_main_and_left_by_the_others(
    rank: int, at_exit: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: Calls = []
    for name in ("leading", "following"):

        def enter(name: str = name) -> Any:
            entered.append(name)
            return nullcontext()

        monkeypatch.setattr(f"lockstep.launcher.attach.{name}", enter)
    for name, value in {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(JobError, match=r"^torchrun would run the whole sweep in each rank; type lockstep train -m"):
        callbacks.SweepCallbacks().on_multirun_start(OmegaConf.create({}))
    assert entered == ["following" if rank else "leading"]
    assert at_exit == []


@pytest.mark.parametrize(("jobs", "due"), [(0, True), (1, False), (1, True)])
def test_the_report_of_a_sweep_with_jobs_is_written_when_it_is_due(
    jobs: int, due: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_due(when: str, seconds: float) -> bool:
        questions.append((when, seconds))
        return due

    questions: Calls = []
    ledger = Ledger(tmp_path)
    ledger.create(Identity())
    ledger.enter([([f"seed={seed}"], "a") for seed in range(jobs)])
    ended = callbacks.SweepCallbacks()
    ended.began, ended.handled = 100.0, None
    monkeypatch.setattr("lockstep.report.listener.is_due", is_due)
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setattr("lockstep.report.sweep_page.write_sweep_report", lambda of: of.folder / "report.html")
    monkeypatch.setattr(callbacks.log, "show", lambda text: print(text, terminal._patience_s))
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: 107.0)
    node = {"hydra": {"sweep": {"dir": str(tmp_path)}}, "telemetry": {"report": "auto"}}
    ended.on_multirun_end(OmegaConf.create(node))
    assert questions == [("auto", 7.0)] * bool(jobs)
    line = f"report: {tmp_path.name}/report.html {terminal.READER_WAIT_S}\n"  # no reader holds a sweep up
    assert capsys.readouterr().out == line * (bool(jobs) and due)
    submitted: Calls = []
    monkeypatch.setattr(callbacks, "submit_all", lambda *arguments: submitted.append(arguments))
    replaced: Any = replace(Identity(), words=("x",))
    ended.submissions.append(replaced)
    assert callbacks.SweepCallbacks().submissions == []
    ended.on_run_end(OmegaConf.create(node))
    ended.on_multirun_end(OmegaConf.create(node))
    assert submitted == [([replaced],), ([replaced], tmp_path)]


def test_an_agent_of_a_run_that_is_there_goes_on_in_its_folder_which_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_agent(launcher: Elastic, command: list[str]) -> None:
        forgiven.append(os.environ[RUN_FOLDER])
        if len(forgiven) == 1:
            raise Stopped("stopped")

    forgiven: Calls = []
    own = RunDir.at(tmp_path / "runs" / "mine")
    monkeypatch.setattr(Elastic, "run_agent", run_agent)
    monkeypatch.setattr(Elastic, "is_host", True)
    monkeypatch.setattr(run, "forgive_output", lambda: forgiven.append("forgiven"))
    monkeypatch.setenv(RUN_FOLDER, "of another")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    job = SimpleNamespace(launcher=Elastic(nodes=2), output_root=str(tmp_path / "runs"), name="mine")
    monkeypatch.setattr(run, "prepare", lambda resume: job)
    resume: Any = SimpleNamespace(invocation=SimpleNamespace(sweep=False), folder=own.path, values={})
    with pytest.raises(Stopped):
        run._run_agent(resume)
    assert run._run_agent(resume) is None, "its summary has no score"
    monkeypatch.setattr(Elastic, "is_host", False)
    assert run._run_agent(resume) is None
    assert forgiven == [str(own.path)] * 2 + ["forgiven", str(own.path), "forgiven"]
    assert [*(tmp_path / "runs").iterdir()] == [own.path]


def test_the_lines_of_a_script_are_shown_as_they_are_however_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = "#SBATCH --array=[0-3] [bold]\n" + "x y " * 100 + "\n:smile: 'a' 17"
    monkeypatch.setattr("lockstep.job.slurm.preview", lambda submissions, folder: script)
    waiting: Any = [SimpleNamespace(launcher=Slurm(dry_run=True))]
    callbacks.submit_all(waiting)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        line.rstrip() for line in script.splitlines()
    ]


def test_a_submitted_job_that_is_no_part_of_a_sweep_has_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lockstep.job.slurm.submit", lambda submissions, folder: [("17", tmp_path / "alone")])
    callbacks.submit_all([SimpleNamespace(launcher=Slurm())])  # type: ignore[list-item]
    assert capsys.readouterr().out == f"submitted job 17 of SLURM: {tmp_path}/alone\n"
    assert not any(tmp_path.iterdir())


def test_a_job_that_is_told_to_run_here_is_led_by_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "create_run", lambda resume, lock: (nullcontext("folder"), (resume, lock)))
    monkeypatch.setattr(run, "start_job", lambda run_dir, job: (run_dir, job))
    lock, resume = Lock(), SimpleNamespace(job=SimpleNamespace(launcher=SimpleNamespace(submits=False)))
    vars(resume).update(has_several_machines=False, folder=None, invocation=SimpleNamespace(sweep=False))
    assert run.run_job(resume, lock) == ("folder", (resume, lock))  # type: ignore[arg-type, comparison-overlap]


OF_LINES = {
    "new mine": ("lockstep.cli.new", "new", {"project": "mine"}),
    "watch runs --port 1": ("lockstep.report.watch", "watch", {"path": "runs", "port": 1}),
    "demo run": ("lockstep.inference.demo", "demo", {"path": "run", "device": None, "port": 8000}),
    "report run": ("lockstep.report.report", "report", {"path": "run", "bundle": False}),
    "lr-find seed=1 --steps 3": (
        "lockstep.diagnostics.lr_find",
        "lr_find",
        {"overrides": ["seed=1"], "steps": 3, "low": 1e-6, "high": 10.0, "out": None, "form": "table"},
    ),
}


@pytest.mark.parametrize("line", OF_LINES)
def test_a_command_is_the_function_of_its_name_with_the_arguments_of_its_line(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def command_line(**options: Any) -> Iterator[None]:
        done.append(options)
        yield

    module, name, values = OF_LINES[line]
    done: Calls = []
    monkeypatch.setattr(train.program, "command_line", command_line)
    monkeypatch.setattr(command, "configure_native_threads", lambda: done.append("threads"))
    monkeypatch.setattr(command, "check_installed", lambda *words, **extra: done.append((words, extra)))
    monkeypatch.setattr(f"{module}.{name}", lambda **arguments: done.append(arguments))
    monkeypatch.setattr(sys, "argv", ["lockstep", *line.split()])
    command.run_command()
    word = line.split()[0]
    needed = [(("uvicorn", f"lockstep {word}"), {"extra": "demo"})] * (word in ("demo", "watch"))
    threads = ["threads"] * (word != "new")
    assert done == [{"stopped": signals.STOPPED}, *needed, *threads, values]


def test_every_command_has_a_function_that_takes_its_arguments() -> None:
    parser, commands = parsers()
    assert {*commands} == {"train", *command.COMMANDS}
    needed = {"predict": ["a.png"], "compare": [], "pack": [], "runs": [], "watch": []}
    for word, package in command.COMMANDS.items():
        name = word.replace("-", "_")
        function = vars(importlib.import_module(f"lockstep.{package}.{name}"))[name]
        values = vars(parser.parse_args([word, *["a"] * (word not in ("clean", "doctor")), *needed.get(word, [])]))
        inspect.signature(function).bind(**{key: values[key] for key in values if key not in ("command", "rest")})


def test_what_is_imported_is_frozen_before_a_line_is_read(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.gc, "freeze", lambda: calls.append("frozen"))
    monkeypatch.setattr(sys, "argv", ["/there/mine.py", "seed=1"])
    train.train_command()
    assert calls[:2] == ["frozen", {"says": train.program.explain}]
    assert program_words() == ["python", "mine.py"]
    assert calls[-1][1:] == (None, ["seed=1"])


def test_how_much_torch_writes_of_lost_ranks_is_the_users_choice(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "configure_native_threads", lambda: None)
    monkeypatch.setattr(train.composition.Invocation, "current", classmethod(lambda cls: "invocation"))
    monkeypatch.setattr(train.composition, "of_command", lambda composed: {})
    monkeypatch.setattr(run, "follow", lambda: "follow")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCH_CPP_LOG_LEVEL": "INFO"}.items():
        monkeypatch.setenv(name, value)
    assert train.Training(None)("config") == "follow"  # type: ignore[arg-type]
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_the_time_of_a_sweep_counts_from_its_start(
    at_exit: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_due(when: str, seconds: float) -> bool:
        questions.append((when, seconds))
        return False

    questions: Calls = []
    ledger = Ledger(tmp_path)
    ledger.create(Identity())
    ledger.enter([(["seed=1"], "a")])
    monkeypatch.setattr(callbacks, "configure_native_threads", lambda: None)
    monkeypatch.setattr("lockstep.sweeps.line.choose_folder", lambda config: ledger)
    monkeypatch.setattr("lockstep.report.listener.is_due", is_due)
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: 1000.0)
    monkeypatch.delenv(SWEEP_FOLDER, raising=False)
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}, "telemetry": {"report": "always"}})
    own = callbacks.SweepCallbacks()
    own.on_multirun_start(config)
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: 1012.5)
    own.on_multirun_end(config)
    assert questions == [("always", 12.5)]


@pytest.mark.parametrize("moment", ["on_run_start", "on_run_end", "on_multirun_start", "on_multirun_end"])
def test_an_error_of_a_callback_ends_the_command(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra would only warn of it; an error that goes past Hydra is no Exception."""

    def refuse(*_: object) -> None:
        raise InputError("refused")

    own = callbacks.SweepCallbacks()
    own.handled, own.began = None, 0.0
    for name in ("submit_all", "absent", "is_launched"):
        monkeypatch.setattr(callbacks, name, refuse)
    choices = {"runtime": {"choices": {"hydra/sweeper": "grid"}}, "run": {"dir": "x"}, "sweep": {"dir": "x"}}
    with pytest.raises(BaseException, match="refused") as raised:
        getattr(own, moment)(OmegaConf.create({"hydra": choices}))
    assert not isinstance(raised.value, Exception)
