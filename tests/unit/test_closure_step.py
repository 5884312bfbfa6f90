"""A step that computes several gradients: against SAM by hand, on uneven ranks and micro-batches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_trainer import LOSS, SOURCE, assert_equal, network, trainer_of
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.core.rng import permutation
from lockstep.core.world import World
from lockstep.optim.sam import SAM
from lockstep.strategy import AllReduce
from lockstep.training.trainer import Trainer
from thread_ranks import ThreadRanks

pytestmark = pytest.mark.numerics

STEPS, LR, RHO = 4, 0.5, 0.3


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The pixels and the labels of a global batch; every second one has two examples."""
    split = SOURCE.train()
    epoch, position = divmod(step, 2)
    chosen = permutation(0, epoch, 10)[8 * position : 8 * position + 8]
    return (split.images[chosen].double() / 255 - 0.5) / 0.25, split.labels[chosen]


def mean_loss(model: nn.Module, step: int) -> Tensor:
    pixels, labels = batch_of(step)
    weights = torch.tensor(LOSS.class_weights, dtype=torch.float64)
    losses = weights[labels] * F.cross_entropy(model(pixels), labels, label_smoothing=0.1, reduction="none")
    return losses.mean()


def by_hand() -> tuple[nn.Module, list[float], list[float]]:
    """SAM in a plain loop: the model, the norm of each first gradient, and the loss at the weights of each step."""
    model, norms, losses = network(), [], []
    parameters = [*model.parameters()]
    for step in range(STEPS):
        loss = mean_loss(model, step)
        gradients = torch.autograd.grad(loss, parameters)
        norm = sum(gradient.square().sum() for gradient in gradients).sqrt()
        norms.append(norm.item())
        losses.append(loss.item())
        before = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter += RHO * gradient / norm
        worst = torch.autograd.grad(mean_loss(model, step), parameters)
        with torch.no_grad():
            for parameter, was, gradient in zip(parameters, before, worst, strict=True):
                parameter.copy_(was - LR * gradient)
    return model, norms, losses


def with_sam(trainer: Trainer, **options: Any) -> tuple[Trainer, list[float]]:
    """The trainer with steps of SAM, and a list of the losses that its closures will return."""
    optimizer, losses = SAM(lr=LR, rho=RHO, momentum=0.0).build(trainer.state.model), list[float]()
    step = optimizer.step

    def noted(closure: Callable[[], Tensor]) -> None:
        losses.append(float(step(closure)))

    optimizer.step = noted  # type: ignore[method-assign]
    trainer.step.state = replace(trainer.state, optimizer=optimizer)
    trainer.step.takes_closure = True
    return trainer, losses


def stepped(trainer: Trainer) -> list[float]:
    """Take every step of the plan; returns the norms."""
    norms = [trainer.step.update(shard, measures_norm=True) for shard in shards(trainer)]
    return [float(norm) for norm in norms if norm is not None]


def shards(trainer: Trainer) -> Any:
    return trainer.transforms.train(trainer.loader.train(after=0))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_of_uneven_ranks_and_micro_batches_are_those_of_sam_by_hand(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, norms, losses = by_hand()
    alone, returned = with_sam(trainer_of(network(), World.solo(), steps=STEPS, micro_batches=micro_batches))
    assert stepped(alone) == pytest.approx(norms, rel=1e-12), "the norm of the first gradient"
    assert returned == pytest.approx(losses, rel=1e-12), "the loss before the step"
    assert_equal(alone.state.model, expected)
    ranks, models = ThreadRanks(3, monkeypatch), [network() for _ in range(3)]
    options: dict[str, Any] = {"strategy": AllReduce(), "steps": STEPS, "micro_batches": micro_batches}
    parts = ranks.run(lambda world: with_sam(trainer_of(models[world.rank], world, **options)))
    for actual in ranks.run(lambda world: stepped(parts[world.rank][0])):
        assert actual == pytest.approx(norms, rel=1e-12)
    for trainer, of_rank in parts:
        assert of_rank == pytest.approx(losses, rel=1e-12)
        assert_equal(trainer.state.model, expected)


def test_the_second_look_leaves_the_running_statistics_and_the_losses_of_the_first() -> None:
    norms = [nn.Sequential(nn.BatchNorm2d(1).double(), *network()) for _ in range(2)]
    plain, (twice, _) = trainer_of(norms[0], World.solo(), steps=1), with_sam(trainer_of(norms[1], World.solo()))
    recorded: list[list[float]] = []
    for trainer in (plain, twice):
        losses: list[float] = []
        record = replace(trainer.step.listener, record=lambda loss, *_, losses=losses: losses.append(float(loss)))
        trainer.step.listener = record
        trainer.step.update(next(iter(shards(trainer))))
        recorded.append(losses)
    assert recorded[0] == recorded[1]
    for name, buffer in norms[0].named_buffers():
        assert torch.equal(buffer, norms[1].get_buffer(name)), name
    assert [parameter.grad for parameter in norms[1].parameters()] == [None] * 6


def test_each_gradient_of_a_step_comes_with_the_loss_of_its_own_look() -> None:
    trainer, _ = with_sam(trainer_of(network(), World.solo(), steps=1, micro_batches=3))
    returned = list[float]()

    def looks(closure: Callable[[], Tensor]) -> None:
        returned.extend(float(closure()) for _ in range(3))

    trainer.step.state.optimizer.step = looks  # type: ignore[method-assign, assignment]
    expected = mean_loss(trainer.state.model, 0).item()
    stepped(trainer)
    assert returned == pytest.approx([expected] * 3, rel=1e-12)
