"""Mixup and CutMix: the same pixels and targets as a plain loop, to the bit, however a global batch is cut."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import betaincinv
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from lockstep.core import rng
from lockstep.core.data_protocols import Shard
from lockstep.core.plan import Plan
from lockstep.core.rng import MIX, MIX_BATCH, permutation, sample_keys, uniform
from lockstep.core.world import World
from lockstep.data.datasets.builtin import Digits
from lockstep.data.loading.loaders import Resident, Streaming
from lockstep.data.loading.shards import IGNORE_INDEX, Loader
from lockstep.data.transforms.augment import CropFlip
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.data.transforms.mixing import Mix, beta, box
from lockstep.losses import CrossEntropy, MaskedLoss
from lockstep.precision import FP32, FP64

pytestmark = pytest.mark.numerics

# An epoch has two batches of ten examples and one of three; the fourth step belongs to the second epoch.
PLAN = Plan(examples=23, batch=10, total_steps=4, micro_batches=1, log_every=1, eval_every=1, save_every=1)
KINDS = {"mixup": (0.4, 0.0), "cutmix": (0.0, 1.0), "both": (0.4, 1.0)}
REFERENCES: dict[str, Any] = {"mixup": v2.MixUp, "cutmix": v2.CutMix}
OPTIONS: list[dict[str, Any]] = [{"by": "batch"}, {"prob": 0.6, "switch": 0.8, "until": 3}]
SEED = 5


def transforms(mix: Mix | None, precision: FP32 | None = None) -> DeviceTransforms:
    form: Any = {"device": torch.device("cpu"), "precision": precision or FP32(), "seed": SEED}
    return DeviceTransforms.of(Digits().preprocessing, CropFlip(), mix=mix, **form)


def mixing(kind: str, **options: Any) -> Mix:
    mixup, cutmix = KINDS[kind]
    return Mix(classes=10, mixup=mixup, cutmix=cutmix, **options)


def plain_loop(mix: Mix, precision: FP32, step: int) -> tuple[Tensor, Tensor]:
    """The images and targets of a global batch, one example after another."""
    split, epoch = Digits().train(), PLAN.epoch(step)
    start = PLAN.position(step) * PLAN.batch
    batch = permutation(SEED, epoch, PLAN.examples)[start : start + PLAN.batch]

    def augmented(index: Tensor) -> Tensor:
        return transforms(None, precision).augmented(split.images[index][None], epoch, index[None])[0]

    images, targets = [], []
    for index, following in zip(batch, [*batch[1:], batch[0]], strict=True):
        image, partner = augmented(index), augmented(following)
        key = sample_keys(SEED, epoch, index, MIX)
        if mix.by == "batch":
            key = torch.tensor(rng.key(SEED, MIX_BATCH, step))
        cuts = uniform(key, 1) < mix.switch if mix.mixup and mix.cutmix else bool(mix.cutmix)
        share = beta(uniform(key, 0), mix.cutmix if cuts else mix.mixup)
        if step > mix.until or uniform(key, 4) >= mix.prob:
            share = torch.tensor(1.0)
        if cuts:
            side = int((1 - share).sqrt() * 8) // 2
            row, column = int(uniform(key, 2) * 8), int(uniform(key, 3) * 8)
            rows, columns = (slice(max(0, at - side), min(8, at + side)) for at in (row, column))
            share = torch.tensor(1 - (rows.stop - rows.start) * (columns.stop - columns.start) / 64)
            image = image.clone()
            image[:, rows, columns] = partner[:, rows, columns]
        else:
            image = share.to(precision.sums) * image + (1 - share.to(precision.sums)) * partner
        one, two = (F.one_hot(split.labels[position], 10).to(precision.sums) for position in (index, following))
        images.append(image)
        targets.append(share.to(precision.sums) * one + (1 - share.to(precision.sums)) * two)
    return torch.stack(images), torch.stack(targets)


def shards(path: DeviceTransforms, ranks: int, loader: Resident | Streaming, rank: int) -> list[Shard]:
    world = World(rank=rank, local_rank=rank, size=ranks, local_size=ranks, device=torch.device("cpu"))
    split = Digits().train()
    feed = loader.feed(split, world)
    data: Any = {"train_labels": split.labels, "eval_labels": split.labels, "eval_feed": feed, "eval_batch": 4}
    data_loader = Loader(world=world, plan=PLAN, seed=SEED, train_feeds={0: feed}, partners=True, stride=3, **data)
    return list(path.train(data_loader.train(after=0)))


@pytest.mark.parametrize("precision", [FP32(), FP64()], ids=repr)
@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in KINDS), *(("both", one) for one in OPTIONS)])
def test_every_piece_of_every_cut_has_the_pixels_and_targets_of_the_plain_loop(
    kind: str, options: dict[str, Any], precision: FP32
) -> None:
    mix = mixing(kind, **options)
    expected = [plain_loop(mix, precision, step) for step in range(1, 5)]
    path = transforms(mix, precision)
    for ranks, parts, loader in [
        *((ranks, parts, Resident()) for ranks in (1, 2, 3, 4) for parts in (1, 4)),
        (3, 4, Streaming(workers=0)),
    ]:
        by_rank = [shards(path, ranks, loader, rank) for rank in range(ranks)]
        for step, whole in enumerate(expected):
            pieces = [path.mixed(micro) for shards in by_rank for micro, _ in shards[step].micro_batches(parts)]
            for place in (0, 1):
                assert all(piece[place].dtype == precision.dtype for piece in pieces)
                assert torch.equal(torch.cat([piece[place] for piece in pieces]), whole[place])


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_a_batch_is_mixed_as_torchvision_mixes_it_with_the_same_share_and_centre(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels, reference = torch.rand(6, 3, 8, 8), torch.arange(6), REFERENCES[kind](num_classes=10)
    for key in rng.draw(0, torch.arange(20)):
        reference._dist = SimpleNamespace(sample=lambda _, key=key: beta(uniform(key, 0), max(KINDS[kind])))
        centre = iter([(uniform(key, n) * 8).long()[None] for n in (3, 2)])
        monkeypatch.setattr(torch, "randint", lambda *_, centre=centre, **__: next(centre))
        # torchvision's partner is the example before, ours the next one.
        expected = [tensor.flip(0) for tensor in reference(images.flip(0), labels.flip(0))]
        with_partner = [torch.cat([tensor, tensor[:1]]) for tensor in (images, labels)]
        mixed = mixing(kind, by="batch").apply(*with_partner, key.expand(7))
        assert all(torch.equal(*pair) for pair in zip(mixed, expected, strict=True))


def test_without_mixing_the_targets_are_the_labels() -> None:
    shard = shards(transforms(None), 1, Resident(), 0)[0]
    assert torch.equal(transforms(None).mixed(shard)[1], shard.labels)


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_without_examples_has_a_loss_of_zero(kind: str) -> None:
    path = transforms(mixing(kind))
    last = shards(path, 4, Resident(), 0)[2]
    assert not last.mix_partner
    empty = [micro for micro, _ in last.micro_batches(4) if not len(micro.labels)]
    assert empty
    images, targets = path.mixed(empty[0])
    logits = images.flatten(1) @ torch.ones(64, 10, requires_grad=True)
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.1)
    loss.backward()
    assert (images.shape, targets.shape, loss.item()) == ((0, 1, 8, 8), (0, 10), 0)


@pytest.mark.parametrize(("alpha", "accuracy"), [(0.2, 1e-6), (0.5, 1e-6), (1.0, 1e-7), (2.0, 5e-3)])
def test_shares_are_the_quantiles_of_their_numbers(alpha: float, accuracy: float) -> None:
    points = torch.arange(2**16) / 2**16
    exact = betaincinv(alpha, alpha, points.double().numpy())
    assert np.abs(beta(points, alpha).double().numpy() - exact).max() < accuracy


@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_shares_are_on_the_device_of_their_numbers(alpha: float) -> None:
    shares = beta(torch.zeros(3, device="meta"), alpha)
    assert (shares.device.type, shares.shape) == ("meta", (3,))


def test_boxes_have_their_area_and_lie_everywhere() -> None:
    keys = sample_keys(0, 0, torch.arange(20_000), MIX)
    share = torch.full((20_000,), 0.75)
    boxes = box(share, keys, 20, 30)
    areas = boxes.sum((1, 2))
    # Half of each side, rounded down to an even number: 10 by 14, and less at the border.
    assert areas.max() == 10 * 14
    assert areas.min() >= 5 * 7
    assert (areas == 140).double().mean().item() == pytest.approx(11 / 20 * 17 / 30, abs=0.02)
    # The centre is uniform, so the probability that a pixel is covered is the share of centres near enough to it.
    covered = boxes.double().mean(0)
    assert covered[10, 15].item() == pytest.approx(10 / 20 * 14 / 30, abs=0.02)
    assert covered[0, 0].item() == pytest.approx(6 / 20 * 8 / 30, abs=0.02)


def test_with_both_on_half_of_the_samples_take_each() -> None:
    images, keys = torch.rand(4001, 1, 8, 8) + torch.arange(4001)[:, None, None, None], torch.arange(4001)
    mixed, _ = mixing("both").apply(images, torch.zeros(4001, dtype=torch.int64), sample_keys(0, 0, keys, MIX))
    # With CutMix each pixel equals that of one of the two images; with mixup that happens only for tiny shares.
    cut = ((mixed == images[:-1]) | (mixed == images[1:])).all((1, 2, 3))
    assert cut.double().mean().item() == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_image_has_no_weight_and_leaves_the_sample_before_it_alone(kind: str, smoothing: float) -> None:
    labels = torch.tensor([1, 2, IGNORE_INDEX, IGNORE_INDEX, 3, 4])
    images = torch.rand(6, 1, 8, 8, dtype=torch.float64)
    mix = mixing(kind)
    loss = MaskedLoss(CrossEntropy(label_smoothing=smoothing).build(10, torch.empty(0)), tolerates_broken=True)
    mixed, targets = mix.apply(images, labels, sample_keys(0, 0, torch.arange(6), MIX))
    assert torch.equal(mixed[1], images[1])
    assert torch.equal(targets[1], F.one_hot(labels[1], 10).double())
    logits = torch.randn(5, 10, dtype=torch.float64, requires_grad=True)
    loss.counted(loss(logits, targets), labels[:-1]).sum().backward()
    assert logits.grad is not None
    assert (logits.grad.abs().amax(1) > 1e-15).tolist() == [True, True, False, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_the_targets_of_oblong_images_of_several_labels_are_the_shares_of_their_pixels(kind: str) -> None:
    number = torch.arange(41)
    images = (number % 2).double()[:, None, None, None].expand(-1, 2, 6, 20)  # black ones and white ones in turn
    labels = torch.stack([number % 2, 1 - number % 2, torch.ones(41)], 1).double()
    mix = Mix(classes=3, **dict(zip(("mixup", "cutmix"), KINDS[kind], strict=True)))
    mixed, targets = mix.apply(images, labels, sample_keys(0, 0, number, MIX))
    torch.testing.assert_close(targets[:, 0], mixed.mean((1, 2, 3)))
    torch.testing.assert_close(targets[:, 0] + targets[:, 1], torch.ones(40, dtype=torch.float64))
    assert torch.equal(targets[:, 2], torch.ones(40, dtype=torch.float64)), "a label of both"
    assert (targets[:, 0] % 1 != 0).any()
