"""The trainer is the textbook's loop: a plain loop over the same batches gives the same losses and the same weights.

The first loop uses nothing of Lockstep except the images and the order of the examples: the network, the schedule,
the optimizer, the clipping, the average and the loss are written out again, from their papers. In float64: twenty
steps of float32 make a thousandth of the last bit of the first, on one CPU more than on another.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from helpers import NARROW, built, losses, records, train_here, weights
from lockstep.core import rng
from lockstep.stochastic import KeyedModel, key_draws

pytestmark = pytest.mark.numerics

STEPS, BATCH, WARMUP, RATE, FINAL, DECAY, SMOOTHING, CLIP, EMA = 12, 200, 4, 0.05, 0.1, 0.02, 0.1, 2.0, 0.8
MOMENTUM, PIECES = 0.9, 3
# So large because a bias in front of a group norm has no gradient except for rounding errors, which a small one turns
# into whole steps.
EPS = 1e-3
JOB = (
    f"batch={BATCH}",
    f"steps={STEPS}",
    "model=digitnet",
    "model.width=8",
    "model.dropout=0",
    "precision=fp64",
    "augment=none",
    "schedule=cosine",
    f"schedule.warmup={WARMUP}",
    f"schedule.final={FINAL}",
    f"loss.label_smoothing={SMOOTHING}",
    f"optimizer.lr={RATE}",
    f"optimizer.weight_decay={DECAY}",
    f"train.micro_batches={PIECES}",
    f"train.clip_norm={CLIP}",
    f"train.ema={EMA}",
    "train.eval_every=100%",
)


def digitnet() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
    layers.insert(6, nn.MaxPool2d(2))
    layers += [nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Identity(), nn.Linear(128, 10)]
    return nn.Sequential(*layers)


def rate(step: int) -> float:
    """A line up to the base rate at step WARMUP, then half a cosine, which reaches FINAL a step after the end."""
    if step <= WARMUP:
        return RATE * step / WARMUP
    angle = math.pi * (step - WARMUP - 1) / (STEPS - WARMUP)
    return RATE * (FINAL + (1 - FINAL) * (1 + math.cos(angle)) / 2)


class PlainSGD:
    """Momentum, and weight decay of matrices and filters alone."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.momenta = [torch.zeros_like(parameter) for parameter in parameters]

    def step(self, parameters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
        for parameter, gradient, momentum in zip(parameters, gradients, self.momenta, strict=True):
            decay = DECAY if parameter.dim() > 1 else 0.0
            momentum.mul_(MOMENTUM).add_(gradient + decay * parameter)
            parameter.sub_(lr * momentum)


class PlainAdamW:
    """Loshchilov and Hutter 2019, algorithm 2, with the betas of torch."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.count = 0
        self.first = [torch.zeros_like(parameter) for parameter in parameters]
        self.second = [torch.zeros_like(parameter) for parameter in parameters]

    def step(self, parameters: list[Tensor], gradients: list[Tensor], lr: float) -> None:
        self.count += 1
        for parameter, gradient, first, second in zip(parameters, gradients, self.first, self.second, strict=True):
            parameter.mul_(1 - lr * (DECAY if parameter.dim() > 1 else 0.0))
            first.mul_(0.9).add_(0.1 * gradient)
            second.mul_(0.999).add_(0.001 * gradient.square())
            mean, square = first / (1 - 0.9**self.count), second / (1 - 0.999**self.count)
            parameter.sub_(lr * mean / (square.sqrt() + EPS))


def smoothed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum of the cross-entropies to targets of which SMOOTHING is spread over all classes."""
    targets = torch.full_like(logits, SMOOTHING / 10)
    targets[torch.arange(len(labels)), labels] += 1 - SMOOTHING
    return -(targets * (logits - logits.logsumexp(1, keepdim=True))).sum()


@pytest.mark.parametrize(
    ("optimizer", "plain"),
    [
        (("optimizer=sgd", f"optimizer.momentum={MOMENTUM}"), PlainSGD),
        (("optimizer=adamw", f"optimizer.eps={EPS}"), PlainAdamW),
    ],
    ids=["sgd", "adamw"],
)
def test_a_run_is_the_plain_loop_over_the_same_batches(
    tmp_path: Path, optimizer: tuple[str, ...], plain: type[PlainSGD | PlainAdamW]
) -> None:
    run = train_here(tmp_path / "run", *optimizer, *JOB)

    source = built(*JOB).dataset
    split, val = source.train(), source.eval()
    pixels, val_pixels = ((part.images.double() / 255 - source.mean[0]) / source.std[0] for part in (split, val))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = digitnet().double()
    parameters = [parameter.detach() for parameter in model.parameters()]
    average, rule = [], plain(parameters)
    expected, norms = [], []
    for step in range(1, STEPS + 1):
        epoch, position = divmod(step - 1, math.ceil(len(split) / BATCH))
        batch = rng.permutation(0, epoch, len(split))[position * BATCH : (position + 1) * BATCH]
        loss = 0.0
        model.zero_grad()
        for piece in batch.tensor_split(PIECES):
            part = smoothed_loss(model(pixels[piece]), split.labels[piece]) / len(batch)
            part.backward()
            loss += part.item()
        expected.append(loss)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms.append(math.sqrt(sum(gradient.square().sum().item() for gradient in gradients)))
        if norms[-1] > CLIP:
            gradients = [gradient * CLIP / (norms[-1] + 1e-6) for gradient in gradients]
        rule.step(parameters, gradients, rate(step))
        decay = min(EMA, (1 + step) / (10 + step))
        average = [
            decay * old + (1 - decay) * new if step > 1 else new.clone()
            for old, new in zip(average or parameters, parameters, strict=True)
        ]
    assert min(norms) < CLIP < max(norms), "the clipping bites in some steps, and not in others"

    lines = records(run)
    assert losses(run) == pytest.approx(expected, rel=1e-12)
    assert [line["optim/grad_norm"] for line in lines if "optim/grad_norm" in line] == pytest.approx(norms, rel=1e-12)
    assert [line["optim/lr"] for line in lines if "optim/lr" in line] == pytest.approx(
        [rate(step) for step in range(1, STEPS + 1)], rel=1e-12
    )
    checkpoint = run.checkpoints / (run.checkpoints / "last").read_text()
    actual, actual_average = weights(run), load_file(checkpoint / "ema.safetensors")
    for number, (name, _) in enumerate(model.named_parameters()):
        torch.testing.assert_close(actual[name], parameters[number], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(actual_average[name], average[number], rtol=1e-12, atol=1e-12)

    scores = next(line for line in lines if "loss/val" in line)
    with torch.no_grad():
        logits = model(val_pixels)
    assert scores["loss/val"] == pytest.approx(F.cross_entropy(logits, val.labels).item(), rel=1e-12)
    assert scores["acc/val_top1"] == pytest.approx(100 * (logits.argmax(1) == val.labels).double().mean().item())


KEYED = (
    "batch=100",
    "steps=5",
    NARROW,
    "precision=fp64",
    "augment=none",
    "schedule=constant",
    "schedule.warmup=0",
    "optimizer.lr=0.001",
    "optimizer.decay_all=true",
)


class Batch(NamedTuple):
    """What the masks of dropout depend on."""

    step: int
    epoch: int
    number: int
    labels: Tensor
    indices: Tensor


def test_a_run_with_dropout_is_the_plain_loop_over_the_keyed_network(tmp_path: Path) -> None:
    run = train_here(tmp_path / "run", *KEYED)

    job = built(*KEYED)
    split = job.dataset.train()
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    model = job.model.build(10, (1, 8, 8)).double()
    draws = key_draws(model, torch.zeros(1, 1, 8, 8, dtype=torch.float64), job.seed)
    network = KeyedModel(model, draws)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    expected = []
    for step in range(1, 6):
        epoch, position = divmod(step - 1, 15)
        chosen = rng.permutation(job.seed, epoch, len(split))[position * 100 : (position + 1) * 100]
        images = (split.images[chosen].double() / 255 - job.dataset.mean[0]) / job.dataset.std[0]
        (keys,) = draws.keys_of(Batch(step, epoch, 0, split.labels[chosen], chosen))
        loss = F.cross_entropy(network(images, keys), split.labels[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    assert losses(run) == pytest.approx(expected, rel=1e-12)
