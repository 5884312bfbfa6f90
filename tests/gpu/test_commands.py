"""Whole commands on a GPU: a run that is killed, a sweep, `prove`, `doctor`, ranks that NCCL refuses."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch

from card import DRIVER, MARKS, PRETENDED
from helpers import FAKE, command, forked, losses, train, weights
from processes import ended, start, wait_for

pytestmark = MARKS
SMALL = (*FAKE, "dataset.examples=64", "batch=16", "device=cuda", "launcher.threads=1")


def test_a_killed_run_resumes_with_the_bits_of_the_run_that_was_not_killed(tmp_path: Path) -> None:
    steps = 40 if PRETENDED else 2000
    job = ("device=cuda", "repro=strict", f"steps={steps}", "checkpoint.every=5%", "launcher=inline")
    code, err = ended(start(tmp_path / "whole", *job))
    assert code == 0, err
    process = start(tmp_path / "killed", *job)
    wait_for(lambda: [*(tmp_path / "killed" / "checkpoints").glob("step-*")] or process.poll() is not None)
    process.send_signal(signal.SIGKILL)
    assert ended(process)[0] == -signal.SIGKILL
    code, err = ended(start(tmp_path / "killed", *job))
    assert code == 0, err
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    expected = weights(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "killed").items())


def test_the_jobs_of_a_sweep_share_the_gpu(tmp_path: Path) -> None:
    # The variable names a GPU to use although other tests use it.
    words = (*SMALL, "steps=4", f"hydra.sweep.dir={tmp_path}", f"output_root={tmp_path}")
    done = train("-m", "seed=0,1,2", *words, CUDA_VISIBLE_DEVICES="0")
    assert done.code == 0, done.err
    assert len([*tmp_path.glob("*/summary.json")]) == 3


def test_streamed_batches_are_the_resident_ones_with_any_number_of_workers(tmp_path: Path) -> None:
    job = (*SMALL, "model=linear", "augment=none", "precision=fp64", "epochs=3", "telemetry.interval=1")
    loaders = (("loader=resident",), *(("loader=streaming", f"loader.workers={number}") for number in (1, 4)))
    for number, loader in enumerate(loaders):
        folder = tmp_path / str(number)
        done = train(*job, *loader, f"hydra.run.dir={folder}", f"output_root={tmp_path}", "launcher=inline")
        assert done.code == 0, done.err
        assert losses(folder) == pytest.approx(losses(tmp_path / "0"), rel=1e-12)


@DRIVER
def test_prove_agrees(tmp_path: Path) -> None:
    done = forked("lockstep", "prove", "--steps", "6", *SMALL, f"output_root={tmp_path}")
    assert done.code == 0, done.out + done.err


@DRIVER
def test_doctor_finds_nothing_wrong(tmp_path: Path) -> None:
    done = forked("lockstep", "doctor", *SMALL, f"output_root={tmp_path}")
    assert done.code == 0, done.out + done.err


@DRIVER
def test_two_nccl_ranks_on_one_gpu_are_refused_in_one_sentence(tmp_path: Path) -> None:
    ranks = torch.cuda.device_count() + 1
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    done = command(*torchrun, "train.py", *SMALL, "launcher.backend=nccl", "strategy=ddp", f"output_root={tmp_path}")
    assert done.code != 0
    assert "use launcher.backend=gloo" in done.err
