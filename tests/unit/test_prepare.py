"""From what a command resumes to a run folder: what is checked, kept, said, and undone on the way."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from helpers import FAKE, composed, resolved, run_dir
from lockstep.config import components, composition
from lockstep.config.composition import ConfigFiles, Invocation
from lockstep.core.errors import InputError, StorageError
from lockstep.core.plan import Averaging, Plan
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.core.safe_write import Lock
from lockstep.job import prepare
from lockstep.job.prepare import check_code, checked_job, fitted_to_images, job_folder, job_here, note_changes
from lockstep.job.resume import Resume, decide_resume
from lockstep.launcher import Inline, Spawn
from lockstep.runtime import user_code
from lockstep.strategy import DDP, Single, Strict
from lockstep.training.resolved_job import decisions, load_job, plan_of

SMALL = (*FAKE, "model=linear", "device=cpu")


def resume_of(*words: str, sweep: bool = False, **changed: Any) -> Resume:
    called, values = Invocation(overrides=words, sweep=sweep, folder=None, hydra="mode: RUN\n"), composed(*words)
    with composition.composing():
        return replace(decide_resume(values, called), **changed)


def test_a_new_run_folder_has_the_job_its_command_its_words_and_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.config.commands._WORDS", ["lockstep", "train"])
    words = (*SMALL, "dataset.examples=100", "steps=3", "name=mine", f"output_root={tmp_path}")
    resume = resume_of(*words)
    configs = ConfigFiles(searchpath=("hydra.searchpath=[/more]",))
    resume = replace(resume, typed=(*words, "seed=0"), invocation=replace(resume.invocation, configs=configs))
    with closing(Lock()) as lock, closing(Lock()) as another:
        folder, job = prepare.create_run(resume, lock)
        (place,) = tmp_path.iterdir()
        with pytest.raises(InputError, match="in use by another job"):
            another.take(place / ".lock")
        with folder as run:
            assert run == RunDir(place)
            assert "-mine-" in place.name
    assert load_job(run.config) == job
    assert run.command.read_text() == f"lockstep train 'hydra.searchpath=[/more]' {' '.join(words)} seed=0\n"
    assert (run.hydra / "hydra.yaml").read_text() == "mode: RUN\n"
    assert yaml.safe_load(run.overrides.read_text()) == list(words)
    assert components.read_config(run.composed) == dict(resume.composed)
    assert not run.lock.exists()


@pytest.mark.parametrize(("sweep", "forks"), [(False, False), (True, True)])
def test_a_rank_of_a_sweep_in_one_process_is_a_process_of_its_own_and_forks_if_it_can(
    sweep: bool, forks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported: list[Any] = []
    monkeypatch.setattr(prepare.forking, "import_for_ranks", imported.append)
    monkeypatch.setattr(Spawn, "can_fork", lambda self: True)
    words = (*SMALL, "dataset.examples=100", f"output_root={tmp_path}")
    with closing(Lock()) as lock:
        _, job = prepare.create_run(resume_of(*words, sweep=sweep), lock)
    assert type(job.launcher) is (Spawn if sweep else Inline)
    assert imported == ([job] if forks else [])
    monkeypatch.setattr(prepare.multiprocessing, "parent_process", lambda: "the pool")
    assert type(prepare.prepare(resume_of(*words, sweep=sweep)).launcher) is Inline, "a job of the pool has its own"


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_published_weights_are_fetched_for_a_run_that_begins(
    has_checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    resume = resume_of(*SMALL, "dataset.examples=100")
    resume.__dict__["checkpoint"] = Path("run/checkpoints/step-00000003") if has_checkpoint else None
    job = resolved(*SMALL, "dataset.examples=100")
    monkeypatch.setattr(type(job.model), "prepare", lambda self: steps.append("weights"))
    monkeypatch.setattr(Inline, "try_address", lambda self: steps.append("address"))
    monkeypatch.setattr(prepare.forking, "keep_one_thread", lambda: steps.append("thread"))
    monkeypatch.setattr(prepare, "checked_job", lambda own, sweep: job)
    monkeypatch.setattr(prepare, "fetch_data", lambda own, dataset: steps.append("data"))
    monkeypatch.setattr(prepare, "check_plan", lambda own: steps.append("plan") or plan_of(own, 100))
    monkeypatch.setattr(prepare, "check_resumable", lambda own, job, plan: steps.append(f"resume {plan.examples}"))
    assert prepare.prepare(resume) == job
    assert steps == ["thread", "address", "data", "plan", *["weights"] * (not has_checkpoint), "resume 100"]


def test_a_command_that_makes_no_run_takes_one_device_and_leaves_out_what_only_a_run_uses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unused = ("strategy=ddp", "strategy.sync_batchnorm=false", "launcher.ranks=2", "hydra.run.dir=run", "epochs=7")
    words = (*SMALL, "dataset.examples=100", "seed=3", *unused)
    job = job_here(words, "this is a trial", {"epochs"})
    assert (job.launcher.ranks, type(job.launcher), type(job.strategy)) == (1, Inline, Single)
    assert (job.seed, job.epochs, job.dataset.examples) == (3, 20, 100)
    assert f"this is a trial; ignored: {' '.join(unused)}" in capsys.readouterr().err
    assert job_here(words, "a trial").epochs == 7


def test_a_command_without_a_run_folder_keeps_its_ranks_fits_its_batch_and_fetches_its_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[Any] = []
    monkeypatch.setattr(prepare, "fetch_data", lambda resume, dataset: fetched.append((resume.may_fetch, dataset)))
    words = (*SMALL, "dataset.examples=30", "launcher=spawn", "launcher.ranks=2", "hydra.run.dir=run")
    job = prepare.job_of(words)
    assert (job.launcher.ranks, type(job.strategy), job.batch) == (2, DDP, 30)
    assert fetched == [(True, job.dataset)]
    assert "no run folder is made; ignored: hydra.run.dir=run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("strategy=strict",), False),
        (("repro=strict",), False),
        (("repro=exact",), False),
        (("repro=exact", "strategy=strict"), True),
        (("repro=strict", "strategy=strict"), False),
    ],
)
def test_a_fixed_order_is_refused_where_the_command_asks_for_another(words: tuple[str, ...], refused: bool) -> None:
    resume = resume_of(*SMALL, *words)
    if refused:
        with pytest.raises(InputError, match=r"^strategy=strict belongs to repro=strict, but repro=exact is given"):
            checked_job(resume)
    else:
        assert isinstance(checked_job(resume).strategy, Strict) == any("strict" in word for word in words)


@pytest.mark.parametrize(
    ("images", "words", "batch"),
    [
        (63, (), 63),
        (64, (), 64),
        (65, (), 64),
        (16, (), 16),
        (16, ("++batch=auto",), 16),
        (16, ("train.eval_batch=8",), 16),
        (63, ("batch=64",), None),
        (16, ("++batch=17",), None),
        (16, ("batch=16",), 16),
    ],
)
def test_a_batch_that_nobody_typed_is_at_most_the_split_and_has_its_own_rate(
    images: int, words: tuple[str, ...], batch: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    resume = resume_of(*SMALL, f"dataset.examples={images}", *[word for word in words if "auto" not in word])
    resume = replace(resume, overrides=(*resume.overrides, *[word for word in words if "auto" in word]))
    if batch is None:
        typed = int(words[0].rpartition("=")[2])
        assert fitted_to_images(checked_job(resume), resume).batch == typed
        assert capsys.readouterr().err == ""
        return
    job = fitted_to_images(checked_job(resume), resume)
    assert (job.batch, job.optimizer.lr) == (batch, pytest.approx(1e-3 * (batch / 64) ** 0.5))
    is_smaller = batch == images < 64 and "batch=16" not in words
    note = f"batch is {images}, all images of the training split; it would be 64 with more images"
    assert (note in capsys.readouterr().err) is is_smaller


def test_the_plan_of_a_run_has_the_batch_that_fits_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    monkeypatch.setattr(prepare.forking, "keep_one_thread", lambda: None)
    monkeypatch.setattr(prepare, "check_resumable", lambda own, job, plan: batches.append(plan.batch))
    job = prepare.prepare(resume_of(*SMALL, "dataset.examples=30"))
    assert (job.batch, batches) == (30, [30])


@pytest.mark.parametrize("sweep", [True, False])
def test_a_job_is_resolved_with_the_checkpoint_that_it_resumes(sweep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    resolve, checkpoint = prepare.resolve, Path("run", "checkpoints", "step-00000001")
    monkeypatch.setattr(Resume, "checkpoint", checkpoint)
    monkeypatch.setattr(prepare, "resolve", lambda job, **how: (calls.append(how), resolve(job, sweep=False))[1])
    checked_job(resume_of(*SMALL), sweep=sweep)
    assert calls == [{"sweep": sweep, "resumed": checkpoint}]


def test_a_job_is_checked_again_with_the_batch_that_fits_its_images() -> None:
    resume = resume_of(*SMALL, "dataset.examples=10", "train.repeats=4")
    job = checked_job(resume)
    with pytest.raises(InputError, match=r"^train\.repeats is 4, but batch is 10"):
        fitted_to_images(job, resume)


def test_a_batch_of_all_images_has_the_rate_of_trained_weights_and_what_the_images_choose() -> None:
    auto = ("epochs=auto", "train.ema=auto", "train.mixup=auto", "train.patience=auto")
    resume = resume_of(*SMALL, "dataset.examples=16", *auto)
    trained = replace(checked_job(resume), init_from="start.safetensors")
    fitted = fitted_to_images(trained, resume)
    assert (fitted.batch, fitted.optimizer.lr) == (16, pytest.approx(1e-4 * (16 / 64) ** 0.5))
    assert (fitted.train.ema, fitted.train.mixup, fitted.train.patience) == (0.99, 0, "50%")


@pytest.mark.parametrize("may_fetch", [True, False])
def test_data_that_cannot_be_read_names_the_folder_only_where_it_is_not_fetched(may_fetch: bool) -> None:
    def fail() -> None:
        raise InputError("no such files")

    source: Any = SimpleNamespace(prepare=fail, train=lambda: None, eval=fail)
    with pytest.raises(InputError) as raised:
        prepare.fetch_data(resume_of(*SMALL, may_fetch=may_fetch), source)
    only = "; nothing is downloaded to a folder that only the run or a config file names: name it with "
    assert str(raised.value) == "no such files" + ("" if may_fetch else f"{only}data_root=FOLDER")


def test_a_summary_that_is_damaged_ends_no_run_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_dir(tmp_path / "run", *SMALL, "dataset.examples=64", "batch=32", "steps=4")
    run.summary.write_text("{")
    job = load_job(run.config)
    resume = resume_of(*SMALL, folder=run.path)
    resume.__dict__["checkpoint"] = run.checkpoints / "step-00000004"
    step = {"step": 4}
    monkeypatch.setattr(prepare, "check_fingerprint", lambda fingerprint, resumed: {"progress": step})
    prepare.check_resumable(resume, job, plan_of(job, 64))
    assert f"warning: {run.summary} is not " in (shown := capsys.readouterr().out)
    assert "; it will be replaced" in shown
    step["step"] = 5
    with pytest.raises(InputError) as raised:
        prepare.check_resumable(resume, job, plan_of(job, 64))
    stands = "stands at step 5, and this job would end at step 4; train longer with steps=10"
    assert str(raised.value) == f"resume: {resume.checkpoint} {stands}"


def recorded(run: RunDir, **files: dict[str, str]) -> None:
    code = {package: {"sha256": f"hash of {package}", "files": own} for package, own in files.items()}
    run.environment.write_text(json.dumps({"code": code}))


@pytest.mark.parametrize("repro", ["exact", "strict"])
@pytest.mark.parametrize(
    ("now", "changed"),
    [
        ({"mine": {"a.py": "1"}, "more": {"b.py": "2"}}, ""),
        ({"mine": {"a.py": "1"}}, ""),
        ({"mine": {"a.py": "9"}, "more": {"b.py": "2"}}, "mine (a.py)"),
        ({"mine": {"a.py": "9"}, "more": {"c.py": "2"}}, "mine (a.py), more (b.py (gone), c.py (new))"),
    ],
    ids=["same", "less", "one", "both"],
)
def test_other_code_is_said_and_refused_for_the_same_bits(
    tmp_path: Path,
    repro: str,
    now: dict[str, dict[str, str]],
    changed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = {"mine": {"a.py": "1"}, "more": {"b.py": "2"}}
    monkeypatch.chdir(tmp_path)
    recorded(run := RunDir.at(tmp_path / "outputs" / "run"), **before)
    job, parts = resolved(*SMALL, f"repro={repro}"), list[Any]()
    callback: Any = SimpleNamespace()

    def code_of(config: Any, own: Any) -> dict[str, Any]:
        assert config == components.plain(job)
        parts.append(own)
        return {
            name: SimpleNamespace(
                facts={"sha256": f"hash of {name}" if files == before[name] else "new", "files": files}
            )
            for name, files in now.items()
        }

    monkeypatch.setattr(user_code, "code_of", code_of)
    monkeypatch.setattr("lockstep.training.objects.code_parts", lambda own, callbacks: [own, callbacks])
    sentence = f"resume: code has changed since the run last began: {changed}"
    if changed and repro == "strict":
        with pytest.raises(InputError) as raised:
            check_code(job, run.checkpoints / "step-00000003", [callback])
        assert str(raised.value) == (
            f"{sentence}, and repro=strict continues with the same code; restore it (env.json has its commit, and "
            "code.diff what that lacks), or take only the weights with init_from=outputs/run"
        )
        assert capsys.readouterr().err == ""
    else:
        check_code(job, run.checkpoints / "step-00000003", [callback])
        assert capsys.readouterr().err == (f"{sentence}\n" if changed else "")
    assert parts == [[job, [callback]]]


@pytest.mark.parametrize("code", [None, {}, []])
def test_the_code_of_a_run_that_has_recorded_none_is_not_looked_at(
    tmp_path: Path, code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.at(tmp_path / "run")
    run.environment.write_text(json.dumps({"code": code}))
    monkeypatch.delattr(user_code, "code_of")
    assert not Run(run.path).code
    check_code(resolved(*SMALL, "repro=strict"), run.checkpoints / "step-00000003", ())


def noted(step: int, saved: dict[str, list[int]], capsys: pytest.CaptureFixture[str], *words: str) -> str:
    job = resolved(*SMALL, "schedule=constant", "steps=40", "batch=10", *words)
    plan = plan_of(job, 1000)
    note_changes(job, plan, {**decisions(job, plan), **saved}, step)
    return capsys.readouterr().err.strip()


HEAD = "resume: a run of 40 steps would have had until step {}, in steps: "
TAIL = "; the steps so far stay as they were trained, and an average follows the new plan"


@pytest.mark.parametrize(
    ("step", "saved", "note"),
    [
        (21, {"train.mix_until": [20]}, ""),
        (20, {"train.mix_until": [30]}, ""),
        (21, {"train.mix_until": [30]}, "train.mix_until [20] (not [30])"),
        (30, {"train.mix_until": [25]}, "train.mix_until [20] (not [25])"),
        (11, {"train.mix_until": [10]}, "train.mix_until [20] (not [10])"),
        (10, {"train.mix_until": [10]}, ""),
        (40, {"steps": [80]}, ""),
        (12, {"train.patience": [11]}, "train.patience null (not [11])"),
        (
            12,
            {"train.mix_until": [11], "train.patience": [3]},
            "train.mix_until [20] (not [11]), train.patience null",
        ),
    ],
)
def test_what_begins_before_the_step_of_a_resume_is_said_if_the_plan_moves_it(
    step: int, saved: dict[str, list[int]], note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = noted(step, saved, capsys, "train.mix_until=50%", "train.mixup=0.2")
    if not note:
        assert text == ""
        return
    assert text.startswith(f"{HEAD.format(step)}{note}")
    assert text.endswith(TAIL)
    assert "learning rate" not in text


def test_a_decision_that_the_run_did_not_have_is_said_too(capsys: pytest.CaptureFixture[str]) -> None:
    job = resolved(*SMALL, "schedule=constant", "steps=40", "batch=10", "train.mix_until=50%", "train.mixup=0.2")
    plan = plan_of(job, 1000)
    here = decisions(job, plan)
    saved = {key: steps for key, steps in here.items() if key != "train.mix_until"}
    assert saved != here
    note_changes(job, plan, saved, 21)
    assert capsys.readouterr().err.strip() == f"{HEAD.format(21)}train.mix_until [20] (not null){TAIL}"


def test_the_learning_rates_up_to_the_step_of_a_resume_are_compared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []

    def factor(self: Any, at: int, plan: Plan, scores: Any) -> float:
        looked_at.append(at)
        return 0.5 if (at, plan.total_steps) == (differs, 40) else 1.0

    monkeypatch.setattr("lockstep.optim.schedule.Constant.factor", factor)
    differs = 0
    for other, is_said in ((1, True), (7, True), (8, False)):
        differs = other
        text = noted(7, {"steps": [80]}, capsys)
        assert text == (f"{HEAD.format(7)}another learning rate{TAIL}" if is_said else "")
    assert {*looked_at} == {*range(1, 8)}
    looked_at.clear()
    noted(5_000, {"steps": [80]}, capsys)
    assert len({*looked_at}) < 1001, "a thousand steps of a long run are enough"


def test_a_schedule_that_does_not_fit_into_the_plan_of_before_is_no_obstacle(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def factor(self: Any, at: int, plan: Plan, scores: Any) -> float:
        if plan.total_steps == 80:
            raise InputError("its parts end before")
        return 1.0

    monkeypatch.setattr("lockstep.optim.schedule.Constant.factor", factor)
    assert noted(7, {"steps": [80]}, capsys) == ""
    words = ("train.mix_until=50%", "train.mixup=0.2")
    change = "train.mix_until [20] (not [30])"
    assert noted(21, {"steps": [80], "train.mix_until": [30]}, capsys, *words) == HEAD.format(21) + change + TAIL


MISPLACED = {
    **dict.fromkeys(
        (
            *("config.yaml", "command.txt", "env.json", "metrics.jsonl", "model.safetensors", "train.log"),
            *("summary.json", "code.diff", "checkpoints/last", ".hydra/config.yaml", ".hydra/other.yaml"),
            *("logs/rank0.log", "logs/rank3.error.json", "events.out.tfevents.1"),
        ),
        "a folder, expected a file",
    ),
    **dict.fromkeys(("incident", "checkpoints/step-00000003"), "a file, expected a folder"),
}


@pytest.mark.parametrize("name", MISPLACED)
def test_what_is_misplaced_in_a_run_folder_is_named(tmp_path: Path, name: str) -> None:
    run = RunDir.at(tmp_path / "run")
    run.overrides.write_text("[]")
    path = run.path / name
    path.mkdir() if MISPLACED[name].startswith("a folder") else path.touch()
    with closing(Lock()) as lock, pytest.raises(InputError) as raised:
        prepare.lock_run_folder(run.path, lock)
    assert str(raised.value) == f"{path} is {MISPLACED[name]}; move it"


@pytest.mark.parametrize("step", [1, -1])
def test_of_what_is_misplaced_the_first_name_is_said_whatever_the_order_of_the_disk(
    tmp_path: Path, step: int
) -> None:
    run = RunDir.at(tmp_path / "run")
    run.overrides.write_text("[]")
    for name in sorted(MISPLACED)[::step]:
        if "/" not in name and MISPLACED[name].startswith("a folder"):
            (run.path / name).mkdir()
    with closing(Lock()) as lock, pytest.raises(InputError) as raised:
        prepare.lock_run_folder(run.path, lock)
    assert str(raised.value).startswith(f"{run.path / 'code.diff'} is a folder, expected a file")


def test_a_folder_that_another_job_has_is_refused_before_the_job_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir.at(tmp_path / "run")
    run.overrides.write_text("[]")
    run.summary.write_text('{"format": 99, "lockstep": "9.0"}')  # not looked at while the other job may write it
    monkeypatch.setattr(prepare, "prepare", None)  # is not called
    with closing(Lock()) as earlier, closing(Lock()) as lock:
        earlier.take(run.lock)
        with pytest.raises(InputError, match="in use by another job"):
            prepare.create_run(resume_of(*SMALL, folder=run.path), lock)


@pytest.mark.parametrize(
    "fault",
    [OSError(5, "odd"), StorageError("full"), UnreadableFile("a", "is damaged")],
    ids=lambda e: type(e).__name__,
)
def test_a_fault_of_what_undoes_a_refused_job_hides_no_refusal(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise fault

    run = RunDir.at(tmp_path / "run")
    monkeypatch.setattr(prepare, "remove_empty", fail)
    for folders in ([run.path], []):
        with pytest.raises(InputError, match=r"^no$"), job_folder(run, {run.config: "text"}, folders):
            raise InputError("no")


def test_a_summary_that_cannot_be_read_hides_no_refusal(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "run")

    def refuse() -> None:
        with job_folder(run, {run.config: "text"}):
            run.metrics.touch()
            run.summary.mkdir()
            raise InputError("no")

    with pytest.raises(InputError, match=r"^no$"):
        refuse()


def test_files_and_folders_of_the_user_may_be_in_a_run_folder_and_links_may_not(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "run")
    run.overrides.write_text("[]")
    for name in ("notes", "logs/of mine", "checkpoints/step-00000003", "notes/config.yaml"):
        (run.path / name).mkdir()
    for name in ("more.txt", "checkpoints/other", "notes/incident"):
        (run.path / name).touch()
    with closing(Lock()) as lock:
        prepare.lock_run_folder(run.path, lock)
    (run.path / "notes" / "link").symlink_to("more.txt")
    with closing(Lock()) as lock, pytest.raises(InputError, match=r"notes/link is a symbolic link, which leads"):
        prepare.lock_run_folder(run.path, lock)


def test_of_a_refused_job_neither_a_diff_nor_a_lock_is_left(tmp_path: Path) -> None:
    run, new = RunDir.provide(tmp_path / "run", tmp_path, "name")
    with suppress(InputError), job_folder(run, {run.config: "text"}, new):
        run.lock.write_text("{}")
        run.code_diff.write_text("diff")
        raise InputError("no")
    assert not run.path.exists()
    earlier = RunDir.at(tmp_path / "earlier")
    for file in (earlier.code_diff, earlier.environment, earlier.lock):
        file.write_text("earlier")
    with suppress(InputError), job_folder(earlier, {earlier.config: "text"}):
        earlier.code_diff.write_text("later")
        earlier.environment.unlink()
        raise InputError("no")
    assert {file.read_text() for file in (earlier.code_diff, earlier.environment, earlier.lock)} == {"earlier"}
    assert not earlier.config.exists()


def test_the_config_that_a_resume_compares_is_gone_while_the_overrides_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_atomic(path: Path, text: str) -> None:
        seen.append((path.name, run.composed.exists()))
        write(path, text)

    seen: list[tuple[str, bool]] = []
    run, write = RunDir.at(tmp_path / "run"), prepare.write_atomic
    run.composed.write_text("of the command before")
    monkeypatch.setattr(prepare, "write_atomic", write_atomic)
    with job_folder(run, {run.overrides: "[]", run.composed: "{}"}):
        assert run.composed.read_text() == "{}"
    assert seen == [("overrides.yaml", False), ("config.yaml", False)]


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("averages", [True, False])
def test_an_average_is_continued_by_the_steps_that_its_checkpoint_has(
    tmp_path: Path, saved: bool, averages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    words = (*SMALL, "dataset.examples=64", "batch=32", "steps=8", *["train.swa_from=3"] * averages)
    run = run_dir(tmp_path / "run", *words)
    job = load_job(run.config)
    plan, checkpoint = plan_of(job, 64), run.checkpoints / "step-00000004"
    decided = {**decisions(job, plan), "train.swa_from": [2], "train.swa_every": [5], "steps": [6]}
    progress = {"step": 4, **({"decisions": decided} if saved else {})}
    resume = resume_of(*SMALL, folder=run.path)
    resume.__dict__["checkpoint"] = checkpoint
    monkeypatch.setattr(prepare, "check_fingerprint", lambda own, resumed: {"progress": progress})
    monkeypatch.setattr(prepare, "check_code", lambda *words: calls.append(("code", *words)))
    monkeypatch.setattr(prepare, "note_changes", lambda *words: calls.append(("note", *words)))
    monkeypatch.setattr(prepare.files, "read_state", lambda path: {"ema_updates": 7.0} if path == checkpoint else {})
    monkeypatch.setattr(Averaging, "check_resumed", lambda *words: calls.append(("average", *words)))
    prepare.check_resumable(resume, job, plan)
    here, earlier = Averaging(3, 2, 8), Averaging(2, 5, 6) if saved else 7
    assert calls == [
        ("code", job, checkpoint, ()),
        *[("average", here, earlier, 4, 3)] * averages,
        *[("note", job, plan, decided, 4)] * saved,
    ]


@pytest.mark.parametrize("is_given", [True, False])
def test_the_objects_of_a_program_are_checked_with_their_job(is_given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    resume = resume_of(*SMALL)
    monkeypatch.setattr(prepare.extensions, "arguments_of", lambda parts: ["model"] * is_given)
    monkeypatch.setattr("lockstep.training.objects.check_given", calls.append)
    monkeypatch.setattr(Resume, "check_personal", lambda self, component: calls.append(component))
    checked_job(resume)
    assert calls == [resume.job, *[vars(resume.job)] * is_given]


def test_what_was_chosen_for_the_images_is_said(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    notes: list[Any] = []
    monkeypatch.setattr(
        prepare.auto_training,
        "notes",
        lambda job, fitted, images: notes.append((job, fitted, images)) or ["one", "two"],
    )
    resume = resume_of(*SMALL, "dataset.examples=50")
    fitted = fitted_to_images(checked_job(resume), resume)
    assert notes == [(resume.job, fitted, 50)]
    assert capsys.readouterr().err.endswith("\none\ntwo\n")
