"""Optimizers that look at the gradient several times: against loops by hand, on ranks, micro-batches and a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from helpers import FAKE, Done, forked, largest_difference, own_project, train_in, weights
from lockstep.core.rng import permutation
from lockstep.data.datasets.builtin import Fake

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

PACKAGE = """
from typing import ClassVar

import lockstep
import torch
from lockstep.optim.optimizers import OptimizerOption


@lockstep.option("optimizer")
class LBFGS(OptimizerOption):
    needs_closure: ClassVar[bool] = True

    def make(self, groups):
        return torch.optim.LBFGS(groups, lr=self.rate, max_iter=4, history_size=3)


@lockstep.option("callback")
class Clip(lockstep.Callback):
    every_rank = True

    def after_backward(self, run):
        pass
"""
EXAMPLES, BATCH, STEPS, LR = 90, 20, 4, 0.1
JOB = (
    *(*FAKE, "augment=none", f"dataset.examples={EXAMPLES}", "precision=fp64", "device=cpu", "schedule=constant"),
    *(f"steps={STEPS}", f"optimizer.lr={LR}", "train.eval_every=100%", "logger=jsonl", "telemetry.report=never"),
)
SMALL = (f"batch={BATCH}", "model=linear", "optimizer=sam", "optimizer.rho=0.5")
WHOLE = (f"batch={EXAMPLES}", "model=linear", "optimizer=lbfgs")
PLACES = {
    "ddp": ("strategy=ddp", "launcher.ranks=2", "launcher.threads=1"),
    "micro": ("train.micro_batches=3",),
    "both": ("strategy=allreduce_hooks", "launcher.ranks=2", "launcher.threads=1", "train.micro_batches=2"),
    "strict": ("repro=strict", "launcher.ranks=2", "launcher.threads=1"),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_project(tmp_path_factory.mktemp("project"), PACKAGE)


def train(project: Path, name: str, *words: str, code: int = 0) -> Done:
    return train_in(project, name, *JOB, *words, code=code)


def loss_of(step: int, batch: int) -> Callable[[list[Tensor]], Tensor]:
    """The mean loss of the step's global batch, of the weight and the bias of a linear model."""
    split = Fake(examples=EXAMPLES, classes=10, channels=1, size=8).train()
    epoch, place = divmod(step, -(-EXAMPLES // batch))
    chosen = permutation(0, epoch, EXAMPLES)[place * batch : (place + 1) * batch]
    pixels, labels = (split.images[chosen].double() / 255 - 0.5) / 0.25, split.labels[chosen]
    return lambda parameters: F.cross_entropy(F.linear(pixels.flatten(1), *parameters), labels)


@pytest.fixture(scope="module")
def begin(project: Path) -> dict[str, Tensor]:
    """The weights before the first step."""
    train(project, "no-step", "batch=20", "model=linear", "steps=1", "optimizer=sgd", "optimizer.lr=1e-300")
    return weights(project / "no-step")


def test_sam_takes_the_steps_of_its_paper_on_any_ranks_and_micro_batches(
    project: Path, begin: dict[str, Tensor]
) -> None:
    parameters = [tensor.clone().requires_grad_() for tensor in sorted(begin.values(), key=Tensor.dim, reverse=True)]
    momenta = [torch.zeros_like(parameter) for parameter in parameters]
    for step in range(STEPS):
        loss = loss_of(step, BATCH)
        gradients = torch.autograd.grad(loss(parameters), parameters)
        norm = torch.sqrt(sum((gradient.square().sum() for gradient in gradients), torch.zeros(())))
        worst = [weight + 0.5 * gradient / norm for weight, gradient in zip(parameters, gradients, strict=True)]
        for number, gradient in enumerate(torch.autograd.grad(loss(worst), worst)):
            momenta[number] = 0.9 * momenta[number] + gradient
            parameters[number] = (parameters[number] - LR * momenta[number]).detach().requires_grad_()
    train(project, "sam", *SMALL)
    expected = {name: next(own for own in parameters if own.shape == tensor.shape) for name, tensor in begin.items()}
    assert largest_difference(expected, weights(project / "sam")) < 1e-12
    for name, words in PLACES.items():
        train(project, f"sam-{name}", *SMALL, *words)
        assert largest_difference(expected, weights(project / f"sam-{name}")) < 1e-12, name
    train(project, "sam-part", *SMALL, "steps=2")
    assert forked("train.py", "resume=sam-part", f"steps={STEPS}", cwd=project).code == 0
    assert largest_difference(weights(project / "sam"), weights(project / "sam-part")) == 0


@pytest.mark.parametrize("words", [(), ("train.micro_batches=2",)])
def test_the_second_look_has_the_same_random_numbers_and_leaves_the_statistics(
    project: Path, words: tuple[str, ...]
) -> None:
    network = ("model=wide_resnet", "model.depth=10", "model.width=1", "model.dropout=0.3", "batch=20", *words)
    name = f"sgd-{len(words)}"
    train(project, name, *network, "optimizer=sgd")
    train(project, f"near-{name}", *network, "optimizer=sam", "optimizer.rho=1e-300")
    assert largest_difference(weights(project / name), weights(project / f"near-{name}")) == 0


def test_lbfgs_of_torch_takes_its_steps_on_ranks_and_in_a_resume(project: Path, begin: dict[str, Tensor]) -> None:
    parameters = [tensor.clone().requires_grad_() for tensor in sorted(begin.values(), key=Tensor.dim, reverse=True)]
    optimizer = torch.optim.LBFGS(parameters, lr=LR, max_iter=4, history_size=3)
    for step in range(STEPS):

        def closure(step: int = step) -> float:
            optimizer.zero_grad()
            loss = loss_of(step, EXAMPLES)(parameters)
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)
    expected = {name: next(own for own in parameters if own.shape == tensor.shape) for name, tensor in begin.items()}
    train(project, "lbfgs", *WHOLE)
    assert largest_difference(begin, expected) > 1e-3
    assert largest_difference(expected, weights(project / "lbfgs")) < 1e-9
    train(project, "lbfgs-2", *WHOLE, *PLACES["both"])
    assert largest_difference(expected, weights(project / "lbfgs-2")) < 1e-9
    for name, words in {"lbfgs": (), "lbfgs-2": PLACES["both"]}.items():
        train(project, f"{name}-part", *WHOLE, *words, "steps=2")
        done = forked("train.py", f"resume={name}-part", f"steps={STEPS}", cwd=project)
        assert done.code == 0, done.err
        assert largest_difference(weights(project / name), weights(project / f"{name}-part")) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("strategy=zero", *PLACES["ddp"][1:]), "optimizer=sam looks at all parameters together, but under strategy"),
        (("strategy=fsdp", *PLACES["ddp"][1:]), "optimizer=sam looks at all parameters together, but under strategy"),
        (("strategy=pipeline", *PLACES["ddp"][1:]), "optimizer=sam looks at all parameters together, but under str"),
        (("precision=fp16",), "optimizer=sam computes several gradients in a step, which a loss scaler cannot skip"),
        (("optimizer.lookahead=2",), "optimizer=sam computes several gradients in a step, which optimizer.lookahead"),
        (("callback=[clip]",), "optimizer=sam computes several gradients in a step, of which after_backward of the"),
    ],
)
def test_what_cannot_look_again_is_refused(project: Path, words: tuple[str, ...], sentence: str) -> None:
    done = train(project, "refused", *SMALL, *words, code=2)
    assert sentence in done.err
    assert "Traceback" not in done.err
