"""What each part of a run gets from the job, from its data and from its place among the ranks."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from helpers import FAKE, resolved, run_dir
from lockstep.checkpoint.writing import Checkpointer
from lockstep.core.errors import InputError, LockstepError, NumericalError, Stopped
from lockstep.core.observer import Callback, RunInfo
from lockstep.core.run_dir import RunDir
from lockstep.core.tags import Direction, Monitor
from lockstep.core.world import World
from lockstep.data.loading.loaders import Resident, Streaming
from lockstep.data.loading.sampler import balanced_order, repeated_order
from lockstep.models import DigitNet
from lockstep.runtime.signals import StopRequest
from lockstep.stochastic import ForwardDraws
from lockstep.tasks import Multilabel
from lockstep.training import build_data, build_observers, dry_run, experiment, train_state
from lockstep.training.build_data import TrainingData
from lockstep.training.build_observers import Observers
from lockstep.training.evaluate import Patience
from lockstep.training.graph_step import GraphStep
from lockstep.training.moments import Callbacks
from lockstep.training.resolved_job import ResolvedJob, load_job, plan_of
from lockstep.training.train_state import Progress, TrainState, blank_labels, build_loss, note_callbacks, restore
from lockstep.training.train_step import TrainStep
from thread_ranks import ThreadRanks

JOB = (*FAKE, "augment=none", "model=linear", "device=cpu", "dataset.examples=40", "batch=10", "steps=6")
ANY: Any = None


class Keywords:
    """Takes the place of a class, and keeps what it is called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str) -> None:
        self.calls: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for name in names:
            monkeypatch.setattr(owner, name, partial(self.call, name))

    def call(self, name: str, *values: Any, **named: Any) -> Any:
        self.calls[name].append({"values": values, **named})
        return SimpleNamespace(**{"check": "the check of the spending", "trained": "what was trained", **named})

    def one(self, name: str) -> dict[str, Any]:
        (call,) = self.calls[name]
        return call


def observed(
    monkeypatch: pytest.MonkeyPatch, job: ResolvedJob, world: World, run: RunDir, gpus: list[str], **progress: Any
) -> tuple[Any, Any, Keywords, Observers]:
    """The telemetry and the watch of a rank, and what all parts were made from."""
    parts = Keywords(monkeypatch, build_observers, "Telemetry", "HardwareWatch", "Spending", "TimeLeft", "parts_of")
    monkeypatch.setattr(build_observers, "watched_gpus", lambda replica, world: gpus)
    monkeypatch.setattr(build_observers, "_observe", lambda *values: None)
    monkeypatch.setattr(build_observers, "_times", lambda *values: SimpleNamespace(clock="the clock"))
    monkeypatch.setattr(build_observers, "display", lambda *values, is_main: is_main)
    data: Any = SimpleNamespace(plan=plan_of(job, 40))
    state: Any = SimpleNamespace(replica="replica", peak_rate=7.5)
    observer = Observers()
    build = build_observers.build_observers
    telemetry, watch = build(job, run, world, data, state, Progress(**progress), StopRequest(), observer)
    return telemetry, watch, parts, observer


def test_the_telemetry_of_a_rank_goes_on_where_the_run_was_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, window = resolved(*JOB), object()
    ranks = replace(World.solo(), rank=1, size=4, local_size=2)
    telemetry, watch, parts, observer = observed(monkeypatch, job, ranks, RunDir(tmp_path), [], step=4, window=window)
    facts = parts.one("Telemetry")
    assert (facts["step"], facts["opened"], facts["peak_rate"], facts["comparable"]) == (4, window, 7.5, True)
    assert (facts["display"], facts["names"], facts["samples"]) == (False, [], None)
    assert facts["loss_limit"] == 1000 * math.log(10)
    assert facts["hits"] is not None
    assert parts.one("TimeLeft")["values"][1:] == ("the clock", 4)
    assert (watch, observer.observers, hasattr(telemetry, "profile")) == (None, (), False)
    job = replace(resolved(*JOB, "task=multilabel"), task=Figured())
    telemetry, *_ = observed(monkeypatch, job, ranks, RunDir(tmp_path), [])
    assert telemetry.names == ["my/c"]


@pytest.mark.parametrize(
    ("words", "limit", "hits"),
    [
        (("dataset.classes=1", "task=multilabel"), 1000 * math.log(2), False),
        (("dataset.classes=2",), 1000 * math.log(2), True),
        (("dataset.classes=3",), 1000 * math.log(3), True),
        (("task=regression",), sys.float_info.max, False),
    ],
)
def test_a_loss_has_diverged_far_above_that_of_a_guess(
    words: tuple[str, ...], limit: float, hits: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, _, parts, _ = observed(monkeypatch, resolved(*JOB, *words), World.solo(), RunDir.at(tmp_path / "run"), [])
    facts = parts.one("Telemetry")
    assert facts["loss_limit"] == limit
    assert (facts["hits"] is not None) == hits


@pytest.mark.parametrize(
    ("gpus", "size", "local_size", "counted", "energy"),
    [([], 4, 2, 0, False), (["a", "b"], 4, 2, 4, False), (["a", "b", "c"], 2, 2, 3, True), (["a"], 1, 1, 1, True)],
)
def test_main_watches_and_pays_for_all_gpus_of_the_job(
    gpus: list[str],
    size: int,
    local_size: int,
    counted: int,
    energy: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    words = ("cost.usd_per_gpu_hour=2.5", "telemetry.profile=true", "budget.usd=9")
    run, peers = RunDir.at(tmp_path / "run"), {1: 71, 2: 72}
    ranks = replace(World.solo(), size=size, local_size=local_size, local_peer_pids=peers)
    telemetry, watch, parts, observer = observed(monkeypatch, resolved(*JOB, *words), ranks, run, gpus, step=2)
    spending = parts.one("Spending")
    assert (spending["gpus"], spending["counts_energy"], spending["usd_per_gpu_hour"]) == (counted, energy, 2.5)
    assert (spending["run_dir"], spending["watch"], watch.sampled) == (run, watch, "the check of the spending")
    assert len(observer.observers) == 1
    assert (spending["budget"].usd, spending["trained"]) == (9, "what was trained")
    assert isinstance(spending["stop"], StopRequest)
    watched = parts.one("parts_of")
    assert (watched["gpus"], watched["path"], watched["processes"]) == (gpus, run.gpu, [os.getpid(), 71, 72])
    telemetry.step = 5
    assert parts.one("HardwareWatch")["step"]() == 5
    assert telemetry.profile.keywords == {"folder": run.logs / "profile", "total": 4, "on_gpu": False}
    assert parts.one("Telemetry")["display"] is True


@pytest.mark.parametrize(("strategy", "comparable"), [("single", True), ("pipeline", False)])
def test_ranks_that_do_other_work_are_not_compared_and_the_display_has_the_monitor(
    strategy: str, comparable: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = list[Any]()
    job = resolved(*JOB, f"strategy={strategy}", "monitor=-loss", "telemetry.samples=true")
    run = RunDir.at(tmp_path / "run")
    telemetry, *_ = observed(monkeypatch, job, World.solo(), run, [])
    assert telemetry.comparable is comparable
    assert telemetry.samples is not None
    telemetry.samples.close()
    monkeypatch.setattr(build_observers, "display", lambda *values, is_main: shown.extend(values))
    data: Any = SimpleNamespace(plan=plan_of(job, 40))
    state: Any = SimpleNamespace(replica=None, peak_rate=0.0)
    member = replace(World.solo(), rank=1, size=2)
    build = build_observers.build_observers
    telemetry, watch = build(job, run, member, data, state, Progress(), StopRequest(), Observers())
    assert (shown[0], shown[2], watch) == (data.plan, Monitor("loss", Direction.minimize), None)
    assert telemetry.samples is not None
    telemetry.samples.close()


class Figured(Multilabel):
    """A task that logs a figure."""

    figures: ClassVar[tuple[str, ...]] = ("-my/c",)


class OwnLogger:
    """A logger that keeps the run that it is built for."""

    def __init__(self, name: str, *figures: str) -> None:
        self.name, self.figures, self.runs = name, figures, list[RunInfo]()

    def build(self, run: RunInfo) -> str:
        self.runs.append(run)
        return self.name


def test_main_observes_with_its_callbacks_the_loggers_that_log_and_then_those_that_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("task=multilabel",)
    run, job = run_dir(tmp_path / "run", *JOB, *words), resolved(*JOB, *words)
    one, two, three = OwnLogger("writes"), OwnLogger("logs", "my/a"), OwnLogger("writes too")
    job = replace(job, task=Figured(), logger={"one": one, "two": two, "three": three})  # type: ignore[dict-item]
    lines = [(2, {"loss/train": 4.0, "optim/lr": 0.5}), (4, {"loss/train": 3.0})]
    logged = list[Any]()
    monkeypatch.setattr(build_observers, "read_figures", lambda *place: (logged.append(place), lines)[1])
    monkeypatch.setattr(build_observers, "listeners", lambda: [lambda info: ("listens to", info)])
    monkeypatch.setattr(build_observers.components, "plain", lambda of: {"batch": of.batch})
    monkeypatch.setattr(build_observers, "hyperparameters", lambda *values: values)
    monkeypatch.setattr(build_observers.sinks, "CsvTable", lambda *values: ("table", values))
    monkeypatch.setattr(build_observers.sinks, "PredictionsFile", lambda path: ("predictions", path))
    run.start_summary(run="abc", monitor="top1")
    (tmp_path / "sweep.json").write_text('{"swept": ["batch"]}')
    observers = Observers("a callback", names=["my/b"])  # type: ignore[arg-type]
    plan, model = plan_of(job, 40), nn.ReLU()
    state: Any = SimpleNamespace(model=model)
    progress = Progress(step=4, scores=[(4, 1.0)])
    build_observers._observe(observers, job, run, World.solo(), plan, state, progress)
    first, *own, table, predictions, listening = observers.observers
    assert (first, own) == ("a callback", ["logs", "writes", "writes too"])
    (info,) = one.runs
    tags = ["loss/val", *(f"metric/{name}" for name in ("map", "f1", "subset_accuracy")), "my/c", "my/b"]
    assert (info.run_dir, info.plan, info.step, info.after, info.id) == (run, plan, 4, 4.5, "abc")
    assert (info.config, info.model, info.tags, info.log) == ({"batch": 10}, model, tags, observers.log)
    assert info.hyperparameters == (job, World.solo(), {"batch": "10"})  # type: ignore[comparison-overlap]
    latest = {"loss/train": 3.0, "optim/lr": 0.5}
    assert table == ("table", (run.table, plan, 4.5, latest, tags))  # type: ignore[comparison-overlap]
    assert predictions == ("predictions", run.validation)  # type: ignore[comparison-overlap]
    assert listening == ("listens to", info)  # type: ignore[comparison-overlap]
    assert logged == [(run.metrics, 4.5)]


def test_a_job_without_figures_of_gpus_reads_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = resolved(*JOB, "telemetry.gpu=false")
    _, _, parts, _ = observed(monkeypatch, job, World.solo(), RunDir.at(tmp_path / "run"), ["a"])
    assert parts.one("parts_of")["gpus"] == []
    assert parts.one("Spending")["gpus"] == 1


class Split:
    def __init__(self, number: int, skip: int = 0) -> None:
        self.labels, self.skip = torch.arange(number) % 10, skip

    def __len__(self) -> int:
        return len(self.labels)


@pytest.mark.parametrize(("skips", "most"), [((1, 2, 3), 3), ((3, 2, 1), 3), ((1, 3, None), 3), ((0, 0, None), 0)])
def test_as_many_images_may_be_broken_as_in_any_split(skips: tuple[Any, ...], most: int) -> None:
    train, val, test = (None if skip is None else Split(1, skip) for skip in skips)
    data = TrainingData(
        train=train,
        val=val,
        test=test,
        plan=ANY,
        fingerprint={},
        transforms=ANY,
        loader_reason="",  # type: ignore[arg-type]
    )
    assert data.skip == most


def test_a_loader_is_chosen_by_all_images_that_a_machine_will_read() -> None:
    words = ("dataset=digits", "dataset.input_size=12", "device=cpu", "batch=10", "steps=6", "train.eval_every=4")
    job = resolved(*words)  # images are kept as they are stored
    ranks = replace(World.solo(), rank=1, size=6, local_size=2)
    context = build_data._loader_context(job, Split(40), Split(20), ranks)  # type: ignore[arg-type]
    assert context.gigabytes == 60 * 64 / 1e9
    assert context.reads == (6 * 10 + 2 * 20) * 2 // 6, "two evaluations: behind the fourth step and the last one"
    assert context.changes == job.dataset.changes
    assert [len(split) for split in context.splits] == [40, 20]


def loader_noting(strides: list[tuple[int, int]]) -> Any:
    """A loader whose feed of a split is the split; it notes for which batches and values it is asked for a stride."""
    return SimpleNamespace(
        feed=lambda split, world: split,
        stride=lambda batch, values, world: strides.append((batch, values)),
        order_device=lambda world: "a device",
    )


def test_each_loader_has_the_labels_of_its_split_in_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Keywords(monkeypatch, build_data, "Loader", "EvalLoader")
    job = resolved(*JOB, "seed=7", "train.eval_batch=9")
    train, val, test = Split(40, 1), Split(20, 2), Split(8, 3)
    transforms = SimpleNamespace(train_sizes={0: (8, 8)}, mix=None)
    data = TrainingData(
        train=train,  # type: ignore[arg-type]
        val=val,  # type: ignore[arg-type]
        test=test,  # type: ignore[arg-type]
        plan=plan_of(job, 40),
        fingerprint={},
        transforms=transforms,  # type: ignore[arg-type]
        loader_reason="",
    )
    strides = list[tuple[int, int]]()
    monkeypatch.setattr(build_data, "read_once", lambda split, world: split)
    job = replace(job, loader=loader_noting(strides))
    ranks = replace(World.solo(), rank=1, size=4)
    for mix in (None, "a mix"):
        transforms.mix = mix
        build_data.build_loader(job, data, ranks)
        facts = parts.calls["Loader"][-1]
        assert (facts["seed"], facts["eval_batch"], facts["skip"], facts["partners"]) == (7, 9, 1, mix is not None)
        assert (facts["train_feeds"], facts["eval_feed"], facts["order_of"]) == ({0: train}, val, None)
        for name, split in (("train_labels", train), ("eval_labels", val)):
            assert torch.equal(facts[name], split.labels)
            assert facts[name].data_ptr() != split.labels.data_ptr(), "the loader marks broken images in them"
    assert strides == [(10 // 4, 64)] * 2
    build_data.build_test_loader(job, data, ranks)
    facts = parts.one("EvalLoader")
    assert (facts["eval_batch"], facts["skip"], facts["eval_feed"]) == (9, 3, test)
    assert torch.equal(facts["eval_labels"], test.labels)
    assert facts["eval_labels"].data_ptr() != test.labels.data_ptr()
    assert build_data.build_test_loader(job, replace(data, test=None), ranks) is None


def test_the_loader_gets_the_micro_batches_that_were_chosen_and_the_plan_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen, tried, rates = list[float](), list[Any](), list[float | None]()

    def choose(job: ResolvedJob, world: World, *, held_gb: float) -> int:
        chosen.append(held_gb)
        return 3

    monkeypatch.setattr(dry_run, "choose_micro_batches", choose)
    monkeypatch.setattr(dry_run, "training_rate", lambda job, world: tried.append(job.train.micro_batches))
    loader = SimpleNamespace(
        held_gb=lambda context: round(1e9 * context.gigabytes),
        choose=lambda context: rates.append(context.training_rate()) or (Resident(), "why"),
    )
    for words, number, held in (("train.micro_batches=auto", 3, [60 * 64]), ("train.micro_batches=2", 2, [])):
        job = replace(resolved(*JOB, "dataset.examples=48", words), loader=loader)  # type: ignore[arg-type]
        job, data = build_data.build_data(job, World.solo())
        assert (job.train.micro_batches, data.plan.micro_batches, tried.pop()) == (number,) * 3
        assert (job.loader, data.loader_reason) == (Resident(), "why")
        assert (chosen, len(data.train), len(data.val), data.fingerprint["examples"]) == (held, 48, 12, 48)
        chosen.clear()
    assert rates == [None, None], "a step that is not tried is no slow one"


def test_all_ranks_have_the_loader_that_main_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(context: Any) -> Any:
        return Streaming(workers=context.world.rank), f"rank {context.world.rank}"

    job = replace(resolved(*JOB), loader=SimpleNamespace(choose=choose))  # type: ignore[arg-type]

    def chosen(world: World) -> tuple[Any, str]:
        own, data = build_data.build_data(job, world)
        return own.loader, data.loader_reason

    assert ThreadRanks(2, monkeypatch).run(chosen) == [(Streaming(workers=0), "rank 0")] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_reads_the_data_before_it_is_prepared(rank: int) -> None:
    events = list[str]()

    def part(name: str) -> Any:
        return lambda *_: (events.append(name), Split(4))[1]

    names = ("prepare", "train", "eval", "test")
    source = SimpleNamespace(**{name: part(name) for name in names}, crops_files=False)
    source.read_as = lambda split, how, crop=None: (split, how, crop)
    job: Any = SimpleNamespace(dataset=source, preprocessing="how", train_shapes=[(3, 8, 6), (3, 16, 12)])
    world: Any = SimpleNamespace(local_rank=rank, barrier=lambda: events.append("barrier"))
    train, val, test = build_data._splits(job, world)
    assert events[: 2 - rank] == [*["prepare"] * (rank == 0), "barrier"]
    assert {*events[2 - rank :]} == {"train", "eval", "test"}
    assert [len(split) for split in (train, val, test)] == [3] * 3  # type: ignore[arg-type]
    source.test = lambda: None
    assert build_data._splits(job, world)[2] is None


def test_boxes_are_cut_in_the_size_of_the_first_step_and_of_each_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    job = resolved(*JOB, "augment=standard", "seed=7")
    source = SimpleNamespace(crops_files=True, read_as=lambda split, how, crop=None: crop)
    monkeypatch.setattr(type(job.augment), "boxes", "boxes")
    shapes = [(3, 8, 6), (3, 16, 12)]
    own: Any = SimpleNamespace(
        dataset=source, preprocessing=None, augment=job.augment, seed=7, train_shapes=shapes, loader=None
    )
    for name in ("prepare", "train", "eval", "test"):
        setattr(source, name, lambda: None)
    first: Any = build_data._splits(own, World.solo())[0]
    later: Any = build_data._cropped(own, Split(4), (16, 12))  # type: ignore[arg-type]
    assert [(crop.boxes, crop.seed, crop.size) for crop in (first, later)] == [
        ("boxes", 7, (8, 6)),
        ("boxes", 7, (16, 12)),
    ]


@pytest.mark.parametrize(
    ("words", "values"),
    [((), 64), (("dataset.input_size=12",), 144), (("train.size=16", "augment=standard"), 256)],
)
@pytest.mark.parametrize("strategy", ["single", "pipeline"])
def test_a_stride_is_for_the_largest_images_of_the_ranks_that_share_a_batch(
    words: tuple[str, ...], values: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Keywords(monkeypatch, build_data, "Loader", "EvalLoader")
    usual = ("dataset=digits", "augment=none", "model=test_resnet", "device=cpu", "batch=10")
    own = [word for word in usual if word.partition("=")[0] not in {word.partition("=")[0] for word in words}]
    job = resolved(*own, *words, f"strategy={strategy}")
    strides = list[tuple[int, int]]()
    facts: dict[str, Any] = {"plan": plan_of(job, 40), "fingerprint": {}, "loader_reason": "", "test": Split(8)}
    sizes = SimpleNamespace(train_sizes={0: (8, 8), 3: (16, 16)}, mix=None)
    data = TrainingData(train=Split(40), val=Split(20), transforms=sizes, **facts)  # type: ignore[arg-type]
    monkeypatch.setattr(build_data, "read_once", lambda split, world: split)
    ranks = replace(World.solo(), rank=1, size=4)
    job = replace(job, loader=loader_noting(strides))
    build_data.build_loader(job, data, ranks)
    build_data.build_test_loader(job, data, ranks)
    together = strategy == "pipeline"  # its ranks are stages of one batch
    assert strides == [(10 if together else 10 // 4, values)]
    for name in ("Loader", "EvalLoader"):
        world = parts.one(name)["world"]
        assert (world.rank, world.size) == ((0, 1) if together else (1, 4)), name
    assert {*parts.one("Loader")["train_feeds"]} == {0, 3}
    assert (parts.one("Loader")["order_device"], parts.one("Loader")["crops"]) == ("a device", False)


@pytest.mark.parametrize(
    ("words", "order"),
    [
        ((), None),
        (("train.repeats=1",), None),
        (("train.repeats=2",), lambda plan, labels: repeated_order(7, 3, plan, 2)),
        (("train.sampling=balanced",), lambda plan, labels: balanced_order(7, 3, labels)),
    ],
)
def test_the_order_of_an_epoch_is_that_of_the_sampling_the_seed_and_the_training_labels(
    words: tuple[str, ...], order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Keywords(monkeypatch, build_data, "Loader")
    job, data = build_data.build_data(resolved(*JOB, "seed=7", *words), World.solo())
    build_data.build_loader(job, data, World.solo())
    order_of = parts.one("Loader")["order_of"]
    assert (order_of is None) == (order is None)
    assert order is None or torch.equal(order_of(3), order(data.plan, data.train.labels))


@pytest.mark.parametrize(
    ("words", "cutout", "erase", "mixes"),
    [
        ((), False, False, False),
        (("train.cutout=2",), True, False, False),
        (("train.erase=0.5", "train.erase_mode=pixel"), False, True, False),
        (("train.cutmix=1", "train.mix_until=1"), False, False, True),
        (("train.mixup=0.5", "train.cutout=2"), True, False, True),
    ],
)
def test_images_are_cut_erased_and_mixed_only_where_a_job_says_so(
    words: tuple[str, ...], cutout: bool, erase: bool, mixes: bool
) -> None:
    job = resolved(*JOB, *words)
    parts = build_data._mixing(job, plan_of(job, 40))
    assert {name: parts.get(name) is not None for name in ("cutout", "erase", "mix")} == {
        "cutout": cutout,
        "erase": erase,
        "mix": mixes,
    }
    assert not cutout or parts["cutout"].side == 2
    assert not erase or (parts["erase"].probability, parts["erase"].mode) == (0.5, "pixel")
    assert not mixes or parts["mix"].until == (1 if "train.mix_until=1" in words else math.inf)


def test_a_cutout_of_a_list_of_sizes_begins_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    job = resolved(*JOB, "train.sizes={50%: 16, 0: 8}")
    sizes = build_data._transforms(job, plan_of(job, 40), World.solo()).train_sizes
    assert [*sizes.items()] == [(0, (8, 8)), (3, (16, 16))]


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ((), (torch.float32, torch.contiguous_format, 0, False)),
        (
            ("precision=bf16", "model=digitnet", "model.channels_last=true", "seed=7"),
            (torch.bfloat16, torch.channels_last, 7, False),
        ),
        (
            ("dataset=folder", "dataset.path=photos", "dataset.decode_size=8", "dataset.crop_from=file"),
            (torch.float32, torch.contiguous_format, 0, True),
        ),
    ],
)
def test_images_are_transformed_to_the_formats_of_the_model_with_the_seed_of_the_job(
    words: tuple[str, ...], options: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_data = ("dataset=fake", "dataset.size=8", "dataset.channels=1") if "dataset=folder" not in words else ()
    job = resolved(*of_data, "model=linear", "device=cpu", "augment=standard", "batch=10", *words)
    cuts, on_device = list[bool](), type(job.augment).on_device

    def noted(self: Any, interpolation: str, *, cropped: bool) -> Any:
        cuts.append(cropped)
        return on_device(self, interpolation, cropped=cropped)

    monkeypatch.setattr(type(job.augment), "on_device", noted)
    transforms = build_data._transforms(job, plan_of(job, 40), World.solo())
    assert (transforms.dtype, transforms.memory_format, transforms.seed, *cuts) == options


class Told(Callback):
    every_rank = True


@pytest.mark.parametrize(("rank", "names"), [(0, ["all", "main"]), (1, ["all"])])
def test_a_rank_that_is_not_main_has_the_callbacks_of_every_rank(rank: int, names: list[str]) -> None:
    job, every, main = resolved(*JOB), Told(), Callback()
    world = replace(World.solo(), rank=rank, size=2)
    own: Any = experiment.own_observers(job, {"all": every, "main": main}, world)
    assert [*own.callbacks] == names
    assert [*own.observers] == [*own.callbacks.values()]
    own.callbacks["all"].figures = ("my/a",)
    job = replace(job, logger={"own": OwnLogger("x", "-my/b")})  # type: ignore[dict-item]
    for callbacks, figures in (({"all": every, "main": main}, ["my/b", "my/a"]), ({}, ["my/b"])):
        assert [*experiment.own_observers(job, callbacks, world).names] == figures
    assert type(experiment.own_observers(job, {}, world)) is Observers


@pytest.mark.parametrize("logger", ["[jsonl]", "[]"])
@pytest.mark.parametrize("rank", [0, 1])
def test_main_writes_checkpoints_and_misses_the_files_without_which_nobody_can_resume(
    logger: str, rank: int, tmp_path: Path
) -> None:
    job = resolved(*JOB, f"logger={logger}", "checkpoint.keep=4", "checkpoint.keep_best=2")
    run, data = RunDir(tmp_path), SimpleNamespace(fingerprint={"a": 1}, plan=SimpleNamespace(save_every_s=9.0))
    world = replace(World.solo(), rank=rank, size=2)
    card: Any = object()
    whole = SimpleNamespace(whole_tensors=lambda tensors, keep: ("whole", keep))
    job = replace(job, strategy=whole)  # type: ignore[arg-type]
    own = experiment.build_checkpointer(job, run, world, data, card)  # type: ignore[arg-type]
    assert (own.writes, own.keep, own.keep_best, own.every_s, own.fingerprint) == (rank == 0, 4, 2, 9.0, {"a": 1})
    assert own.whole([torch.ones(2)]) == ("whole", rank == 0)
    assert own.card is card
    assert own.needed == (run.config, run.overrides, *[run.metrics] * (logger == "[jsonl]"))
    own.pool.shutdown()


@pytest.mark.parametrize(
    ("graph", "device", "cls"),
    [(True, "cuda:0", GraphStep), (True, "cpu", TrainStep), (False, "cuda:0", TrainStep)],
)
def test_graphs_are_replayed_on_a_gpu_alone(graph: bool, device: str, cls: type[TrainStep]) -> None:
    job: Any = SimpleNamespace(train=SimpleNamespace(cuda_graph=graph))
    assert experiment.step_class(job, World.solo(device)) is cls


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("benchmark", [True, False])
def test_a_job_sets_what_an_earlier_one_of_its_process_has_left(
    micro_batches: int, benchmark: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeps, cudnn = list[bool](), torch.backends.cudnn.benchmark
    monkeypatch.setattr(experiment, "keep_freed_memory", lambda world, *, keep: keeps.append(keep))
    job = resolved(*JOB, f"train.micro_batches={micro_batches}", "seed=3", f"train.cudnn_benchmark={benchmark}")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not benchmark
    try:
        experiment.configure_torch(job, World.solo())
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.benchmark is benchmark
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = cudnn
    assert torch.initial_seed() == 3
    assert keeps == [micro_batches == 1]


class Caught(Exception):
    """Ends a run where a test has seen enough of it."""


def trainer_of_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str, world: World | None = None, **parts: Any
) -> dict[str, Any]:
    """What the trainer of a run is made from."""
    facts = dict[str, Any]()

    def trainer(**own: Any) -> None:
        facts.update(own)
        raise Caught

    monkeypatch.setattr(experiment, "Trainer", trainer)
    run = run_dir(folder, *JOB, "logger=[]", *words)
    with pytest.raises(Caught):
        experiment.run(load_job(run.config), run, world or World.solo(), **parts)
    facts["telemetry"].close()
    facts["checkpointer"].close()
    return facts


def test_a_trainer_has_the_settings_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, beats, compiled = StopRequest(), list[int](), list[Any]()
    monkeypatch.setattr(train_state, "compile_model", lambda *parts: compiled.append(parts[3]))
    words = (
        "train.patience=3",
        "train.min_delta=0.5",
        "monitor=-loss",
        "train.eval_views=2",
        "metric=f1",
        "loss=bce",
    )
    facts = trainer_of_run(tmp_path / "a", monkeypatch, *words, stop=stop, heartbeat=lambda: beats.append(1))
    assert (facts["patience"], facts["monitor"]) == (
        Patience(limit=3, min_delta=0.5),
        Monitor("loss", Direction.minimize),
    )
    assert (facts["eval_views"], facts["stop"], facts["moments"], facts["test_loader"]) == (2, stop, None, None)
    assert (facts["interrupts_compiling"], compiled) == (False, [stop])
    facts["heartbeat"]()
    assert beats == [1]
    assert [*facts["scores"].metrics] == ["f1"]
    assert (facts["scores"].kind, facts["scores"].targets) == ("sigmoid", "classes")
    assert facts["predictions"].kind == "sigmoid"
    predictions = facts["predictions"]
    assert (len(predictions.split), predictions.observer) == (10, facts["telemetry"].observer), "of the evaluation"
    assert facts["checkpointer"].on_saved == facts["telemetry"].observer.saved
    callback = Told()
    facts = trainer_of_run(tmp_path / "b", monkeypatch, "model.compile=true", callbacks={"told": callback})
    assert facts["interrupts_compiling"]
    assert facts["moments"].callbacks.callbacks == {"told": callback}
    facts = trainer_of_run(tmp_path / "b", monkeypatch, "model.compile=false")
    assert not facts["interrupts_compiling"]


def test_the_code_of_a_user_is_in_the_card_of_the_weights_and_beside_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[Any]()

    def write_code(run: RunDir, codes: Any, step: int) -> dict[str, Any]:
        written.append((run.path, codes, step))
        return {"code": {"mine": "here"}}

    monkeypatch.setattr("lockstep.runtime.user_code.write_code", write_code)
    monkeypatch.setattr(train_state, "restore", lambda *parts: (Progress(step=4), "a checkpoint"))
    code: Any = {"mine": SimpleNamespace(facts={"sha256": "0" * 64})}
    facts = trainer_of_run(tmp_path / "run", monkeypatch, code=code)
    assert facts["checkpointer"].card.packages == {"mine": "0" * 64}
    assert written == [(tmp_path / "run", code, 4)], "with the step that it continues from"
    assert json.loads(RunDir(tmp_path / "run").environment.read_text())["code"] == {"mine": "here"}


def test_only_a_lone_rank_may_be_stopped_while_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_state, "compile_model", lambda *parts: None)
    alone = {"barrier": lambda _: None, "gather": lambda _, value: [value] * 2, "broadcast": lambda _, value: value}
    for name, collective in alone.items():
        monkeypatch.setattr(World, name, collective)
    for size in (1, 2):
        world = replace(World.solo(), size=size, local_size=size)
        facts = trainer_of_run(tmp_path / str(size), monkeypatch, "model.compile=true", world=world)
        assert facts["interrupts_compiling"] == (size == 1)


def test_a_run_whose_images_are_refused_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, repaired = run_dir(tmp_path / "run", *JOB), list[int]()

    def refuse(*parts: Any) -> None:
        raise Caught

    monkeypatch.setattr(experiment, "build_loader", refuse)
    monkeypatch.setattr(Checkpointer, "repair_export", lambda self, best_step: repaired.append(best_step))
    monkeypatch.setattr(train_state, "restore", lambda *parts: (Progress(step=4, best_step=2), "a checkpoint"))
    with pytest.raises(Caught):
        experiment.run(load_job(run.config), run, World.solo())
    assert not run.environment.exists()
    assert repaired == [2]


def test_the_moments_of_a_run_begin_with_the_saved_states_and_log_as_callbacks(tmp_path: Path) -> None:
    job, run = resolved(*JOB), RunDir(tmp_path / "run")
    callbacks = Callbacks({"told": Told()}, names=["my/a"])
    telemetry: Any = SimpleNamespace(observer=callbacks, plan="plan")
    state: Any = SimpleNamespace(model="model", optimizer="optimizer")
    progress = Progress(step=4)
    world = World.solo()
    for loaded, saved in (
        (None, {}),
        (SimpleNamespace(state={}), {}),
        (SimpleNamespace(state={"callbacks": {"told": {"a": 1}}}), {"told": {"a": 1}}),
    ):
        moments = experiment.build_moments(job, run, world, telemetry, state, progress, loaded)  # type: ignore[arg-type]
        assert moments.saved == saved
    own = moments.run
    assert (moments.callbacks, moments.progress) == (callbacks, progress)
    assert (own.folder, own.plan, own.world, own.model, own.optimizer) == (
        *(run.path, "plan", world, "model", "optimizer"),
    )
    assert (own.step, own.config["batch"]) == (4, 10)
    own.log("my/a", 3)
    assert callbacks.logged == {"my/a": 3.0}
    with pytest.raises(InputError, match=r"^callback: the figure 'my/b' is not declared"):
        own.log("my/b", 3)


@pytest.mark.parametrize(("device", "built_on"), [("cpu", "cpu"), ("cuda", "cuda:0")])
def test_parts_are_built_on_the_first_gpu_or_on_the_cpu_in_the_formats_of_the_job(
    device: str, built_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, job = list[torch.device](), resolved(*JOB)
    configured = list[str]()

    def build(job: ResolvedJob, world: World) -> None:
        devices.append(world.device)
        raise Caught

    monkeypatch.setattr(experiment, "build_data", build)
    monkeypatch.setattr(type(job.precision), "configure", lambda self: configured.append("formats"))
    with pytest.raises(Caught):
        experiment.build_parts(replace(job, device=device))
    assert (devices, configured) == ([torch.device(built_on)], ["formats"])
    experiment.configure_torch(job, World.solo())
    assert configured == ["formats"] * 2


def test_the_images_to_evaluate_have_the_format_of_the_model_and_the_labels_of_the_split() -> None:
    parts = experiment.build_parts(resolved(*JOB, "precision=bf16", "train.eval_batch=4"))
    blocks = [*parts.evaluation()]
    split = resolved(*JOB).dataset.eval()
    assert [len(labels) for _, labels in blocks] == [4, 4, 2]
    assert torch.equal(torch.cat([labels for _, labels in blocks]), split.labels)
    pixels = torch.cat([images for images, _ in blocks])
    assert pixels.dtype is torch.bfloat16
    mean, std = parts.job.input.mean, parts.job.input.std
    assert mean is not None and std is not None  # noqa: PT018
    expected = (split.images / 255 - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
    torch.testing.assert_close(pixels.float(), expected, rtol=1e-2, atol=1e-2)


def test_batches_have_the_step_the_images_and_the_targets_of_the_training_and_the_keys_of_their_examples() -> None:
    parts = experiment.build_parts(resolved(*JOB, "train.mixup=0.5", "augment=shift", "steps=8"))
    expected, keyed = [*parts.transforms.train(parts.loader.train(after=3))], list[torch.Tensor]()
    parts.set_keys = lambda shard: keyed.append(shard.indices)
    batches = []
    for batch in parts.batches(3):
        batches.append(batch)
        assert len(keyed) == len(batches), "they are set before the loop calls the model"
    assert [step for step, *_ in batches] == [4, 5, 6, 7, 8]
    assert [len(images) for _, images, _ in batches] == [10] * 5
    for (_, images, targets), shard, indices in zip(batches, expected, keyed, strict=True):
        own_images, own_targets = parts.transforms.mixed(shard)
        assert torch.equal(images, own_images)
        assert torch.equal(targets, own_targets)
        assert targets.shape == (10, 10)
        assert torch.equal(indices, shard.indices)
    assert next(iter(parts.batches()))[0] == 1


def test_the_end_of_a_run_closes_its_watch_its_checkpoints_and_its_telemetry_in_this_order() -> None:
    events, outcomes = list[str](), list[str]()

    def part(name: str) -> Any:
        return lambda: events.append(name)

    telemetry = SimpleNamespace(outcome="failed")
    telemetry.close = lambda: (events.append("telemetry"), outcomes.append(telemetry.outcome))
    trainer: Any = SimpleNamespace(
        checkpointer=SimpleNamespace(close=part("checkpointer")),
        telemetry=telemetry,
        fit=part("fit"),
        test=part("test"),
    )
    watch: Any = SimpleNamespace(start=part("start"), close=lambda: (events.append("watch"), {"cpu_cores": 2.0})[1])
    assert experiment.train(trainer, watch, nullcontext()) == {"cpu_cores": 2.0}
    assert events == ["start", "fit", "test", "watch", "checkpointer", "telemetry"]
    events.clear()
    assert experiment.train(trainer, None, nullcontext()) == {}
    assert events == ["fit", "test", "checkpointer", "telemetry"]
    trainer.test, telemetry.outcome = fail, "failed"
    with pytest.raises(ZeroDivisionError):
        experiment.train(trainer, None, nullcontext())
    assert outcomes == ["completed", "completed", "failed"]


def fail() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("error", "raised", "events"),
    [
        (Stopped("stopped at step 3"), Stopped, ["progress"]),
        (NumericalError("bad", step=2), NumericalError, ["progress", "incident", "barrier"]),
        (MemoryError(), LockstepError, ["advice 4"]),
        (RuntimeError("CUDA out of memory"), LockstepError, ["advice 4"]),
        (RuntimeError("odd"), RuntimeError, []),
        (ValueError("odd"), ValueError, []),
    ],
    ids=repr,
)
def test_an_error_of_the_training_is_explained_by_what_is_kept_of_it(
    error: Exception, raised: type[Exception], events: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()

    def advice(error: Exception, job: object, world: object, state: object, step: int) -> LockstepError:
        done.append(f"advice {step}")
        return LockstepError("use train.micro_batches=2")

    monkeypatch.setattr(dry_run, "oom_advice", advice)
    run, job = run_dir(tmp_path / "run", *JOB), resolved(*JOB)
    trainer: Any = SimpleNamespace(
        telemetry=SimpleNamespace(outcome="failed"), progress=SimpleNamespace(step=3), state=None
    )
    record: Any = SimpleNamespace(
        run_dir=run,
        world=SimpleNamespace(barrier=lambda: done.append("barrier")),
        keep_progress=lambda progress: done.append("progress"),
        keep_incident=lambda error, trainer: done.append("incident"),
    )
    with pytest.raises(raised) as caught, experiment.explaining(job, trainer, record):
        raise error
    assert done == events
    assert trainer.telemetry.outcome == ("stopped" if raised is Stopped else "failed")
    if raised is Stopped:
        assert str(caught.value).startswith("stopped at step 3; `")
        assert str(caught.value).endswith("` continues the run")


def test_the_average_of_a_state_is_one_from_its_first_update_on() -> None:
    model = nn.Linear(2, 2)
    ema: Any = SimpleNamespace(module="average", n_averaged=torch.tensor(0))
    for own, average in ((None, None), (ema, None)):
        assert (
            TrainState(model=model, replica=model, draws=ANY, optimizer=ANY, scaler=ANY, ema=own).averaged == average
        )
    ema.n_averaged += 1
    state = TrainState(model=model, replica=model, draws=ANY, optimizer=ANY, scaler=ANY, ema=ema)
    assert (state.averaged, state.parameters) == ("average", 6)


def test_the_progress_knows_which_step_was_evaluated_and_keeps_finite_figures() -> None:
    progress = Progress(step=4)
    assert (progress.is_evaluated, progress.score, progress.after) == (False, None, 4)
    progress.evaluated(50.0, {"top1": 50.0, "loss": math.nan, "x": math.inf}, better=True)
    assert (progress.is_evaluated, progress.score, progress.after) == (True, 50.0, 4.5)
    assert progress.figures == progress.best_figures == {"top1": 50.0}
    progress.step = 6
    assert (progress.is_evaluated, progress.score, progress.after) == (False, None, 6)
    progress.evaluated(40.0, {"top1": 40.0}, better=False)
    assert (progress.best, progress.best_step, progress.best_figures) == (50.0, 4, {"top1": 50.0})
    progress.step = 8
    progress.evaluated(None, {}, better=False)
    facts = {**vars(progress), "scores": [[4, 50.0], [6, 40.0], [8, None]]}
    assert Progress.saved(facts) == progress


@pytest.mark.parametrize(
    ("saved", "here", "says"),
    [
        ((), (), ""),
        (("a",), ("a",), ""),
        (("a",), ("a", "b", "c"), "the checkpoint has no state of the callbacks b, c, which start fresh"),
        (("a", "b"), ("a",), "the run no longer has the callbacks b, whose state is dropped"),
        (("a",), ("b",), "the callbacks b, which start fresh; the run no longer has the callbacks a, whose"),
    ],
)
def test_a_resume_says_which_callbacks_come_and_go(
    saved: tuple[str, ...], here: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = list[str]()
    monkeypatch.setattr(train_state.log, "note", notes.append)
    note_callbacks(dict.fromkeys(saved, "x"), dict.fromkeys(here, "y"))
    assert len(notes) == bool(says)
    assert says in "".join(notes)


def test_labels_for_trials_differ_from_their_neighbours() -> None:
    classes = resolved(*JOB, "dataset.classes=3")
    assert blank_labels(classes, 5, World.solo()).tolist() == [0, 1, 2, 0, 1]
    labels = resolved(*JOB, "dataset.classes=3", "task=multilabel")
    assert blank_labels(labels, 2, World.solo()).tolist() == [[0, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize(
    ("words", "shape"),
    [((), (4,)), (("train.mixup=0.5",), (4, 3)), (("train.cutmix=1",), (4, 3)), (("task=multilabel",), (4, 3))],
)
def test_a_loss_is_tried_on_the_targets_that_it_will_get(words: tuple[str, ...], shape: tuple[int, ...]) -> None:
    job = resolved(*JOB, "dataset.classes=3", *words)
    targets = train_state._tried_targets(job, World.solo())
    assert targets.shape == shape
    if len(shape) == 2 and "task=multilabel" not in words:
        assert targets.tolist() == torch.eye(3)[[0, 1, 2, 0]].tolist()


class Learning(nn.Module):
    """A loss with something to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("skip", [0, 1, 2])
def test_a_loss_tolerates_broken_images_where_one_may_be_and_learns_nothing(skip: int) -> None:
    job, labels = resolved(*JOB, "dataset.classes=3"), torch.arange(6) % 3
    assert build_loss(job, labels, World.solo(), skip=skip).tolerates_broken == (skip > 0)
    weighted = resolved(*JOB, "dataset.classes=3", "loss.class_weights=[1,2,3]")
    assert build_loss(weighted, labels, World.solo(), skip=skip) is not None, "buffers are no parameters"
    own: Any = SimpleNamespace(build=lambda classes, labels: Learning())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_state, "named", lambda option: "Learning")
        with pytest.raises(InputError, match="the loss Learning has parameters, which no optimizer trains"):
            build_loss(replace(job, loss=own), labels, World.solo(), skip=skip)


def test_a_fresh_run_names_the_weights_that_it_begins_with() -> None:
    job = resolved(*JOB)
    plan = plan_of(job, 40)
    progress, origin = restore(job, plan, ANY, ANY, None, {"a": "b"})
    assert (origin, progress.callbacks, progress.decisions["steps"]) == ("", {"a": "b"}, [6])
    _, origin = restore(replace(job, init_from="a.safetensors"), plan, ANY, ANY, None, {})
    assert origin == "weights of a.safetensors, step 0"


@pytest.mark.parametrize(
    ("more", "callbacks", "stopped", "evaluated"),
    [
        ({}, {}, "", [2]),  # of a version that saved neither decisions nor callbacks
        ({"stopped": "enough", "callbacks": {"a": "A"}}, {"a": "A"}, "enough", [2, 1235]),
        ({"stopped": "enough", "callbacks": {"a": "A"}}, {"a": "A()"}, "", [2]),
        ({"stopped": "", "callbacks": {"a": "A"}, "decisions": {"steps": [5]}}, {"a": "A"}, "", [2]),
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_a_checkpoint_gives_its_progress_as_this_plan_and_these_callbacks_would_have_it(
    own: bool,
    more: dict[str, Any],
    callbacks: dict[str, str],
    stopped: str,
    evaluated: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    events, run, job = list[Any](), RunDir.at(tmp_path / "run"), resolved(*JOB)
    saved = {"step": 1235, "scores": [[2, 1.0], [3, 2.0], [1235, 3.0]], "figures": {}}
    saved |= {"best": 3.0, "best_step": 1235, "best_figures": {"top1": 3.0}, **more}
    loaded: Any = SimpleNamespace(path=tmp_path / ("run" if own else "other") / "checkpoints" / "step-00001235")
    monkeypatch.setattr(train_state, "check_fingerprint", lambda *parts: events.append(parts))
    monkeypatch.setattr(
        train_state.reading, "restore_from", lambda of, **parts: (events.append((of, parts)), dict(saved))[1]
    )
    checkpointer: Any = SimpleNamespace(fingerprint={"seed": 1}, run_dir=run)
    parts = {"model": "model", "ema": None, "optimizer": "optimizer", "scaler": "scaler"}
    state: Any = SimpleNamespace(**parts)
    plan = replace(plan_of(job, 40), eval_every=2, total_steps=2000)
    progress, origin = restore(job, plan, state, checkpointer, loaded, callbacks)
    assert events == [({"seed": 1}, loaded.path), (loaded, parts)], "other data are refused before anything is read"
    assert origin == f"{'run' if own else 'other'}/checkpoints/step-00001235, step 1,235"
    assert (progress.step, progress.stopped, progress.callbacks) == (1235, stopped, callbacks)
    assert [step for step, _ in progress.scores] == evaluated
    best = (3.0, 1235, {"top1": 3.0}) if own else (None, 0, {})
    assert (progress.best, progress.best_step, progress.best_figures) == best
    assert progress.decisions["steps"] == [2000]


def state_of(*words: str, world: World | None = None, **changed: Any) -> tuple[TrainState, ResolvedJob]:
    """The state of a job on 40 blank images."""
    job = replace(resolved(*JOB, *words), **changed)
    images = torch.zeros(40, *job.train_shape)
    return train_state.build_state(job, world or World.solo(), plan_of(job, 40), lambda number: images[:number]), job


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (lambda: "a text", r"^model=digitnet: its build returns 'a text', expected a module$"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 11)),
            r"^the model Sequential returns \[11\] for an example, expected \[10\]: a tensor with an output for each "
            r"of the classes of the data set$",
        ),
        (lambda: nn.Linear(8, 8), r"returns \[1, 8, 8\] for an example, expected \[10\]"),
        (lambda: nn.Flatten(), "the model Flatten has no parameter that requires a gradient"),
    ],
)
def test_a_network_that_does_not_fit_the_data_is_refused_before_the_first_step(
    network: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DigitNet, "build", lambda *_: network())
    with pytest.raises(InputError, match=says):
        state_of("model=digitnet")


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 4), ("pipeline", 1)])
def test_single_examples_are_looked_for_in_the_pieces_of_the_ranks_that_share_a_batch(
    strategy: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = list[Any]()

    def check(*parts: Any) -> None:
        checked.extend(parts)
        raise Caught

    monkeypatch.setattr(train_state.network, "check_single_examples", check)
    words = ("model=digitnet", "train.freeze=['0']", "train.freeze_until=2")
    with pytest.raises(Caught):
        state_of(*words, f"strategy={strategy}", world=replace(World.solo(), size=4))
    _, (images, *_), plan, own, pieces, freezing = checked
    assert (images.shape, plan.total_steps, type(own).__name__.lower(), pieces) == ((2, 1, 8, 8), 6, strategy, ranks)
    assert (freezing.until, freezing.numbers > 0) == (2, True)


@pytest.mark.parametrize("words", [(), ("train.freeze=['1']",), ("train.freeze=['1']", "train.freeze_until=2")])
def test_the_parameters_of_a_state_count_frozen_ones_and_no_buffers(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)
    monkeypatch.setattr(DigitNet, "build", lambda *_: nn.Sequential(*layers))
    state, _ = state_of("model=digitnet", "train.ema=0.5", *words)
    assert state.parameters == 2 * 64 + 64 * 10 + 10
    assert layers[1].weight.requires_grad == (not words)


def test_a_task_of_a_users_own_may_have_any_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DigitNet, "build", lambda *_: nn.Sequential(nn.Flatten(), nn.Linear(64, 11)))
    monkeypatch.setattr(train_state, "is_ours", lambda cls: not cls.__name__.startswith("Multi"))
    state, _ = state_of("model=digitnet")
    assert state.draws.returned == "[11]"


@pytest.mark.parametrize(
    ("words", "tf32", "divides"),
    [((), False, True), (("precision=tf32",), True, True), (("train.sizes={0: 8, 3: 16}",), False, False)],
)
def test_the_peak_rate_of_a_job_is_of_its_format_and_of_images_of_one_size(
    words: tuple[str, ...], tf32: bool, divides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for = list[Any]()
    monkeypatch.setattr(
        train_state, "peak_flops", lambda device, dtype, *, tf32: (asked_for.append((dtype, tf32)), 6e12)[1]
    )
    monkeypatch.setattr(train_state, "training_flops", lambda model, shape: 3e3)
    state, _ = state_of(*words, "model=test_resnet", "dataset.size=16")
    assert asked_for == [(torch.float32, tf32)]
    assert state.peak_rate == (2e9 if divides else 0)


def test_a_state_has_the_formats_the_average_and_the_frozen_layers_of_its_job() -> None:
    words = ("model=digitnet", "model.width=8", "precision=bf16_pure", "model.channels_last=true", "train.ema=0.5")
    state, _ = state_of(*words, "train.freeze=['0']", "train.freeze_until=2", "seed=7")
    assert state.draws.seed == 7
    assert {parameter.dtype for parameter in state.model.parameters()} == {torch.bfloat16}
    kernel = next(
        parameter for parameter in state.model.parameters() if parameter.ndim == 4 and parameter.shape[1] > 1
    )
    assert kernel.is_contiguous(memory_format=torch.channels_last)
    assert state.averaged is None
    assert state.ema is not None
    assert all(map(torch.equal, state.ema.module.parameters(), state.model.parameters()))
    assert {*map(id, state.ema.module.parameters())}.isdisjoint(map(id, state.model.parameters()))
    first = [parameter.requires_grad for name, parameter in state.model.named_parameters() if name.startswith("0.")]
    assert first == [False] * len(first)
    assert (state.freezing.until, state.freezing.frozen(2), state.freezing.frozen(3)) == (2, True, False)
    trained = {id(parameter) for group in state.optimizer.param_groups for parameter in group["params"]}
    assert trained == {*map(id, state.model.parameters())}, "layers that thaw have their place in the optimizer"
    assert not state.scaler.is_enabled()
    frozen, _ = state_of(*words, "train.freeze=['0']")
    assert len(frozen.optimizer.param_groups[0]["params"]) < len([*frozen.model.parameters()])


@pytest.mark.parametrize("recomputes", [True, False])
def test_the_blocks_of_the_model_alone_are_computed_again_and_not_those_of_its_average(recomputes: bool) -> None:
    words = ("model=test_resnet", "dataset.size=32", "train.ema=0.5", f"model.grad_checkpointing={recomputes}")
    state, _ = state_of(*words)
    assert state.ema is not None
    pairs = [*zip(state.model.modules(), state.ema.module.modules(), strict=True)]
    assert all(isinstance(own, type(average)) for own, average in pairs), "the class of a block is made of its own"
    assert any(type(own) is not type(average) for own, average in pairs) == recomputes


def test_the_start_of_a_model_from_a_file_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Any]()

    def load_start(model: nn.Module, path: Path, names: Any) -> str:
        started.append((path, names))
        return "all but the head"

    monkeypatch.setattr("lockstep.checkpoint.weights.load_start", load_start)
    state, job = state_of(init_from="a.safetensors")
    assert started == [(Path("a.safetensors"), job.dataset.class_names)]
    assert state.notes == ["init_from: all but the head"]
    assert state_of()[0].notes == []
    with monkeypatch.context() as patch:
        patch.setattr(ForwardDraws, "notes", ["a layer draws numbers of its own"])
        assert state_of(init_from="a.safetensors")[0].notes == [*state.notes, "a layer draws numbers of its own"]


def test_the_replica_of_a_rank_is_the_network_that_takes_empty_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[Any]()

    def replaced(network: nn.Module, *parts: Any) -> nn.Module:
        tried.extend(parts)
        return nn.Sequential(network)

    monkeypatch.setattr(train_state.network, "for_empty_micro_batches", replaced)
    world = World.solo()
    state, job = state_of(world=world)
    (images, *_), plan, own = tried
    assert (images.shape, plan, own) == ((2, 1, 8, 8), plan_of(job, 40), world)
    assert isinstance(state.replica, nn.Sequential)
    assert state.replica is not state.model
    without = train_state.without_start(
        replace(resolved(*JOB, "model=resnet18", "model.pretrained=true"), init_from="a")
    )
    assert (without.init_from, without.starts_trained) == (None, False)


def test_a_checkpoint_is_read_where_the_resume_says_and_takes_the_place_of_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, read = list[Any](), list[Any]()
    checkpoint: Any = None
    monkeypatch.setattr(train_state, "load_newest", lambda run, path: (read.append((run, path)), checkpoint)[1])
    monkeypatch.setattr(train_state, "build_state", lambda job, *parts: built.append(job.init_from))
    run, job = RunDir(tmp_path), replace(resolved(*JOB), init_from="a.safetensors")
    for checkpoint, resume, start in ((None, None, "a.safetensors"), ("x", None, None), ("x", "runs/step-1", None)):
        own = replace(job, resume=resume)
        _, loaded = train_state.build_and_load_state(own, run, World.solo(), ANY, ANY)
        assert (loaded, built.pop()) == (checkpoint, start)
        assert read.pop() == (run, None if resume is None else Path(resume))


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The callbacks of torch's compiler, of which a test has its own, as it has the compiler's settings."""
    from torch._dynamo import callback
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor

    handler = callback.CompilationCallbackHandler()
    monkeypatch.setattr(callback, "callback_handler", handler)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    with warnings.catch_warnings(), dynamo.patch(recompile_limit=8), inductor.patch(compile_threads=7):
        yield SimpleNamespace(handler=handler, dynamo=dynamo, inductor=inductor)


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("is_main", [True, False])
def test_a_model_is_compiled_for_fixed_shapes_and_main_says_so_once(
    compiles: bool, is_main: bool, compiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, announced, logged, handler = list[Any](), list[str](), list[str](), compiling.handler
    handler.start_callbacks.append(lambda _: announced.append("of an earlier run"))
    monkeypatch.setattr(train_state.log, "say", announced.append)
    monkeypatch.setattr(train_state.log.logger, "info", lambda text, *values: logged.append(text % values))
    now = iter([10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr(train_state.time, "monotonic", lambda: next(now))
    model: Any = SimpleNamespace(compile=lambda **how: calls.append(how))
    job: Any = SimpleNamespace(model=SimpleNamespace(compile=compiles, compile_mode="max_autotune"))
    stop, world = StopRequest(), replace(World.solo(), rank=1 - is_main, size=2)
    stop.immediate = False
    train_state.compile_model(model, job, world, stop)
    if not compiles:
        assert (calls, compiling.dynamo.recompile_limit, len(handler.start_callbacks)) == ([], 8, 1)
        return
    assert calls == [{"mode": "max-autotune", "dynamic": False}]
    assert compiling.dynamo.recompile_limit == 32
    interrupted = list[bool]()
    for stop.undoes in (True, False):
        handler.run_start_callbacks(ANY)
        interrupted.append(stop.immediate)
        handler.run_end_callbacks(ANY)
        assert not stop.immediate
    assert interrupted == [True, False], "only a step that is undone may be interrupted"
    sentence = "compiling the model: the first batch of each shape takes about a minute, less the next time"
    assert announced == [sentence] * is_main
    assert logged == ["compiled in 2.5 s", "compiled in 1.0 s"]
    compiling.dynamo.recompile_limit = 64
    job.model.compile_mode = "max_autotune_no_cudagraphs"  # of a class of a user
    train_state.compile_model(model, job, world, stop)
    assert calls[1:] == [{"mode": "max-autotune-no-cudagraphs", "dynamic": False}]
    assert compiling.dynamo.recompile_limit == 64
    assert len(handler.start_callbacks) == len(handler.end_callbacks) == 1


@pytest.mark.parametrize(
    ("cores", "ranks", "typed", "threads"), [(6, 2, False, 3), (1, 2, False, 1), (6, 2, True, 7)]
)
def test_ranks_share_the_cores_to_compile_with(
    cores: int, ranks: int, typed: bool, threads: int, compiling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_state, "cores", lambda: cores)
    if typed:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
    job: Any = SimpleNamespace(model=SimpleNamespace(compile=True, compile_mode="default"))
    model: Any = SimpleNamespace(compile=lambda **how: None)
    train_state.compile_model(model, job, replace(World.solo(), local_size=ranks), StopRequest())
    assert compiling.inductor.compile_threads == threads


def test_targets_to_try_a_loss_on_have_its_wide_format_and_labels_are_left_alone() -> None:
    job = resolved(*JOB, "dataset.classes=3", "precision=fp64", "train.mixup=0.5")
    assert train_state._tried_targets(job, World.solo()).dtype is torch.float64
    labels = resolved(*JOB, "dataset.classes=3", "task=multilabel", "train.mixup=0.5")
    expected = [[0, 1, 0], [1, 0, 1], [0, 1, 0], [1, 0, 1]]
    assert train_state._tried_targets(labels, World.solo()).tolist() == expected
