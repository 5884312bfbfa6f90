"""How many micro-batches fit, with real allocations that really fail: the limit of the process's address space."""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from helpers import Done, built, forked, losses, resolved, train, train_here
from lockstep.config.hydra_policy import own_hydra
from lockstep.core.world import World
from lockstep.training import dry_run

pytestmark = pytest.mark.slow

# Activations of about 3.4 MB an image: a batch of 64 needs 220 MB, eight images 27 MB.
LARGE = (
    *("dataset=fake", "dataset.examples=64", "dataset.channels=1", "dataset.size=48", "dataset.classes=10"),
    *("model.width=64", "batch=64", "steps=1", "optimizer=sgd", "train.eval_batch=4"),
)
ROOM = 120 * 2**20
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # glibc's numbers (malloc.h)


def limited_here(folder: str, *overrides: str) -> None:
    """Train in this process, which may allocate `ROOM` more than it has after a small run.

    It is the address space that is limited, so what is freed has to leave it: by default glibc keeps large blocks.
    And it gives each thread 64 MiB of it in advance, of which the trial knows nothing.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 65536)
    libc.mallopt(M_ARENA_MAX, 1)
    with own_hydra():
        train_here(Path(folder, "warm"), "steps=1", "batch=8", "optimizer=sgd")
    bound = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
    with own_hydra():
        train_here(Path(folder, "run"), *overrides)


def limited(folder: Path, *overrides: str) -> Done:
    return forked("test_memory:limited_here", str(folder), *LARGE, *overrides)


def test_running_out_of_memory_says_what_would_fit(tmp_path: Path) -> None:
    done = limited(tmp_path)
    assert (
        "LockstepError: out of memory at step 1 with micro-batches of 64 examples; train.micro_batches=" in done.err
    )
    fitting = done.err.rpartition("train.micro_batches=auto")[0].rpartition("train.micro_batches=")[2].split()[0]
    assert int(fitting) in (4, 8, 16, 32)


def failed_kernel_here(room: str) -> None:
    """Try a step after oneDNN has had `room` bytes for a convolution, and fails in this thread since."""

    def convolve(channels: int) -> bool:
        with suppress(RuntimeError):
            return bool(functional.conv2d(torch.ones(2, channels, 20, 20), torch.ones(24, channels, 3, 3)).any())
        return False

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    with own_hydra():
        job = resolved(*LARGE, "model.width=8", "device=cpu")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(room), limits[1]))
    convolve(16)
    resource.setrlimit(resource.RLIMIT_AS, limits)
    print(
        "kernels work"
        if convolve(17)
        else f"kernels fail, fits: {dry_run.fits(job, World.solo(), 4, 0.0, apart=True)}"
    )


def test_a_step_is_tried_apart_from_kernels_that_failed_for_want_of_memory() -> None:
    rooms = range(200_000, 1_600_000, 100_000)  # oneDNN works, fails or crashes, as exactly its allocations fail
    ends = (forked("test_memory:failed_kernel_here", str(room)).out for room in rooms)
    if not (end := next((out for out in ends if "kernels fail" in out), "")):
        pytest.skip("oneDNN compiles no kernels here")
    assert "fits: True" in end


def test_running_out_of_memory_in_evaluation_says_so(tmp_path: Path) -> None:
    done = limited(tmp_path, "batch=4", "dataset.examples=1200", "train.eval_batch=300")
    assert "out of memory in the evaluation after step 1; use train.eval_batch=150" in done.err


def test_auto_finds_what_fits_keeps_the_batch_and_says_so(tmp_path: Path) -> None:
    done = limited(tmp_path, "train.micro_batches=auto")
    assert done.code == 0, done.err
    chosen = int((tmp_path / "run" / "config.yaml").read_text().partition("micro_batches: ")[2].split()[0])
    assert chosen in (4, 8, 16, 32)
    assert f"global batch 64 in {chosen} micro-batches" in done.out


def test_auto_changes_nothing_where_all_fits(tmp_path: Path) -> None:
    job = ("steps=3", "batch=50", "optimizer=sgd")
    assert losses(train_here(tmp_path / "auto", *job, "train.micro_batches=auto")) == losses(
        train_here(tmp_path / "plain", *job)
    )


def test_batch_auto_keeps_the_batch_of_the_recipe_and_lets_the_cut_be_found(tmp_path: Path) -> None:
    done = train(
        "experiment=mnist_tutorial",
        "dataset=fake",
        "dataset.size=28",
        "dataset.channels=1",
        "batch=auto",
        "steps=1",
        "dataset.examples=128",
        f"output_root={tmp_path}",
    )
    assert done.code == 0, done.err
    (config,) = tmp_path.glob("*/config.yaml")
    assert "\nbatch: 64\n" in config.read_text()
    assert "  micro_batches: 1\n" in config.read_text()
    both = train("batch=auto", "train.micro_batches=2", f"output_root={tmp_path / 'none'}")
    assert both.code == 2
    assert "batch=auto chooses train.micro_batches, which is 2; remove one of them" in both.err


def test_the_search_doubles_up_to_single_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(
        dry_run, "fits", lambda job, world, examples, held, **how: tried.append(examples) or examples <= 3
    )
    job = built("batch=20")
    assert dry_run.micro_batches_that_fit(job, World.solo()) == 16
    assert tried == [24, 12, 6, 4, 3]
    monkeypatch.setattr(dry_run, "fits", lambda job, world, examples, held, **how: False)
    assert dry_run.micro_batches_that_fit(job, World.solo()) is None


def test_images_that_become_resident_are_left_room(tmp_path: Path) -> None:
    """As many bytes as fit beside a step of all examples, and more than that."""
    job, alone = resolved("batch=64", "model.width=8", "device=cpu"), World.solo()
    free = dry_run.available_memory() / dry_run.GB
    assert dry_run.micro_batches_that_fit(job, alone, held_gb=free / 4) == 1
    assert dry_run.micro_batches_that_fit(job, alone, held_gb=2 * free) is None


@pytest.mark.parametrize(
    ("error", "out"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported at some other call"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (dist.DistBackendError("NCCL error: unhandled cuda error\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_running_out_of_memory_is_told_from_other_errors(error: Exception, out: bool) -> None:
    assert dry_run.is_out_of_memory(error) is out
