"""Trials before a run: their results, what fits into memory, and that they do not change the run."""

import gc
import re
import resource
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import nn

from helpers import losses, resolved, train_here
from lockstep.core.errors import InputError, LockstepError
from lockstep.core.world import World
from lockstep.models import zoo
from lockstep.optim import AdamW
from lockstep.runtime.host import GB
from lockstep.training import averages, dry_run, train_step
from lockstep.training.dry_run import choose_micro_batches, dry_run_step, fits, oom_advice, training_rate
from lockstep.training.resolved_job import plan_of
from lockstep.training.train_state import build_state
from thread_ranks import ThreadRanks


@pytest.mark.parametrize(
    ("seconds", "batch", "ranks", "tried", "rate"),
    [
        ([3.0, 0.1, 0.7, 0.5], 64, 1, [8, 64], 64 / 0.5),
        ([3.0, 0.1, 0.7, 0.5], 127, 2, [8, 64], 64 / 0.5),
        ([3.0, 0.2], 64, 1, [8], 8 / 0.2),
        ([3.0, 0.125], 64, 1, [8], 64.0),  # all of them take a second
        ([3.0, 0.0625, 3.0, 0.25], 9, 1, [8, 9], 36.0),
        ([3.0, 0.0625], 8, 1, [8], 128.0),
        ([3.0, 0.0625], 4, 1, [4], 64.0),
    ],
)
def test_the_rate_is_that_of_a_full_micro_batch_unless_it_would_take_long_and_of_no_first_step(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], batch: int, ranks: int, tried: list[int], rate: float
) -> None:
    examples, times = list[int](), iter(seconds)
    monkeypatch.setattr(dry_run, "dry_run_step", lambda job, world, count: examples.append(count))
    monkeypatch.setattr(dry_run, "timed", lambda step, device: next(times))
    assert training_rate(resolved(f"batch={batch}"), replace(World.solo(), size=ranks)) == rate
    assert (examples, next(times, None)) == (tried, None)


def test_a_model_that_would_be_compiled_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "dry_run_step", None)
    assert training_rate(resolved("model.compile=true"), World.solo()) is None


def test_a_first_step_without_memory_is_no_error_and_another_error_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[int]()

    def step_of(error: Exception | None) -> Any:
        def step() -> None:
            steps.append(1)
            if error is not None:
                raise error

        return lambda job, world, examples: step

    monkeypatch.setattr(dry_run, "dry_run_step", step_of(MemoryError()))
    assert dry_run.stopwatch(resolved(), World.solo(), 2) is None
    monkeypatch.setattr(dry_run, "dry_run_step", step_of(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        dry_run.stopwatch(resolved(), World.solo(), 2)
    monkeypatch.setattr(dry_run, "dry_run_step", step_of(None))
    steps.clear()
    seconds = dry_run.stopwatch(resolved(), World.solo(), 2)
    assert seconds is not None
    assert steps == [1], "the first one is not timed"
    assert seconds() >= 0
    assert steps == [1, 1]


@pytest.mark.parametrize(("device", "frees"), [("cuda:0", ["collect", "empty"]), ("cpu", [])])
@pytest.mark.parametrize("fails", [True, False])
def test_the_memory_of_a_gpu_is_free_after_a_trial(
    device: str, frees: list[str], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = list[str]()
    monkeypatch.setattr(dry_run.gc, "collect", lambda: freed.append("collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append("empty"))
    with suppress(ZeroDivisionError), dry_run.trial(torch.device(device)):
        assert freed == []
        if fails:
            raise ZeroDivisionError
    assert freed == frees


def test_a_trial_reads_no_weights_of_a_file_and_holds_what_a_strategy_would_beside_the_gradients() -> None:
    job = replace(resolved("model=linear", "dataset=digits"), init_from="nowhere.safetensors")
    result: Any = dry_run_step(job, World.solo(), 2)()
    _, buckets = result
    assert sum(bucket.nbytes for bucket in buckets) == 4 * 650
    result = dry_run_step(resolved("train.freeze=[backbone]", "model.width=8"), World.solo(), 2)()
    assert len(result[1]) == 2, "of the head alone"


@pytest.mark.parametrize("fitting", [0, 8])
def test_a_step_that_does_not_fit_has_no_rate(fitting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "stopwatch", lambda job, world, count: (lambda: 0.1) if count <= fitting else None)
    assert training_rate(resolved("batch=64"), World.solo()) is None


@pytest.mark.parametrize(("device", "waits"), [("cuda:1", ["step", "cuda:1"]), ("cpu", ["step"])])
def test_a_step_has_been_timed_when_its_device_has_done_it(
    device: str, waits: list[str], passes: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def passing(name: object) -> None:
        order.append(str(name))
        passes(2)

    order = list[str]()
    monkeypatch.setattr(torch.cuda, "synchronize", passing)
    assert dry_run.timed(lambda: passing("step"), torch.device(device)) == 2 * len(waits)
    assert order == waits


def test_a_trial_needs_neither_two_examples_nor_published_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    job = resolved("model=test_resnet", "dataset=fake", "dataset.size=16", "batch=1")
    dry_run_step(job, World.solo(), 1)()
    job = resolved("model=test_resnet", "model.pretrained=true", "dataset=fake", "dataset.size=32")
    monkeypatch.setattr(zoo, "published_weights", None)
    dry_run_step(job, World.solo(), 2)()


def test_a_trial_has_all_that_takes_memory_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []

    def kept(build: Any) -> Any:
        def building(*arguments: Any, **options: Any) -> Any:
            parts.append(build(*arguments, **options))
            return parts[-1]

        return building

    monkeypatch.setattr(AdamW, "build", kept(AdamW.build))
    monkeypatch.setattr(averages, "EMA", kept(averages.EMA))
    done: Any = dry_run_step(resolved("train.ema=0.9"), World.solo(), 2)()
    average, optimizer = parts
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert all(optimizer.state[parameter] for parameter in parameters)
    assert sum(bucket.nbytes for bucket in done[1]) == sum(parameter.nbytes for parameter in parameters)
    assert average.n_averaged == 1


def test_a_trial_has_images_of_the_size_of_training() -> None:
    shapes = set[tuple[int, ...]]()

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Conv2d) and module.in_channels == 3 and len(inputs[0]) == 2:
            shapes.add((*inputs[0].shape,))

    words = ("model=test_resnet", "dataset=fake", "dataset.channels=3", "dataset.size=32", "train.size=[24,16]")
    hook = nn.modules.module.register_module_forward_pre_hook(look)
    try:
        dry_run_step(resolved(*words), World.solo(), 2)()
    finally:
        hook.remove()
    assert shapes == {(2, 3, 24, 16)}


@pytest.mark.parametrize(
    "job",
    [
        ("loss=bce", "train.mixup=0.2", "train.clip_norm=1", "train.ema=0.9"),
        ("loss.balanced=true", "precision=bf16", "train.cutmix=1"),
        ("repro=strict", "batch=64"),
        ("strategy=allreduce", "launcher.ranks=2"),
        ("model=whitenet", "dataset=fake", "dataset.size=32"),
        ("model=test_resnet", "model.drop_path_rate=0.2", "dataset=fake", "dataset.size=32"),
    ],
    ids=" ".join,
)
def test_a_trial_is_the_step_of_any_job(job: tuple[str, ...]) -> None:
    dry_run_step(resolved(*job), World.solo(), 2)()


def test_a_trial_trains_the_layers_that_thaw_in_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    states, build = [], dry_run.build_state

    def building(*arguments: Any) -> Any:
        states.append(build(*arguments))
        return states[-1]

    monkeypatch.setattr(dry_run, "build_state", building)
    for until in ("train.freeze_until=50%", "train.freeze_until=null"):
        dry_run_step(resolved("train.freeze=[backbone]", until), World.solo(), 2)()
    thawed, frozen = [len(state.optimizer.state) for state in states]
    assert (thawed, frozen) == (len(list(states[0].model.parameters())), 2)


@pytest.mark.parametrize("last", [True, False])
def test_a_trial_computes_on_images_of_the_shape_and_the_formats_of_the_run(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, build = list[torch.Tensor](), dry_run.build_state

    def building(*arguments: Any) -> Any:
        state = build(*arguments)
        state.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        return state

    monkeypatch.setattr(dry_run, "build_state", building)
    words = ("model=test_resnet", "dataset=fake", "dataset.size=16", "train.size=[32,24]", "augment=standard")
    dry_run_step(resolved(*words, "precision=bf16", f"model.channels_last={last}"), World.solo(), 5)()
    images = seen[-1]
    assert (images.shape, images.dtype) == ((5, 3, 32, 24), torch.bfloat16)
    assert images.is_contiguous(memory_format=torch.channels_last) == last


def test_a_trial_leaves_the_random_numbers_of_the_run_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    training_rate(resolved("model.dropout=0.5", "train.ema=0.9"), World.solo())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory"), torch.OutOfMemoryError("odd")])
def test_memory_that_has_run_out_is_no_error_of_a_trial(error: Exception) -> None:
    def fail() -> None:
        activations = torch.ones(2)
        raise error if len(activations) else AssertionError

    assert dry_run.unless_out_of_memory(fail) is None
    (frame,) = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is fail.__code__]
    assert frame.f_locals == {}, "the error may be kept, and the activations not"
    error = RuntimeError("odd")
    with pytest.raises(RuntimeError, match="odd"):
        dry_run.unless_out_of_memory(fail)
    assert dry_run.unless_out_of_memory(lambda: 3) == 3


@pytest.mark.parametrize(("before", "within"), [(2, 1), (1, 2)])
def test_a_trial_leaves_the_threads_alone(before: int, within: int) -> None:
    torch.set_num_threads(before)
    with suppress(ZeroDivisionError), dry_run.trial(torch.device("cpu")):
        torch.set_num_threads(within)
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_a_run_of_workers_chosen_by_trials_is_the_run_without_them_and_keeps_their_number(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 20, 20, 3), dtype=np.uint8)
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for number, image in enumerate(pixels):
            Image.fromarray(image).save(tmp_path / split / "a" / f"{number}.jpg")
    job = ("dataset=folder", f"dataset.path={tmp_path}", "dataset.decode_size=16", "dataset.crop_from=file")
    job = (*job, "augment=standard", "batch=4", "steps=5", "model.dropout=0.5", "optimizer=sgd")
    tried = train_here(tmp_path / "tried", *job)
    configured = train_here(tmp_path / "configured", *job, "loader=streaming", "loader.workers=0")
    assert losses(tried) == losses(configured)
    loader = yaml.safe_load(tried.config.read_text())["loader"]
    assert loader.pop("workers") >= 1  # the number depends on the measured rates
    assert loader == {"_target_": "lockstep.data.loading.Streaming", "prefetch": 2}


@pytest.mark.parametrize("apart", [False, True])
def test_whether_a_step_fits_changes_no_random_number_and_no_number_of_threads(apart: bool) -> None:
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert fits(resolved("batch=8", "model.dropout=0.5", "device=cpu"), World.solo(), 8, 0.0, apart=apart)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_a_trial_after_a_failure_is_in_a_thread_of_its_own_and_leaves_no_garbage(
    apart: bool, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, collected = list[bool](), list[str]()

    def step() -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        if not room:
            raise MemoryError

    monkeypatch.setattr(dry_run, "dry_run_step", lambda job, world, examples: step)
    monkeypatch.setattr(dry_run.gc, "collect", lambda: collected.append("collect"))
    assert fits(resolved("device=cpu"), World.solo(), 8, 0.0, apart=apart) == room
    assert (threads, collected) == ([not apart], ["collect"])


# A global batch of 64 is 22 examples on the largest of three shards.
WORLD = World(rank=0, local_rank=0, size=3, local_size=3, device=torch.device("cpu"))
PLENTY = 10**6


# With the margin, 22 examples need the room of 27 (21 would need that of 26), 11 of 14, 6 of 8, and one that of two.
@pytest.mark.parametrize(
    ("rooms", "micro_batches"),
    [
        ((27, 27, 27), 1),
        ((27, 26, 27), 2),
        ((27, 14, 13), 4),
        ((100, 100, 2), 22),
        ((100, 1, 100), None),
        ((100, 100, 1), None),
    ],
)
def test_all_ranks_take_the_micro_batches_that_the_smallest_one_needs(
    rooms: tuple[int, ...], micro_batches: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, tried = resolved("batch=65", "train.micro_batches=auto", "device=cpu", "launcher.ranks=1"), list[int]()

    def fits(job: Any, world: World, examples: int, held_gb: float, **how: bool) -> bool:
        assert held_gb == 0.5, "the images stay on the device beside each step"
        tried.append(examples)
        assert len(tried) < 50, "it tries without end"
        return examples <= rooms[world.rank]

    def choice(world: World) -> int | str:
        try:
            return choose_micro_batches(job, world, held_gb=0.5)
        except InputError as error:
            return str(error)

    monkeypatch.setattr(dry_run, "fits", fits)
    choices = ThreadRanks(3, monkeypatch).run(choice)
    if micro_batches is not None:
        assert choices == [micro_batches] * 3
    else:
        assert len(set(choices)) == 1
        assert f"does not fit into the memory of rank {rooms.index(1)} with a single example" in str(choices[0])


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux only")
@pytest.mark.parametrize(
    ("held_gb", "step_gb", "fitting"), [(0, 3, True), (0, 5, False), (2, 1, True), (2, 3, False)]
)
def test_a_step_fits_if_it_has_room_in_a_ranks_share_of_the_memory_beside_what_is_held(
    held_gb: float, step_gb: int, fitting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = World(rank=0, local_rank=0, size=6, local_size=2, device=torch.device("cpu"))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr(dry_run, "available_memory", lambda: 8 * GB)  # 4 GB for each rank
    step = lambda job, world, examples: lambda: torch.empty(int(step_gb * GB), dtype=torch.uint8)  # noqa: E731
    monkeypatch.setattr(dry_run, "dry_run_step", step)
    assert fits(resolved("device=cpu"), two, 1, held_gb) == fitting
    assert resource.getrlimit(resource.RLIMIT_AS) == limits, "training itself is not bounded"


def evaluate_model() -> None:
    """Run out of memory in a frame of the name of an evaluation."""
    raise MemoryError


def train() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("place", "room", "sentence"),
    [
        (evaluate_model, PLENTY, r"^out of memory in the evaluation after step 6; use train\.eval_batch=50$"),
        (train, PLENTY, r"at step 7 with micro-batches of 22 examples; train\.micro_batches=4 fits"),
        (
            train,
            PLENTY,
            r"^out of memory at step 7 .* leaves the global batch as it is; train\.micro_batches=auto finds such a n",
        ),
        (
            train,
            1,
            r"at step 7 with micro-batches of 22 examples; not even single examples fit; use "
            r"model\.grad_checkpointing=true, a smaller model or dataset\.input_size$",
        ),
    ],
)
def test_a_rank_that_ran_out_of_memory_is_told_what_fits(
    place: Any, room: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = list[str]()

    def fits(job: Any, world: World, examples: int, held_gb: float, apart: bool) -> bool:
        events.append("trial")
        return apart and examples <= room

    monkeypatch.setattr(dry_run, "fits", fits)
    monkeypatch.setattr(dry_run, "keep_freed_memory", lambda world, *, keep: events.append(f"keep={keep}"))
    job = resolved("batch=130", "train.micro_batches=2", "train.eval_batch=101", "device=cpu", "launcher.ranks=1")
    with pytest.raises(MemoryError) as caught:
        place()
    state = build_state(job, WORLD, plan_of(job, 1442), lambda number: torch.zeros(number, *job.train_shape))
    assert re.search(sentence, str(oom_advice(caught.value, job, WORLD, state, 7)))
    assert events[:2] == ["keep=False", "trial"] * (place is train), "there is room for a trial"


def out_of_memory(*words: str, place: Any = train, changed: Any = None) -> str:
    """What a rank of three is told that ran out of memory at step 7."""
    job = resolved(*words, "device=cpu", "launcher.ranks=1")
    state = build_state(job, World.solo(), plan_of(job, 1442), lambda number: torch.zeros(number, *job.train_shape))
    with pytest.raises(MemoryError) as caught:
        place()
    return str(oom_advice(caught.value, changed(job) if changed else job, WORLD, state, 7))


def test_the_weights_and_their_average_are_freed_whoever_holds_their_modules() -> None:
    job = resolved("train.ema=0.9", "device=cpu")
    state = build_state(job, World.solo(), plan_of(job, 1442), lambda number: torch.zeros(number, *job.train_shape))
    assert state.ema is not None
    modules = (state.model, state.ema.module)
    dry_run.release(state)
    assert sum(tensor.numel() for module in modules for tensor in (*module.parameters(), *module.buffers())) == 0


def test_a_single_example_that_does_not_fit_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "fits", None)
    assert out_of_memory("batch=3").endswith(
        "with micro-batches of 1 examples; not even single examples fit; use model.grad_checkpointing=true, a "
        "smaller model or dataset.input_size"
    )
    checkpointed = out_of_memory(
        "batch=3",
        changed=lambda job: replace(job, model=replace(job.model, grad_checkpointing=True)),
    )
    assert checkpointed.endswith("fit; use a smaller model or dataset.input_size")
    assert out_of_memory("train.eval_batch=1", place=evaluate_model).endswith("use train.eval_batch=1")


def test_a_rank_with_a_part_of_the_model_is_told_to_halve_its_micro_batches_or_to_take_more_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dry_run, "fits", None)
    for strategy, examples in (("fsdp", 22), ("pipeline", 65)):
        sentence = out_of_memory("batch=130", "train.micro_batches=2", f"strategy={strategy}")
        assert sentence == (
            f"out of memory at step 7 with micro-batches of {examples} examples; train.micro_batches=4 makes them "
            "smaller and leaves the global batch as it is, and more ranks have smaller parts of the model"
        )


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(-1, -1, 2**40 + 4 * GB), (2**40, -1, 2**40), (-1, 2**40 + 1, 2**40 + 1), (2**50, 2**51, 2**40 + 4 * GB)],
)
def test_memory_is_bounded_by_a_ranks_share_and_by_the_limits_of_the_process(
    soft: int, hard: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = list[tuple[int, int]]()
    monkeypatch.setattr(dry_run.sys, "platform", "linux")
    monkeypatch.setattr(dry_run, "available_memory", lambda: 8 * GB)
    monkeypatch.setattr(dry_run.Path, "read_text", lambda path: f"{2**40 // 4096} 7 7")
    monkeypatch.setattr(dry_run.resource, "getpagesize", lambda: 4096)
    monkeypatch.setattr(dry_run.resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(dry_run.resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(dry_run.resource, "setrlimit", lambda kind, both: limits.append(both))
    with suppress(ZeroDivisionError), dry_run._bounded(replace(WORLD, local_size=2)):
        raise ZeroDivisionError
    assert limits == [(expected, hard), (soft, hard)]
    limits.clear()
    with dry_run._bounded(World.solo("cuda:0")):
        pass
    monkeypatch.setattr(dry_run.sys, "platform", "darwin")
    with dry_run._bounded(World.solo()):
        pass
    assert limits == []


def test_a_run_that_ran_out_of_memory_makes_room_for_the_trial_of_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, most = 7 * 13 * 13, list[int]()  # of the weights, which no other tensor has
    models = list[torch.nn.Module]()

    def tensors() -> int:
        gc.collect()
        gradients = sum(parameter.grad is not None for parameter in models[0].parameters())
        return gradients + sum(isinstance(one, torch.Tensor) and one.numel() == numbers for one in gc.get_objects())

    def fits(*_: Any, **options: Any) -> bool:
        most.append(tensors())
        return True

    def train(self: train_step.TrainStep, shard: Any, **options: Any) -> None:
        if shard.step == 2:
            self._compute_gradients(shard, measures_norm=False)
            activations = torch.zeros(numbers)
            models.append(self.state.model)
            most.append(tensors())
            raise MemoryError(len(activations))
        return whole(self, shard, **options)

    whole = train_step.TrainStep.update
    monkeypatch.setattr(train_step.TrainStep, "update", train)
    monkeypatch.setattr(dry_run, "fits", fits)
    job = ("model=linear", "dataset=fake", "dataset.size=13", "dataset.channels=1", "dataset.classes=7", "batch=8")
    with pytest.raises(LockstepError, match=r"train\.micro_batches=2 fits"):
        train_here(tmp_path / "run", *job, "train.ema=0.9", "optimizer=adamw", "steps=3", "schedule=constant")
    before, after = most
    assert before >= 7, "the weights, their average, two of the optimizer, an activation, and two gradients"
    assert after == 0
