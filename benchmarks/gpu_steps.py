"""The steps of `gpu_check.py` that pass or fail. Each takes a `Place` and returns its result as a text."""

from __future__ import annotations

import copy
import hashlib
import multiprocessing
import os
import signal
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pynvml
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpu_jobs import (
    NORMED,
    SMALL,
    Failed,
    Place,
    command,
    expect,
    expect_same_bits,
    finish,
    floats,
    largest_loss_difference,
    largest_weight_difference,
    losses,
    marked,
    newest,
    prepared_job,
    state,
    trained,
    wait_for,
)
from lockstep.config import yaml_io
from lockstep.core.errors import LockstepError
from lockstep.core.run_dir import RunDir
from lockstep.core.sharding import has_shards, whole
from lockstep.core.world import World
from lockstep.precision import FP32
from lockstep.strategy import DDP, FSDP
from lockstep.strategy.ddp import CommHook
from lockstep.telemetry.gpu import sample, watched_gpus
from lockstep.training.fingerprint import plan_of

STRICT_MODELS = ("digitnet", "basicnet", "whitenet", "resnet18")
# The default job reaches 99 %; a wrong kernel or a lost update costs more than the difference.
LEAST_TOP1 = 98.0


def default(place: Place) -> str:
    """The default job, as a user types it, reaches the accuracy of README.md."""
    finish(command(place, "run", "telemetry.interval=20"))
    best = float(RunDir(place.folder / "run").read_summary()["best"])
    expect(best >= LEAST_TOP1, f"the best top-1 is {best:.2f} %, expected {LEAST_TOP1:.0f} % or more")
    return f"best top-1 {best:.2f} % on {place.device}"


def strict(place: Place) -> str:
    """Two processes train the same models; every weight, momentum and statistic must have the same bits."""
    places = [replace(place, folder=place.folder / name) for name in ("first", "second")]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        first, second = pool.map(strict_digests, places)
    different = [model for model in STRICT_MODELS if first[model] != second[model]]
    expect(not different, f"the final state of {', '.join(different)} differs between two runs")
    return f"the same bits in two processes: {', '.join(STRICT_MODELS)}"


def strict_digests(place: Place) -> dict[str, str]:
    """A hash of the final state of each model."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # as a rank sets it; cuBLAS reads it when it starts
    job = (*SMALL, *place.batch, "repro=strict")
    runs = {model: trained(place, model, *job, f"model={model}") for model in STRICT_MODELS}
    return {
        model: hashlib.sha256(repr(sorted(state(run).items())).encode()).hexdigest() for model, run in runs.items()
    }


def half(place: Place) -> str:
    """The digits with SGD in 16 bits: finite losses, about as low as in float32."""
    job = ("model.width=8", "model.dropout=0", "optimizer=sgd", "optimizer.lr=0.05", "epochs=3")
    runs = {name: trained(place, name, *job, f"precision={name}") for name in ("fp32", place.half)}
    whole, short = (losses(run) for run in runs.values())
    # Both runs have the same weights at their first loss. Later the loss scaler may have skipped steps that
    # overflowed, as is usual at the start; so compare the level of the last losses.
    first = abs(short[0] - whole[0]) / whole[0]
    level, expected = (sum(run[-20:]) / 20 for run in (short, whole))
    expect(first < 0.01, f"the first loss is {short[0]:.4f} in {place.half}, and {whole[0]:.4f} in fp32")
    expect(
        abs(level - expected) < 0.25 * expected + 0.05,  # NaN fails too
        f"the last 20 losses are {level:.4f} on average in {place.half}, and {expected:.4f} in fp32",
    )
    finite = all(bool(tensor.isfinite().all()) for _, tensor in floats(newest(runs[place.half]).model))
    expect(finite, f"a weight is not finite after training in {place.half}")
    return f"{place.half} and sgd: first loss within {first:.1e} of fp32, last 20 {level:.4f} and {expected:.4f}"


def hooks(place: Place) -> str:
    """The gradients of DDP in a group of one rank, with each hook, compared with those of the bare model.

    A single rank of Lockstep joins no process group, so this step creates one.
    """
    device = torch.device("cuda:0" if place.cuda else "cpu")
    backend = "nccl" if place.cuda else "gloo"
    job, _ = prepared_job(place, "unused", *SMALL, *place.batch, "model=digitnet", "model.dropout=0")
    torch.manual_seed(0)
    bare = job.model.build(10, job.dataset.input_shape).to(device)
    images = torch.randn(16, *job.dataset.input_shape, device=device)
    expected = gradients(bare, images)
    own = device if place.cuda else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=own)
    try:
        for hook in CommHook:
            replica = DDP(comm_hook=hook).replicate(
                copy.deepcopy(bare), plan_of(job, len(job.dataset.train())), (images[:2],)
            )
            # PowerSGD sends whole gradients in its first ten steps, and a matrix of rank one afterwards.
            passes = [gradients(replica, images) for _ in range(14 if hook is CommHook.powersgd else 2)]
            compare_gradients(hook, passes, expected)
    finally:
        dist.destroy_process_group()
    return f"{backend}: {', '.join(hook.value for hook in CommHook)} give the gradients of the bare model"


def gradients(model: nn.Module, images: Tensor) -> list[Tensor]:
    """The gradients of a nonlinear loss: for a sum of logits, group norm would make some of them zero."""
    model.zero_grad()
    model(images).logsumexp(1).mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def compare_gradients(hook: CommHook, passes: list[list[Tensor]], expected: list[Tensor]) -> None:
    """Raise Failed unless the gradient of every pass is as exact as the hook's format allows."""
    eps = {CommHook.fp16: 2.0**-11, CommHook.bf16: 2.0**-8}.get(hook, 1e-5)
    whole = torch.cat([tensor.flatten() for tensor in expected])
    for number, gradients_of_pass in enumerate(passes, 1):
        sent = torch.cat([tensor.flatten() for tensor in gradients_of_pass])
        if hook is CommHook.powersgd and number > 10:
            cosine = float(torch.nn.functional.cosine_similarity(sent, whole, dim=0))
            expect(
                cosine > 0.5, f"powersgd: the cosine to the bare model's gradient is {cosine:.2f} at pass {number}"
            )
        else:
            difference = float((sent - whole).abs().max() / whole.abs().max())
            expect(difference <= 2 * eps, f"{hook.value}: a gradient is {difference:.1e} off at pass {number}")


def parts(place: Place) -> str:
    """The gradients of a model that FSDP has sharded, in a group of one rank, and those of the bare model."""
    world = World.solo("cuda:0" if place.cuda else "cpu")
    job, _ = prepared_job(place, "unused", *SMALL, *place.batch, "model=digitnet", "model.dropout=0")
    torch.manual_seed(0)
    bare = job.model.build(10, job.dataset.input_shape).to(world.device)
    images = torch.randn(16, *job.dataset.input_shape, device=world.device)
    expected = torch.cat([gradient.flatten() for gradient in gradients(bare, images)])
    model, own = copy.deepcopy(bare), world.device if place.cuda else None
    backend = "nccl" if place.cuda else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=own)
    try:
        FSDP().cut(model, world, FP32())
        expect(has_shards(model), "no parameter is cut")
        actual = torch.cat([whole(gradient).flatten() for gradient in gradients(model, images)])
    finally:
        dist.destroy_process_group()
    difference = float((actual - expected).abs().max() / expected.abs().max())
    expect(difference < 1e-5, f"a gradient is {difference:.1e} off that of the bare model, expected 1e-5")
    return f"{backend}: the gradients are within {difference:.1e} of those of the bare model"


def stages(place: Place) -> str:
    """A pipeline of two stages on one device is the same run as one rank, with micro-batches of uneven sizes."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    job = (*NORMED, "dataset.examples=33", "dataset.size=64", "batch=16", "train.micro_batches=3", "precision=fp64")
    several = ("strategy=pipeline", "launcher.backend=gloo", "launcher.threads=1")
    one = trained(place, "one", *job)
    finish(command(place, "two", *job, *several, launch=torchrun))
    two = RunDir(place.folder / "two")
    expect((two.logs / "rank1.log").exists(), "there is no log of a second rank")
    losses_off, weights_off = largest_loss_difference(two, one), largest_weight_difference(two, one)
    expect(losses_off < 1e-9, f"a loss of two stages is {losses_off:.1e} off that of one rank, expected 1e-9")
    expect(weights_off < 1e-9, f"a weight of two stages is {weights_off:.1e} off that of one rank, expected 1e-9")
    return f"two stages and one rank differ by {losses_off:.1e} (losses) and {weights_off:.1e} (weights)"


def ranks(place: Place) -> str:
    """Two ranks on one device are the same run as one rank, also at a step with one example for both."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2")
    # Two epochs of two batches of 16 and one of a single example, with batch norm over all ranks.
    job = (*NORMED, "dataset.examples=33", "dataset.size=64", "batch=16", "steps=6")
    several = ("strategy=ddp", "launcher.backend=gloo", "launcher.threads=1")
    # float64 shows a wrong statistic or a wrong shard. A CPU without bfloat16 instructions would be too slow.
    bounds = {"fp64": 1e-9, "bf16": 0.1} if place.cuda else {"fp64": 1e-9}
    differences = {}
    for precision, bound in bounds.items():
        one = trained(place, f"one {precision}", *job, f"precision={precision}")
        finish(command(place, f"two_{precision}", *job, f"precision={precision}", *several, launch=torchrun))
        two = RunDir(place.folder / f"two_{precision}")
        expect((two.logs / "rank1.log").exists(), "there is no log of a second rank")
        differences[precision] = largest_loss_difference(two, one)
        expect(len(losses(two)) == 6, f"{len(losses(two))} losses were logged, expected 6")
        expect(
            differences[precision] < bound,
            f"{precision}: a loss of two ranks is {differences[precision]:.1e} off that of one, expected {bound:g}",
        )
    return "losses of two ranks and one differ by " + ", ".join(f"{d:.1e} ({p})" for p, d in differences.items())


def resume(place: Place) -> str:
    """A resumed run is the same as one that was not stopped.

    To the bit if both parts use the same kernels, which `repro=strict` makes deterministic; with one virtual shard,
    because CUDA graphs do not support micro-batches. With another memory format the kernels add in another order, so
    there the difference is bounded in float64: a wrongly permuted momentum would make it 10^9 times larger.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    job = (*NORMED, *place.batch, "strategy=strict", "strategy.shards=1")
    ways: dict[str, tuple[str, ...]] = {
        "channels_last": ("model.channels_last=true",),
        place.half: (f"precision={place.half}",),
    }
    if place.cuda:
        ways["CUDA graphs"] = ("model.compile=true", "model.compile_mode=reduce_overhead")
    for way, overrides in ways.items():
        for name, steps in (("whole", 6), ("resumed", 3), ("resumed", 6)):
            if "model.compile=true" in overrides:
                torch.compiler.reset()  # a new command has nothing compiled either
            trained(place, f"{way}, {name}", *job, *overrides, f"steps={steps}")
        expect_same_bits(RunDir(place.folder / f"{way}, resumed"), RunDir(place.folder / f"{way}, whole"), way)
    exact = (*NORMED, *place.batch, "precision=fp64")
    whole = trained(place, "layouts, whole", *exact, "steps=6")
    for layouts in (("false", "true"), ("true", "false")):
        for steps, last in zip((3, 6), layouts, strict=True):
            name = f"channels_last {' to '.join(layouts)}"
            moved = trained(place, name, *exact, f"model.channels_last={last}", f"steps={steps}")
        difference = largest_weight_difference(moved, whole)
        expect(difference < 1e-9, f"{name}: a weight is {difference:.1e} off in float64, expected 1e-9")
    graphs = "" if place.cuda else "; CUDA graphs need a GPU"
    return f"to the bit: {', '.join(ways)}; from one layout to the other: {difference:.1e} in float64{graphs}"


def graph(place: Place) -> str:
    """Steps that are replayed from a CUDA graph are the steps that are launched; a resume has the bits of the run."""
    # Two full batches and a short one in an epoch, and a rate that changes at each step.
    job = (
        *("dataset=fake", "dataset.size=16", "dataset.classes=10", "dataset.examples=300", "batch=128", "steps=7"),
        *("train.micro_batches=2", "train.ema=0.9", "train.eval_every=100%", "precision=fp64"),
    )
    replayed = ("train.cuda_graph=true",)
    differences = {}
    for optimizer in ("adamw", "sgd", "muon"):
        words = (*job, f"optimizer={optimizer}")
        expected = trained(place, f"{optimizer}, launched", *words)
        recorded = trained(place, f"{optimizer}, replayed", *words, *replayed)
        # A graph reads its rates from float32 tensors.
        differences[optimizer] = difference = largest_loss_difference(recorded, expected)
        expect(difference < 1e-4, f"{optimizer}: a loss of replayed steps is {difference:.1e} off, expected 1e-4")
    # The matrix products of a linear layer add in one order only.
    linear = (*job, "model=linear", "optimizer=sgd", "schedule=constant", *replayed)
    whole = trained(place, "whole", *linear)
    for steps in (4, 7):
        resumed = trained(place, "resumed", *linear, f"steps={steps}")
    expect_same_bits(resumed, whole, "a resume under CUDA graphs")
    shown = ", ".join(f"{difference:.1e} ({optimizer})" for optimizer, difference in differences.items())
    return f"losses of replayed and launched steps differ by {shown}; a resume has the bits of the run"


def out_of_memory(place: Place) -> str:
    """The error for a batch that does not fit names its remedy, and the remedy works.

    The allocator is limited to 2 GB, as on a small GPU.
    """
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2e9 / total)
    job = (*SMALL, "model=resnet18", "dataset.size=224", "dataset.examples=256", "batch=256", "steps=2")
    try:
        trained(place, "whole", *job)
    except LockstepError as error:
        sentence = str(error)
    else:
        raise Failed("a batch of 256 at 224 pixels fits into 2 GB")
    expect("train.micro_batches=" in sentence and "out of memory" in sentence, f"the error is: {sentence}")
    run = trained(place, "auto", *job, "train.micro_batches=auto")
    chosen = yaml_io.load(run.config)["train"]["micro_batches"]
    expect(chosen > 1 and len(losses(run)) == 2, f"auto chose {chosen} micro-batches")
    return f"{sentence.partition(';')[0]}; auto chose {chosen} micro-batches and trained"


def stop(place: Place) -> str:
    """At SIGTERM a run saves and ends with exit code 75, the same command resumes it, and no process is left."""
    job = ("model.width=8", "checkpoint.every=100%", "schedule=constant")
    folder = place.folder / "run"
    run = RunDir(folder)
    process = command(place, "run", *job, "epochs=1000")
    wait_for(lambda: process.poll() is not None or (run.metrics.exists() and len(losses(run)) >= 3), "three steps")
    process.send_signal(signal.SIGTERM)
    finish(process, code=75)
    stopped = int(newest(run).facts["progress"]["step"])
    wait_for(lambda: not marked(folder), "the stopped run has no process")
    finish(command(place, "run", *job, f"steps={stopped + 5}"))
    expect(run.read_summary()["status"] == "completed", "the resumed run did not come to its end")
    steps = len(losses(run))
    expect(steps == stopped + 5, f"{steps} steps were logged, expected each of {stopped + 5} once")
    wait_for(lambda: not marked(folder), "the resumed run has no process")
    return f"stopped at step {stopped} with exit code 75, went on to {stopped + 5}; no process is left"


def nvml(place: Place) -> str:
    """The samples of a busy GPU agree with nvidia-smi."""
    (uuid,) = watched_gpus(nn.Linear(1, 1), World.solo("cuda:0"))
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(free // 4, dtype=torch.uint8, device="cuda")
    factor = torch.randn(4096, 4096, device="cuda")
    product = torch.empty_like(factor)
    query = "--query-gpu=memory.used,memory.reserved,utilization.gpu,power.draw,power.limit,temperature.gpu"
    began = time.monotonic()
    while time.monotonic() < began + 2:  # the driver's utilisation is an average over up to the last second
        torch.mm(factor, factor, out=product)
        torch.cuda.synchronize()
    with subprocess.Popen(
        ["nvidia-smi", f"--id={uuid}", query, "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, text=True
    ) as smi:
        while smi.poll() is None:
            torch.mm(factor, factor, out=product)
            torch.cuda.synchronize()
        assert smi.stdout is not None
        answer = smi.stdout.read()
    pynvml.nvmlInit()
    here = sample(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    pynvml.nvmlShutdown()
    used, reserved, busy, watts, limit, celsius = (float(word) for word in answer.split(","))
    # nvidia-smi reports the driver's own memory separately.
    gigabytes = (used + reserved) * 2**20 / 1e9
    expect(here["mem_gb"] > held.numel() / 1e9, f"{here['mem_gb']:.2f} GB are in use, with more than that allocated")
    expect(
        abs(here["mem_gb"] - gigabytes) < 0.02 * gigabytes,
        f"NVML says {here['mem_gb']:.2f} GB are in use, nvidia-smi {gigabytes:.2f} GB",
    )
    expect(50 < here["util"] <= 100, f"utilisation is {here['util']:.0f} % under load; nvidia-smi says {busy:.0f} %")
    expect(
        0.5 * watts < here["power_w"] < 1.2 * limit,
        f"power is {here['power_w']:.0f} W; nvidia-smi says {watts:.0f} W, and at most {limit:.0f} W",
    )
    expect(abs(here["temp_c"] - celsius) <= 5, f"temperature is {here['temp_c']:.0f}; nvidia-smi says {celsius:.0f}")
    shown = ", ".join(f"{key} {value:.4g}" for key, value in here.items())
    return f"{shown}; nvidia-smi: {gigabytes:.4g} GB, {busy:.0f} %, {watts:.0f} W, {celsius:.0f} C"
