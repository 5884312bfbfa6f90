"""What a command continues: which checkpoint, with which config, and when nothing is left to do."""

import json
import shlex
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from helpers import FAKE, composed, run_dir, train_here
from lockstep.config import components, composition
from lockstep.config.components import build_job
from lockstep.config.composition import ConfigFiles, Invocation
from lockstep.core.errors import InputError
from lockstep.core.fields import Role, leaves, with_role
from lockstep.core.formats import NewerFormat
from lockstep.core.run import read_overrides
from lockstep.core.run_dir import RunDir
from lockstep.job import resume as resuming
from lockstep.job.prepare import check_resumable, fetch_data
from lockstep.job.resume import Resume, decide_resume, refuse_in_sweep, refuse_resume
from lockstep.telemetry.loggers import MLflow
from lockstep.training.resolved_job import load_job, plan_of

SHORT = (*FAKE, "dataset.examples=64", "batch=32", "model.width=8", "checkpoint.every=2", "train.eval_every=100%")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of four steps with checkpoints at the second and the last one."""
    return train_here(tmp_path_factory.mktemp("trained") / "run", *SHORT, "steps=4")


def resume_of(folder: Path | None, named: Path | None = None) -> Resume:
    values = {"resume": None if named is None else str(named)}
    called = Invocation(overrides=(), sweep=False, folder=None, hydra="")
    own = {"composed": values, "values": values, "run": folder, "folder": folder}
    return Resume(invocation=called, overrides=(), may_fetch=True, **own)


def decided(*overrides: str, **changed: Any) -> Resume:
    """What a command with these overrides continues; `changed` are values that its config has besides."""
    called = Invocation(overrides=overrides, sweep=False, folder=None, hydra="")
    values = {**composed(*overrides), **changed}
    with composition.composing():
        return decide_resume(values, called)


def test_a_run_that_began_from_a_checkpoint_goes_on_from_its_own(trained: RunDir, tmp_path: Path) -> None:
    named = tmp_path / "step-00000002"
    assert resume_of(tmp_path / "new", named).checkpoint == named
    assert resume_of(None, named).checkpoint == named
    assert resume_of(trained.path, named).checkpoint == trained.checkpoints / "step-00000004"
    assert resume_of(None).checkpoint is None


def test_a_run_goes_on_until_all_of_it_is_done(trained: RunDir, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    shutil.copytree(trained.path, run.path)
    job = load_job(run.config)
    plan = plan_of(job, 64)
    last = run.checkpoints / "step-00000004"
    for done in (resume_of(run.path), resume_of(None, last)):
        with pytest.raises(InputError, match="has finished step 4 of 4, so nothing is left to do; train longer with"):
            check_resumable(done, job, plan)
    check_resumable(resume_of(None, run.checkpoints / "step-00000002"), job, plan)
    run.write_summary(status="stopped")
    check_resumable(resume_of(run.path), job, plan)  # its last evaluation is left
    with pytest.raises(InputError, match="stands at step 4, and this job would end at step 3"):
        check_resumable(resume_of(run.path), replace(job, steps=3), plan_of(replace(job, steps=3), 64))


def test_the_command_that_resumes_has_the_last_word(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", "epochs=3", "seed=5")
    resume = decided(f"resume={run.path}", "epochs=7")
    assert (resume.values["epochs"], resume.values["seed"]) == (7, 5)
    assert [word for word in resume.overrides if "epochs" in word] == ["epochs=3", "epochs=7"]
    assert not any(word.startswith("resume=") for word in resume.overrides), "a run does not go on from itself"
    assert composed(*resume.overrides)["epochs"] == 7, "the overrides give the config of the run again"


def test_a_run_folder_decides_neither_where_runs_are_nor_where_data_is_fetched_to(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", "dataset=mnist", "data_root=/somebody/elses")
    resume = decided(f"resume={run.path}", f"output_root={tmp_path / 'mine'}")
    assert resume.values["output_root"] == str(tmp_path / "mine")
    assert not resume.may_fetch
    own = run_dir(tmp_path / "own", "dataset=mnist", f"data_root={tmp_path}")
    assert decided(f"resume={own.path}", f"data_root={tmp_path}").may_fetch
    digits = decided(f"resume={run_dir(tmp_path / 'digits').path}")
    assert (digits.may_fetch, digits.values["output_root"]) == (True, "outputs")


@pytest.mark.parametrize("run", [None, Path("run")])
@pytest.mark.parametrize("may_fetch", [True, False])
def test_data_is_fetched_for_a_command_that_may_alone(run: Path | None, may_fetch: bool) -> None:
    calls: list[str] = []
    source: Any = SimpleNamespace(**{name: partial(calls.append, name) for name in ("prepare", "train", "eval")})
    fetch_data(replace(resume_of(run), may_fetch=may_fetch), source)
    assert calls == (["prepare"] if may_fetch else ["train", "eval"])


@pytest.mark.parametrize(
    ("words", "own", "configs", "may_fetch"),
    [
        (("dataset=mnist",), (), ConfigFiles(), True),
        (("dataset=mnist", "data_root=theirs"), (), ConfigFiles(), True),
        (("dataset=mnist", "data_root=theirs"), (), ConfigFiles(folder="/conf"), False),
        (("dataset=mnist", "data_root=theirs"), (), ConfigFiles(searchpath=("x",)), False),
        (("dataset=mnist", "data_root=mine"), ("data_root=mine",), ConfigFiles(folder="/conf"), True),
        (("dataset=mnist", "dataset.root=mine"), ("++dataset.root=mine",), ConfigFiles(folder="/conf"), True),
        (("dataset=mnist", "dataset.root=theirs"), ("data_root=mine",), ConfigFiles(folder="/conf"), False),
        (("dataset=mnist",), (), ConfigFiles(folder="/conf"), True),
        (("data_root=theirs",), (), ConfigFiles(folder="/conf"), True),
    ],
    ids=str,
)
def test_data_is_fetched_to_the_usual_folder_or_one_that_the_command_itself_names(
    words: tuple[str, ...], own: tuple[str, ...], configs: ConfigFiles, may_fetch: bool
) -> None:
    called = Invocation(overrides=words, sweep=False, folder=None, hydra="", configs=configs, own_words=own)
    resume = decide_resume(composed(*words), called)
    assert resume.may_fetch is may_fetch
    assert (resume.own is None, resume.own == {}) == (not configs.are_foreign, configs.are_foreign)


def test_a_checkpoint_is_named_from_the_current_folder_or_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for place in ("step-00000002", "home/step-00000003"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "manifest.json").write_text("{}")
    for word, place in (("step-00000002", "step-00000002"), ("'~/step-00000003'", "home/step-00000003")):
        resume = decided(f"resume={word}")
        assert (resume.values["resume"], resume.checkpoint) == (str(tmp_path / place), tmp_path / place)
        assert (resume.run, resume.folder) == (None, None)
    (link := tmp_path / "link").symlink_to(run_dir(tmp_path / "run").path)
    assert decided(f"resume={link}").run == tmp_path / "run", "a run is one folder by whatever name"
    with pytest.raises(InputError, match=r"^resume has the weights of its checkpoint, and init_from names others"):
        decided("resume=step-00000002", "init_from=there")


def test_a_file_that_is_no_run_starts_a_new_one_and_what_is_nothing_is_named_again(tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").touch()
    (tmp_path / "folder").mkdir()
    of_file = f"a new run starts from a file's weights with init_from={tmp_path}/w.safetensors"
    other = "name one with resume=PATH, or the newest run with resume=latest"
    for name, remedy in (("w.safetensors", of_file), ("folder", other), ("nothing", other)):
        with pytest.raises(InputError) as raised:
            decided(f"resume={tmp_path / name}")
        assert str(raised.value) == (f"resume: {tmp_path / name} is neither a run folder nor a checkpoint; {remedy}")


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (InputError("no run of that name"), " with resume=PATH"),
        (InputError("no run mnie. Did you mean mine?"), ""),
        (NewerFormat("written by Lockstep 9"), ""),
    ],
    ids=str,
)
def test_what_latest_does_not_name_may_be_named_unless_something_else_helps(
    error: InputError, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(resuming, "pointed", fail)
    with pytest.raises(InputError) as raised:
        decided("resume=latest")
    assert str(raised.value) == f"{error}{ends}"


@pytest.mark.parametrize("word", ["launcher.threads=3", "train.eval_batch=8", "train.ema_every=7 train.ema=0.9"])
def test_a_key_is_lost_unless_the_command_types_it_or_what_it_is_in(word: str, tmp_path: Path) -> None:
    """Those of the last bits of a run too; and `train.ema` is no part of `train.ema_every`."""
    run = run_dir(tmp_path / "run", "seed=5", *word.split())
    lost, *whole = word.split()
    words = [own for own in read_overrides(run.overrides) if own != lost]
    run.overrides.write_text(components.dump(words))
    key, _, value = lost.partition("=")
    for again in ((), tuple(whole)):
        with pytest.raises(InputError, match=rf"\({key} was {value} and is "):
            decided(f"resume={run.path}", *again)
    assert dict(leaves(decided(f"resume={run.path}", lost).values))[key] == int(value)


def test_no_key_of_an_option_that_the_command_types_again_is_lost(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", "seed=5", "optimizer=sgd", "optimizer.momentum=0.5")
    run.overrides.write_text(components.dump([*read_overrides(run.overrides)][:-1]))
    with pytest.raises(InputError, match=r"\(optimizer\.momentum was 0\.5 and is 0\.9\)"):
        decided(f"resume={run.path}")
    assert decided(f"resume={run.path}", "optimizer=sgd").values["optimizer"]["momentum"] == 0.9


def test_of_an_option_that_was_lost_no_class_and_no_key_that_is_gone_is_to_be_typed(tmp_path: Path) -> None:
    lost = ("optimizer=sgd", "optimizer.momentum=0.5", "optimizer.lr=0.3")
    run = run_dir(tmp_path / "run", "seed=5", *lost)
    run.overrides.write_text(components.dump([word for word in read_overrides(run.overrides) if word not in lost]))
    with pytest.raises(InputError, match=r"optimizer\._target_ was 'lockstep\.optim\.SGD' and is ") as raised:
        decided(f"resume={run.path}")
    proposed = [word.partition("=")[0] for word in shlex.split(str(raised.value).partition("then: ")[2])]
    assert "optimizer.lr" in proposed
    assert not {"optimizer._target_", "optimizer.momentum"} & {*proposed}


def test_a_resumed_run_keeps_its_name(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    config = components.read_config(run.config)
    run.config.write_text(components.dump({**config, "name": "first"}))
    assert decided(f"resume={run.path}").values["name"] == "first"
    assert decided(f"resume={run.path}", "name=second").values["name"] == "second"


def test_a_line_that_the_overrides_of_a_run_have_lost_is_noticed(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", "seed=5", "epochs=3")
    words = read_overrides(run.overrides)
    run.overrides.write_text(components.dump([word for word in words if word != "seed=5"]))
    with pytest.raises(InputError, match=r"no longer composes to its config \(seed was 5 and is 0\)"):
        decided(f"resume={run.path}", "epochs=7")
    assert decided(f"resume={run.path}", "seed=6").values["seed"] == 6


@pytest.mark.parametrize(("lost", "more"), [(3, ""), (4, ""), (5, ", and 1 more"), (6, ", and 2 more")])
def test_of_the_lines_that_were_lost_four_are_named_and_the_others_counted(
    tmp_path: Path, lost: int, more: str
) -> None:
    lines = ("seed=5", "epochs=3", "batch=100", "optimizer.weight_decay=0.5", "optimizer.lr=0.3", "train.repeats=2")
    run = run_dir(tmp_path / "run", *lines)
    run.overrides.write_text(
        components.dump([word for word in read_overrides(run.overrides) if word not in lines[:lost]])
    )
    with pytest.raises(InputError, match="no longer composes to its config") as caught:
        decided(f"resume={run.path}")
    named = str(caught.value).partition(" (")[2].partition("); restore")[0]
    assert named.count(" was ") == min(lost, 4)
    assert named.endswith(more or named.rpartition(" was ")[2])
    assert ("more" in named) == bool(more)
    assert {word.partition("=")[0] for word in shlex.split(str(caught.value).partition("then: ")[2])} == {
        line.partition("=")[0] for line in lines[:lost]
    }


def test_a_line_that_makes_no_other_run_may_be_lost_or_changed_in_a_recipe(tmp_path: Path) -> None:
    lines = ("cost.usd_per_gpu_hour=2", "telemetry.report=never", "budget.hours=1", "data_root=elsewhere")
    run = run_dir(tmp_path / "run", "seed=5", *lines)
    words = [word for word in read_overrides(run.overrides) if word not in lines]
    run.overrides.write_text(components.dump(words))
    assert decided(f"resume={run.path}").values["seed"] == 5


def test_a_key_of_a_users_option_is_compared_by_the_role_that_its_class_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Net:
        shows: int = with_role(Role.display, 8)
        rounds: int = with_role(Role.rounding, 8)
        width: int = 8

    monkeypatch.setattr("lockstep.config.extensions.class_of", lambda group, target: Net)
    run = RunDir.at(tmp_path / "run")
    node = {"_target_": "mine.of_roles.Net", "shows": 8, "rounds": 8, "width": 8}
    run.composed.write_text(components.dump({"model": node}))
    own: dict[str, Any] = {"model": {**node, "shows": 16}}
    resuming._check_kept_config(run, own, own, [])
    for key in ("rounds", "width"):
        own = {"model": {**node, key: 16}}
        with pytest.raises(InputError, match=rf"\(model\.{key} was 8 and is 16\)"):
            resuming._check_kept_config(run, own, own, [])


def test_a_resume_may_set_the_keys_of_the_options_that_only_its_run_names(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", "schedule=plateau", "schedule.gamma=0.2")
    for word, patience in (("schedule.patience=1", 1), ("schedule.patiens=1", None)):
        with composition.invoked([f"resume={run.path}", word]) as (values, invocation):
            values = dict(decide_resume(values, invocation).values)
        if patience is None:
            with pytest.raises(InputError, match=r"schedule\.patiens is not a key of schedule=plateau"):
                build_job(values)
        else:
            assert (values["schedule"]["patience"], values["schedule"]["gamma"]) == (patience, 0.2)


def test_a_run_of_before_is_continued_and_a_changed_default_is_named_with_its_override(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", "epochs=3")
    values = components.read_config(run.composed)
    del values["train"]["repeats"]
    run.composed.write_text(components.dump(values))
    assert decided(f"resume={run.path}").values["train"]["repeats"] == 1
    values["train"]["freeze"], values["steps"] = ["head", "stem"], 7
    run.composed.write_text(components.dump(values))
    with pytest.raises(InputError, match=r"or add what had another default then: ") as caught:
        decided(f"resume={run.path}")
    words = shlex.split(str(caught.value).partition("then: ")[2])
    decided_values = decided(f"resume={run.path}", *words).values
    assert (decided_values["train"]["freeze"], decided_values["steps"]) == (["head", "stem"], 7)


def test_the_largest_batch_of_a_machine_is_no_part_of_what_a_run_is() -> None:
    decision = decided("batch=auto", "name=test", batch="auto")
    values, composed = decision.values, decision.composed
    assert (values["batch"], values["train"]["micro_batches"]) == (64, "auto")
    assert (composed["batch"], composed["train"]["micro_batches"]) == ("auto", 1), "as it was typed"
    same = decided("batch=auto", "name=test", "train.micro_batches=auto", batch="auto").values
    assert (same["batch"], same["train"]) == (64, values["train"])
    with pytest.raises(InputError, match=r"batch=auto chooses train\.micro_batches, which is 4; remove one"):
        decided("batch=auto", "name=test", "train.micro_batches=4", batch="auto")


@pytest.mark.parametrize(
    ("first", "now", "key", "value"),
    [
        ("schedule=step schedule.gamma=0.5", "schedule=constant", "schedule", {"warmup": 0}),
        ("schedule=step schedule.warmup=7", "schedule=constant", "schedule", {"warmup": 7}),
        ("schedule=step ~schedule.gamma", "schedule=constant", "schedule", {"warmup": 0}),
        ("schedule.final=0.1", "experiment=cifar10_tutorial", "schedule", {"warmup": 0}),
        *(
            (f"{gone} batch=32", "experiment=cifar10_tutorial", "epochs", 5)
            for gone in ("~experiment", "~experiment=null")
        ),
        *(
            (f"schedule=step {gone}", "schedule=constant schedule.warmup=7", "schedule", {"warmup": 7})
            for gone in ("~schedule.warmup", "~schedule.warmup=0")
        ),
        ("metric=[f1] metric.f1.average=macro", "metric=[]", "metric", {}),
        ("schedule=step ++schedule={gamma:0.5}", "schedule=constant", "schedule", {"warmup": 0}),
        ("schedule=step schedule.gamma=0.5", "epochs=7 batch=32", "epochs", 7),
    ],
)
def test_another_option_replaces_the_first(tmp_path: Path, first: str, now: str, key: str, value: Any) -> None:
    run = run_dir(tmp_path / "run", *first.split())
    resume = decided(f"resume={run.path}", f"output_root={tmp_path}", *now.split())
    left = resume.values[key]
    assert (left if key == "epochs" else {name: left[name] for name in left if name != "_target_"}) == value
    assert composed(*resume.overrides) == resume.composed, "the overrides give the config again"


def test_a_key_that_is_typed_now_must_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_dir(tmp_path / "run", "schedule=step", "schedule.gamma=0.5")
    values = {**composed("schedule=constant"), "resume": str(run.path)}
    for word in ("schedule.gamma=0.7", "schedule.warmpu=7", "++schedule={gamma: 0.7}"):
        called = Invocation(overrides=("schedule=constant", word), sweep=False, folder=None, hydra="")
        with pytest.raises(InputError, match=r"schedule\.(gamma|warmpu)"), composition.composing():
            build_job(decide_resume(values, called).values)
    assert "schedule.gamma=0.5 of the run is dropped" in capsys.readouterr().out
    assert decided(f"resume={run.path}", "epochs=7").values["schedule"]["gamma"] == 0.5


@pytest.mark.parametrize("words", [("seed=3",), ("schedule=constant",)])
def test_the_options_of_a_run_are_its_own_whatever_the_command_that_resumes_would_choose(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    run = run_dir(tmp_path / "run", "model=linear", "schedule=step", "augment=none")
    choices = yaml.safe_load(decided(f"resume={run.path}", *words).hydra)["hydra"]["runtime"]["choices"]
    schedule = "constant" if "schedule=constant" in words else "step"
    assert (choices["model"], choices["augment"], choices["schedule"]) == ("linear", "none", schedule)
    assert (choices["dataset"], choices["optimizer"]) == ("digits", "adamw")


def test_a_value_that_refers_to_a_choice_refers_to_the_choice_of_the_run(tmp_path: Path) -> None:
    word = "data_root=/data/${hydra:runtime.choices.model}"
    run = run_dir(tmp_path / "run", "model=linear")
    for file in (run.overrides, run.composed):
        values = read_overrides(file) if file == run.overrides else components.read_config(file)
        more = [*values, word] if isinstance(values, list) else {**values, "data_root": "/data/linear"}
        file.write_text(components.dump(more))
    assert decided(f"resume={run.path}", "epochs=7").values["data_root"] == "/data/linear"


def test_a_run_that_was_killed_at_its_start_needs_the_checkpoint_that_it_started_from(
    trained: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tmp_path / "step-00000002"
    shutil.copytree(trained.checkpoints / start.name, start)
    new = run_dir(tmp_path / "new", *SHORT, "steps=6", f"resume={start}")
    monkeypatch.chdir(tmp_path.parent)
    resume, job = decided(f"resume={new.path}"), load_job(new.config)
    assert resume.checkpoint == start
    check_resumable(resume, job, plan_of(job, 64))
    shutil.rmtree(start)
    with pytest.raises(InputError, match=f"checkpoint {start} is damaged"):
        check_resumable(decided(f"resume={new.path}"), job, plan_of(job, 64))


def test_two_folders_for_one_run_are_refused_unless_they_are_one(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    values = composed(f"resume={run.path}")
    for folder in (run.path, tmp_path / "link", tmp_path / "other" / ".." / "run", tmp_path / "other"):
        called = Invocation(overrides=(f"resume={run.path}",), sweep=False, folder=folder, hydra="")
        (tmp_path / "other").mkdir(exist_ok=True)
        if folder.name == "other":
            with pytest.raises(InputError) as raised, composition.composing():
                decide_resume(dict(values), called)
            says = f"resume continues in {run.path}, but hydra.run.dir names {folder}; remove one of them"
            assert str(raised.value) == says
        else:
            with composition.composing():
                assert decide_resume(dict(values), called).folder == run.path


def test_the_folder_that_is_named_is_taken_before_the_one_of_before_a_restart(tmp_path: Path) -> None:
    for named, earlier, folder in (
        (tmp_path / "a", "", "a"),
        (None, str(tmp_path / "b"), "b"),
        (tmp_path / "a", str(tmp_path / "b"), "a"),
        (None, "", None),
    ):
        called = Invocation(overrides=(), sweep=False, folder=named, hydra="")
        resume = decide_resume(composed(), called, earlier)
        assert (resume.folder, resume.run) == (None if folder is None else tmp_path / folder, None)
    run = run_dir(tmp_path / "run")
    called = Invocation(overrides=(f"resume={run.path}",), sweep=False, folder=None, hydra="")
    values = composed(f"resume={run.path}")
    with composition.composing():
        assert decide_resume(values, called, str(tmp_path / "b")).folder == run.path


def test_keys_of_a_sweep_are_for_sweeps_and_a_run_to_continue_is_not(tmp_path: Path) -> None:
    called = Invocation(overrides=(), sweep=True, folder=None, hydra="")
    decide_resume(composed("sweep.retry=true"), called)
    with pytest.raises(InputError, match=r"^sweep\.\* applies only to sweeps; add -m, or remove it$"):
        decided("sweep.retry=true")
    run = run_dir(tmp_path / "run")
    with pytest.raises(InputError, match=r"^resume continues one run, so it cannot be combined with a sweep; remove"):
        decide_resume(composed(f"resume={run.path}"), called)
    refuse_in_sweep(None)
    refuse_resume(["epochs=3", "resumed=3"], "a sweep of seeds")
    with pytest.raises(InputError) as raised:
        refuse_resume(["epochs=3", "++resume=run"], "a sweep of seeds")
    assert str(raised.value) == "++resume=run: a sweep of seeds; remove it, and type the overrides of the run"


@pytest.mark.parametrize(
    ("nodes", "several"),
    [(None, False), (1, False), ("1", False), ("1:1", False), (2, True), ("1:2", True), ("2", True)],
)
def test_several_machines_are_known_without_a_job(nodes: Any, several: bool) -> None:
    launcher = {"_target_": "x"} | ({} if nodes is None else {"nodes": nodes})
    assert replace(resume_of(None), values={"launcher": launcher}).has_several_machines is several
    assert not replace(resume_of(None), values={"launcher": None}).has_several_machines


@pytest.mark.parametrize("active", [(), ("mine",)])
def test_extensions_that_a_run_had_and_that_are_gone_are_named(
    active: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_dir(tmp_path / "run")
    monkeypatch.setattr(
        resuming.extensions, "active", lambda: [SimpleNamespace(package=package) for package in active]
    )
    gone = [*["mine (1.0)"] * ("mine" not in active), "theirs (git)"]
    for environment, ends in (
        ({"extensions": {"mine": "1.0", "theirs": "git"}}, gone),
        ({"extensions": {}}, []),
        ({"extensions": ["mine"]}, []),
        ({}, []),
    ):
        run.environment.write_text(json.dumps(environment))
        names = f" The run had extensions that are not here: {', '.join(ends)}; install them, or use its own program."
        assert resuming._missing_extensions(run) == (names if ends else "")
    monkeypatch.undo()
    run.environment.write_text(json.dumps({"extensions": {"theirs": "git"}}))
    run.overrides.write_text(components.dump(["model=no_such_model"]))
    with pytest.raises(InputError, match=r" The run had extensions that are not here: theirs \(git\); install them"):
        decided(f"resume={run.path}")


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        (("++batch=auto",), "64 auto"),
        (("batch=32", "++batch=auto"), "32 auto"),
        (("batch=32",), "32 1"),
    ],
    ids=str,
)
def test_the_batch_of_batch_auto_is_that_of_the_other_words(words: tuple[str, ...], batch: str) -> None:
    values = decided(*words, **({"batch": "auto"} if "++batch=auto" in words else {})).values
    assert f"{values['batch']} {values['train']['micro_batches']}" == batch


def test_a_batch_auto_of_a_file_is_left_to_be_refused() -> None:
    assert decided("epochs=3", batch="auto").values["batch"] == "auto"


def test_keys_of_before_are_those_of_the_run_unless_the_command_types_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    run = run_dir(tmp_path / "run", "seed=5")
    checkpoint = run.checkpoints / "step-00000002"
    monkeypatch.setattr(
        resuming.history, "as_before", lambda job, config, typed: calls.append((config["seed"], typed)) or job
    )
    resume = replace(resume_of(None), values=composed("seed=5"), overrides=("seed=5", "++train.ema=0.9"))
    assert resume.job.seed == 5
    assert calls == [], "no run of before is continued"
    named = replace(resume, values=composed("seed=5"))
    named.__dict__["checkpoint"] = checkpoint
    assert named.job.seed == 5
    assert calls == [(5, {"seed", "train.ema"})]
    run.config.unlink()
    copied = replace(named)
    copied.__dict__["checkpoint"] = checkpoint
    assert copied.job.seed == 5
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("folder", "words", "own", "fits"),
    [
        ("{0}/run/mlflow", (), {}, True),
        ("{0}/outputs/mlflow", (), {}, True),
        ("mlflow", (), {}, True),
        ("{0}/other", (), {}, False),
        ("../mlflow", (), {}, False),
        ("{0}/other", ("logger.mlflow.folder={0}/other",), {}, True),
        ("{0}/other", ("++logger.mlflow.folder=x",), {}, True),
        ("{0}/other", ("logger.wandb.folder={0}/other",), {}, False),
        ("{0}/other", (), {"logger.mlflow.folder": "{0}/other"}, True),
        ("{0}/other", (), {"logger.mlflow.folder": "{0}/another"}, False),
        ("{0}/other", (), None, True),
    ],
)
def test_a_place_of_a_file_of_strangers_is_inside_or_one_that_the_user_names(
    folder: str,
    words: tuple[str, ...],
    own: dict[str, str] | None,
    fits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    called = Invocation(
        overrides=(), sweep=False, folder=None, hydra="", own_words=tuple(word.format(tmp_path) for word in words)
    )
    values = {"output_root": str(tmp_path / "outputs"), "resume": None}
    resume = replace(resume_of(tmp_path / "run"), invocation=called, values=values)
    resume = replace(resume, own=own and {key: value.format(tmp_path) for key, value in own.items()})
    if own == {}:
        resume = replace(resume, own={})
    logger = MLflow(folder=folder.format(tmp_path))
    if fits:
        resume.check_personal(logger, "logger.mlflow.")
        resume.check_personal(MLflow(), "logger.mlflow.")
    else:
        with pytest.raises(InputError, match=r"^logger\.mlflow\.folder is .*from the command line alone; type "):
            resume.check_personal(logger, "logger.mlflow.")


def test_without_a_run_to_continue_only_this_folder_is_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"output_root": "/somewhere", "resume": None}
    resume = replace(resume_of(None), values=values, own={})
    resume.check_personal(MLflow(folder="mlflow"), "logger.mlflow.")
    with pytest.raises(InputError, match=r"^logger\.mlflow\.folder is '/somewhere/mlflow'"):
        resume.check_personal(MLflow(folder="/somewhere/mlflow"), "logger.mlflow.")
    with pytest.raises(InputError, match=r"^logger\.mlflow\.experiment is 'theirs'"):
        resume.check_personal(MLflow(experiment="theirs"), "logger.mlflow.")
