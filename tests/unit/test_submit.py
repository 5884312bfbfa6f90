"""What SLURM hears of a job, and when the job is queued again. SLURM's programs are stand-ins."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from helpers import composed
from lockstep.cli import callbacks
from lockstep.config.composition import ConfigFiles, Invocation
from lockstep.core.errors import InputError, Stopped
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import Lock
from lockstep.job.resume import Resume
from lockstep.job.slurm import REASON_CHARACTERS, Submission, preview, submission, submit
from lockstep.job.slurm_task import SlurmTask
from lockstep.launcher import Slurm
from lockstep.records.ledger import Ledger
from lockstep.sweeps import line

Programs = Callable[..., None]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Puts stand-ins for SLURM's programs into the PATH: a script of shell for each name."""

    def install(**scripts: str) -> None:
        for name, text in scripts.items():
            path = tmp_path / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return install


def job(root: Path, folder: Path | None = None, **options: Any) -> Submission:
    return Submission(launcher=Slurm(**options), name="mine", command=("train", "x"), folder=folder, root=root)


def directives(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


@pytest.mark.parametrize(
    ("time", "save_before", "minutes", "signal_"),
    [("90s", "30s", "2", "USR2@30"), ("2h", "2min", "120", "USR2@120"), ("61", "1.5", "2", "USR2@2")],
)
def test_a_limit_is_in_whole_minutes_and_the_warning_before_it_in_seconds(
    tmp_path: Path, time: str, save_before: str, minutes: str, signal_: str
) -> None:
    options = directives(preview([job(tmp_path, time=time, save_before=save_before)]))
    assert (options["time"], options["signal"]) == (minutes, signal_)


def test_a_machine_has_one_task_and_what_the_launcher_asks_for(tmp_path: Path) -> None:
    options = directives(preview([job(tmp_path, nodes=3, gpus=4, cpus=16, memory=50, partition="a100")]))
    expected = {"nodes": "3", "ntasks-per-node": "1", "gpus-per-node": "4", "cpus-per-task": "16", "mem": "50G"}
    expected |= {"partition": "a100", "requeue": "", "open-mode": "append"}
    assert options.items() >= expected.items()
    assert not {"array", "account", "mem"} & directives(preview([job(tmp_path)])).keys()


def test_an_array_is_throttled_and_any_other_option_of_sbatch_is_passed_on(tmp_path: Path) -> None:
    further = {"gres": "gpu:a100:2", "exclude": "a b", "exclusive": True, "nice": 0, "hold": False, "comment": None}
    options = directives(preview([job(tmp_path, at_once=4, sbatch=further)] * 9, tmp_path))
    assert options["array"] == "0-8%4"
    assert (options["gres"], options["exclude"], options["exclusive"]) == ("gpu:a100:2", "'a b'", "")
    assert (options["nice"], {"hold", "comment"} & options.keys()) == ("0", set())
    for key, sentence in (("nodes", "which Lockstep sets"), ("a\nb", "a long option"), ("x=y", "a long option")):
        with pytest.raises(InputError, match=sentence):
            preview([job(tmp_path, sbatch={key: "1"})])


def test_a_submission_that_slurm_refuses_leaves_only_what_was_there(tmp_path: Path, programs: Programs) -> None:
    programs(sbatch="echo 'first line' >&2; echo 'no such partition' >&2; exit 1")
    mine, bare, root = tmp_path / "mine", tmp_path / "bare", tmp_path / "a" / "runs"
    mine.mkdir()
    bare.mkdir()
    (mine / "precious").write_text("precious")
    with pytest.raises(InputError, match=r"was not submitted \(no such partition\)"):
        submit([job(root, mine), job(root, bare), job(root), job(root, tmp_path / "new" / "run")])
    assert (mine / "precious").read_text() == "precious"
    assert bare.is_dir()
    assert not any((tmp_path / name).exists() for name in ("a", "new"))


def test_each_submitted_job_has_its_number_and_its_folder(tmp_path: Path, programs: Programs) -> None:
    programs(sbatch=f"cat > {tmp_path}/script; echo 'welcome'; echo '17;cluster'")
    ((number, folder),) = submit([job(tmp_path / "runs")])
    assert (number, folder.parent, folder.is_dir()) == ("17", tmp_path / "runs", True)
    assert directives((tmp_path / "script").read_text())["output"] == f"{folder}/logs/slurm-%j.log"
    numbers = [number for number, _ in submit([job(tmp_path / "runs"), job(tmp_path / "runs")], tmp_path)]
    assert numbers == ["17_0", "17_1"]
    assert directives((tmp_path / "script").read_text())["output"] == f"{tmp_path}/slurm-%A_%a.log"


@pytest.mark.parametrize(
    "program",
    ["import lockstep; lockstep.main(extensions=['beside'])", "import beside, lockstep; lockstep.main()"],
    ids=["extension", "import"],
)
def test_a_program_that_the_job_could_not_import_is_not_submitted(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    programs(sbatch=f"cat > {tmp_path}/script; echo 17")
    for name, text in (("train.py", program), ("beside/__init__.py", "")):
        (tmp_path / "project" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "project" / name).write_text(text)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "project" / "train.py")])
    fix = f"beside.*install the project: pip install -e {tmp_path}/project$"
    with pytest.raises(InputError, match=fix):
        submit([job(tmp_path / "runs")])
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "script").exists()
    submit([job(tmp_path / "runs", setup=["export PYTHONPATH=project"])])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "project"))  # as if it were installed
    submit([job(tmp_path / "runs")])


def submitted(monkeypatch: pytest.MonkeyPatch, run: Path | None, *words: str, **values: Any) -> Submission:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    values = {**composed("device=cpu"), "resume": None, **values}
    called = Invocation(overrides=words, sweep=False, folder=None, hydra="", own_words=words)
    word_fields: dict[str, Any] = {"invocation": called, "overrides": words, "typed": words}
    resume = Resume(composed=values, values=values, run=run, folder=run, may_fetch=True, **word_fields)
    options = {key: values.pop(key) for key in ("setup", "sbatch", "gpus") if key in values}
    return submission(resume, Slurm(**options), Lock())


def test_a_submitted_command_continues_what_its_line_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / ".hydra").mkdir(parents=True)
    (run / ".hydra" / "overrides.yaml").write_text("[]\n")
    goes_on = submitted(monkeypatch, run, "resume=latest", "epochs=9", "launcher.dry_run=false")
    assert goes_on.words(run)[-2:] == ["epochs=9", f"resume={run}"]
    checkpoint = str(tmp_path / "step-00000003")
    new = submitted(monkeypatch, None, "epochs=9", resume=checkpoint)
    assert new.words(run)[-3:] == ["epochs=9", f"resume={checkpoint}", f"hydra.run.dir={run}"]
    assert submitted(monkeypatch, None, "epochs=9").words(run)[-2:] == ["epochs=9", f"hydra.run.dir={run}"]
    assert new.words(Path("/a,b/c=d"))[-1] == 'hydra.run.dir="/a,b/c=d"', "else Hydra reads two values"


def test_lines_of_shell_come_from_the_present_command_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "launcher.setup=['module load cuda']"
    assert submitted(monkeypatch, None, typed, setup=["module load cuda"]).launcher.setup == ["module load cuda"]
    for words, setup in (((), ["touch mark"]), ((typed,), ["module load cuda", "touch mark"])):
        with pytest.raises(InputError, match=r"launcher\.setup is .*, but lines of shell come from the command line"):
            submitted(monkeypatch, None, *words, setup=setup)


def test_options_of_sbatch_come_from_the_present_command_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = 'launcher.sbatch={gres: "gpu:2"}'
    assert submitted(monkeypatch, None, typed, sbatch={"gres": "gpu:2"}).launcher.sbatch == {"gres": "gpu:2"}
    with pytest.raises(InputError, match=r"launcher\.sbatch is .*, but lines of shell come from the command line"):
        submitted(monkeypatch, None, sbatch={"gres": "gpu:2"})


def test_a_job_asks_for_the_cores_of_its_ranks_and_their_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for workers, gpus, cpus in ((3, 4, 16), (0, 4, 4), (2, None, 3), ("auto", 4, None)):
        loader = {**composed("loader=streaming")["loader"], "workers": workers}
        waiting = submitted(monkeypatch, None, gpus=gpus, loader=loader)
        assert waiting.launcher.cpus == cpus


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Programs) -> Iterator[Callable[..., SlurmTask]]:
    """A task of the first machine, whose command is a line of shell; `squeue` says the state of its job."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP)}
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    (tmp_path / "run" / "logs").mkdir(parents=True)

    def make(line: str, *, state: str = "RUNNING", node: int = 0) -> SlurmTask:
        programs(squeue=f"echo {state}", scontrol=f'echo "$@" >> {tmp_path}/requeued')
        for name, value in {"SLURM_JOB_ID": "17", "SLURM_NODEID": str(node), "SLURM_PROCID": str(node)}.items():
            monkeypatch.setenv(name, value)
        return SlurmTask(str(tmp_path / "run"), ["sh", "-c", line])

    yield make
    for number, handler in handlers.items():
        signal.signal(number, handler)


def requeued(tmp_path: Path) -> bool:
    path = tmp_path / "requeued"
    return path.exists() and path.read_text() == "requeue 17\n"


@pytest.mark.parametrize(
    ("code", "state", "node", "again"),
    [
        (Stopped.exit_code, "RUNNING", 0, True),  # another job takes the machines
        (Stopped.exit_code, "CANCELLED", 0, False),
        (Stopped.exit_code, "COMPLETING", 0, False),
        (Stopped.exit_code, "RUNNING", 1, False),  # the first machine does it
        (0, "RUNNING", 0, False),
        (70, "RUNNING", 0, False),
    ],
)
def test_a_job_that_was_stopped_is_queued_again_unless_scancel_did_it(
    task: Callable[..., SlurmTask], tmp_path: Path, code: int, state: str, node: int, again: bool
) -> None:
    assert task(f"exit {code}", state=state, node=node).run() == code
    assert requeued(tmp_path) is again


@pytest.mark.parametrize("missing", ["scontrol", "squeue"])
@pytest.mark.parametrize("saves", [False, True])
def test_without_programs_of_slurm_a_stop_keeps_its_code_and_is_explained(
    task: Callable[..., SlurmTask],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    missing: str,
    saves: bool,
) -> None:
    here, fails = task(f"exit {Stopped.exit_code}"), missing == "scontrol" or not saves
    (tmp_path / "bin" / missing).unlink()
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    here.must_save = saves
    assert here.run() == Stopped.exit_code
    err = capfd.readouterr().err
    assert ("Traceback" in err, f"because {missing} does not work here (No such file" in err) == (False, fails)
    assert requeued(tmp_path) is not fails


@pytest.mark.parametrize(("code", "again"), [(Stopped.exit_code, True), (70, True), (0, False), (2, False)])
def test_near_its_limit_a_job_is_queued_again_if_something_is_left_that_can_be_done(
    task: Callable[..., SlurmTask], tmp_path: Path, code: int, again: bool
) -> None:
    near = task(f"exit {code}")
    near.must_save = True
    assert near.run() == code
    assert requeued(tmp_path) is again


def test_only_the_first_machine_of_a_job_hears_that_its_limit_is_near(task: Callable[..., SlurmTask]) -> None:
    first, other = task("exit 0"), task("exit 0", node=1)
    for machine in (first, other):
        machine.save()
    assert [(machine.must_save, machine.must_stop) for machine in (first, other)] == [(True, True), (False, False)]


def test_a_tasks_command_is_no_rank_and_writes_into_the_run_folder(
    task: Callable[..., SlurmTask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_SLURM_JOB", "5")  # of a job that has submitted this one
    assert task('echo "${SLURM_PROCID:-none} $LOCKSTEP_SLURM_JOB"; exit 3').run() == 3
    assert (tmp_path / "run" / "logs" / "slurm-17-0.log").read_text() == "none 17\n"


def test_a_sweep_that_is_started_while_an_error_is_handled_ends_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Path | None] = []
    monkeypatch.setattr(callbacks, "submit_all", lambda jobs, folder: submitted.append(folder))
    monkeypatch.setattr(line, "choose_folder", lambda config: Ledger(tmp_path))
    config, sweep = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}), callbacks.SweepCallbacks()
    try:
        raise FileNotFoundError
    except FileNotFoundError:
        sweep.on_multirun_start(config)
        sweep.on_multirun_end(config)
        assert submitted == [tmp_path]
        try:
            raise KeyError
        except KeyError:  # an error of the sweep itself
            sweep.on_multirun_end(config)
    assert submitted == [tmp_path]


def test_a_sweep_that_ends_with_an_error_submits_none_of_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Path | None] = []
    monkeypatch.setattr(callbacks, "submit_all", lambda jobs, folder: submitted.append(folder))
    monkeypatch.setattr(line, "choose_folder", lambda config: Ledger(tmp_path))
    config, sweep = OmegaConf.create({"hydra": {"sweep": {"dir": str(tmp_path)}}}), callbacks.SweepCallbacks()
    sweep.on_multirun_start(config)
    try:
        raise KeyError
    except KeyError:
        sweep.on_multirun_end(config)
    assert submitted == []
    sweep.on_multirun_end(config)
    assert submitted == [tmp_path]


def test_jobs_that_return_their_submissions_are_submitted_together_at_the_end(
    tmp_path: Path, programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    programs(sbatch=f"cat >> {tmp_path}/script; echo 17")
    jobs, config = [job(tmp_path, tmp_path / name) for name in "ab"], OmegaConf.create()
    for folder, cpus in ((None, None), (tmp_path, 4)):
        jobs = [replace(waiting, launcher=replace(waiting.launcher, cpus=cpus)) for waiting in jobs]
        sweep = callbacks.SweepCallbacks()
        for value in (*jobs, 0.5, 3, 0, None):
            sweep.on_job_end(config, JobReturn(status=JobStatus.COMPLETED, _return_value=value))
        sweep.on_job_end(config, JobReturn(status=JobStatus.FAILED, _return_value=KeyError()))
        assert sweep.submissions == jobs
        callbacks.submit_all(sweep.submissions, folder)
        assert ("Ask for more: launcher.cpus=8" in capsys.readouterr().out) == (cpus is None)
    assert (tmp_path / "script").read_text().count("#SBATCH --array=0-1") == 2


def test_a_script_has_the_options_of_its_job_the_setup_and_one_command(tmp_path: Path) -> None:
    options = {"account": "me", "qos": "high", "constraint": "a100|h100", "cpus": 3, "at_once": 2}
    text = preview([job(tmp_path, setup=["module load cuda", "set -e"], **options)])
    named = directives(text)
    assert (named["account"], named["qos"], named["constraint"]) == ("me", "high", "'a100|h100'")
    assert (named["job-name"], "array" in named) == ("mine", False)
    assert named["output"] == f"{tmp_path}/RUN_FOLDER/logs/slurm-%j.log"
    command = f"{sys.executable} -m lockstep.job.slurm_task {tmp_path}/RUN_FOLDER train x"
    assert text.splitlines()[0] == "#!/bin/bash"
    assert text.splitlines()[-4:] == [
        *("export PYTHONSAFEPATH=1", "module load cuda", "set -e"),
        f"srun --unbuffered --cpus-per-task=3 {command} hydra.run.dir={tmp_path}/RUN_FOLDER",
    ]
    assert text.endswith("\n")
    bare = preview([job(tmp_path / "50%", tmp_path / "50%" / "a b")])
    assert directives(bare)["output"] == f"'{tmp_path}/50%%/a b/logs/slurm-%j.log'"
    assert f"srun --unbuffered {sys.executable}" in bare
    assert f"'{tmp_path}/50%/a b' train x 'hydra.run.dir=" in bare


def test_each_job_of_an_array_has_its_own_command_and_the_folder_of_the_sweep_the_output(tmp_path: Path) -> None:
    jobs = [replace(job(tmp_path, tmp_path / name), command=("train", name)) for name in "ab"]
    text = preview(jobs, tmp_path / "sweep")
    assert directives(text)["array"] == "0-1"
    assert directives(text)["output"] == f"{tmp_path}/sweep/slurm-%A_%a.log"
    cases = text[text.index("case $SLURM_ARRAY_TASK_ID in") :].splitlines()
    assert [line.partition(") ")[0] for line in cases] == ["case $SLURM_ARRAY_TASK_ID in", "0", "1", "esac"]
    assert all(f" {tmp_path}/{name} train {name} " in line for name, line in zip("ab", cases[1:3], strict=True))
    assert directives(preview(jobs))["output"] == f"{tmp_path}/slurm-%A_%a.log", "below the root without a sweep"
    resumed = replace(jobs[0], resumes=True)
    assert resumed.words(tmp_path) == ["train", "a"], "the command names the run"


@pytest.mark.parametrize("line", ["echo a\nrm b", "echo \x1b", "a\x00"])
def test_no_line_of_a_script_has_a_control_character(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match=r"^launcher=slurm: the line .* has a control character; remove it$"):
        preview([job(tmp_path, setup=[line])])
    monkeypatch.setattr("shutil.which", lambda name: name)
    with pytest.raises(InputError, match="has a control character"):
        submit([job(tmp_path / "runs", setup=[line])])
    assert not [*tmp_path.iterdir()]


def test_a_machine_without_slurm_submits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"^launcher=slurm needs the commands of SLURM \(sbatch\), which this"):
        submit([job(tmp_path / "runs")])
    assert not any(tmp_path.iterdir())


def test_the_advice_on_cores_is_for_those_who_ask_for_none_in_any_way(
    tmp_path: Path, programs: Programs, capsys: pytest.CaptureFixture[str]
) -> None:
    programs(sbatch="echo 17")
    for options, advised in (({}, True), ({"cpus": 1}, False), ({"sbatch": {"cpus-per-gpu": 4}}, False)):
        submit([job(tmp_path / "runs", setup=["true"], **options)])
        assert ("Ask for more: launcher.cpus=8" in capsys.readouterr().out) is advised


def test_a_refusal_of_slurm_without_a_word_is_one(tmp_path: Path, programs: Programs) -> None:
    programs(sbatch="exit 1")
    with pytest.raises(InputError, match=r"was not submitted \(no reason given\); change it with launcher\.KEY"):
        submit([job(tmp_path / "runs", setup=["true"])])
    programs(sbatch=f"printf '%*s' {2 * REASON_CHARACTERS} | tr ' ' x >&2; exit 1")
    with pytest.raises(InputError, match=rf"was not submitted \(x{{{REASON_CHARACTERS}}}\);"):
        submit([job(tmp_path / "runs", setup=["true"])])


def test_a_submission_has_the_config_files_of_its_line_and_leaves_its_folder_to_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("HOME", str(tmp_path))
    run = RunDir.at(tmp_path / "run")
    run.overrides.write_text("[]\n")
    values = {**composed("device=cpu", "name=mine"), "resume": None, "output_root": "~/runs"}
    configs = ConfigFiles(name="other", folder="/conf", searchpath=("hydra.searchpath=[/more]",))
    called = Invocation(overrides=(), sweep=False, folder=None, hydra="", configs=configs)
    resume = Resume(
        *(),
        invocation=called,
        overrides=(),
        composed=values,
        values=values,
        run=None,
        folder=run.path,
        may_fetch=True,
    )
    with closing(Lock()) as lock, closing(Lock()) as of_job:
        waiting = submission(resume, Slurm(), lock)
        of_job.take(run.lock)
    assert (waiting.name, waiting.root, waiting.folder, waiting.resumes) == (
        "mine",
        tmp_path / "runs",
        run.path,
        False,
    )
    words = waiting.words(run.path)
    assert words[2:] == [*configs.words, f"hydra.run.dir={run.path}"]
    strangers = replace(resume, own={})
    with pytest.raises(InputError, match=r"^output_root is '~/runs' in a config file or in the run folder"):
        submission(strangers, Slurm(), Lock())


def test_a_signal_before_the_command_has_begun_ends_it(task: Callable[..., SlurmTask]) -> None:
    early = task("exec sleep 60")
    early.must_stop = True
    assert early.run() == -signal.SIGTERM


def test_a_command_of_a_task_hears_no_signal_of_slurms_and_its_errors_are_in_its_log(
    task: Callable[..., SlurmTask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("SLURM_LOCALID", "0")
    shown = 'echo "${HYDRA_FULL_ERROR:-none} ${SLURM_LOCALID:-none}" >&2'
    assert task(f"kill -USR2 $$; {shown}; kill -TERM $$").run() == -signal.SIGTERM
    assert (tmp_path / "run" / "logs" / "slurm-17-0.log").read_text() == "none none\n"
    handled = {number: signal.getsignal(number) for number in (signal.SIGUSR2, signal.SIGHUP)}
    assert [handler.__name__ for handler in handled.values()] == ["save", "stop"]  # type: ignore[union-attr]
    assert callable(signal.getsignal(signal.SIGTERM)), "its handler does nothing"


def test_a_job_asks_for_the_cores_of_the_ranks_that_are_typed_or_for_those_that_are_typed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = {**composed("loader=streaming")["loader"], "workers": 3}
    values = {**composed("device=cpu"), "resume": None, "loader": loader}
    called = Invocation(overrides=(), sweep=False, folder=None, hydra="")
    parts: dict[str, Any] = {"composed": values, "values": values, "run": None, "folder": None}
    resume = Resume(invocation=called, overrides=(), may_fetch=True, **parts)
    for launcher, cpus in (
        (Slurm(ranks=2, gpus=5), 8),
        (Slurm(ranks=1, gpus=5), 4),
        (Slurm(gpus=5), 20),
        (Slurm(gpus=0), 4),
        (Slurm(ranks=2, cpus=1), 1),
    ):
        assert submission(resume, launcher, Lock()).launcher == replace(launcher, cpus=cpus)


def test_an_option_of_sbatch_that_is_null_is_left_out_and_one_that_lockstep_sets_is_named(tmp_path: Path) -> None:
    options = directives(preview([job(tmp_path, sbatch={"gres": None, "nice": 0, "hold": True})]))
    assert ("gres" in options, options["nice"], options["hold"]) == (False, "0", "")
    with pytest.raises(InputError) as raised:
        preview([job(tmp_path, sbatch={"mem": "4G"})])
    assert str(raised.value) == (
        "launcher.sbatch has 'mem', which Lockstep sets: see 'lockstep train launcher=slurm --help'; expected a long "
        "option of sbatch: 'launcher.sbatch={gres: \"gpu:2\"}'"
    )
    for key in ("Gres", "-gres", "g_res", "", "1a"):
        with pytest.raises(InputError, match=r"^launcher\.sbatch has '.*'; expected a long option of sbatch"):
            preview([job(tmp_path, sbatch={key: "1"})])


def test_one_job_with_a_limit_at_a_time_is_no_array(tmp_path: Path) -> None:
    for number, array in ((1, None), (2, "0-1%3"), (11, "0-10%3")):
        assert directives(preview([job(tmp_path, at_once=3)] * number, tmp_path)).get("array") == array
    assert directives(preview([job(tmp_path)] * 3, tmp_path))["array"] == "0-2"


def test_slurm_is_asked_for_the_state_of_this_job_whatever_it_is(
    task: Callable[..., SlurmTask], tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    stopped = task(f"exit {Stopped.exit_code}")
    monkeypatch.setattr(time, "sleep", waits.append)
    programs(squeue=f'echo "$@" > {tmp_path}/words; echo CANCELLED')
    stopped.run()
    assert (tmp_path / "words").read_text() == "--noheader --jobs 17 --states all --format %T\n"
    assert waits == [1], "SLURM shows the state a moment later"
    assert not requeued(tmp_path)


def test_a_stop_ends_the_command_of_a_task_and_is_no_save(task: Callable[..., SlurmTask]) -> None:
    ended: list[str] = []
    running = task("true")
    running.process = SimpleNamespace(terminate=lambda: ended.append("terminated"))  # type: ignore[assignment]
    running.stop(signal.SIGHUP, None)
    assert (running.must_stop, running.must_save, ended) == (True, False, ["terminated"])
    running.save(signal.SIGUSR2, None)
    assert (running.must_save, ended) == (True, ["terminated"] * 2)
    assert (task("true", node=0).is_first, task("true", node=1).is_first, task("true", node=10).is_first) == (
        *(True, False, False),
    )


def test_a_task_appends_to_the_log_of_its_machine(task: Callable[..., SlurmTask], tmp_path: Path) -> None:
    for word in ("first", "second"):
        task(f"echo {word}", node=3).run()
    logs = tmp_path / "run" / "logs"
    assert [path.name for path in logs.iterdir()] == ["slurm-17-3.log"]
    assert (logs / "slurm-17-3.log").read_text() == "first\nsecond\n"


def test_a_program_that_cannot_start_is_told_its_last_line(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(sbatch="echo 17", broken="exit 1")
    script = tmp_path / "project" / "bad.sh"
    for text, reason in (("exit 3", "no reason given"), ("echo first >&2; echo last >&2; exit 3", "last")):
        programs(broken=text)
        monkeypatch.setattr("lockstep.job.slurm.command_of_program", lambda: ["broken"])
        monkeypatch.setattr(sys, "argv", [str(script)])
        with pytest.raises(InputError) as raised:
            submit([job(tmp_path / "runs")])
        assert str(raised.value) == (
            "launcher=slurm: the job could not start its program, because it imports nothing from a folder that is "
            f"not installed ({reason}); install the project: pip install -e {script.parent}"
        )
    programs(broken='[ "$1" = --help ] && [ "$PYTHONSAFEPATH" = 1 ]')
    ((number, _),) = submit([job(tmp_path / "runs")])
    assert number == "17"
