"""`train.cuda_graph` on a CPU, where a tape stands for the CUDA graph. What CUDA itself refuses is for tests/gpu."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_trainer import network, trainer_of
from torch.optim import Optimizer

from helpers import losses, records, train_here, weights
from lockstep.core.errors import InputError, LockstepError
from lockstep.core.world import World
from lockstep.models.nets import MaxPoolTo
from lockstep.training import experiment, graph_step, train_step
from lockstep.training.graph_step import CudaGraph, GraphStep, reading_rates, unchanged
from lockstep.training.train_step import StepListener, TrainStep, set_learning_rate
from tape import Tape


def round_rates(optimizer: Optimizer, lr: float) -> None:
    """Set learning rates that a float32 tensor can hold."""
    set_learning_rate(optimizer, lr)
    for group in optimizer.param_groups:
        group["lr"] = float(np.float32(group["lr"]))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Have runs replay tapes, or not; in both cases their learning rates fit float32."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(train_step, "set_learning_rate", round_rates)
        monkeypatch.setattr(graph_step, "CudaGraph", Tape)
        monkeypatch.setattr(experiment, "step_class", lambda job, world: GraphStep if on else train_step.TrainStep)
        Tape.replays.clear()

    return switch


def run(folder: Path, *overrides: str, stop_at: int | None = None) -> Path:
    # An epoch has three full batches and one of six examples.
    job = ("dataset=fake", "dataset.size=8", "dataset.classes=10", "dataset.examples=30", "batch=8", "precision=fp64")
    job = (*job, "telemetry.interval=1", "train.eval_every=100%", "train.cuda_graph=true")
    return train_here(folder, *job, *overrides, stop_at=stop_at).path


def figures(folder: Path) -> list[dict[str, float]]:
    """What a run has logged of its steps, besides what depends on the clock."""
    lines = [{key: value for key, value in line.items() if not key.startswith(CLOCK)} for line in records(folder)]
    return [line for line in lines if line.keys() - {"step"}]


def assert_same_run(one: Path, other: Path) -> None:
    expected = weights(other)
    assert losses(one) == losses(other)
    assert figures(one) == figures(other)
    assert not [name for name, value in weights(one).items() if not torch.equal(value, expected[name])]


CLOCK = ("time", "perf/", "cpu/", "gpu/")
MIXED = ("train.micro_batches=3", "train.clip_norm=0.5", "train.mixup=0.4", "train.cutmix=1")


@pytest.mark.parametrize(
    ("overrides", "replays"),
    [
        (("model.dropout=0.3", "train.ema=0.9", "steps=5"), [4]),
        (("optimizer=sgd", "optimizer.nesterov=true", "optimizer.lr=0.01", "steps=2", *MIXED), [2]),
        (("optimizer.head_lr=0.01", "train.freeze=[backbone]", "train.freeze_until=1", "steps=3"), [1, 2]),
        (("model=test_resnet", "dataset.size=32", "model.drop_path_rate=0.2", "steps=2"), [2]),
        (("optimizer=sgd", "telemetry.interval=3", "steps=3"), [3]),
    ],
    ids=["adamw-dropout-ema", "sgd-micro-batches-mixing", "thawing", "batch-norm-drop-path", "log-points-are-rare"],
)
def test_a_recorded_step_has_the_bits_of_the_step(
    tmp_path: Path, graphs: Callable[[bool], None], overrides: tuple[str, ...], replays: list[int]
) -> None:
    graphs(False)
    expected = run(tmp_path / "expected", *overrides)
    assert Tape.replays == []
    graphs(True)
    recorded = run(tmp_path / "recorded", *overrides)
    assert Tape.replays == replays
    assert_same_run(recorded, expected)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_what_a_replay_has_told_stays_as_it_was_after_later_ones(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_step, "CudaGraph", Tape)
    records_of: dict[type[TrainStep], list[Any]] = {}
    for kind in (TrainStep, GraphStep):
        trainer = trainer_of(network(), World.solo(), steps=5, micro_batches=micro_batches)
        step = kind(**{part.name: getattr(trainer.step, part.name) for part in fields(TrainStep)})
        records_of[kind] = records = []
        step.listener = StepListener(
            record=lambda loss, logits, micro, images, records=records: records.append((loss, logits, images, micro))
        )
        for shard in trainer.transforms.train(trainer.loader.train(after=0)):
            step.update(shard)
    assert len(records_of[GraphStep]) == 5 * micro_batches
    for expected, actual in zip(records_of[TrainStep], records_of[GraphStep], strict=True):
        tensors = [[*own, micro.images, micro.labels, micro.indices] for *own, micro in (expected, actual)]
        assert all(map(torch.equal, *tensors))


def test_a_recorded_step_of_muon_is_the_step_to_rounding(tmp_path: Path, graphs: Callable[[bool], None]) -> None:
    """It multiplies by the rate and by the decay in the format of the rate's tensor, float32."""
    overrides = ("optimizer=muon", "optimizer.weight_decay=0.01", "steps=3")
    graphs(False)
    expected = run(tmp_path / "expected", *overrides)
    graphs(True)
    recorded = run(tmp_path / "recorded", *overrides)
    assert Tape.replays == [3]
    for name, value in weights(recorded).items():
        torch.testing.assert_close(value, weights(expected)[name], rtol=1e-6, atol=1e-6)


def test_an_optimizer_is_capturable_in_a_recording_alone() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    before = [dict(group) for group in optimizer.param_groups]
    with reading_rates(optimizer, [torch.tensor(0.25)]):
        assert (optimizer.param_groups[0]["capturable"], float(optimizer.param_groups[0]["lr"])) == (True, 0.25)
    assert optimizer.param_groups == before


def test_an_optimizer_has_its_own_rates_again_after_an_error() -> None:
    parameters = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    groups = [{"params": [parameter], "lr": rate} for parameter, rate in zip(parameters, (0.5, 0.25), strict=True)]
    optimizer = torch.optim.SGD(groups)
    rates = [torch.tensor(3.0), torch.tensor(4.0)]
    seen = list[Any]()

    def fail() -> None:
        seen.extend(group["lr"] for group in optimizer.param_groups)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), reading_rates(optimizer, rates):
        fail()
    assert seen == rates
    assert [(group["lr"], "capturable" in group) for group in optimizer.param_groups] == [(0.5, False), (0.25, False)]


@pytest.mark.parametrize("fails", [True, False])
def test_a_recording_changes_neither_weights_nor_buffers_nor_the_state_of_the_optimizer(fails: bool) -> None:
    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    model.weight.grad = torch.ones(2)
    optimizer.step()  # of the bias there is no state yet
    state: Any = SimpleNamespace(model=model, optimizer=optimizer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kept_state = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
    with suppress(ZeroDivisionError), unchanged(state):
        model.bias.grad = torch.ones(2)
        model(torch.randn(4, 2))
        optimizer.step()
        assert optimizer.state[model.bias]["exp_avg"].any()
        if fails:
            raise ZeroDivisionError
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(value, kept_state[name]) for name, value in optimizer.state[model.weight].items())
    assert not any(value.any() for value in optimizer.state[model.bias].values())


def test_memory_that_runs_out_in_a_recording_is_no_fault_of_the_model(
    tmp_path: Path, graphs: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs(True)

    def fail(self: Tape, function: Callable[[], None]) -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904

    monkeypatch.setattr(Tape, "record", fail)
    with pytest.raises(LockstepError, match="out of memory at step 1"):
        run(tmp_path / "run", "steps=2")


class Stream:
    """A stream that keeps whom it waits for."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: "Stream") -> None:
        self.events.append(f"{self.name} waits for {other.name}")


def test_passes_before_a_recording_are_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[str]()
    usual, side = Stream("usual", events), Stream("side", events)

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        events.append(f"on {stream.name}")
        yield
        events.append("back")

    for name, fake in (("CUDAGraph", object), ("Stream", lambda: side), ("current_stream", lambda: usual)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "stream", on)
    CudaGraph().warm_up(lambda: events.append("pass"))
    passes = ["pass"] * 3
    assert events == ["side waits for usual", "on side", *passes, "back", "usual waits for side"]


def test_a_recording_lets_other_threads_allocate_memory_and_a_replay_launches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Capturing(Cuda):
        replays = 0

        def capture_begin(self, pool: Any, **options: Any) -> None:
            super().capture_begin(pool, **options)
            self.options = options

        def replay(self) -> None:
            self.replays += 1

    cuda = Capturing(monkeypatch)
    graph = CudaGraph()
    graph.record(lambda: None)
    assert cuda.options["capture_error_mode"] == "thread_local"
    assert cuda.replays == 0
    graph.replay()
    assert cuda.replays == 1


def test_a_resume_has_the_bits_of_the_whole_run(tmp_path: Path, graphs: Callable[[bool], None]) -> None:
    graphs(True)
    overrides = ("model.dropout=0.3", "train.ema=0.9", "steps=5")
    whole = run(tmp_path / "whole", *overrides)
    parts = run(tmp_path / "parts", *overrides, stop_at=2)
    run(parts, *overrides)
    assert Tape.replays == [4, 2, 2]
    assert_same_run(parts, whole)


def test_a_model_that_reads_a_number_is_refused(
    tmp_path: Path, graphs: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs(True)
    forward = MaxPoolTo.forward
    monkeypatch.setattr(MaxPoolTo, "forward", lambda self, x: forward(self, x) * float(x.mean() < 9))
    with pytest.raises(InputError, match=r"cannot be recorded .*not permitted.*; use train\.cuda_graph=false"):
        run(tmp_path / "run", "steps=2")


class Cuda:
    """What `CudaGraph` calls of `torch.cuda`. A recording that fails ends as torch's C++ code ends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.pools, self.random_state = "default", list[Any](), "idle"
        self.released = list[Any]()
        fakes: dict[str, Any] = {
            "CUDAGraph": lambda: self,
            "Stream": lambda: "capture",
            "current_device": lambda: 1,
            "current_stream": lambda: self.current,
            "set_stream": lambda stream: setattr(self, "current", stream),
            "stream": self.stream,
            "graph_pool_handle": lambda: (0, 7),
            "default_generators": [
                None,
                SimpleNamespace(clone_state=lambda: "idle", graphsafe_set_state=self.set_random),
            ],
            **dict.fromkeys(("synchronize", "empty_cache"), lambda: None),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
        release = lambda *pool: self.released.append(pool)  # noqa: E731
        for name, function in (("_cuda_endAllocateToPool", self.end_pool), ("_cuda_releasePool", release)):
            monkeypatch.setattr(torch._C, name, function, raising=False)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)

    def set_random(self, state: str) -> None:
        self.random_state = state

    def end_pool(self, device: int, pool: Any) -> None:
        if (device, pool) != (1, (0, 7)) or pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def capture_begin(self, pool: Any, **options: Any) -> None:
        self.failed, self.random_state = False, "recording"
        self.pools.append(pool)

    def waits(self) -> None:
        """What a model does that cannot be recorded."""
        self.failed = True
        raise RuntimeError("operation not permitted when stream is capturing")

    def capture_end(self) -> None:
        if self.failed:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.random_state = "idle"
        self.pools.clear()

    @property
    def state(self) -> tuple[Any, ...]:
        return self.current, [*self.pools], self.random_state


def test_the_process_is_as_before_after_a_recording_and_after_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, during = Cuda(monkeypatch), list[Any]()
    before = cuda.state
    CudaGraph().record(lambda: during.append(cuda.state))
    assert (during, cuda.state, cuda.released) == ([("capture", [(0, 7)], "recording")], before, [])
    with pytest.raises(RuntimeError, match="a previous error") as caught:
        CudaGraph().record(cuda.waits)
    assert "not permitted" in str(caught.value.__context__)
    assert (cuda.state, cuda.released) == (before, [(1, (0, 7))])
