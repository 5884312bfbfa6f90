"""The code that only a run on a GPU takes, on GPUs that are only pretended: see `pretended_gpu`.

Here are also the tests of tests/gpu, all at once.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import pretended_gpu
from helpers import FAKE, NARROW, ROOT, Done, command, first_on_path, forked, losses, train, tree

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
SHORT = ("telemetry.interval=1", "train.eval_every=100%", "telemetry.report=never", "optimizer=sgd")
SMALL = (NARROW, *FAKE, "dataset.examples=160")


def on_gpu(folder: Path, *overrides: str) -> str:
    """Train on the pretended GPU; returns what the command prints."""
    words = (f"hydra.run.dir={folder}", f"output_root={folder.parent}", "launcher.threads=1", *SHORT, *overrides)
    done = forked("pretended_gpu:train", "device=cuda", "launcher=inline", *words, PRETENDED_GPUS="1")
    assert done.code == 0, done.err
    return done.out


def on_cpu(folder: Path, *overrides: str) -> list[float]:
    """The losses of the same run on the CPU."""
    words = (f"hydra.run.dir={folder}", f"output_root={folder.parent}", "launcher.threads=1", *SHORT, *overrides)
    done = train("device=cpu", *words)
    assert done.code == 0, done.err
    return losses(folder)


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer=adamw", "model=digitnet", "train.clip_norm=1.0", "train.ema=0.9", "metric=[f1]"),
        ("precision=bf16", "train.micro_batches=3", "train.cutmix=1.0", "train.cutout=2", "telemetry.samples=true"),
        ("precision=bf16_pure", "model.channels_last=true", "loader=streaming", "loader.workers=1"),
        ("precision=fp64", "optimizer=muon", "augment=randaugment", "repro=strict"),
        ("task=multilabel",),
        ("task=regression", "train.ema=0.9"),
    ],
)
def test_a_run_on_a_gpu_takes_the_steps_of_the_cpu(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    out = on_gpu(tmp_path / "gpu", *SMALL, "steps=5", *overrides)
    assert f"1 process on {pretended_gpu.NAME}" in " ".join(out.split())
    assert losses(tmp_path / "gpu") == on_cpu(tmp_path / "cpu", *SMALL, "steps=5", *overrides)
    summary = json.loads((tmp_path / "gpu" / "summary.json").read_text())
    assert summary["gpu_memory"] == 2**30


def test_images_of_files_are_copied_ahead_and_fp16_scales_its_loss(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 40, 40, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        path = tmp_path / "photos" / ("train", "val")[number % 4 == 3] / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    words = ("dataset=folder", f"dataset.path={tmp_path}/photos", "dataset.decode_size=32", "loader=streaming")
    on_gpu(tmp_path / "gpu", NARROW, *words, "batch=6", "steps=4", "precision=fp16")
    lines = [json.loads(line) for line in (tmp_path / "gpu" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss/train" in line] == [1, 2, 3, 4]
    assert lines[0]["optim/scale"] > 1


def test_no_step_and_no_log_point_waits_for_the_device(tmp_path: Path) -> None:
    words = (*SMALL, "checkpoint.every=100%", "telemetry.gpu=false")
    outs = [on_gpu(tmp_path / str(steps), *words, f"steps={steps}") for steps in (12, 18)]  # one timed step each
    few, many = (int(re.findall(r"waits: (\d+)", out)[0]) for out in outs)
    assert few == many


def test_all_copies_ahead_of_a_run_share_a_stream(tmp_path: Path) -> None:
    out = on_gpu(tmp_path / "run", *SMALL, "steps=4", "loader=streaming", "train.eval_every=1")
    assert "streams: 1" in out.splitlines()


def test_the_memory_of_a_run_is_its_own_peak_and_not_of_trials_before_it(tmp_path: Path) -> None:
    on_gpu(tmp_path / "run", *SMALL, "steps=2", "train.micro_batches=auto")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["gpu_memory"] == 2**30


@pytest.mark.slow
def test_a_resume_on_a_gpu_is_the_run_that_was_not_stopped(tmp_path: Path) -> None:
    on_gpu(tmp_path / "whole", *SMALL, "steps=8", "schedule=constant")
    on_gpu(tmp_path / "cut", *SMALL, "steps=4", "schedule=constant")
    done = forked(
        "pretended_gpu:train", f"resume={tmp_path}/cut", "steps=8", f"output_root={tmp_path}", PRETENDED_GPUS="1"
    )
    assert done.code == 0, done.err
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def pretending(folder: Path) -> dict[str, str]:
    """The variables of a process that has pretended GPUs, as all processes have that it starts."""
    (folder / "sitecustomize.py").write_text("import pretended_gpu\npretended_gpu.plug_in()\n")
    return {"PYTHONPATH": f"{folder}:{first_on_path(Path(__file__).parents[1])}"}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_all_that_needs_a_gpu_works_on_a_pretended_one_except_what_the_documents_name(tmp_path: Path) -> None:
    words = ("-q", "-rs", "-n", "0", "-p", "no:cacheprovider", "tests/gpu")
    done = command(sys.executable, "-m", "pytest", *words, timeout=3000, PRETENDED_GPUS="1", **pretending(tmp_path))
    assert done.code == 0, done.out[-20_000:] + done.err
    skipped = Counter[str]()
    for number, reason in re.findall(r"^SKIPPED \[(\d+)\] \S+ (.*)", done.out, re.M):
        skipped[reason] += int(number)
    section = (ROOT / "docs" / "performance.md").read_text().partition("| left out | tests |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.*?) \| (\d+) \|", section, re.M)
    assert skipped == {reason: int(number) for reason, number in rows}


@pytest.mark.slow
def test_two_gpus_have_a_rank_each_and_the_steps_of_two_ranks_of_the_cpu(tmp_path: Path) -> None:
    job = (*SMALL, "steps=5", "strategy=allreduce")  # the ranks are fresh, and DDP would import a compiler
    words = ("device=cuda", *SHORT, *job, "launcher.threads=1")
    where = (f"hydra.run.dir={tmp_path}/gpu", f"output_root={tmp_path}")
    done = forked("pretended_gpu:train", *words, *where, PRETENDED_GPUS="2", **pretending(tmp_path))
    assert done.code == 0, done.err
    assert f"2 processes on 2 x {pretended_gpu.NAME} by AllReduce" in " ".join(done.out.split())
    assert losses(tmp_path / "gpu") == on_cpu(tmp_path / "cpu", *job, "launcher.ranks=2")


@pytest.mark.slow
def test_an_evaluation_on_two_gpus_is_the_one_on_one_gpu_to_the_bit(tmp_path: Path) -> None:
    run, gpus = tmp_path / "run", {"PRETENDED_GPUS": "2", **pretending(tmp_path)}
    on_gpu(run, *SMALL, "steps=2", "train.eval_batch=16", "metric=f1")

    def evaluated(ranks: int) -> Done:
        (out := tmp_path / str(ranks)).mkdir()
        words = ("evaluate", str(run), "device=cuda", f"launcher.ranks={ranks}", "--out", str(out))
        return command(sys.executable, "-m", "lockstep", *words, **gpus)

    assert [evaluated(1).code, evaluated(2).code] == [0, 0]
    assert tree(tmp_path / "1") == tree(tmp_path / "2")
    assert "this machine has 2 GPUs, and each rank needs one; use launcher.ranks=2" in evaluated(3).err
