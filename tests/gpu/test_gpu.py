"""What needs a CUDA device: NCCL, the reduced precisions, memory formats, compilation, NVML.

`tests/distributed/test_pretended_gpu.py` runs them without one, on a pretended GPU, with smaller jobs. It leaves out
what `needs_card`.
"""

from __future__ import annotations

import copy
import json
import math
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from card import COMPILED, DRIVER, KERNELS, MARKS, PRETENDED, needs_card
from helpers import command, losses, records, resolved, run_dir, run_until, train, weights
from lockstep.core import rng
from lockstep.core.data_protocols import Shard
from lockstep.core.errors import InputError, LockstepError
from lockstep.core.model import whole
from lockstep.core.world import World
from lockstep.data.datasets.arrays import ArraySplit
from lockstep.data.loading.loaders import Streaming
from lockstep.data.transforms.crops import RandomResizedCrop
from lockstep.data.transforms.policies import AugMix, RandAugment, ThreeAugment, TimmRandAugment, TrivialAugment
from lockstep.models.nets import MaxPoolTo
from lockstep.optim.muon import Muon, newton_schulz, orthogonalised
from lockstep.precision import FP32
from lockstep.stochastic import KeyedModel, key_draws
from lockstep.strategy.ddp import COMM_HOOKS, DDP
from lockstep.strategy.sync_batchnorm import convert_sync_batchnorm
from lockstep.strategy.zero import FSDP
from lockstep.telemetry.hardware import Gpus, watched_gpus
from lockstep.training.resolved_job import plan_of
from lockstep.training.train_step import TrainStep
from lockstep.training.trainer import Trainer
from processes import ended, processes, running, start, wait_for

pytestmark = MARKS
JOB = (
    "model=resnet18",
    f"batch={16 if PRETENDED else 64}",
    "dataset.input_size=32",
    "steps=6",
    "launcher.ranks=1",
    "telemetry.interval=1",
    "optimizer=sgd",
    f"optimizer.lr={0.001 if PRETENDED else 0.01}",  # small batches amplify a difference more
)


def run(folder: Path, *overrides: str) -> Path:
    """Train on the GPU as a user would; returns the run folder."""
    done = train(*JOB, "device=cuda", f"hydra.run.dir={folder}", f"output_root={folder.parent}", *overrides)
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("reference") / "run", "launcher=inline", "strategy=single")


@contextmanager
def never_waiting() -> Iterator[None]:
    """A context in which waiting for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def largest_difference(one: Path, other: Path) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(losses(one), losses(other), strict=True))


def test_one_nccl_rank_under_ddp_is_the_single_run(reference: Path, tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "launcher=elastic", "strategy=ddp")
    assert "backend: nccl" in (folder / "config.yaml").read_text()
    assert "1 process on" in (log := " ".join((folder / "train.log").read_text().split()))
    assert " by DDP," in log
    assert largest_difference(reference, folder) < 1e-4


@pytest.mark.parametrize(
    ("overrides", "bound"),
    [
        (("precision=bf16",), 0.1),
        (("precision=fp16",), 0.05),
        (("precision=tf32",), 0.01),
        (("model.channels_last=true",), 1e-3),
        pytest.param(("precision=bf16", "model.channels_last=true", "model.compile=true"), 0.1, marks=COMPILED),
        (("loader=streaming", "loader.workers=2"), 1e-4),
        pytest.param(("strategy=dp",), 1e-4, marks=DRIVER),
    ],
)
def test_a_faster_way_gives_about_the_same_losses(
    reference: Path, tmp_path: Path, overrides: tuple[str, ...], bound: float
) -> None:
    folder = run(tmp_path / "run", "launcher=inline", *overrides)
    assert all(math.isfinite(loss) for loss in losses(folder))
    assert largest_difference(reference, folder) < bound


def test_batches_arrive_whole_while_the_device_is_busy_with_earlier_ones() -> None:
    images = torch.randint(0, 256, (4096, 3, 32, 32), dtype=torch.uint8)
    split = ArraySplit(images, torch.zeros(4096, dtype=torch.int64))
    requests = [(0, torch.randperm(4096)[:512]) for _ in range(40)]
    side = 64 if PRETENDED else 4096
    busy = torch.randn(side, side, device="cuda")
    sums = []
    for seen, _ in Streaming(workers=2).feed(split, World.solo("cuda:0"))(requests):
        for _ in range(4):
            busy = (busy @ busy).clamp(-1, 1)  # the sums below wait for it, and the next batches do not
        sums.append(seen.long().sum((1, 2, 3)))
        del seen  # its memory may be given to a later batch
    for total, (_, indices) in zip(sums, requests, strict=True):
        assert torch.equal(total.cpu(), images[indices].long().sum((1, 2, 3)))


@COMPILED
@pytest.mark.parametrize("mode", ["default", "reduce_overhead"])
def test_what_is_counted_later_is_what_each_step_gave(reference: Path, tmp_path: Path, mode: str) -> None:
    compiled = ("model.compile=true", f"model.compile_mode={mode}")
    late = run(tmp_path / "run", "launcher=inline", *compiled, "telemetry.interval=6")
    reference_lines, (whole,) = records(reference), [line for line in records(late) if "loss/train" in line]
    steps = [line for line in reference_lines if "loss/train" in line]
    for name in ("loss/train", "acc/train_top1"):
        assert whole[name] == pytest.approx(statistics.fmean(line[name] for line in steps), rel=0.1)


def test_more_ranks_than_gpus_are_refused() -> None:
    done = train("strategy=ddp", f"launcher.ranks={torch.cuda.device_count() + 1}")
    assert done.code == 2
    assert "each rank needs one" in done.err


def test_derived_random_numbers_are_those_of_the_cpu() -> None:
    indices = torch.arange(100_000)
    here = rng.uniform(rng.sample_keys(3, 1, indices), 2)
    there = rng.uniform(rng.sample_keys(3, 1, indices.cuda()), 2)
    assert torch.equal(here, there.cpu())
    assert torch.equal(rng.permutation(3, 1, 100_000), rng.permutation(3, 1, 100_000, torch.device("cuda")).cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_of_dropout_are_those_of_the_cpu_in_any_precision(dtype: torch.dtype) -> None:
    def mask(device: str, dtype: torch.dtype) -> Tensor:
        model = nn.Sequential(nn.Dropout(0.3), nn.Dropout2d(0.2)).to(device).train()
        draws = key_draws(model, torch.zeros(1, 3, 16, 16, device=device), 0)
        keys = rng.sample_keys(3, 1, torch.arange(64, device=device), rng.FORWARD)
        ones = torch.ones(64, 3, 16, 16, device=device, dtype=dtype)
        masked: Tensor = KeyedModel(model, draws)(ones, torch.stack([keys, keys], 1)) == 0
        return masked.cpu()

    assert torch.equal(mask("cuda", dtype), mask("cpu", torch.float32))


def test_a_run_with_dropout_and_drop_path_is_that_of_the_cpu(tmp_path: Path) -> None:
    job = ("precision=fp64", "model.drop_rate=0.2", "model.drop_path_rate=0.2", "steps=3")
    there = run(tmp_path / "gpu", *job)
    here = run(tmp_path / "cpu", *job, "device=cpu")
    assert largest_difference(there, here) < 1e-10


@pytest.fixture
def nccl_group() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    yield
    dist.destroy_process_group()


@KERNELS
@pytest.mark.usefixtures("nccl_group")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_synchronised_batch_norm_is_torchs_and_never_waits_for_the_device(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    torch.manual_seed(0)
    x = (2 + 3 * torch.randn(16, 24, 14, 14, device="cuda")).to(dtype, memory_format=memory_format)
    storage = torch.promote_types(dtype, torch.float32)
    reference = nn.BatchNorm2d(24).to("cuda", storage)
    ours = convert_sync_batchnorm(copy.deepcopy(reference))
    results = []
    for norm in (reference, ours):
        inputs = x.clone().requires_grad_()
        norm(inputs).sum().backward()  # the first call allocates
        with never_waiting():
            norm.zero_grad()
            inputs.grad = None
            output = norm(inputs)
            (output * x.sin()).sum().backward()
        gradients = [tensor.grad for tensor in (inputs, *norm.parameters())]
        results.append([output, *gradients, *norm.buffers()])
    bound = 16 * torch.finfo(dtype).eps
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=bound, atol=bound * expected.abs().max().item())


@pytest.mark.usefixtures("nccl_group")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_synchronised_batch_norm_takes_no_examples(dtype: torch.dtype) -> None:
    norm = convert_sync_batchnorm(nn.BatchNorm2d(3).cuda())
    entering = torch.empty(0, 3, 4, 4, device="cuda", dtype=dtype, requires_grad=True)
    norm(entering).sum().backward()
    assert norm.weight.grad.tolist() == [0, 0, 0]
    assert norm.running_var.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "mixing",
    [
        (),
        ("train.mixup=0.4", "train.cutmix=1", "train.cutout=2", "train.ema=0.9"),
        ("train.mixup=0.4", "train.mix_by=batch", "train.erase=0.5", "train.erase_mode=pixel", "train.repeats=2"),
        ("train.cuda_graph=true", "train.ema=0.9"),
    ],
)
def test_neither_a_step_nor_a_log_point_waits_for_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixing: tuple[str, ...]
) -> None:
    watched_steps = set[int]()

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: TrainStep | Trainer, at: Shard | int, *arguments: Any) -> Any:
            step = at if isinstance(at, int) else at.step
            if step <= 5:  # the first steps allocate
                return method(self, at, *arguments)
            watched_steps.add(step)
            with never_waiting():
                return method(self, at, *arguments)

        return call

    for owner, name in ((TrainStep, "__call__"), (Trainer, "log")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
    every = ("telemetry.interval=4", "train.eval_every=100%", "checkpoint.every=100%")
    run_until(World.solo("cuda:0"), run_dir(tmp_path / "run", "device=cuda", "epochs=2", *every, *mixing), None)
    assert len(watched_steps) > 30


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=COMPILED)])
@pytest.mark.parametrize("policy", [RandAugment, TrivialAugment, TimmRandAugment, AugMix, ThreeAugment])
def test_a_policy_is_that_of_the_cpu_and_never_waits_for_the_device(policy: Any, compiled: bool) -> None:
    images = torch.randint(256, (200, 3, 40, 40), dtype=torch.uint8)
    indices = torch.arange(200)
    expected = policy().operate(images, rng.SampleRNG(0, 0, indices))
    there, draws = images.cuda(), rng.SampleRNG(0, 0, indices.cuda())
    policy(compile=compiled).operate(there, draws)
    with never_waiting():
        actual = policy(compile=compiled).operate(there, draws)
    # A rotation may round a coordinate to the pixel beside it, a blend a value to the one below it.
    assert (actual.cpu() != expected).float().mean().item() < 0.001


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_resized_crops_are_those_of_the_cpu_and_never_wait_for_the_device(interpolation: str) -> None:
    images, indices = torch.randint(256, (50, 3, 64, 64), dtype=torch.uint8), torch.arange(50)
    crop = RandomResizedCrop()
    expected = crop.apply(images, rng.SampleRNG(0, 0, indices), (24, 24), interpolation)
    there, draws = images.cuda(), rng.SampleRNG(0, 0, indices.cuda())
    with never_waiting():
        actual = crop.apply(there, draws, (24, 24), interpolation)
    assert (actual.cpu().int() - expected.int()).abs().max() <= 2


@needs_card("there is no nvidia-smi")
def test_nvml_agrees_with_nvidia_smi(tmp_path: Path) -> None:
    (uuid,) = watched_gpus(nn.Linear(1, 1), World.solo("cuda:0"))
    gpus = Gpus([uuid], tmp_path / "gpu.jsonl")
    figures = gpus.gpus[0].sample()
    query = "--query-gpu=memory.used,temperature.gpu,power.draw"
    smi = subprocess.run(
        ["nvidia-smi", f"--id={uuid}", query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    used_mib, celsius, watts = (float(word) for word in smi.stdout.split(","))
    gpus.close()
    # nvidia-smi leaves out what the driver keeps for itself.
    assert figures["mem_gb"] == pytest.approx(used_mib * 2**20 / 1e9, abs=1.5)
    assert figures["temp_c"] == pytest.approx(celsius, abs=3)
    assert figures["power_w"] == pytest.approx(watts, rel=0.5)


def test_a_run_writes_gpu_figures_once_a_second(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", f"steps={20 if PRETENDED else 2000}", "launcher=inline")
    lines = [json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()]
    assert lines
    assert set(lines[0]) >= {"time", "step", "local_rank", "uuid", "util", "mem_gb", "power_w", "temp_c", "sm"}
    shares = [line["sm_active"] for line in lines if "sm_active" in line]  # Hopper and later
    assert all(0 <= share <= 100 for share in shares)


# Images of noise in three batches an epoch. Of several virtual shards CUDA graphs know nothing, so there is one.
BATCH, SHORT = (8, 3) if PRETENDED else (128, 44)
NOISE = (
    *("dataset=fake", "dataset.size=32", "dataset.classes=10", f"dataset.examples={3 * BATCH}", f"batch={BATCH}"),
    *("optimizer=sgd", "optimizer.lr=0.01", "schedule=constant", "launcher=inline", "checkpoint.every=100%"),
)
STRICT = (*NOISE, "model=test_resnet", "strategy=strict", "strategy.shards=1")


def noise(folder: Path, *overrides: str) -> Path:
    """Train on noise on the GPU, or go on with the run in `folder`; returns the folder."""
    words = (*NOISE, "device=cuda", "telemetry.interval=1", f"hydra.run.dir={folder}", f"output_root={folder.parent}")
    done = train(*words, *overrides)
    assert done.code == 0, done.err
    return folder


def test_evaluations_leave_no_memory_reserved(tmp_path: Path) -> None:
    job = ("model=linear", "dataset.size=64", "loader=streaming", "steps=12")
    few, many = (noise(tmp_path / str(every), *job, f"train.eval_every={every}") for every in (12, 1))
    reserved = [json.loads((folder / "summary.json").read_text())["gpu_memory"] for folder in (few, many)]
    assert reserved[1] < reserved[0] + 50e6, "a stream for each would keep 20 MB or more"


def assert_same_bits(one: Path, other: Path) -> None:
    actual, expected = weights(one), weights(other)
    assert actual.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]
    assert losses(one) == losses(other)


@pytest.mark.parametrize("model", ["linear", "digitnet", "basicnet", "whitenet", "resnet34", "resnet18"])
def test_a_strict_run_has_the_same_bits_twice(tmp_path: Path, model: str) -> None:
    one, other = (noise(tmp_path / name, f"model={model}", "repro=strict", "steps=3") for name in ("one", "other"))
    assert_same_bits(one, other)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.channels_last=true",),
        ("precision=fp16",),
        pytest.param(("model.compile=true", "model.compile_mode=reduce_overhead"), marks=COMPILED),
    ],
)
def test_a_resume_ends_with_the_bits_of_the_run_that_was_not_stopped(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    whole = noise(tmp_path / "whole", *STRICT, *overrides, "steps=6")
    noise(tmp_path / "resumed", *STRICT, *overrides, "steps=3")
    assert_same_bits(noise(tmp_path / "resumed", *STRICT, *overrides, "steps=6"), whole)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_a_step_that_is_replayed_is_the_step_that_is_launched(tmp_path: Path, optimizer: str) -> None:
    # Two full batches and a short one in an epoch, in micro-batches, with a rate that changes at each step.
    job = (
        *("model=digitnet", f"dataset.examples={2 * BATCH + SHORT}", "train.micro_batches=2", "train.ema=0.9"),
        *(f"optimizer={optimizer}", "schedule=cosine", "steps=7", "precision=fp64"),
    )
    launched = noise(tmp_path / "launched", *job)
    replayed = noise(tmp_path / "replayed", *job, "train.cuda_graph=true")
    # A graph reads its rates from float32 tensors.
    assert largest_difference(launched, replayed) < 1e-4


def test_a_resume_of_replayed_steps_has_the_bits_of_the_whole_run(tmp_path: Path) -> None:
    # The matrix products of a linear layer add in one order only.
    job = ("model=linear", f"dataset.examples={2 * BATCH + SHORT}", "train.ema=0.9", "train.cuda_graph=true")
    whole = noise(tmp_path / "whole", *job, "steps=7")
    noise(tmp_path / "resumed", *job, "steps=4")
    assert_same_bits(noise(tmp_path / "resumed", *job, "steps=7"), whole)


def test_a_model_that_waits_for_the_device_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = MaxPoolTo.forward
    monkeypatch.setattr(MaxPoolTo, "forward", lambda self, x: forward(self, x) * float(x.mean() < 9))
    job = run_dir(tmp_path / "run", "device=cuda", "train.cuda_graph=true", "steps=2")
    with pytest.raises(InputError, match=r"cannot be recorded .*; use train\.cuda_graph=false"):
        run_until(World.solo("cuda:0"), job, None)
    monkeypatch.undo()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()
    torch.rand(1, device="cuda")
    next_job = run_dir(tmp_path / "next", "device=cuda", "train.cuda_graph=true", "steps=2")
    run_until(World.solo("cuda:0"), next_job, None)


@pytest.mark.parametrize(("first", "second"), [("false", "true"), ("true", "false")])
def test_a_resume_in_another_memory_layout_is_the_run_to_rounding(tmp_path: Path, first: str, second: str) -> None:
    job = ("model=test_resnet", "precision=fp64")
    whole = noise(tmp_path / "whole", *job, "steps=6")
    noise(tmp_path / "moved", *job, f"model.channels_last={first}", "steps=3")
    moved = noise(tmp_path / "moved", *job, f"model.channels_last={second}", "steps=6")
    expected = weights(whole)
    # Other kernels add in another order; a momentum that came back permuted would be off by its own size.
    for name, tensor in weights(moved).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("nccl_group")
@pytest.mark.parametrize("hook", COMM_HOOKS)
def test_ddp_in_a_group_of_one_has_the_gradients_of_the_bare_model(hook: str) -> None:
    job = resolved("model=digitnet", "model.dropout=0")
    torch.manual_seed(0)
    bare = job.model.build(10, (1, 8, 8)).cuda()
    images = torch.randn(16, 1, 8, 8, device="cuda")
    replica = DDP(comm_hook=hook).replicate(copy.deepcopy(bare), plan_of(job, 1442), (images[:2],))

    def gradient(model: nn.Module) -> Tensor:
        model.zero_grad()
        model(images).logsumexp(1).mean().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    expected = gradient(bare)
    eps = {"fp16": 2**-11, "bf16": 2**-8}.get(hook, 1e-5)
    torch.testing.assert_close(gradient(replica), expected, rtol=0, atol=2 * eps * expected.abs().max().item())


@needs_card("torch makes the parts of `fully_shard` below the calls that it sees")
@pytest.mark.usefixtures("nccl_group")
def test_fsdp_in_a_group_of_one_has_the_gradients_of_the_bare_model() -> None:
    job = resolved("model=digitnet", "model.dropout=0")
    bare = job.model.build(10, (1, 8, 8)).cuda()
    images, model = torch.randn(16, 1, 8, 8, device="cuda"), copy.deepcopy(bare)
    FSDP().cut(model, World.solo("cuda:0"), FP32())
    for network in (bare, model):
        network(images).logsumexp(1).mean().backward()
    for cut, parameter in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(whole(cut.grad), parameter.grad, rtol=1e-5, atol=1e-6)


def of_two_ranks(folder: Path, *overrides: str) -> Path:
    """Train on noise with two ranks that share the GPU: NCCL would want a card for each."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")
    words = ("device=cuda", "launcher.backend=gloo", f"hydra.run.dir={folder}", "telemetry.interval=1")
    done = command(*torchrun, *NOISE, *words, *overrides)
    assert done.code == 0, done.err
    assert (folder / "logs" / "rank1.log").exists()
    return folder


@DRIVER
def test_a_pipeline_of_two_stages_on_a_gpu_is_one_rank(tmp_path: Path) -> None:
    job = ("model=test_resnet", "dataset.examples=33", "dataset.size=64", "batch=16", "train.micro_batches=3")
    one = noise(tmp_path / "one", *job, "precision=fp64", "steps=3")
    two = of_two_ranks(tmp_path / "two", *job, "precision=fp64", "steps=3", "strategy=pipeline")
    assert largest_difference(one, two) < 1e-9


def test_the_default_job_learns_on_a_gpu(tmp_path: Path) -> None:
    done = train("device=cuda", f"hydra.run.dir={tmp_path / 'run'}", f"output_root={tmp_path}")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best"] >= 98


@pytest.mark.parametrize(("precision", "bound"), [("fp64", 1e-9), ("bf16", 0.1)])
def test_two_ranks_that_share_a_gpu_over_gloo_are_one_also_with_an_empty_shard(
    tmp_path: Path, precision: str, bound: float
) -> None:
    # The third step of an epoch has one example for both ranks.
    job = ("model=test_resnet", "dataset.examples=33", "dataset.size=64", "batch=16", "steps=6")
    one = noise(tmp_path / "one", *job, f"precision={precision}")
    two = of_two_ranks(tmp_path / "two", *job, f"precision={precision}", "strategy=ddp")
    assert largest_difference(one, two) < bound


@needs_card("there is no allocator with a limit")
def test_a_batch_that_does_not_fit_is_said_with_a_remedy_that_works(tmp_path: Path) -> None:
    # Resident images would have a share of the whole card kept free for them.
    job = ("device=cuda", *NOISE, "loader=streaming", "model=resnet18", "dataset.size=224", "batch=256", "steps=2")
    torch.cuda.empty_cache()
    # The allocator is given little, which is to it as a small card.
    torch.cuda.set_per_process_memory_fraction(2e9 / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(LockstepError, match=r"out of memory at step 1 .*; train\.micro_batches=\d+ fits"):
            run_until(World.solo("cuda:0"), run_dir(tmp_path / "whole", *job), None)
        run_until(World.solo("cuda:0"), run_dir(tmp_path / "auto", *job, "train.micro_batches=auto"), None)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert len(losses(tmp_path / "auto")) == 2


def test_a_stopped_run_on_the_gpu_leaves_nothing_and_goes_on(tmp_path: Path) -> None:
    job = ("device=cuda", "schedule=constant", "launcher=inline")
    process = running(tmp_path / "run", *job, "epochs=1000")
    process.send_signal(signal.SIGTERM)
    code, err = ended(process)
    assert code == 75, err
    wait_for(lambda: not processes(tmp_path / "run"))
    steps = len(losses(tmp_path / "run")) + 5
    code, err = ended(start(tmp_path / "run", *job, f"steps={steps}"))
    assert code == 0, err
    assert len(losses(tmp_path / "run")) == steps
    wait_for(lambda: not processes(tmp_path / "run"))


def test_muon_iterates_in_bfloat16_unless_the_model_is_in_float64() -> None:
    torch.manual_seed(0)
    update = torch.randn((64, 24, 3, 3), dtype=torch.float64)
    (exact,), (on_gpu,) = orthogonalised([update], 5), orthogonalised([update.cuda()], 5)
    torch.testing.assert_close(on_gpu.cpu(), exact, rtol=1e-10, atol=1e-10)
    (result,) = orthogonalised([update.float().cuda()], 5)
    narrow = newton_schulz(update.float().flatten(1)[None].cuda().bfloat16(), 5)
    assert torch.equal(result, narrow[0].float().view_as(result))


def test_a_step_of_muon_waits_for_nothing_and_keeps_the_order_in_memory() -> None:
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3, bias=False), nn.Flatten(), nn.Linear(512, 4)]
    model = nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)
    model(torch.randn(2, 3, 12, 12, device="cuda")).square().sum().backward()
    optimizer = Muon(lr=0.1, fixed_norm=True, weight_decay=0.1).build(model)
    with never_waiting():
        optimizer.step()
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
