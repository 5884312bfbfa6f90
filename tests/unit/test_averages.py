"""Stochastic weight averaging: the mean is torch's, of the weights that it should be of, with torch's statistics."""

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_swa_multi_avg_fn, update_bn

from helpers import records, refusal, resolved, train_here
from lockstep.core.plan import Averaging
from lockstep.core.world import World
from lockstep.training.averages import EMA, SWA, build_average
from lockstep.training.resolved_job import plan_of
from thread_ranks import ThreadRanks


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5)
    return nn.Sequential(*layers)


def averaged(model: nn.Module) -> tuple[SWA, AveragedModel]:
    """Ours and torch's average of three sets of weights of `model`."""
    ours, theirs = SWA(model, None, Averaging(1, 1, 3)), AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn())
    for _ in range(3):
        for parameter in model.parameters():
            parameter.data.uniform_(0.5, 2)
        ours.update_parameters(model)
        theirs.update_parameters(model)
    return ours, theirs


def test_the_plain_mean_is_that_of_torch_to_the_bit() -> None:
    ours, theirs = averaged(network())
    # In float32: torch's own weight of an update is in float32, also for weights in float64.
    pairs = zip(ours.module.parameters(), theirs.module.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_statistics_of_averaged_weights_are_those_of_torch() -> None:
    ours, theirs = (average.double() for average in averaged(network()))
    blocks = [torch.randn(8, 3, 6, 6, dtype=torch.float64) for _ in range(5)]
    update_bn(blocks, theirs.module)
    ours.renew_statistics((), [*blocks, torch.zeros_like(blocks[0])], 5, nn.Module.__call__, World.solo())
    for name, tensor in theirs.module.state_dict().items():
        torch.testing.assert_close(ours.module.state_dict()[name], tensor, rtol=1e-12, atol=0)


def test_a_frozen_batch_norm_keeps_its_statistics() -> None:
    model = network()
    ours, _ = averaged(model)
    before = {name: buffer.clone() for name, buffer in ours.module.named_buffers()}
    ours.renew_statistics((model[1],), [torch.randn(8, 3, 6, 6)], 1, nn.Module.__call__, World.solo())
    same = [name for name, buffer in ours.module.named_buffers() if torch.equal(buffer, before[name])]
    assert same == [name for name in before if name.startswith("1.")]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("size", [2, 3])
def test_the_statistics_have_the_same_bits_on_any_number_of_ranks(
    size: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = [torch.randn(8, 3, 6, 6, generator=generator) for _ in range(6)]
    rounds = -(-number // size)

    def buffers_of(world: World) -> dict[str, torch.Tensor]:
        ours, _ = averages[world.rank]
        own = blocks[world.rank :: world.size][: rounds if world.size > 1 else number]
        ours.renew_statistics((), own, number, nn.Module.__call__, world)
        return dict(ours.module.named_buffers())

    averages = [averaged(network()) for _ in range(size)]
    of_ranks = ThreadRanks(size, monkeypatch).run(buffers_of)
    averages = [averaged(network())]
    alone = buffers_of(World.solo())
    assert alone["1.num_batches_tracked"] == number
    for own in of_ranks:
        assert [name for name, buffer in own.items() if not torch.equal(buffer, alone[name])] == []


def test_a_batch_norm_without_running_statistics_has_none_to_renew() -> None:
    torch.manual_seed(0)
    ours, _ = averaged(
        nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))
    )
    assert [norm for norm, _ in ours.norms] == [ours.module[2]]
    ours.renew_statistics((), [torch.randn(8, 3, 4, 4)], 1, nn.Module.__call__, World.solo())
    assert ours.module[2].num_batches_tracked == 1


def test_an_average_whose_norms_are_all_frozen_reads_no_image() -> None:
    model = network()
    ours, _ = averaged(model)
    blocks = iter([torch.randn(8, 3, 6, 6)])
    ours.renew_statistics((model[4], model[1]), blocks, 1, nn.Module.__call__, World.solo())
    assert next(blocks, None) is not None


def test_nothing_is_dropped_while_the_statistics_are_computed_and_each_module_has_its_mode_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm2d(3), nn.Dropout(0.5))
    ours = SWA(model, None, Averaging(1, 1, 3))
    modes = [True, False, True, False]
    for module, training in zip(ours.module.modules(), modes, strict=True):
        module.training = training
    images = torch.randn(8, 3, 6, 6)
    ours.module[1].running_mean.fill_(7)
    gradients = list[bool]()

    def forward(module: nn.Module, block: torch.Tensor) -> None:
        gradients.append(torch.is_grad_enabled())
        module(block)

    ours.renew_statistics((), [images], 1, forward, World.solo())
    assert gradients == [False]
    torch.testing.assert_close(ours.module[1].running_mean, images.mean((0, 2, 3)))
    torch.testing.assert_close(ours.module[1].running_var, images.transpose(0, 1).flatten(1).var(1))
    assert [module.training for module in ours.module.modules()] == modes


def test_a_buffer_with_one_infinite_number_is_copied_and_its_counter_is_no_mean() -> None:
    model = nn.BatchNorm1d(2)
    model.register_buffer("bounds", torch.tensor([0.0, torch.inf]))
    average = EMA(model, 0.5)
    for number in (2.0, 4.0):
        model.bounds[0] = model.running_mean[0] = model.num_batches_tracked[...] = number
        average.update_parameters(model)
    own = average.module.state_dict()
    assert own["bounds"].tolist() == [4, torch.inf]
    assert (own["running_mean"][0], own["num_batches_tracked"]) == (3, 4)


@pytest.mark.parametrize("warmup", [True, False])
def test_the_average_of_a_job_has_its_decay_its_steps_and_its_images(warmup: bool) -> None:
    def average_of(*words: str) -> EMA:
        job = resolved(*JOB, *words)
        return build_average(job, plan_of(job, 50), model, copy.deepcopy(model))

    model = network()
    ema = average_of("train.ema=0.75", "train.ema_every=3", f"train.ema_warmup={warmup}")
    assert (type(ema), ema.steps, ema.start) == (EMA, None, 1)
    assert [ema.due(step) for step in range(1, 8)] == [True, False, False, True, False, False, True]
    assert [ema.share(update) for update in (1, 2, 50)] == pytest.approx([1, 1 - 3 / 12 if warmup else 0.25, 0.25])
    mean = average_of("train.swa_from=6", "train.swa_every=2", "train.swa_images=40")
    assert (type(mean), mean.steps, mean.start, mean.images) == (SWA, Averaging(6, 2, 12), 6, 40)
    assert [step for step in range(1, 13) if mean.due(step)] == [6, 8, 10, 12]
    assert [mean.share(update) for update in (1, 2, 4)] == [1, 1 / 2, 1 / 4]
    assert [norm for norm, _ in mean.norms] == [mean.module[1], mean.module[4]]
    assert [of_model for _, of_model in mean.norms] == [model[1], model[4]]


FAKE = ("dataset=fake", "dataset.examples=50", "dataset.size=16", "dataset.classes=4", "model=test_resnet")
JOB = (*FAKE, "precision=fp64", "batch=20", "epochs=4", "optimizer=sgd", "optimizer.lr=0.05", "augment=none")


def test_a_run_averages_its_last_share_and_evaluates_the_average(tmp_path: Path) -> None:
    words = ("train.swa_from=6", "train.swa_every=2", "steps=11", "checkpoint.every=1", "checkpoint.keep=20")
    run = train_here(tmp_path / "run", *JOB, *words, "train.eval_batch=16")
    folders = {step: run.checkpoints / f"step-{step:08d}" for step in range(1, 12)}
    assert [step for step, folder in folders.items() if (folder / "ema.safetensors").exists()] == [*range(6, 12)]
    sets = [load_file(folders[step] / "model.safetensors") for step in (6, 8, 10, 11)]
    average = load_file(folders[11] / "ema.safetensors")
    for name in (name for name in average if name.endswith(("weight", "bias"))):
        mean = torch.stack([weights[name] for weights in sets]).mean(0)
        torch.testing.assert_close(average[name], mean, rtol=1e-12, atol=1e-15)
    assert average["bn1.num_batches_tracked"] == 3  # whole blocks of 16 of the 50 images
    assert [line["step"] for line in records(run) if "loss/val_ema" in line] == [6, 9, 11]


def test_a_best_score_at_the_first_averaged_step_is_said_to_be_of_the_average(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_here(tmp_path / "run", *JOB, "train.swa_from=3", "steps=3", "train.eval_every=100%")
    assert re.search(r"best \S+ .*of the averaged weights at step 3 ", capsys.readouterr().out)


def test_an_average_that_never_begins_is_refused(tmp_path: Path) -> None:
    says = "train.swa_from is 21ep, step 483, but the run has 460 steps, so nothing is averaged"
    assert says in refusal(tmp_path / "outputs", "train.swa_from=21ep")
