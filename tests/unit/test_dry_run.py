"""The dry run before a run: its result, and that it does not change the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from helpers import losses, resolved, train_here
from lockstep.core.world import World
from lockstep.models import zoo
from lockstep.optim import AdamW
from lockstep.training import build_model, dry_run
from lockstep.training.dry_run import OUT_OF_MEMORY, dry_run_step, training_rate, unless_out_of_memory


@pytest.mark.parametrize(
    ("seconds", "tried", "rate"), [([0.1, 0.5], [8, 64], 64 / 0.5), ([0.2], [8], 8 / 0.2)], ids=["quick", "slow"]
)
def test_the_rate_is_that_of_a_full_micro_batch_unless_it_would_take_long(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], tried: list[int], rate: float
) -> None:
    examples: list[int] = []
    monkeypatch.setattr(dry_run, "dry_run_step", lambda job, world, count: examples.append(count))
    monkeypatch.setattr(dry_run, "_seconds", lambda step, world: seconds[len(examples) - 1])
    assert training_rate(resolved("batch=64"), World.solo()) == rate
    assert examples == tried


@pytest.mark.parametrize(("seconds", "counts"), [([3.0, 0.5], 0.5), ([6.0], 6.0)], ids=["warm", "too long for two"])
def test_the_first_step_of_a_trial_warms_up_and_does_not_count(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], counts: float
) -> None:
    times = iter(seconds)
    monkeypatch.setattr(dry_run, "dry_run_step", lambda job, world, count: None)
    monkeypatch.setattr(dry_run, "timed", lambda step, device: next(times))
    assert training_rate(resolved("batch=8"), World.solo()) == 8 / counts


def test_a_trial_of_one_example_works_where_batch_norm_takes_none() -> None:
    job = resolved("model=test_resnet", "dataset=fake", "dataset.size=16", "batch=1")
    dry_run_step(job, World.solo(), 1)()


def test_a_trial_has_all_that_takes_memory_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []

    def kept(build: Any) -> Any:
        def building(*arguments: Any, **options: Any) -> Any:
            parts.append(build(*arguments, **options))
            return parts[-1]

        return building

    monkeypatch.setattr(AdamW, "build", kept(AdamW.build))
    monkeypatch.setattr(build_model, "EMA", kept(build_model.EMA))
    dry_run_step(resolved("train.ema=0.9"), World.solo(), 2)()
    average, optimizer = parts
    assert all(optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"])
    assert average.n_averaged == 1


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
    networks, build = [], dry_run.build_network

    def building(*arguments: Any) -> Any:
        networks.append(build(*arguments))
        return networks[-1]

    monkeypatch.setattr(dry_run, "build_network", building)
    for until in ("train.freeze_until=50%", "train.freeze_until=null"):
        dry_run_step(resolved("train.freeze=[backbone]", until), World.solo(), 2)()
    thawed, frozen = [len(network.optimizer.state) for network in networks]
    assert (thawed, frozen) == (len(list(networks[0].model.parameters())), 2)


def test_a_trial_needs_no_published_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    job = resolved("model=test_resnet", "model.pretrained=true", "dataset=fake", "dataset.size=32")
    monkeypatch.setattr(zoo, "published_weights", None)
    dry_run_step(job, World.solo(), 2)()


def fails(error: Exception) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


@pytest.mark.parametrize("words", OUT_OF_MEMORY)
def test_each_library_says_in_its_words_that_memory_ran_out(words: str) -> None:
    assert unless_out_of_memory(fails(RuntimeError(f"an error: {words}."))) is None


def test_another_error_of_a_trial_is_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        unless_out_of_memory(fails(RuntimeError("the shapes do not fit")))


def test_a_trial_leaves_the_threads_as_they_were() -> None:
    with dry_run.trial(torch.device("cpu")):
        torch.set_num_threads(2)
    assert torch.get_num_threads() == 1


def test_a_model_that_is_compiled_is_not_tried() -> None:
    assert training_rate(resolved("model.compile=true"), World.solo()) is None


def test_a_trial_leaves_the_random_numbers_of_the_run_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    training_rate(resolved("model.dropout=0.5", "train.ema=0.9"), World.solo())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_whose_workers_were_chosen_by_trials_is_the_run_without_them_and_keeps_their_number(
    tmp_path: Path,
) -> None:
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
