"""Mixing examples with their partners: the same whatever the ranks and the micro-batches."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from lockstep.data import rng
from lockstep.data.augment import CropFlip
from lockstep.data.loader import Loader, Resident
from lockstep.data.mix import Mix, beta_quantiles
from lockstep.data.pipeline import Pipeline
from lockstep.data.sources import Digits
from lockstep.plan import Plan
from lockstep.world import World

CPU = torch.device("cpu")
PLAN = Plan(examples=1442, batch=61, total_steps=26, micro_batches=1, log_every=1, eval_every=1, save_every=1)


def mixed(ranks: int, micro_batches: int, *, mixup: float, cutmix: float) -> list[tuple[Tensor, Tensor]]:
    """Pixels and targets of each global batch as so many ranks see them together."""
    source, steps = Digits(), []
    mix = Mix.of(mixup=mixup, cutmix=cutmix, classes=10, device=CPU)
    pipeline = Pipeline.of(
        source, CropFlip(pad=1), device=CPU, dtype=torch.float32, channels_last=False, seed=5, mix=mix
    )
    runs = []
    for rank in range(ranks):
        world = World(rank=rank, local_rank=rank, size=ranks, local_size=ranks, device=CPU)
        split, held_out = source.train(), source.eval()
        loader = Loader(
            world=world,
            plan=PLAN,
            seed=5,
            eval_batch=100,
            train_labels=split.labels,
            eval_labels=held_out.labels,
            train_feed=Resident().feed(split, world, once=True),
            eval_feed=Resident().feed(held_out, world, once=False),
            partners=mix is not None,
        )
        runs.append(
            [[pipeline.train(micro) for micro, _ in shard.micro_batches(micro_batches)] for shard in loader.train(0)]
        )
    for pieces in zip(*runs, strict=True):
        together = [piece for rank in pieces for piece in rank if len(piece[0])]
        steps.append((torch.cat([images for images, _ in together]), torch.cat([targets for _, targets in together])))
    return steps


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_ranks_and_micro_batches_mix_alike_to_the_bit(mixup: float, cutmix: float) -> None:
    expected = mixed(1, 1, mixup=mixup, cutmix=cutmix)
    for ranks, micro_batches in ((1, 4), (2, 1), (3, 4), (4, 1)):
        found = mixed(ranks, micro_batches, mixup=mixup, cutmix=cutmix)
        for (images, targets), (same_images, same_targets) in zip(found, expected, strict=True):
            assert torch.equal(images, same_images)
            assert torch.equal(targets, same_targets)


def test_mixup_adds_the_next_image_and_its_class_by_one_share() -> None:
    mix = Mix.of(mixup=1.0, cutmix=0, classes=3, device=CPU)
    assert mix is not None
    images = torch.tensor([0.0, 1.0, 0.0]).view(3, 1, 1, 1).expand(3, 1, 4, 4)
    keys = rng.sample_keys(0, 0, torch.arange(2), rng.MIX)
    pixels, targets = mix.apply(images, keys, torch.tensor([0, 1]), torch.tensor([1, 2]))
    share = pixels[:, 0, 0, 0]
    assert torch.equal(pixels, share.view(2, 1, 1, 1).expand(2, 1, 4, 4))
    torch.testing.assert_close(targets, torch.tensor([[1 - share[0], share[0], 0], [0, share[1], 1 - share[1]]]))


def test_cutmix_puts_a_box_of_the_next_image_and_counts_its_pixels() -> None:
    mix = Mix.of(mixup=0, cutmix=1.0, classes=2, device=CPU)
    assert mix is not None
    keys = rng.sample_keys(0, 0, torch.arange(500), rng.MIX)
    first, second = torch.zeros(500, dtype=torch.int64), torch.ones(500, dtype=torch.int64)
    images = torch.cat([torch.zeros(1, 1, 16, 12), torch.ones(500, 1, 16, 12)])
    pixels, targets = mix.apply(images, keys, first, second)
    area = pixels[0].mean()  # only the first image is dark, and has a bright neighbour
    torch.testing.assert_close(targets[:1], torch.tensor([[1 - area, area]]))
    halves = torch.cat([torch.zeros(250, 1, 16, 12), torch.ones(251, 1, 16, 12)])
    pixels, targets = mix.apply(halves, keys, first, second)
    assert set(pixels.unique().tolist()) <= {0.0, 1.0}
    assert torch.allclose(targets.sum(1), torch.ones(500))


def test_the_quantiles_are_those_of_the_beta_distribution() -> None:
    for alpha in (0.1, 0.2, 1.0, 2.0):
        numbers = rng.uniform(rng.sample_keys(1, 0, torch.arange(20_000)), 0)
        table = beta_quantiles(alpha)
        place = numbers * (len(table) - 1)
        found = torch.lerp(table[place.long()], table[place.long() + 1], place - place.long())
        expected = torch.from_numpy(stats.beta(alpha, alpha).ppf(numbers.double().numpy())).float()
        assert (found - expected).abs().max() < 0.006
        assert (found - expected).abs().mean() < 2e-4
        if alpha >= 1:  # below, many are so near to 0 or 1 that float32 has one number for them
            assert stats.kstest(found.numpy(), stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def test_both_kinds_are_taken_evenly() -> None:
    mix = Mix.of(mixup=1.0, cutmix=1.0, classes=2, device=CPU)
    assert mix is not None
    keys = rng.sample_keys(0, 0, torch.arange(4000), rng.MIX)
    labels = torch.zeros(4000, dtype=torch.int64)
    images = torch.arange(2.0).repeat(2001)[:4001].view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    pixels, _ = mix.apply(images, keys, labels, labels)
    blended = ((pixels > 0) & (pixels < 1)).flatten(1).any(1).float().mean()
    assert 0.46 < blended < 0.54


def test_nothing_is_mixed_by_default() -> None:
    assert Mix.of(mixup=0.0, cutmix=0.0, classes=10, device=CPU) is None
