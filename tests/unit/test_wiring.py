"""What each part of a run gets from the job, from its data and from its place among the ranks."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from helpers import FAKE, resolved, run_dir
from lockstep.core.errors import InputError, LockstepError, NumericalError, Stopped
from lockstep.core.observer import Callback
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.runtime.signals import StopRequest
from lockstep.training import build_data, build_observers, dry_run, experiment, train_state
from lockstep.training.build_data import TrainingData
from lockstep.training.build_observers import Observers
from lockstep.training.graph_step import GraphStep
from lockstep.training.resolved_job import ResolvedJob, plan_of
from lockstep.training.train_state import Progress, TrainState, blank_labels, build_loss, note_callbacks, restore
from lockstep.training.train_step import TrainStep

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
    words = ("cost.usd_per_gpu_hour=2.5", "telemetry.profile=true")
    run, peers = RunDir.at(tmp_path / "run"), {1: 71, 2: 72}
    ranks = replace(World.solo(), size=size, local_size=local_size, local_peer_pids=peers)
    telemetry, watch, parts, observer = observed(monkeypatch, resolved(*JOB, *words), ranks, run, gpus, step=2)
    spending = parts.one("Spending")
    assert (spending["gpus"], spending["counts_energy"], spending["usd_per_gpu_hour"]) == (counted, energy, 2.5)
    assert (spending["run_dir"], spending["watch"], watch.sampled) == (run, watch, "the check of the spending")
    assert len(observer.observers) == 1
    watched = parts.one("parts_of")
    assert (watched["gpus"], watched["path"], watched["processes"][1:]) == (gpus, run.gpu, [71, 72])
    telemetry.step = 5
    assert parts.one("HardwareWatch")["step"]() == 5
    assert telemetry.profile.keywords == {"folder": run.logs / "profile", "total": 4, "on_gpu": False}
    assert parts.one("Telemetry")["display"] is True


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
    job = resolved(*JOB, "train.eval_every=4")
    ranks = replace(World.solo(), rank=1, size=6, local_size=2)
    context = build_data._loader_context(job, Split(40), Split(20), ranks)  # type: ignore[arg-type]
    assert context.gigabytes == 60 * 64 / 1e9
    assert context.reads == (6 * 10 + 2 * 20) * 2 // 6, "two evaluations: behind the fourth step and the last one"
    assert context.changes == job.dataset.changes
    assert [len(split) for split in context.splits] == [40, 20]


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
    loader = SimpleNamespace(
        feed=lambda split, world: split,
        stride=lambda batch, values, world: strides.append((batch, values)),
        order_device=lambda world: "a device",
    )
    monkeypatch.setattr(build_data, "read_once", lambda split, world: split)
    job = replace(job, loader=loader)  # type: ignore[arg-type]
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
    assert not erase or parts["erase"].mode == "pixel"
    assert not mixes or parts["mix"].until == (1 if "train.mix_until=1" in words else math.inf)


def test_a_cutout_of_a_list_of_sizes_begins_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    job = resolved(*JOB, "train.sizes={50%: 16, 0: 8}")
    assert build_data._transforms(job, plan_of(job, 40), World.solo()).train_sizes == {0: (8, 8), 3: (16, 16)}


class Told(Callback):
    every_rank = True


@pytest.mark.parametrize(("rank", "names"), [(0, ["all", "main"]), (1, ["all"])])
def test_a_rank_that_is_not_main_has_the_callbacks_of_every_rank(rank: int, names: list[str]) -> None:
    job, every, main = resolved(*JOB), Told(), Callback()
    world = replace(World.solo(), rank=rank, size=2)
    own: Any = experiment.own_observers(job, {"all": every, "main": main}, world)
    assert [*own.callbacks] == names
    assert type(experiment.own_observers(job, {}, world)) is Observers


@pytest.mark.parametrize("logger", ["[jsonl]", "[]"])
@pytest.mark.parametrize("rank", [0, 1])
def test_main_writes_checkpoints_and_misses_the_files_without_which_nobody_can_resume(
    logger: str, rank: int, tmp_path: Path
) -> None:
    job = resolved(*JOB, f"logger={logger}", "checkpoint.keep=4", "checkpoint.keep_best=2")
    run, data = RunDir(tmp_path), SimpleNamespace(fingerprint={"a": 1}, plan=SimpleNamespace(save_every_s=9.0))
    world = replace(World.solo(), rank=rank, size=2)
    own = experiment.build_checkpointer(job, run, world, data, ANY)  # type: ignore[arg-type]
    assert (own.writes, own.keep, own.keep_best, own.every_s, own.fingerprint) == (rank == 0, 4, 2, 9.0, {"a": 1})
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
    try:
        experiment.configure_torch(job, World.solo())
        assert not torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.benchmark is benchmark
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = cudnn
    assert torch.initial_seed() == 3
    assert keeps == [micro_batches == 1]


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
    facts = {**vars(progress), "scores": [[4, 50.0], [6, 40.0]]}
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
