"""`model.compile=true`: a word while it lasts, one compilation for each shape, and a resume to the bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from helpers import forked, train, weights

pytestmark = pytest.mark.slow

# 1,442 examples in batches of 500: the third step of an epoch has 442. All 355 are evaluated at once.
JOB = ("model=linear", "model.compile=true", "batch=500", "train.eval_batch=355", "schedule=constant", "device=cpu")
JOB = (*JOB, "launcher.threads=1")  # processes to compile in would import torch each
QUIET = ("logger=jsonl", "checkpoint.every=100%")


def test_each_shape_is_compiled_once_and_a_resume_keeps_every_bit(tmp_path: Path) -> None:
    def run(name: str, steps: int) -> str:
        folders = (f"hydra.run.dir={tmp_path / name}", f"output_root={tmp_path}")
        cache = str(tmp_path / "cache")
        done = train(*JOB, *QUIET, *folders, f"steps={steps}", TORCHINDUCTOR_CACHE_DIR=cache)
        assert done.code == 0, done.err
        assert done.out.count("compiling the model: the first batch of each shape") == 1
        return (tmp_path / name / "train.log").read_text()

    logged = run("whole", 4)
    # Two shapes of training batches, forward and backward, and one of evaluation; none again in the second epoch.
    assert len(re.findall(r"compiled in \d+\.\d s", logged)) in range(1, 6)
    assert "step 3/4" in logged
    assert "compiled in" not in logged.partition("step 3/4")[2]
    run("parts", 2)
    run("parts", 4)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_ranks_share_the_cores_for_compiling_unless_the_environment_says_how_many() -> None:
    program = (
        "from dataclasses import replace; from types import SimpleNamespace as Stub; from torch import nn; "
        "from torch._inductor import config; from lockstep.core.world import World; "
        "from lockstep.runtime.signals import StopRequest; from lockstep.training import train_state; "
        "config.compile_threads = 7; "  # what inductor reads from the environment when it is imported
        "train_state.cores = lambda: 6; world = replace(World.solo(), local_size=2); "
        "job = Stub(model=Stub(compile=True, compile_mode='default')); "
        "train_state.compile_model(nn.Linear(2, 2), job, world, StopRequest()); "
        "print(config.compile_threads)"
    )
    assert forked("-c", program).out.split() == ["3"]
    assert forked("-c", program, TORCHINDUCTOR_COMPILE_THREADS="7").out.split() == ["7"]


def test_torchs_remedy_for_float32_on_a_gpu_is_not_shown() -> None:
    program = (
        "from types import SimpleNamespace as Stub; import torch; from lockstep.core.world import World; "
        "from lockstep.runtime.signals import StopRequest; from lockstep.training import train_state; "
        "from torch._inductor import compile_fx; from torch._inductor.fx_passes import fuse_attention; "
        "torch.cuda.is_available = lambda: True; torch.cuda.get_device_capability = lambda: (9, 0); "
        "job = Stub(model=Stub(compile=True, compile_mode='default')); "
        "train_state.compile_model(torch.nn.Linear(2, 2), job, World.solo(), StopRequest()); "
        "compile_fx._warn_tf32_disabled(); fuse_attention._warn_tf32_disabled()"
    )
    done = forked("-c", program)
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (("train.cudnn_benchmark=true",), "use train.cudnn_benchmark=false, or"),
        (("model.compile=true", "model.compile_mode=max_autotune"), "use model.compile_mode=default, or"),
    ],
)
def test_under_strict_no_stopwatch_chooses_kernels(overrides: tuple[str, ...], remedy: str) -> None:
    done = train("repro=strict", *overrides)
    assert done.code == 2
    assert remedy in done.err
