"""The run folder: its name, its creation, and what remains of it when a job is refused."""

import json
import os
import shutil
import time
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
from lockstep.core.formats import FileFormat, NewerFormat, stamp
from lockstep.core.protocols import Entry
from lockstep.core.run import Run
from lockstep.core.run_dir import MANIFEST, NAME_LIMIT, RunDir, latest, near_path, near_paths, pointed, relative, slug
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
    names |= {".a.": "a", "_a_": "a", "-a-": "-a-", "a+b=c,d.e-f_g": "a+b=c,d.e-f_g", "\udcff": "job"}
    plain = ("digits-resnet18", "model=resnet18,seed=1")
    assert {text: slug(text) for text in (*names, *plain)} == names | dict(zip(plain, plain, strict=True))
    assert len({slug("x" * 200), slug("x" * 201), slug("x" * 200 + "/"), slug("訓練" * 60), slug("訓練" * 61)}) == 5
    assert len({slug("x" * 200 + end) for end in ("/", "\udcff", "\udcfe", "?")}) == 4, "the hash is of the text"


@given(st.text())
def test_no_text_leaves_its_folder_hides_or_grows_too_long(text: str) -> None:
    name = slug(text)
    assert Path("root", name).parent == Path("root")
    assert Path("root", name).resolve().parent == Path("root").resolve()
    assert name.isprintable()
    assert not name.startswith(".")
    assert 0 < len(name.encode()) <= NAME_LIMIT


def test_the_paths_of_a_run_begin_with_the_path_that_was_named(tmp_path: Path) -> None:
    RunDir.at(tmp_path / "run")
    link = tmp_path / "link"
    link.symlink_to("run")
    for path in (link, Path("relative")):
        run = RunDir(path)
        assert (run.log, run.composed) == (path / "train.log", path / ".hydra" / "config.yaml")


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
    run.lock.write_text("{}")
    if logged:
        run.log.write_text("trained\n")
        run.rank_log(0).write_text("trained\n")
        run.rank_error(0).write_text("a longer, older error")
        for empty in (run.rank_log(1), run.code_diff):
            empty.write_text("")
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


PREPARED = (".lock", "config.yaml", "command.txt", "env.json", "code.diff", "summary.json", "train.log", ".x.tmp")
PREPARED += (".hydra/overrides.yaml", ".hydra/config.yaml", ".hydra/hydra.yaml", "logs/slurm-7.log", "logs/x.tmp")
PREPARED += ("logs/rank0.log", "logs/rank12.log", "logs/rank3.error.json", "logs/rank12.error.json")
TRAINED = ("metrics.jsonl", "metrics.csv", "model.safetensors", "logs/other.log", ".hydra/other.yaml", "more/x.log")


@pytest.mark.parametrize("name", [*PREPARED, *TRAINED])
def test_a_job_that_was_killed_while_it_was_prepared_leaves_these_files_alone(tmp_path: Path, name: str) -> None:
    run = RunDir.at(tmp_path)
    (file := tmp_path / name).parent.mkdir(exist_ok=True)
    file.touch()
    assert run.only_prepared == (name in PREPARED)
    assert (file in run.prepared_files()) == (name in PREPARED and file.suffix != ".tmp")
    assert (file in run.log_files()) == (
        (name in PREPARED and "logs/rank" in name) or file.name in ("train.log", "slurm-7.log")
    )
    assert (file in run.rank_errors()) == name.endswith(".error.json")
    assert run.began == (name == "metrics.jsonl")


def test_a_new_run_folder_comes_with_all_folders_that_were_made_for_it_the_deepest_first(tmp_path: Path) -> None:
    root = tmp_path / "new" / "runs"
    run, new = RunDir.provide(None, root, "job")
    assert new == [run.hydra, run.logs, run.checkpoints, run.path, root, root.parent]
    assert RunDir.provide(None, root, "job")[1][4:] == []
    folder = root / "mine"
    expected = [folder, *(folder / name for name in (".hydra", "logs", "checkpoints"))]
    assert RunDir.provide(folder, tmp_path, "job") == (RunDir(folder), sorted(expected, reverse=True))
    assert RunDir.provide(folder, tmp_path, "job") == (RunDir(folder), [])


def test_a_disk_that_is_full_before_a_run_is_a_fault_of_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, **options: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(StorageError, match=r"run cannot be written \(No space left on device\)"):
        RunDir.at(tmp_path / "run")


def test_a_summary_keeps_its_version_and_a_start_takes_what_it_is_told(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path)
    run.summary.write_text(json.dumps({**STAMP, "lockstep": "0.9", "step": 1}))
    run.write_summary(step=2)
    assert run.read_summary() == {**STAMP, "lockstep": "0.9", "step": 2}
    run.start_summary(status="resumed")
    assert run.read_summary() == {**STAMP, "status": "resumed"}
    run.summary.write_text(json.dumps({"format": 99, "lockstep": "9.0"}))
    with pytest.raises(NewerFormat, match="of a run folder"):
        run.read_summary()
    run.write_ending(InputError("hides nothing of why the job ended"))
    assert json.loads(run.summary.read_text()) == {"format": 99, "lockstep": "9.0"}


@pytest.mark.parametrize("config", ["", "{}", "[]", "output_root: null", "output_root: [1]", "!"])
def test_an_ending_is_written_whatever_the_config_says_of_its_root(tmp_path: Path, config: str) -> None:
    run = RunDir.at(tmp_path / "run")
    run.config.write_text(config)
    run.write_ending(Stopped("early"))
    assert run.read_summary()["error"] == "early"


@pytest.mark.parametrize(
    ("name", "kind"), [("summary.json", "run folder"), ("manifest.json", "checkpoint"), ("sweep.json", "sweep")]
)
def test_a_folder_of_a_later_version_is_refused_and_a_damaged_one_is_not(
    tmp_path: Path, name: str, kind: str
) -> None:
    (tmp_path / name).write_text('{"format": 99, "lockstep": "9.0"}')
    with pytest.raises(NewerFormat, match=f"{name} has format 99 of a {kind}"):
        pointed(tmp_path, tmp_path, "resume")
    if name == "summary.json":
        (tmp_path / name).write_text('{"format": 99, "lockstep": "9.0", "status": ["of another kind"]}')
        with pytest.raises(NewerFormat, match="has format 99 of a run folder"):
            RunDir(tmp_path).read_summary()
    sweep = tmp_path / "sweep"
    (sweep / "003-x").mkdir(parents=True)
    (sweep / "sweep.json").write_text("{}")
    (sweep / "003-x" / name).write_text('{"format": 99, "lockstep": "9.0"}')
    for word in ("latest", "best"):
        (sweep / word).write_text("003-x\n")
    for path in (sweep / "latest", sweep / "best", sweep / "3", Path("latest")):
        with pytest.raises(NewerFormat, match=f"003-x/{name} has format 99 of a {kind}"):
            pointed(path, sweep, "resume")
    for text in ("{", "[]", '{"format": "x", "lockstep": "1.0"}', '{"format": 99}'):
        (tmp_path / name).write_text(text)
        assert pointed(tmp_path, tmp_path, "resume") == tmp_path


def test_a_job_of_a_sweep_is_named_by_its_whole_number(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    for number in (113, 1003, 13, 103, 31):
        (tmp_path / f"{number:03}-seed=3-3").mkdir()
        assert pointed(tmp_path / "3", tmp_path, "resume") == tmp_path / "3", "there is no such job"
    for number in (3, 13, 103, 1003):
        (tmp_path / f"{number:03}-seed=3-3").mkdir(exist_ok=True)
        assert pointed(tmp_path / str(number), tmp_path, "resume") == tmp_path / f"{number:03}-seed=3-3"


def test_latest_is_the_name_of_a_folder_below_its_root_also_of_one_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.at(tmp_path / "disk" / "deep" / "run")
    run.mark_latest(tmp_path / "disk")
    (root := tmp_path / "outputs").symlink_to("disk")
    assert latest(root, "resume").path == run.path
    run.mark_latest(tmp_path / "new" / "runs")
    assert (tmp_path / "new" / "runs" / "latest").read_text() == "../../disk/deep/run\n"
    for itself in (".", "deep/.."):
        (tmp_path / "disk" / "latest").write_text(itself)
        with pytest.raises(InputError, match="expected a folder below"):
            latest(root, "resume")
    run.config.write_text(f"output_root: {tmp_path}/outputs/../new/runs/\n")
    assert latest(tmp_path / "new" / "runs", "resume") == run
    run.mark_latest(tmp_path / "disk")
    run.mark_latest(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert (
        pointed(Path("disk/latest"), Path(), "resume")
        == pointed(Path("latest"), Path("disk"), "resume")
        == Path("disk/deep/run")
    )
    monkeypatch.chdir(tmp_path / "new")
    assert pointed(Path("../disk/latest"), Path(), "resume") == run.path, "it is not below this folder"
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match=r"^resume: no run has been started in .*none yet; name a run folder$"):
        pointed(tmp_path / "none" / "latest", Path(), "resume")


def test_a_misspelt_path_has_a_similar_one_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("outputs/baseline/checkpoints", "outputs/baseline2", "other"):
        Path(name).mkdir(parents=True)
    near = {
        "outputs/baselin": " Did you mean outputs/baseline or outputs/baseline2?",
        "outputs/baselin/checkpoints": " Did you mean outputs/baseline/checkpoints?",
        "outputs/baselin/nothing": "",
        "outputs/baseline": "",
        "outputs/else": "",
        "latst": " Did you mean latest?",
        "a\0b": "",
    }
    assert {name: near_path(Path(name), ["latest"]) for name in near} == near
    with pytest.raises(InputError, match=r"^resume: outputs/baselin does not exist\. Did you mean outputs/b"):
        pointed(Path("outputs/baselin"), Path("outputs"), "resume")
    with pytest.raises(InputError, match=r"^latst does not exist\. Did you mean latest\?$"):
        pointed(Path("latst"), Path("outputs"), "latst")
    assert pointed(Path("nothing/like/it"), Path("outputs"), "resume") == Path("nothing/like/it")


def test_best_is_the_best_job_of_a_sweep_and_no_link(tmp_path: Path) -> None:
    for name in ("sweep/003-x", "runs/best", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(InputError, match=r"^resume: there is no .*sweep/best: `best` is in the folder of a sweep"):
        pointed(tmp_path / "sweep" / "best", tmp_path, "resume")
    (best := tmp_path / "sweep" / "best").write_text("003-x\n")
    assert pointed(best, tmp_path, "resume") == tmp_path / "sweep" / "003-x"
    for content in ("../elsewhere", ".", ""):
        best.write_text(content)
        with pytest.raises(InputError, match=r"^resume: .*best has .* in it, expected the name of a folder next to"):
            pointed(best, tmp_path, "resume")
    best.write_text("link")
    (tmp_path / "sweep" / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"best names link, a symbolic link, expected a folder; name a run folder$"):
        pointed(best, tmp_path, "resume")
    assert pointed(tmp_path / "runs" / "best", tmp_path, "resume") == tmp_path / "runs" / "best", "a run of that name"
    gone = tmp_path / "no" / "such" / "best"
    assert pointed(gone, tmp_path, "resume") == gone


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


def test_a_number_in_a_sweep_is_its_job_unless_there_is_a_folder_of_that_name(tmp_path: Path) -> None:
    for name in (
        "sweep/003-seed=1",
        "sweep/012-seed=2",
        "sweep/1000-seed=3",
        "sweep/007-seed=4",
        "sweep/7",
        "runs/003-x",
    ):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    jobs = {"3": "003-seed=1", "003": "003-seed=1", "12": "012-seed=2", "1000": "1000-seed=3", "7": "7", "5": "5"}
    for number, name in jobs.items():
        assert pointed(tmp_path / "sweep" / number, tmp_path, "resume") == tmp_path / "sweep" / name
    assert pointed(tmp_path / "runs" / "3", tmp_path, "resume").name == "3", "it is no sweep"
    with pytest.raises(InputError, match=r"^resume: .*/003-seed=2 does not exist\. Did you mean .*/003-seed=1"):
        pointed(tmp_path / "sweep" / "003-seed=2", tmp_path, "resume")


def test_no_two_runs_get_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endings = iter(["aa", "aa", "aa", "bb"])
    monkeypatch.setattr("secrets.token_hex", lambda size: next(endings))
    monkeypatch.setattr("time.strftime", lambda form: "now")
    assert [RunDir.create(tmp_path, "job").path.name for _ in range(2)] == ["now-job-aa", "now-job-bb"]


def test_a_run_folder_has_the_second_of_its_start_its_name_and_an_ending_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strftime, moment = time.strftime, time.struct_time((2026, 1, 2, 13, 4, 5, 4, 2, 0))
    monkeypatch.setattr(time, "strftime", lambda form: strftime(form, moment))
    monkeypatch.setattr("secrets.token_hex", "{:04x}".format)
    assert RunDir.create(tmp_path, "a b").path == tmp_path / "20260102-130405-a_b-0002", "of two bytes"


def test_what_is_in_the_way_of_a_run_is_named(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    (run / "logs").touch()
    (tmp_path / "file").touch()
    for folder, file in ((run, run / "logs"), (tmp_path / "file", tmp_path / "file")):
        with pytest.raises(InputError) as caught:
            RunDir.at(folder)
        assert str(caught.value) == f"output_root: {file} is a file, expected a folder for the run"
    for name in (".hydra", "logs", "checkpoints"):
        (linked := tmp_path / f"linked{name}").mkdir()
        (linked / name).symlink_to(tmp_path)
        with pytest.raises(InputError, match=rf"{name} is a symbolic link, expected a folder; replace it by its tar"):
            RunDir.at(linked)
    with pytest.raises(FileExistsError):
        RunDir.at(run, new=True)
    with pytest.raises(InputError) as caught:
        RunDir.at(Path("/proc/none/run"))
    says = "cannot be written (No such file or directory); choose a folder that can be, with output_root=FOLDER"
    assert str(caught.value) == f"output_root: /proc/none/run {says}"


def test_a_root_that_cannot_be_made_is_a_fault_of_the_storage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = RunDir.at(tmp_path / "run")
    with pytest.raises(StorageError, match=rf"^{tmp_path}/file/root cannot be written \(Not a directory\)$"):
        run.mark_latest(tmp_path / "file" / "root")
    run.config.write_text(f"output_root: {tmp_path}/file/root")
    run.write_ending(Stopped("early"))
    assert run.read_summary()["error"] == "early", "nothing hides why the job ended"


def test_who_names_a_folder_without_a_best_job_or_a_latest_run_is_told_where_they_are(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        pointed(tmp_path / "best", tmp_path, "resume")
    assert str(caught.value) == (
        f"resume: there is no {tmp_path}/best: `best` is in the folder of a sweep, from the first job that is done; "
        "name a run folder, or outputs/sweeps/NAME/best"
    )
    (root := tmp_path / "root").mkdir()
    (root / "latest").write_text("../other")
    with pytest.raises(InputError) as caught:
        latest(root, "init_from")
    says = f"{root / 'latest'} names {tmp_path / 'other'}, expected a folder below {root}; name a run folder"
    assert str(caught.value) == f"init_from: {says}"


def test_a_path_below_the_current_folder_alone_is_shown_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "here-too"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert relative(Path.cwd() / "outputs" / "run") == Path("outputs/run")
    assert relative(Path.cwd()) == Path()
    for elsewhere in (tmp_path / "here-too" / "run", tmp_path, Path("outputs/run")):
        assert relative(elsewhere) == elsewhere


def test_a_summary_is_one_line_a_key_with_its_end_and_every_table_is_one(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path)
    run.start_summary(step=1)
    lines = run.summary.read_text().splitlines(keepends=True)
    assert lines[0] == "{\n"
    assert lines[-2:] == ['  "step": 1\n', "}\n"]
    run.write_summary(step=2)
    assert run.summary.read_text() == "".join(lines).replace('"step": 1', '"step": 2')
    for rank in (3, 13, 103):
        of_rank = (run.rank_log(rank), run.rank_samples(rank), run.rank_error(rank))
        assert of_rank == tuple(
            tmp_path / "logs" / f"rank{rank}.{end}" for end in ("log", "samples.jsonl", "error.json")
        )


def test_a_word_with_a_meaning_comes_before_similar_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lates", "latex"):
        Path(name).mkdir()
    assert near_path(Path("latess"), ["latest", "other"]).startswith(" Did you mean latest or late")
    assert near_path(Path("lates"), ["latest"]) == "", "it exists"
    assert near_path(tmp_path / "latess", ["latest"]).startswith(f" Did you mean {tmp_path}/late"), "it is no word"


def test_a_path_that_nobody_may_look_for_has_no_similar_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "baseline").mkdir()
    assert near_paths(tmp_path / "baselin") == [tmp_path / "baseline"]
    assert [near_paths(path) for path in (tmp_path / ("x" * 300), tmp_path / "baseline", Path("/"))] == [[]] * 3

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    assert near_paths(tmp_path / "baselin") == []
