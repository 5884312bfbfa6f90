"""The run folder: its name, its creation, and what remains of it when a job is refused."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import composed, run_dir
from lockstep.config.composition import Invocation
from lockstep.core import log
from lockstep.core.errors import InputError, NumericalError, Stopped, StorageError
from lockstep.core.formats import FileFormat, stamp
from lockstep.core.protocols import Entry
from lockstep.core.run import Run
from lockstep.core.run_dir import MANIFEST, NAME_LIMIT, RunDir, latest, pointed, slug
from lockstep.core.safe_write import write_atomic
from lockstep.job.prepare import job_folder
from lockstep.job.resume import decide_resume
from lockstep.launcher.inline import Inline
from lockstep.launcher.spawn import first_failure
from lockstep.records.ledger import Ledger
from lockstep.records.record import Record
from lockstep.runtime.signals import StopNow, StopRequest
from lockstep.sweeps.pool import Pool

STAMP = stamp(FileFormat.run)


def test_a_name_becomes_one_safe_folder_name_and_two_long_ones_stay_two() -> None:
    names = {"../../../etc/passwd": "etc_passwd", "a b\n[c]": "a_b_c", "..": "job", "": "job"}
    plain = ("digits-resnet18", "model=resnet18,seed=1")
    assert {text: slug(text) for text in (*names, *plain)} == names | dict(zip(plain, plain, strict=True))
    assert len({slug("x" * 200), slug("x" * 201), slug("x" * 200 + "/"), slug("訓練" * 60), slug("訓練" * 61)}) == 5


@given(st.text())
def test_no_text_leaves_its_folder_hides_or_grows_too_long(text: str) -> None:
    name = slug(text)
    assert Path("root", name).parent == Path("root")
    assert Path("root", name).resolve().parent == Path("root").resolve()
    assert name.isprintable()
    assert not name.startswith(".")
    assert 0 < len(name.encode()) <= NAME_LIMIT


def test_twenty_jobs_that_start_at_once_get_twenty_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(20) as pool:
        runs = list(pool.map(lambda _: RunDir.create(tmp_path / "new" / "root", "job"), range(20)))
    assert len({run.path for run in runs}) == 20
    assert all(run.path.name.split("-", 2)[2].startswith("job-") for run in runs)
    assert all(folder.is_dir() for run in runs for folder in (run.logs, run.checkpoints, run.hydra))


def test_a_file_in_the_way_is_an_error_and_not_an_endless_search(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for attempt in (
        lambda: RunDir.create(tmp_path / "file", "job"),
        lambda: RunDir.create(tmp_path / "file" / "below", "job"),
        lambda: RunDir.at(tmp_path / "file"),
    ):
        with pytest.raises(InputError, match=r"output_root: .*file"):
            attempt()


def test_a_folder_that_cannot_be_written_is_an_error_with_its_remedy() -> None:
    with pytest.raises(InputError, match=r"/proc/none/.* cannot be written .*output_root=FOLDER"):
        RunDir.create(Path("/proc/none"), "job")


def test_the_summary_is_changed_and_added_to_and_stays_json(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "run")
    assert run.read_summary() == {}
    run.write_summary(status="running", step=0)
    run.write_summary(status="completed", objective=98.5)
    expected = {**STAMP, "status": "completed", "step": 0, "objective": 98.5}
    assert json.loads(run.summary.read_text()) == expected
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.write_summary(objective=float("nan"))
    assert run.read_summary()["objective"] == 98.5


def test_a_run_that_goes_on_forgets_how_an_earlier_part_of_it_ended(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "run")
    run.metrics.write_text("")
    run.write_ending(NumericalError("the loss is nan"))
    run.start_summary(step=3)
    assert run.read_summary() == {**STAMP, "status": "running", "step": 3}


@pytest.mark.parametrize(("status", "newest"), [(None, True), ("stopped", True), ("running", False)])
def test_a_run_that_ended_before_it_began_is_the_newest_too(tmp_path: Path, status: str | None, newest: bool) -> None:
    run = run_dir(tmp_path / "run")
    RunDir.at(tmp_path / "later").mark_latest(tmp_path)
    if status is not None:
        run.write_summary(status=status)
    run.write_ending(Stopped("early"))
    assert run.read_summary()["status"] == "stopped"
    assert latest(tmp_path, "resume").path.name == ("run" if newest else "later")


def test_a_stop_before_a_step_says_how_far_the_run_was_saved_before(tmp_path: Path) -> None:
    run, new = RunDir.at(tmp_path / "run"), RunDir.at(tmp_path / "new")
    run.last.write_text("step-00000312\n")
    run.start_summary(steps=345)
    (tmp_path / "jobs").mkdir()

    def stops(path: Path) -> None:
        raise StopNow

    for folder, says in ((run, "stopped at step 312 of 345, which was saved"), (new, "stopped before a step was")):
        with pytest.raises(Stopped, match=says):
            Inline(ranks=1).launch(Entry(stops), folder)
        request = StopRequest()
        request.saved = Run(folder.path).saved
        pool: Any = SimpleNamespace(ledger=Ledger(tmp_path))
        record = Pool._without_record(pool, Record(number=0, overrides=(), folder=folder.path.name), 75)
        for sentence in (first_failure(folder, {0: 75}), request.error(), record.error):
            assert str(sentence).startswith(says)


def begun(path: Path) -> RunDir:
    """A run folder with all files that are written before training starts."""
    run = RunDir.at(path)
    for file in (run.config, run.command, run.environment, run.overrides, run.hydra / "config.yaml"):
        file.write_text("written")
    for file in (run.hydra / "hydra.yaml", run.log, run.rank_log(0), run.rank_log(1), run.rank_error(0)):
        file.write_text("written")
    run.write_summary(status="running")
    return run


def test_of_a_refused_job_nothing_is_left_but_what_the_user_had(tmp_path: Path) -> None:
    """Nothing, or empty folders, or files with the names of a run's, which a start that was killed leaves too."""
    for had in ((), ("",), ("logs/", "checkpoints/"), ("env.json", "data/precious.bin")):
        folder = tmp_path / "new" / "run"
        for name in had:
            path = folder / name
            (path if name.endswith("/") or not name else path.parent).mkdir(parents=True, exist_ok=True)
            if path != folder and not name.endswith("/"):
                path.write_text("precious")
        before = [(path, path.is_file() and path.read_text()) for path in sorted(tmp_path.rglob("*"))]
        run, new = RunDir.provide(folder, tmp_path, "name")
        described = (run.config, run.command, run.overrides, run.composed, run.hydra / "hydra.yaml")
        with suppress(InputError), job_folder(run, dict.fromkeys(described, "text"), new):
            begun(folder)
            raise InputError("the model does not fit")
        assert [(path, path.is_file() and path.read_text()) for path in sorted(tmp_path.rglob("*"))] == before
        shutil.rmtree(tmp_path / "new", ignore_errors=True)


def test_a_job_that_began_keeps_its_folder_and_says_how_it_ended(tmp_path: Path) -> None:
    for error, status, code, sentence in (
        (InputError("no"), "failed", 2, "no"),
        (Stopped("stopped at step 3"), "stopped", 75, "stopped at step 3"),
        (NumericalError("the loss is nan"), "failed", 76, "the loss is nan"),
        (ValueError("odd"), "failed", 70, "ValueError: odd"),
        (KeyboardInterrupt(), "failed", 70, "KeyboardInterrupt: "),
    ):
        run = begun(tmp_path / type(error).__name__)
        run.metrics.write_text("")
        with suppress(type(error)), job_folder(run, {}):
            run.start_summary(started=1.5)
            raise error
        assert run.read_summary() == {**STAMP, "started": 1.5, "status": status, "exit_code": code, "error": sentence}
    run = begun(tmp_path / "a fault before training")
    with pytest.raises(ValueError, match="odd"), job_folder(run, {}):
        raise ValueError("odd")
    assert run.read_summary()["error"] == "ValueError: odd"


def test_a_run_that_refuses_to_go_on_is_as_it_was(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.metrics.write_text("")
    run.write_summary(status="completed")
    with suppress(InputError), job_folder(run, {run.config: "other", run.command: "other"}):
        assert run.config.read_text() == "other"
        raise InputError("nothing is left to do")
    assert (run.config.read_text(), run.command.read_text()) == ("written", "written")
    assert run.read_summary() == {**STAMP, "status": "completed"}


@pytest.mark.parametrize("logged", [True, False])
def test_a_run_that_a_rank_refuses_has_the_same_files_and_logs_as_before(tmp_path: Path, logged: bool) -> None:
    run = begun(tmp_path / "run")
    run.metrics.write_text("")
    if logged:
        run.log.write_text("trained\n")
        run.rank_log(0).write_text("trained\n")
        run.rank_error(0).write_text("a longer, older error")
    else:
        for folder in (run.logs, run.checkpoints):
            shutil.rmtree(folder)
    before = {path: path.is_file() and path.read_bytes() for path in run.path.rglob("*")}
    _, new = RunDir.provide(run.path, tmp_path, "name")
    with suppress(InputError), job_folder(run, {run.config: "other", run.composed: "other"}, new):
        for rank in (0, 1):
            with log.rank_logging(run, rank, separate=False):
                log.logger.info("the parts of the run")
            run.rank_error(rank).write_text("an error")
        raise InputError("the checkpoint does not fit")
    after = {path: path.is_file() and path.read_bytes() for path in run.path.rglob("*")}
    assert after == before


def test_latest_points_to_the_newest_run_unless_it_is_a_folder(tmp_path: Path) -> None:
    for name in ("one", "two"):
        RunDir.at(tmp_path / name).mark_latest(tmp_path)
        assert latest(tmp_path, "resume=latest") == RunDir(tmp_path / name)
    assert (tmp_path / "latest").read_text() == "two\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "two"]
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    RunDir.at(tmp_path / "run").mark_latest(tmp_path)
    with pytest.raises(InputError, match="latest is a folder, expected a plain file; name a run folder"):
        latest(tmp_path, "resume=latest")
    assert (tmp_path / "latest").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "run", "two"]


def test_the_latest_run_can_be_elsewhere_if_it_says_that_it_is_of_this_root(tmp_path: Path) -> None:
    run, root = RunDir.at(tmp_path / "elsewhere"), tmp_path / "runs"
    run.mark_latest(root)
    for content in ("output_root: RUNS/other\n", "output_root: null\n", "- 1\n", "\0"):
        run.config.write_text(content.replace("RUNS", str(root)))
        with pytest.raises(InputError, match=r"names .*elsewhere, expected a folder below"):
            latest(root, "resume=latest")
    run.config.write_text(f"output_root: {root}\n")
    assert latest(root, "resume=latest") == run


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff"])
def test_a_damaged_summary_is_said_where_it_is_read_and_made_anew_where_it_is_written(
    tmp_path: Path, content: bytes
) -> None:
    run = RunDir.at(tmp_path / "run")
    run.summary.write_bytes(content)
    with pytest.raises(InputError, match=r"summary.json is not"):
        run.read_summary()
    run.write_summary(status="running")
    assert run.read_summary() == {**STAMP, "status": "running"}


def test_a_disk_that_fills_up_while_a_job_is_described_leaves_it_as_it_was(tmp_path: Path, full_disk: Any) -> None:
    run = begun(tmp_path / "old")
    texts = {run.config: "other", run.command: "x" * 1000}
    with full_disk(100), pytest.raises(StorageError, match=r"command.txt cannot be written"), job_folder(run, texts):
        pass
    assert (run.config.read_text(), run.command.read_text()) == ("written", "written")
    new, folders = RunDir.provide(tmp_path / "new", tmp_path, "name")
    texts = {new.config: "other", new.command: "x" * 1000}
    refused = job_folder(new, texts, folders)
    with full_disk(100), pytest.raises(StorageError, match=r"command.txt cannot be written"), refused:
        pass
    assert not new.path.exists()
    run.metrics.write_text("")
    with full_disk(10):
        run.write_ending(Stopped("stopped at step 3"))  # hides nothing of why the job ended
    assert run.read_summary() == {**STAMP, "status": "running"}


@pytest.mark.parametrize("content", [b"\xff", bytes(2**20)])
def test_latest_that_names_nothing_is_a_mistake_with_a_remedy(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "latest").write_bytes(content)
    called = Invocation(overrides=(), sweep=False, folder=None, hydra="")
    with pytest.raises(InputError, match=r"resume=latest: .*latest .*; name a run folder with resume=PATH"):
        decide_resume(composed("resume=latest", f"output_root={tmp_path}"), called)
    with pytest.raises(InputError, match=r"^weights: .*latest .*; name a run folder$"):
        pointed(tmp_path / "latest", tmp_path, "weights")
    (tmp_path / "best").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"best is not UTF-8 text .*; name a run folder with resume=PATH"):
        decide_resume(composed(f"resume={tmp_path / 'best'}"), called)
    (tmp_path / "latest").unlink()
    os.mkfifo(tmp_path / "latest")
    with pytest.raises(InputError, match=r"latest is a pipe"):
        latest(tmp_path, "resume=latest")


def test_the_best_checkpoint_of_a_run_is_resumed_by_the_file_that_names_it(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "run")
    checkpoint = run.checkpoints / "step-00000003"
    checkpoint.mkdir()
    (checkpoint / MANIFEST).write_text("{}")
    run.best.write_text(f"{checkpoint.name}\n")
    called = Invocation(overrides=(), sweep=False, folder=None, hydra="")
    assert decide_resume(composed(f"resume={run.best}"), called).values["resume"] == str(checkpoint)


def test_a_start_that_was_killed_leaves_a_folder_to_start_in_and_a_users_folder_is_none(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "run")
    assert run.only_prepared
    for killed_while_writing in (run.config, run.hydra / ".hydra.yaml.123.tmp", run.lock):
        killed_while_writing.write_text("")
        assert run.only_prepared
    (run.path / "notes.txt").write_text("")
    assert not run.only_prepared


def test_a_kill_never_leaves_the_config_of_one_command_beside_the_overrides_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path / "run")
    beside: list[bool] = []

    def write(path: Path, text: str) -> None:
        write_atomic(path, text)
        beside.append(run.composed.exists() and run.composed.read_text() != run.overrides.read_text())

    monkeypatch.setattr("lockstep.job.prepare.write_atomic", write)
    with job_folder(run, {run.config: "new", run.overrides: "new", run.composed: "new"}):
        assert beside == [False] * 3
