"""What a run writes of itself at its end, in an incident, and after a resume: of which steps, which checkpoint."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from test_trainer import network, trainer_of

from helpers import FAKE, records, resolved, run_dir, train_here
from lockstep.core.errors import BrokenImage, InputError, NumericalError, StorageError
from lockstep.core.model_card import CLASSES, LABELS
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.optim.schedule import Constant
from lockstep.runtime import host
from lockstep.training import run_record
from lockstep.training.build_data import UNEQUAL, balance_note
from lockstep.training.resolved_job import plan_of
from lockstep.training.run_record import Evidence, RunRecord, write_incident
from lockstep.training.train_state import Progress
from lockstep.training.trained import find_weights

JOB = (*FAKE, "augment=none", "dataset.examples=40", "batch=10", "model=linear", "device=cpu")
JOB = (*JOB, "train.eval_every=2", "telemetry.report=never", "steps=6")


def test_a_resume_adds_to_the_hours_of_all_parts_before_from_its_start_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_here(tmp_path / "run", *JOB, stop_at=3)
    summary = json.loads(run.summary.read_text())
    assert summary["spent"]["hours"] < 1
    run.summary.write_text(json.dumps({**summary, "spent": {**summary["spent"], "hours": 7.0}}))
    at_start: list[dict[str, Any]] = []
    monkeypatch.setattr(RunDir, "start_summary", lambda _, **facts: at_start.append(facts))
    train_here(run.path, *JOB)
    (facts,) = at_start
    assert 7 < facts["spent"]["hours"] < 8
    assert facts["seconds"] == pytest.approx(3600 * facts["spent"]["hours"])
    assert 7 < Run(run.path).summary["spent"]["hours"] < 8


@pytest.mark.parametrize("stop_at", [None, 4])
def test_the_evidence_at_the_end_has_the_steps_of_this_part_alone(
    tmp_path: Path, stop_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stop_at is not None:
        train_here(tmp_path / "run", *JOB, stop_at=stop_at)
    steps: list[int] = []

    def noted(**facts: Any) -> Evidence:
        steps.append(facts["steps"])
        return Evidence(**facts)

    monkeypatch.setattr(run_record, "Evidence", noted)
    train_here(tmp_path / "run", *JOB)
    assert steps == [6 - (stop_at or 0)]


@pytest.mark.parametrize("stop_at", [2, 3])
def test_a_resume_leaves_each_log_point_and_each_evaluation_in_the_files_once(tmp_path: Path, stop_at: int) -> None:
    def lines(run: RunDir) -> tuple[list[tuple[int, bool]], list[str]]:
        points = [(line["step"], "loss/val" in line) for line in records(run)]
        return points, [row.partition(",")[0] for row in run.table.read_text().splitlines()]

    job = (*JOB, "telemetry.interval=1")
    expected = lines(train_here(tmp_path / "whole", *job))
    assert len(expected[0]) == len({*expected[0]}) == 6 + 3
    train_here(tmp_path / "parts", *job, stop_at=stop_at)
    assert lines(train_here(tmp_path / "parts", *job)) == expected


@pytest.mark.parametrize(("saved", "step"), [([], 11), ([2], 11), ([2, 10, 9], 11), ([2], None)])
def test_an_incident_names_its_samples_as_the_split_does_and_the_newest_checkpoint(
    tmp_path: Path, saved: list[int], step: int | None
) -> None:
    run = RunDir.at(tmp_path / "run")
    for number in saved:
        (run.checkpoints / f"step-{number:08d}").mkdir()
    trainer = trainer_of(network(), World.solo(), steps=20)
    trainer.progress.step = 14 if step else 11  # an error without a step, a callback's, is of the present one
    batch = trainer.loader.global_batch(11)
    again = replace(batch, indices=batch.indices + 10 * torch.arange(len(batch.indices)))  # drawn so many times
    trainer.loader = SimpleNamespace(global_batch={11: again}.get)  # type: ignore[assignment]
    write_incident(NumericalError("bad", step=step), trainer, dict(trainer.state.model.state_dict()), run)
    facts = json.loads((run.incident / "incident.json").read_text())
    assert facts["samples"] == batch.indices.tolist()
    assert (facts["step"], facts["epoch"], facts["seen_at_step"]) == (11, 5, trainer.progress.step)
    assert facts["checkpoint"] == (f"step-{max(saved):08d}" if saved else None)


@pytest.mark.parametrize("earlier", [True, False])
def test_an_incident_that_cannot_be_written_leaves_an_earlier_one_alone(
    earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, trainer = RunDir.at(tmp_path / "run"), trainer_of(network(), World.solo())
    trainer.checkpointer = SimpleNamespace(whole=list)  # type: ignore[assignment]
    if earlier:
        run.incident.mkdir()

    def fail(*arguments: object) -> None:
        run.incident.mkdir(exist_ok=True)
        raise OSError("the disk is full")

    monkeypatch.setattr(run_record, "write_incident", fail)
    RunRecord(run, World.solo()).keep_incident(NumericalError("bad", step=1), trainer)
    assert run.incident.exists() == earlier


def test_latest_without_weights_is_the_newest_run_or_job_that_has_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = Path("outputs")
    RunDir.at(root / "begun").mark_latest(root)
    with pytest.raises(InputError, match="there are no weights at"):
        find_weights("latest")
    for age, name in enumerate(("sweeps/s/000-a", "older", "sweeps/s/001-b", "oldest")):
        (path := root / name).mkdir(parents=True)
        (path / "model.safetensors").touch()
        os.utime(path / "model.safetensors", (1e9 - age, 1e9 - age))
    assert find_weights("latest") == root / "sweeps/s/000-a/model.safetensors"
    assert find_weights("outputs/latest") == root / "sweeps/s/000-a/model.safetensors"
    (other := tmp_path / "other").mkdir()
    RunDir.at(other / "begun").mark_latest(other)
    for place in (other / "older", other / "sweeps" / "s" / "000-a"):
        place.mkdir(parents=True)
        (place / "model.safetensors").touch()
        os.utime(place / "model.safetensors", (1e7 + (place.name == "older"), 1e7 + (place.name == "older")))
    assert find_weights("other/latest") == Path("other/older/model.safetensors")
    with pytest.raises(InputError, match=r"^task\.teacher: "):
        find_weights("other/begun", "task.teacher")
    (root / "begun" / "model.safetensors").touch()
    os.utime(root / "begun" / "model.safetensors", (1e8, 1e8))
    assert find_weights("latest") == root / "begun/model.safetensors", "however old"


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ((UNEQUAL, 1), True),
        ((UNEQUAL - 1, 1), False),
        ((2 * UNEQUAL, 2, 30), True),
        ((2 * UNEQUAL, 3, 29), False),
        ((0, 5, 5), False),  # a class without images is not rare
        ((0, 1, UNEQUAL), True),
    ],
)
def test_a_class_with_a_tenth_of_the_images_of_the_largest_is_noted(counts: tuple[int, ...], says: bool) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = torch.cat([labels, torch.full((100,), -1)])  # broken images
    job: Any = SimpleNamespace(
        train=SimpleNamespace(sampling="shuffled"),
        loss=SimpleNamespace(balanced=False, class_weights=None),
        task=SimpleNamespace(targets=CLASSES),
        dataset=SimpleNamespace(classes=len(counts), class_names=()),
    )
    assert len(balance_note(job, labels)) == says == bool(says)
    for other in (
        {"train": SimpleNamespace(sampling="balanced")},
        {"loss": SimpleNamespace(balanced=True, class_weights=None)},
        {"loss": SimpleNamespace(balanced=False, class_weights=[1.0] * len(counts))},
        {"task": SimpleNamespace(targets=LABELS)},
    ):
        assert balance_note(SimpleNamespace(**{**vars(job), **other}), labels) == []  # type: ignore[arg-type]


def test_a_single_label_has_a_limit_of_its_loss(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", *JOB, "dataset.classes=1", "task=multilabel")
    assert Run(run.path).summary["status"] == "completed"


def test_a_resume_needs_no_weights_that_the_run_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = train_here(tmp_path / "began", *JOB).weights
    job = (*JOB, f"init_from={began}")
    train_here(tmp_path / "run", *job, stop_at=3)
    monkeypatch.setattr("lockstep.checkpoint.weights.load_start", None)  # the file may be gone by now
    assert Run(train_here(tmp_path / "run", *job).path).summary["status"] == "completed"


def test_a_class_of_few_images_is_named_with_its_number_and_that_of_the_largest() -> None:
    job: Any = SimpleNamespace(
        train=SimpleNamespace(sampling="shuffled"),
        loss=SimpleNamespace(balanced=False, class_weights=None),
        task=SimpleNamespace(targets=CLASSES),
        dataset=SimpleNamespace(classes=2, class_names=("cat", "emu")),
    )
    labels = torch.tensor([0] * 20 + [1] + [-1])
    says = "emu has 1 of 22 images to train on, the largest class 20: train.sampling=balanced or loss.balanced=true"
    assert balance_note(job, labels)[0].startswith(says)
    job.dataset.class_names = ()
    assert balance_note(job, labels)[0].startswith("class 1 has 1 of 22 images")
    job.dataset.classes = 3  # the first one has no image
    assert balance_note(job, torch.where(labels < 0, labels, labels + 1))[0].startswith("class 2 has 1 of 22 images")


MEMBER = replace(World.solo(), rank=1, size=2)


def test_a_rank_that_is_not_main_writes_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: Any = None
    record = RunRecord(RunDir(tmp_path / "run"), MEMBER)
    monkeypatch.setattr("lockstep.config.extensions.active", lambda: ["own"])
    record.announce(nothing, nothing, nothing, "")
    record.write_start(nothing, nothing, Progress(), {})
    record.keep_progress(Progress())
    record.complete(nothing, nothing, {}, 0)
    assert record.user_code(nothing) == {}
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("active", "of_program", "reads"), [(0, 0, 0), (1, 0, 1), (0, 1, 1)])
def test_the_users_code_is_read_by_main_where_there_is_some_and_where_nobody_else_has(
    active: int, of_program: int, reads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read = list[object]()
    monkeypatch.setattr("lockstep.config.extensions.active", lambda: ["own"] * active)
    monkeypatch.setattr("lockstep.config.extensions.of_program", lambda: ["own"] * of_program)
    monkeypatch.setattr("lockstep.runtime.user_code.code_of", lambda config: (read.append(config), {"own": 1})[1])
    monkeypatch.setattr(run_record.components, "plain", lambda job: job)
    job: Any = "the job"
    code: Any = RunRecord(RunDir(tmp_path), World.solo()).user_code(job)
    assert (code, read) == ({"own": 1} if reads else {}, ["the job"] * reads)
    known: Any
    for known in ({"own": 2}, {}):
        assert RunRecord(RunDir(tmp_path), World.solo(), known).user_code(job) == known
    assert len(read) == reads


def test_the_progress_of_a_run_that_ends_early_is_that_of_its_best_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, facts = RunRecord(RunDir.at(tmp_path / "run"), World.solo()), dict[str, Any]()
    monkeypatch.setattr(RunDir, "write_summary", lambda _, **own: facts.update(own))
    best = Progress(step=7, best=50.0, best_step=4, best_figures={"top1": 50.0}, figures={"top1": 40.0})
    record.keep_progress(best)
    assert facts == {"step": 7, "best": 50.0, "best_step": 4, "scores": {"top1": 50.0}}

    def fail(_: RunDir, **own: Any) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(RunDir, "write_summary", fail)
    record.keep_progress(best)  # the error that ends the run is more important


ERRORS = [
    OSError("full"),
    RuntimeError("full"),
    MemoryError("full"),
    SafetensorError("full"),
    BrokenImage(3, "a.png", "odd"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_no_error_of_an_incident_hides_the_one_that_ends_the_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    trainer = trainer_of(network(), World.solo())
    trainer.checkpointer = SimpleNamespace(whole=list)  # type: ignore[assignment]
    monkeypatch.setattr(run_record, "write_incident", fail)
    RunRecord(RunDir.at(tmp_path / "run"), World.solo()).keep_incident(NumericalError("bad", step=1), trainer)
    assert "so nothing is kept of the bad step" in capsys.readouterr().out


def test_a_run_has_the_notes_of_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "balance_note", lambda job, labels: [f"balance of {labels}"])
    dataset, strategy = SimpleNamespace(notes=lambda: ["data"]), SimpleNamespace(notes=lambda *_: ["strategy"])
    job: Any = SimpleNamespace(
        dataset=dataset,
        strategy=strategy,
        metric_notes=lambda: ["metric"],
        precision=SimpleNamespace(dtype=torch.float32, matmul="highest"),
        model=SimpleNamespace(compile=False),
        train=SimpleNamespace(sampling="shuffled"),
        repro="exact",
    )
    data: Any = SimpleNamespace(plan=None, train=SimpleNamespace(labels="labels"))
    state: Any = SimpleNamespace(model=None, notes=["state"])
    notes = RunRecord(RunDir(tmp_path), World.solo())._notes(job, data, state)
    assert notes == ["data", "strategy", "state", "metric", "balance of labels"]


@pytest.mark.parametrize(("seconds", "speed"), [(4.9, ""), (5.0, "slow because of x"), (5.1, "slow because of x")])
def test_a_run_of_five_seconds_has_a_sentence_about_its_speed(
    seconds: float, speed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ends, completed = RunDir.at(tmp_path / "run"), list[Any](), list[Any]()
    run.write_summary(spent={"hours": seconds / 3600})
    trainer: Any = trainer_of(network(), World.solo())
    trainer.tested = {}
    verdict = {"verdict": {"sentence": "slow because of x"}, "learning": {"sentence": "it has learnt"}}
    observer = SimpleNamespace(findings=lambda evidence: verdict, completed=completed.append)
    trainer.telemetry = SimpleNamespace(
        time_shares=lambda: {"forward": 0.123456, "data": 0.0},
        resumed=0,
        times=SimpleNamespace(spread=dict),
        mfu=lambda rate: 0.0,
        trained=dict,
        observer=observer,
    )
    monkeypatch.setattr(run_record, "rates", lambda spent: {"img_per_s": 123.45678, "cpu_cores": 1.0})
    monkeypatch.setattr(run_record.banner, "say_ending", lambda *values: ends.append(values))
    job: Any = SimpleNamespace(job=None)
    RunRecord(run, World.solo()).complete(job, trainer, {"cpu_cores": 2.0}, skipped=3)
    summary = Run(run.path).summary
    assert ends[0][3] == pytest.approx(seconds)
    assert ends[0][6:] == ("it has learnt", speed)
    assert (summary["status"], summary["exit_code"], summary["skipped"]) == ("completed", 0, 3)
    assert (summary["img_per_s"], summary["cpu_cores"]) == (123.457, 2.0)
    assert (summary["time"], summary["test"]) == ({"forward": 0.1235}, None)
    assert completed == [summary]


def test_a_share_is_the_sum_of_its_parts_as_far_as_they_are_known() -> None:
    job: Any = SimpleNamespace(micro_batch=lambda ranks: 10 // ranks)
    options: dict[str, Any] = {"plan": None, "model": None, "steps": 1, "spread": {}, "hardware": {}, "mfu": 0.0}
    evidence = Evidence(job=job, world=MEMBER, shares={"forward": 0.25, "data": 0.5}, **options)
    assert evidence.share("forward", "data", "no such part") == 0.75
    assert (evidence.on_gpu, evidence.local_batch) == (False, 5)
    assert evidence.cores == host.cores()
    assert Evidence(job=job, world=World.solo("cuda:0"), shares={}, **options).on_gpu


def test_an_incident_has_the_batch_as_it_is_stored_the_weights_and_the_rate_of_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, model = RunDir.at(tmp_path / "run"), network()
    trainer = trainer_of(model, World.solo(), steps=20, schedule=Constant(warmup=8))
    batch = trainer.loader.global_batch(3)
    # In another order in memory, as `model.channels_last` has them.
    turned = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    turned["1.weight"] = turned["1.weight"].T.contiguous().T
    write_incident(NumericalError("bad", step=3), trainer, turned, run)
    stored = torch.load(run.incident / "batch.pt", weights_only=True)
    assert {*stored} == {"images", "labels", "indices"}
    for name, tensor in (("images", batch.images), ("labels", batch.known_labels), ("indices", batch.indices)):
        assert torch.equal(stored[name], tensor), name
    weights = load_file(run.incident / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    facts = json.loads((run.incident / "incident.json").read_text())
    assert (facts["learning_rate"], facts["error"]) == (0.5 * 3 / 8, "bad")
    assert not [file for file in run.incident.iterdir() if file.suffix not in (".pt", ".json", ".safetensors")]
    says = f"warning: the batch of step 3 and the weights are kept in {run.incident}"
    assert says in capsys.readouterr().out.replace("\n", " ")


def test_each_rank_takes_part_in_gathering_the_weights_of_an_incident_that_main_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered, written = list[int](), list[Any]()
    trainer = trainer_of(network(), World.solo())
    trainer.checkpointer = SimpleNamespace(whole=lambda tensors: (gathered.append(len(tensors)), tensors)[1])  # type: ignore[assignment]
    monkeypatch.setattr(run_record, "write_incident", lambda *parts: written.append({*parts[2]}))
    for world in (MEMBER, World.solo()):
        RunRecord(RunDir.at(tmp_path / "run"), world).keep_incident(NumericalError("bad", step=1), trainer)
    assert gathered == [4, 4]
    assert written == [{*network().state_dict()}]


@pytest.mark.parametrize("identity", [None, "abc"])
def test_the_summary_of_a_run_that_begins_has_its_plan_its_monitor_and_all_directions(
    identity: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, marked = list[dict[str, Any]](), list[Path]()
    words = (*JOB, "metric=f1", "monitor=-loss", f"output_root={tmp_path}/all")
    run, job = run_dir(tmp_path / "run", *words), resolved(*words)
    if identity:
        run.start_summary(run=identity)
    monkeypatch.setattr(RunDir, "start_summary", lambda _, **facts: started.append(facts))
    monkeypatch.setattr(RunDir, "mark_latest", lambda _, root: marked.append(root))
    logger: Any = SimpleNamespace(figures=("-my/a",))
    callback: Any = SimpleNamespace(figures=("my/b",))
    config = job
    job = replace(job, logger={"own": logger})
    monkeypatch.setattr(run_record.components, "plain", lambda of: {"batch": of.batch})
    now = iter([100.0, 100.0 + 36])
    monkeypatch.setattr(run_record.time, "monotonic", lambda: next(now))
    record = RunRecord(run, World.solo())
    record.write_start(job, plan_of(config, 40), Progress(step=3), {"own": callback})
    (facts,) = started
    assert (facts["steps"], facts["steps_per_epoch"], facts["step"], facts["monitor"]) == (6, 4, 3, "-loss")
    assert (facts["run"] == identity) == (identity is not None)
    assert len(facts["run"]) == (3 if identity else 16)
    assert {name: str(direction) for name, direction in facts["directions"].items()} == {
        "loss/val": "minimize",
        **dict.fromkeys(("acc/val_top1", "acc/val_top5", "metric/f1", "my/b"), "maximize"),
        "my/a": "minimize",
    }
    assert (facts["spent"]["hours"], facts["seconds"]) == (pytest.approx(0.01), 36)
    assert marked == [tmp_path / "all"]
    assert yaml.safe_load(run.config.read_text()) == {"batch": 10}
    assert json.loads(run.environment.read_text())["code"] == {}


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_only_a_run_on_a_gpu_says_its_memory_which_trials_do_not_count_in(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, seen = list[str](), list[Evidence]()
    run = run_dir(tmp_path / "run", *JOB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda of: events.append(f"reset {of}"))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda of: 123)
    monkeypatch.setattr(run_record.environment, "facts", lambda world: {})
    monkeypatch.setattr(run_record.banner, "say_ending", lambda *values: None)
    idle = iter([50.0, 80.0])
    monkeypatch.setattr(host, "idle_seconds", lambda: next(idle))
    now = iter([100.0, 101.0, 110.0])
    monkeypatch.setattr(run_record.time, "monotonic", lambda: next(now))
    world = World.solo(device)
    record, job = RunRecord(run, world), resolved(*JOB)
    record.write_start(job, plan_of(job, 40), Progress(), {})
    assert events == ["reset cuda:0"] * (device != "cpu")
    spent = {"images": 50.0, "training_seconds": 10.0, "waiting_seconds": 1.0}
    run.write_summary(spent={"hours": 1.0, **spent})
    model = network()
    trainer: Any = trainer_of(model, World.solo(), progress=Progress(step=9, best=1.0, best_step=7))
    trainer.progress.best_figures, trainer.tested = {"top1": 1.0}, {"top1": 2.0}
    observer = SimpleNamespace(findings=lambda own: (seen.append(own), {})[1], completed=lambda summary: None)
    trainer.telemetry = SimpleNamespace(
        time_shares=lambda: {"forward": 0.5},
        resumed=4,
        times=SimpleNamespace(spread=lambda: {"forward": 0.1}),
        mfu=lambda rate: 2 * rate,
        trained=lambda: {**spent, "images": 70.0},
        observer=observer,
    )
    record.complete(job, trainer, {"cpu_cores": 2.0}, skipped=0)
    summary = Run(run.path).summary
    assert summary.get("gpu_memory") == (None if device == "cpu" else 123)
    assert (summary["img_per_s"], summary["data_wait_pct"], summary["test"]) == (5.0, 10.0, {"top1": 2.0})
    assert (summary["objective"], summary["best_step"], summary["step"]) == (1.0, 7, 9)
    assert (summary["scores"], summary["stopped_early"]) == ({"top1": 1.0}, "")
    (evidence,) = seen
    assert (evidence.job, evidence.world, evidence.plan, evidence.model) == (job, world, trainer.plan, model)
    assert (evidence.steps, evidence.mfu, evidence.spread) == (5, 14.0, {"forward": 0.1})
    assert evidence.hardware == {"cpu_cores": 2.0, "idle_cores": 3.0}
    assert (evidence.scores, evidence.ended_early, evidence.shares) == ({"top1": 1.0}, "", {"forward": 0.5})
    assert torch.equal(evidence.labels, trainer.loader.eval_labels)


def test_a_run_is_announced_with_its_notes_as_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced = list[Any]()
    monkeypatch.setattr(run_record.banner, "say_start", lambda *values: announced.append(values))
    monkeypatch.setattr(RunRecord, "_notes", lambda *_: ["one", "two"])
    monkeypatch.setattr(run_record.log, "warn", announced.append)
    run, world, parts = RunDir(tmp_path), World.solo(), ("job", "data", "state")
    RunRecord(run, world).announce(*parts, "origin")  # type: ignore[arg-type]
    assert announced == [("job", run, world, "data", "state", "origin"), "one", "two"]
