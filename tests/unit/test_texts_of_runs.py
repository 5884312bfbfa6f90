"""The lines of a run before its first step and behind its last one: each value, at the borders of its words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from helpers import photos_of_two_classes, resolved, run_dir
from lockstep.core import log
from lockstep.core.run_dir import RunDir
from lockstep.core.tags import TOP1, Monitor
from lockstep.core.world import World
from lockstep.optim import SGD, AdamW
from lockstep.training import banner
from lockstep.training.network import Freezing
from lockstep.training.objects import ModelObject
from lockstep.training.resolved_job import ResolvedJob, plan_of
from lockstep.training.train_state import Progress

JOB = ("model=linear", "device=cpu", "dataset=fake", "dataset.size=8", "dataset.classes=3", "dataset.examples=30")
PHOTOS = ("dataset=folder", "dataset.path=photos")
TUNED = (*PHOTOS, "model=resnet18", "model.pretrained=true")


def test_a_number_of_parameters_is_told_in_the_unit_that_it_fills() -> None:
    numbers = {999: "999", 1000: "1 k", 25_500: "26 k", 999_999: "1000 k", 1_000_000: "1.0 M", 25_557_032: "25.6 M"}
    assert {number: banner._count(number) for number in numbers} == numbers


def on(device: str, size: int = 1, local_size: int = 1, *, has_group: bool = False) -> World:
    control: Any = "a group" if has_group else None
    return replace(World.solo(device), size=size, local_size=local_size, control=control)


@pytest.mark.parametrize(
    ("words", "world", "threads", "shown"),
    [
        ((), on("cpu"), 1, "1 process on the CPU, 1 thread, float32"),
        ((), on("cpu"), 2, "1 process on the CPU, 2 threads, float32"),
        (("strategy=ddp",), on("cpu", 2, 2), 1, "2 processes on the CPU by DDP, 1 thread each, float32"),
        (("strategy=ddp",), on("cpu", has_group=True), 2, "1 process on the CPU by DDP, 2 threads, float32"),
        (("precision=bf16",), on("cpu"), 1, "1 process on the CPU, 1 thread, float32 and bfloat16"),
        (("precision=tf32",), on("cuda:1"), 1, "1 process on a GPU 1, float32 with TF32"),
        (("strategy=zero",), on("cuda:1", 4, 2), 1, "4 processes on 2 x a GPU 1 by ZeRO, float32"),
    ],
)
def test_the_ranks_have_their_number_device_strategy_threads_and_formats(
    words: tuple[str, ...], world: World, threads: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"a GPU {torch.device(device).index}")
    torch.set_num_threads(threads)
    assert banner._ranks(resolved(*JOB, *words), world) == shown


@pytest.mark.parametrize(
    ("words", "composed", "shown"),
    [
        (JOB, {"optimizer": {"lr": "auto"}}, " (usual at batch 64)"),
        (TUNED, {"optimizer": {"lr": "auto"}}, " (usual at batch 64 for trained weights)"),
        (JOB, {"optimizer": {"lr": 0.001}}, ""),
        (JOB, {"optimizer": None}, ""),
        (JOB, {}, ""),
    ],
)
def test_a_rate_that_nobody_chose_is_said_to_be_the_usual_one(
    words: tuple[str, ...], composed: dict[str, Any], shown: str
) -> None:
    assert banner._rate_reason(resolved(*words, "batch=64"), composed) == shown


UNSET = {"mean": None, "std": None, "interpolation": "auto"}


@pytest.mark.parametrize(
    ("words", "own", "sizes", "shown"),
    [
        (TUNED, UNSET, ("input_size", "crop"), "size, crop, mean and std, {} as the weights were trained"),
        (TUNED, UNSET, ("crop",), "crop, mean and std, {} as the weights were trained"),
        (TUNED, UNSET, ("input_size",), "size, mean and std, {} as the weights were trained"),
        (TUNED, {**UNSET, "mean": [0.5] * 3}, (), "{} as the weights were trained"),
        (TUNED, {**UNSET, "std": [0.5] * 3}, (), "{} as the weights were trained"),
        (TUNED, {**UNSET, "interpolation": "bicubic"}, (), "mean and std as the weights were trained"),
        (TUNED, {"mean": [0.5], "std": [0.5], "interpolation": "bilinear"}, (), ""),
        (PHOTOS, UNSET, ("input_size", "crop"), "size usual for dataset=folder"),
        (PHOTOS, UNSET, (), ""),
        (JOB, UNSET, ("input_size",), ""),  # of the images themselves
    ],
)
def test_the_input_names_what_was_chosen_for_the_user_and_why(
    words: tuple[str, ...], own: dict[str, Any], sizes: tuple[str, ...], shown: str
) -> None:
    job = resolved(*words)
    text = banner._input_reason(job, {"input": own}, frozenset(sizes))
    assert text == (f" ({shown.format(job.input.interpolation)})" if shown else "")


def test_the_files_of_a_run_take_no_more_than_it_says(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(100, 50), nn.Linear(50, 3))
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    words = ("checkpoint.keep=2", "checkpoint.keep_best=1", "optimizer=sgd", "optimizer.momentum=0.9")
    for average, copies in (("train.ema=null", 1), ("train.ema=0.9", 2), ("train.swa_from=50%", 2)):
        size, total = banner.sizes_of_checkpoints(resolved(*JOB, *words, average), model)
        assert size == (copies + 1) * weights, "the weights, their average, and the momenta"
        exact = 4 * size + weights  # three stay while one is written, and the best weights are exported
        headers = 20_000 + (2 * 4 + 3) * 500  # of a file, its tensors, and the names of the classes
        assert total == pytest.approx(1.05 * (exact + 9 * headers))
    keeps = banner._keeps(resolved(*JOB, *words, "train.ema=null"), SimpleNamespace(model=model))  # type: ignore[arg-type]
    assert keeps.startswith("the newest 2 checkpoints and the best, about 42 kB each; at most 0.")
    assert keeps.endswith(" MB in all, while one is written")
    many = (*words[2:], "checkpoint.keep=1", "checkpoint.keep_best=2")
    keeps = banner._keeps(resolved(*JOB, *many), SimpleNamespace(model=model))  # type: ignore[arg-type]
    assert keeps.startswith("the newest 1 checkpoint and the best 2, about")


def test_the_state_of_an_optimizer_is_that_of_what_it_trains_by_dimensions_and_in_its_format() -> None:
    model = nn.Sequential(nn.Linear(10, 3), nn.Linear(3, 2))
    frozen = model[0].requires_grad_(False)
    assert banner.state_bytes(AdamW(), model) == 2 * 4 * (6 + 2), "none for a layer that is frozen"
    frozen.requires_grad_(True)
    assert banner.state_bytes(AdamW(), model.bfloat16()) == 2 * 2 * (33 + 8)
    assert banner.state_bytes(OfMatrices(), model.float()) == 4 * (30 + 6), "a bias has none"
    assert banner.state_bytes(SGD(momentum=0.0), model) == 0
    before = torch.get_rng_state()
    assert banner.state_bytes(Drawing(), model) == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_has_the_buffers_too_and_one_of_an_unknown_optimizer_the_weights_at_least() -> None:
    model = nn.BatchNorm1d(3, affine=False)
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))
    words = ("checkpoint.keep=1", "checkpoint.keep_best=1", "optimizer=sgd", "optimizer.momentum=0.9")
    job = resolved(*JOB, *words, "train.ema=null")
    tensors = 4 * 3 * 3 + 8  # the scale, both statistics, and their counter
    assert banner.sizes_of_checkpoints(job, model)[0] == tensors + 4 * 3
    for average in ({"ema": 0.9}, {"swa_from": "50%"}):
        averaged = replace(job, train=replace(job.train, **average))
        assert banner.sizes_of_checkpoints(averaged, model)[0] == 2 * tensors + 4 * 3
    unknown = banner.sizes_of_checkpoints(replace(job, optimizer=Unknown()), model)
    headers = 20_000 + (2 * 4 + 3) * 500
    assert unknown == (None, pytest.approx(1.05 * (4 * tensors + 7 * headers)))


class OfMatrices(SGD):
    """An optimizer that keeps something for matrices alone."""

    def make(self, groups: Any) -> torch.optim.Optimizer:
        class Own(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                for parameter in self.param_groups[0]["params"]:
                    kept_of_it = torch.zeros_like(parameter) if parameter.dim() > 1 else torch.zeros(())
                    self.state[parameter] = {"own": kept_of_it, "number": 7}

        return Own(groups, lr=0.1)


class Drawing(SGD):
    """An optimizer that draws numbers in its step."""

    def make(self, groups: Any) -> torch.optim.Optimizer:
        class Own(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                torch.rand(3)

        return Own(groups, lr=0.1)


class Unknown(SGD):
    """An optimizer that needs the real model."""

    def make(self, groups: Any) -> torch.optim.Optimizer:
        raise LookupError("no such layer")


def test_an_optimizer_that_cannot_be_tried_has_a_state_of_unknown_size() -> None:
    model = nn.Linear(10, 3)
    assert banner.state_bytes(Unknown(), model) is None
    job = replace(resolved(*JOB), optimizer=Unknown())
    keeps = banner._keeps(job, SimpleNamespace(model=model))  # type: ignore[arg-type]
    assert keeps.endswith("and the best, as large as the optimizer makes them")
    for option in (AdamW(head_lr=0.1, layer_decay=0.5), AdamW()):
        assert banner.state_bytes(option, model) == 2 * 4 * 33, "two moments; a small module has no head"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is shown_rows, by its label."""
    shown_rows = dict[str, str]()
    monkeypatch.setattr(log, "say_row", lambda label, text, **how: shown_rows.update({label: text}))
    monkeypatch.setattr(log, "say_command", lambda label, text: shown_rows.update({label: text}))
    return shown_rows


def started(run: RunDir, job: ResolvedJob, *, origin: str = "", test: int | None = None, **changed: Any) -> None:
    """Say the start of a run on 30 examples."""
    labels = torch.arange(30) % job.dataset.classes
    model, plan = nn.Linear(1000, 1), replace(plan_of(job, 30), **changed)
    sizes = {0: (8, 8), 5: (16, 8)}
    train, val = (Split(labels) for _ in range(2))
    data: Any = SimpleNamespace(
        plan=plan,
        train=train,
        val=val,
        test=None if test is None else Split(torch.zeros(test)),
        transforms=SimpleNamespace(train_sizes=sizes),
        loader_reason="all of it fits",
    )
    freezing = Freezing(numbers=7, until=4) if origin else Freezing()
    state: Any = SimpleNamespace(model=model, parameters=1001, freezing=freezing)
    banner.say_start(job, run, World.solo(), data, state, origin)


class Split:
    def __init__(self, labels: Tensor) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)


def test_the_start_of_a_run_says_all_that_makes_it(
    tmp_path: Path, rows: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (*JOB, "batch=10", "epochs=2", "seed=5", "optimizer=sgd", "optimizer.lr=0.125", "schedule=constant")
    run, job = run_dir(tmp_path / "runs" / "a", *words), resolved(*words)
    started(run, job)
    assert rows["run"] == "runs/a"
    assert rows["model"] == "Linear, 1 k parameters, random weights"
    assert rows["data"] == "Fake, 30 to train on, 30 to evaluate, 3 classes, 3x8x8"
    assert rows["input"] == f"{job.loader} (all of it fits); augmentation: {job.augment}"
    assert rows["ranks"] == "1 process on the CPU, 1 thread, float32"
    assert rows["optimizer"] == "SGD, lr 0.125, Constant"
    assert rows["loss"] == "CrossEntropy"
    assert rows["steps"] == "6 of global batch 10: 2 epochs of 3, seed 5"
    assert "from" not in rows
    started(run, job, origin="weights of a.safetensors, step 0", test=9, micro_batches=2)
    assert rows["model"] == "Linear, 1 k parameters, 7 of them frozen until step 4"
    assert "30 to evaluate, 9 to test, 3 classes" in rows["data"]
    assert rows["steps"].startswith("6 of global batch 10 in 2 micro-batches: 2 epochs")
    assert rows["from"] == "weights of a.safetensors, step 0"


def test_the_start_of_a_run_on_photos_says_their_folder_and_whose_weights_it_begins_with(
    tmp_path: Path, rows: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos_of_two_classes(tmp_path, 8, "png"))
    words = (*PHOTOS, "model=resnet18", "batch=16", "device=cpu")
    run, job = run_dir(tmp_path / "run", *words), resolved(*words)
    started(run, job)
    assert rows["data"].endswith(", 3x224x224 (size usual for dataset=folder)")
    assert ", lr 0.0005 (usual at batch 16), Cosine" in rows["optimizer"]
    assert rows["data"].startswith("Folder photos, 30 to train on, 30 to evaluate, lamp 15+15, mug 15+15, 3x")
    assert rows["model"] == "resnet18, 1 k parameters, random weights"
    started(run, replace(job, model=replace(job.model, pretrained=True)))  # type: ignore[call-arg]
    assert rows["model"] == "resnet18(pretrained=True), 1 k parameters"


def test_a_task_that_is_not_the_usual_one_stands_beside_its_loss(tmp_path: Path, rows: dict[str, str]) -> None:
    words = (*JOB, "batch=10", "task=multilabel")
    started(run_dir(tmp_path / "run", *words), resolved(*words))
    assert rows["loss"] == "BCE, Multilabel"


def test_data_of_a_program_has_the_name_of_its_type(tmp_path: Path, rows: dict[str, str]) -> None:
    job = resolved(*JOB, "batch=10")
    scans = SimpleNamespace(type="Scans", path=None, classes=3, class_names=(), input_shape=(3, 8, 8))
    vars(scans).update(image_shape=(3, 8, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(banner, "is_object", lambda part: part is scans)
        patch.setattr(banner, "named", lambda part, *_: "Scans" if part is scans else "other")
        started(run_dir(tmp_path / "run", *JOB), replace(job, dataset=scans))  # type: ignore[arg-type]
    assert rows["data"].startswith("Scans, 30 to train on")


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        (300, "100 epochs"),
        (30, "10 epochs"),
        (3, "1 epoch"),
        (4, "1.33 epochs"),
        (1, "0.33 epochs"),
        (3003, "1,001 epochs"),
    ],
)
def test_epochs_are_told_in_hundredths_without_zeros_behind(
    steps: int, shown: str, tmp_path: Path, rows: dict[str, str]
) -> None:
    started(run_dir(tmp_path / "run", *JOB, "batch=10"), resolved(*JOB, "batch=10"), total_steps=steps)
    assert f": {shown} of 3, seed" in rows["steps"]


@pytest.mark.parametrize(("steps", "shown"), [(1, "0.01 epochs"), (99, "0.99 epochs")])
def test_a_hundredth_of_an_epoch_is_told(
    steps: int, shown: str, tmp_path: Path, rows: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = resolved(*JOB, "batch=10")
    started(run_dir(tmp_path / "run", *JOB, "batch=10"), job, examples=1000, total_steps=steps)
    assert f": {shown} of 100, seed" in rows["steps"]
    started(RunDir(tmp_path / "run"), job, examples=1010, total_steps=1)
    assert ": less than 0.01 epochs of 101, seed" in rows["steps"]


def test_a_size_in_training_is_told_beside_that_of_an_evaluation(tmp_path: Path, rows: dict[str, str]) -> None:
    run = run_dir(tmp_path / "run", *JOB)
    job = resolved(*JOB, "batch=10")
    for changed in ({"size": 16}, {"sizes": {"0": 8, "5": 16}}):
        train = replace(job.train, **changed)  # type: ignore[arg-type]
        started(run, replace(job, train=train))
        assert "3x8x8 (8x8, then 16x8 in training)" in rows["data"]


def test_a_key_that_a_resume_changes_is_told_once_with_its_last_word(tmp_path: Path, rows: dict[str, str]) -> None:
    run, job = run_dir(tmp_path / "run", *JOB), resolved(*JOB, "batch=10")
    run.overrides.write_text(yaml.safe_dump(["steps=5", "seed=1", "+steps=9"]))
    started(run, job)
    assert rows["overrides"] == "+steps=9 seed=1"
    run.overrides.write_text("[]")
    started(run, job)
    assert rows["overrides"] == "none, these are the defaults"


@pytest.mark.parametrize(
    ("names", "classes", "targets", "shown"),
    [
        ((), 3, "classes", "3 classes"),
        ((), 1, "classes", "1 classes"),
        ((), 1, "labels", "1 label"),
        ((), 1, "values", "1 value"),
        (tuple("abcdef"), 6, "classes", "6 classes (a, b, c, ...)"),
        (tuple("012345"), 6, "classes", "6 classes"),
        (tuple("01234a"), 6, "classes", "6 classes (0, 1, 2, ...)"),
        (tuple("abcde"), 5, "classes", "a 2+1, b 1+0, c 1+0, d 1+0, e 0+0"),
        (tuple("xyz"), 3, "values", "x, y, z"),
        (tuple("abcdef"), 6, "values", "6 values (a, b, c, ...)"),
    ],
)
def test_up_to_five_classes_are_told_by_name(names: tuple[str, ...], classes: int, targets: str, shown: str) -> None:
    job: Any = SimpleNamespace(
        dataset=SimpleNamespace(classes=classes, class_names=names), task=SimpleNamespace(targets=targets)
    )
    data: Any = SimpleNamespace(
        train=SimpleNamespace(labels=torch.tensor([0, 0, 1, 2, 3])), val=SimpleNamespace(labels=torch.tensor([0]))
    )
    assert banner._classes(job, data) == shown


def test_a_share_of_a_half_is_no_label() -> None:
    job: Any = SimpleNamespace(
        dataset=SimpleNamespace(classes=1, class_names=("cat",)), task=SimpleNamespace(targets="labels")
    )
    data: Any = SimpleNamespace(
        train=SimpleNamespace(labels=torch.tensor([[0.5], [0.6]])), val=SimpleNamespace(labels=torch.tensor([[0.5]]))
    )
    assert banner._classes(job, data) == "cat 1+0"


class Ended:
    """A run that has ended at step 6 of 6, of which each fact can be changed."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.words = (*JOB, "batch=10", "steps=6", "optimizer=sgd", "train.ema=null", *words)
        self.run, self.job = run_dir(folder / "run", *self.words), resolved(*self.words)
        self.figures: dict[str, Any] = {"img_per_s": 1234.4}
        self.shares: dict[str, float] = {}
        observer = SimpleNamespace(commands=[])
        progress = Progress(step=6, scores=[(3, 50.0), (6, 75.0)], best=75.0, best_step=6)
        self.trainer: Any = SimpleNamespace(
            progress=progress,
            monitor=Monitor(TOP1),
            state=SimpleNamespace(ema=None),
            plan=plan_of(self.job, 30),
            tested={},
            ended_early="",
            raw_score=None,
            telemetry=SimpleNamespace(observer=observer),
        )

    def say(self, learning: str = "", speed: str = "") -> None:
        banner.say_ending(self.job, self.run, self.trainer, 75.0, self.figures, self.shares, learning, speed)


def test_the_end_of_a_run_has_its_best_score_and_its_rate(tmp_path: Path, rows: dict[str, str]) -> None:
    ended = Ended(tmp_path)
    ended.say()
    assert rows[""] == "done in 1:15: best 75.00 % top-1 at step 6 (epoch 2), 1,234 img/s"
    assert not {"scores", "test", "time", "learning", "speed", "ended", "average", "look at it"} & rows.keys()
    ended.trainer.progress.best_step = 5
    ended.say()
    assert "at step 5 (epoch 1.67)" in rows[""]
    ended.trainer.progress.best_step = 6
    ended.figures = {"img_per_s": 0.0, "gpu_util": 0.0}
    ended.trainer.progress.best = None
    ended.say("it has learnt", "as fast as it can be")
    assert rows[""] == (
        "done in 1:15: best none, top1 never had a value; the weights are those of step 6, GPU 0 % busy"
    )
    assert (rows["learning"], rows["speed"]) == ("it has learnt", "as fast as it can be")


@pytest.mark.parametrize(("start", "averaged"), [(5, True), (6, True), (7, False)])
def test_the_best_score_of_an_average_is_said_to_be_one(
    start: int, averaged: bool, tmp_path: Path, rows: dict[str, str]
) -> None:
    ended = Ended(tmp_path)
    ended.trainer.state.ema = SimpleNamespace(start=start)
    ended.say()
    assert rows[""].startswith(
        "done in 1:15: best 75.00 % top-1" + " of the averaged weights" * averaged + " at step"
    )


def test_the_parts_of_the_time_come_by_their_size_down_to_a_hundredth(tmp_path: Path, rows: dict[str, str]) -> None:
    ended = Ended(tmp_path)
    ended.shares = {"forward": 0.01, "data": 0.25, "backward": 0.73, "log": 0.0099}
    ended.say()
    assert rows["time"] == "backward 73 %, waiting for data 25 %, forward 1 %"


def test_the_end_has_the_metrics_of_the_best_weights_and_the_figures_of_the_test(
    tmp_path: Path, rows: dict[str, str]
) -> None:
    ended = Ended(tmp_path, "metric=[f1,recall]", "monitor=f1")
    ended.trainer.monitor = Monitor("f1")
    ended.trainer.progress.best_figures = {"f1": 70.0, "recall": 0.0, "top1": 75.0}
    ended.trainer.tested = {"top1": 50.0, "top5": 100.0, "f1/a": 1.0, "recall": 60.0}
    ended.say()
    assert rows["scores"] == "recall 0", "the monitored one stands above"
    assert rows["test"] == "50.00 % top-1, recall 60"
    ended.trainer.monitor = Monitor("f1/a")
    ended.say()
    assert rows["test"] == "50.00 % top-1, f1/a 1, recall 60"


@pytest.mark.parametrize(
    ("words", "raw", "remedy"),
    [
        (("train.ema=0.9",), 75.1, "use train.ema_warmup=true"),
        (("train.ema=0.9", "train.ema_warmup=true"), 75.1, "use a lower train.ema, or train.ema=null"),
        (("train.swa_from=2",), 75.1, "use a later train.swa_from"),
        (("train.ema=0.9",), 75.0, ""),
        (("train.ema=0.9",), None, ""),
    ],
)
def test_an_average_that_is_worse_than_the_weights_has_its_remedy(
    words: tuple[str, ...], raw: float | None, remedy: str, tmp_path: Path, rows: dict[str, str]
) -> None:
    ended = Ended(tmp_path, *words)
    if words == ("train.ema=0.9",):
        ended.job = replace(ended.job, train=replace(ended.job.train, ema_warmup=False))
    ended.trainer.raw_score = raw
    ended.say()
    text = rows.get("average", "")
    assert text.startswith("75.00 % top-1 at the last step, and the raw weights 75.10 % top-1") == bool(remedy)
    assert text.endswith(remedy)


@pytest.mark.parametrize(("raw", "says"), [(0.25, True), (0.5, False), (0.75, False)])
def test_an_average_is_worse_than_the_weights_by_what_is_monitored(
    raw: float, says: bool, tmp_path: Path, rows: dict[str, str]
) -> None:
    ended = Ended(tmp_path, "train.ema=0.9")
    ended.trainer.monitor, ended.trainer.raw_score = Monitor.parse("-loss"), raw
    ended.trainer.progress.scores = [(3, 0.75), (6, 0.5)]
    ended.say()
    assert ("average" in rows) == says
    assert not says or rows["average"].startswith("loss 0.5 at the last step, and the raw weights loss 0.25: it may")
    ended.trainer.progress.scores = [(3, 0.75)]  # the last step was not evaluated
    rows.clear()
    ended.say()
    assert "average" not in rows


def test_a_metric_without_a_value_is_left_out(tmp_path: Path, rows: dict[str, str]) -> None:
    ended = Ended(tmp_path, "metric=[f1,recall]")
    ended.trainer.progress.best_figures = {"recall": 60.0, "top1": 75.0}
    ended.say()
    assert rows["scores"] == "recall 60"


def test_the_lines_behind_the_end_are_indented_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = list[str]()
    monkeypatch.setattr(log, "say_row", lambda label, text, indent=12: lines.append(f"{label:>{indent}}|{text}"))
    monkeypatch.setattr(log, "say_command", lambda label, text: None)
    ended = Ended(tmp_path, "train.ema=0.9")
    ended.trainer.tested, ended.trainer.raw_score = {"loss": 0.5}, 76.0
    ended.say("it has learnt", "as fast as it can be")
    assert [line.partition("|")[0] for line in lines] == [
        "   ",
        *(f"{label:>16}" for label in ("test", "learning", "speed", "average")),
    ]


def test_a_model_of_a_program_is_used_from_a_program(
    tmp_path: Path, rows: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos_of_two_classes(tmp_path, 8, "png"))
    ended = Ended(tmp_path)
    ended.job = replace(resolved(*PHOTOS), steps=6, model=ModelObject(type="Net", module="own", original=nn.ReLU()))
    ended.say()
    assert rows["predict"] == 'lockstep.load("run", model=Net(...)).predict(FILE)'
    ended.run = RunDir(ended.run.path.rename('a "b" \\c'))
    ended.say()
    assert rows["predict"] == r'lockstep.load("a \"b\" \\c", model=Net(...)).predict(FILE)'
    assert not {"evaluate", "export", "demo"} & rows.keys()


@pytest.mark.parametrize(
    ("words", "ended_early", "longer"),
    [
        ((), "", "steps=12"),
        ((), "a callback ends the run: enough", None),
        (("train.patience=1",), "val top-1 has not been better", "train.patience=null"),
        (("train.patience=1", "train.min_delta=2"), "val top-1", "train.patience=null train.min_delta=0"),
    ],
)
def test_a_longer_run_is_one_that_would_not_end_as_this_one(
    words: tuple[str, ...], ended_early: str, longer: str | None, tmp_path: Path, rows: dict[str, str]
) -> None:
    ended = Ended(tmp_path, *words)
    ended.trainer.ended_early = ended_early
    ended.say()
    assert rows.get("ended", "") == ended_early
    command = rows.get("train longer")
    assert (command is None) == (longer is None)
    assert command is None or longer is None or command.endswith(longer)


def test_a_run_that_went_beyond_its_plan_is_trained_longer_than_it_was(tmp_path: Path, rows: dict[str, str]) -> None:
    ended = Ended(tmp_path)
    ended.trainer.progress.step = 8
    ended.say()
    assert rows["train longer"].endswith("steps=16")


@pytest.mark.parametrize(
    ("words", "commands"),
    [(JOB, set()), ((*PHOTOS, "model=linear"), {"evaluate", "predict", "export", "demo"})],
)
def test_the_commands_of_a_run_are_those_that_work_with_it(
    words: tuple[str, ...],
    commands: set[str],
    tmp_path: Path,
    rows: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(photos_of_two_classes(tmp_path, 8, "png"))
    ended = Ended(tmp_path)
    ended.job = replace(resolved(*words), steps=6)
    ended.trainer.telemetry.observer.commands = ["tensorboard --logdir run"]
    ended.say()
    assert rows.keys() & {"evaluate", "predict", "export", "demo"} == commands
    assert rows["look at it"] == "tensorboard --logdir run"
    if commands:
        usual = {verb: f"lockstep {verb} run" for verb in ("evaluate", "export", "demo")}
        assert {verb: rows[verb] for verb in commands} == {**usual, "predict": "lockstep predict run FILE"}
        monkeypatch.setattr(banner, "is_object", lambda part: part is ended.job.loss)
        rows.clear()
        ended.say()
        assert rows.keys() & commands == commands - {"evaluate"}, "no command has the loss of a program"
