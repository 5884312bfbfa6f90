"""Tasks of a user's own, in a package of theirs: the same run on any ranks, micro-batches and through a kill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional as F

from helpers import FAKE, Done, forked, largest_difference, own_project, records, train_in, weights
from lockstep.core.rng import permutation
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.data.datasets.builtin import Fake
from lockstep.records.ledger import Ledger

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

PACKAGE = '''
from typing import ClassVar

import lockstep
import torch
import yaml
from lockstep.metrics import Calibration
from lockstep.models.nets import Network
from lockstep.tasks import Multiclass
from torch import nn


class Heads(nn.Module):
    def __init__(self, values, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(values, 16), nn.Tanh())
        self.main, self.parity = nn.Linear(16, classes), nn.Linear(16, 2)

    def forward(self, images):
        features = self.body(images)
        outputs = self.main(features)
        return torch.cat([outputs, self.parity(features)], 1) if self.training else outputs


@lockstep.option("model")
class TwoHeads(Network):
    def build(self, classes, input_shape):
        channels, height, width = input_shape
        return Heads(channels * height * width, classes)


@lockstep.option("task")
class WithParity(Multiclass):
    """The class, and by a second head whether its number is odd."""

    weight: float = 0.3

    def losses(self, batch):
        both = batch.network(batch.images)
        outputs, parity = both[:, :-2], both[:, -2:]
        odd = batch.targets % 2
        second = nn.functional.cross_entropy(parity, odd, reduction="none")
        return batch.loss(outputs, batch.targets) + self.weight * second, outputs


@lockstep.option("task")
class Consistent(Multiclass):
    """The class, and the distance between the outputs of an image and of its mirror image."""

    figures: ClassVar[tuple[str, ...]] = ("consistent/distance",)

    def losses(self, batch):
        outputs, mirrored = batch.network(batch.images), batch.network(batch.images.flip(-1))
        distance = (outputs - mirrored).square().mean(1)
        batch.log("consistent/distance", distance)
        return batch.loss(outputs, batch.targets) + distance, outputs


@lockstep.option("task")
class Focused(Multiclass):
    usual_loss: ClassVar[str | None] = "focal"


@lockstep.option("task")
class Undeclared(Multiclass):
    def losses(self, batch):
        outputs = batch.network(batch.images)
        batch.log("nobody/knows", outputs[:, 0])
        return batch.loss(outputs, batch.targets), outputs


@lockstep.option("metric")
class Cost:
    """Says by what it builds that less is better."""

    def build(self, classes):
        from torchmetrics.classification import MulticlassHingeLoss

        return MulticlassHingeLoss(classes)


@lockstep.option("metric")
class Error(Calibration):
    """Says it by what it derives from."""


@lockstep.option("task")
class Costly(Multiclass):
    metrics: ClassVar[tuple[str, ...]] = ("cost",)
    monitor: ClassVar[str] = "cost"


@lockstep.option("task")
class Mean(Multiclass):
    figures: ClassVar[tuple[str, ...]] = ("own/mean",)

    def losses(self, batch):
        outputs = batch.network(batch.images)
        batch.log("own/mean", outputs.mean())
        return batch.loss(outputs, batch.targets), outputs


@lockstep.option("task")
class Ours(Multiclass):
    figures: ClassVar[tuple[str, ...]] = ("loss/val",)


@lockstep.option("logger")
class Gap:
    """How much worse the loss is on the evaluation split."""

    logs: str = "gap/loss"
    value: str = "difference"

    figures: ClassVar[tuple[str, ...]] = ("gap/loss", "gap/best")

    def build(self, run):
        return Observed(run, self)


class Observed(lockstep.Observer):
    def __init__(self, run, option):
        self.run, self.option = run, option

    def write(self, step, scalars):
        self.train = scalars.get("loss/train", getattr(self, "train", None))
        if "loss/val" in scalars:
            difference = torch.tensor(scalars["loss/val"] - self.train, dtype=torch.float64)
            self.run.log(self.option.logs, difference if self.option.value == "difference" else self.option.value)

    def evaluated(self, step, scores, best):
        self.run.log("gap/best", best)
'''
JOB = (
    *(*FAKE, "augment=none", "dataset.examples=90", "batch=20", "steps=7", "precision=fp64", "device=cpu"),
    *("optimizer=sgd", "optimizer.lr=0.1", "schedule=constant", "telemetry.interval=3", "train.eval_every=100%"),
)
HEADS, MIRRORED = ("task=with_parity", "model=two_heads"), ("task=consistent", "model=basicnet")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_project(tmp_path_factory.mktemp("project"), PACKAGE)


def train(project: Path, name: str, *words: str, code: int = 0) -> Done:
    return train_in(project, name, *JOB, *words, code=code)


def figures(project: Path, name: str, tag: str) -> dict[int, float]:
    return {line["step"]: line[tag] for line in records(RunDir(project / name)) if tag in line}


def test_a_task_of_ones_own_chooses_its_usual_loss_unless_the_command_names_another(project: Path) -> None:
    for words, loss in (((), "Focal"), (("loss=cross_entropy",), "CrossEntropy")):
        done = forked("train.py", *FAKE, "task=focused", *words, "--cfg", "job", cwd=project)
        assert yaml.safe_load(done.out)["loss"]["_target_"] == f"lockstep.losses.{loss}"


@pytest.mark.parametrize("task", [HEADS, MIRRORED])
def test_a_task_of_ones_own_is_the_same_run_on_any_ranks_and_micro_batches(
    task: tuple[str, ...], project: Path
) -> None:
    name = task[0].partition("=")[2]
    train(project, f"{name}-one", *task)
    whole = weights(project / f"{name}-one")
    for number, words in enumerate(
        (
            ("strategy=ddp", "launcher.ranks=2"),
            ("strategy=allreduce_hooks", "launcher.ranks=3", "train.micro_batches=2"),
            ("strategy=fsdp", "launcher.ranks=2"),
            ("train.micro_batches=3",),
        )
    ):
        train(project, f"{name}-{number}", *task, *words)
        assert largest_difference(whole, weights(project / f"{name}-{number}")) < 1e-12, words
        if task is MIRRORED:
            logged = figures(project, f"{name}-{number}", "consistent/distance")
            assert logged == pytest.approx(figures(project, f"{name}-one", "consistent/distance"), rel=1e-12)
            assert [*logged] == [3, 6, 7]


def test_two_heads_are_trained_by_the_sum_of_their_losses(project: Path) -> None:
    train(project, "heads", *HEADS, "steps=1", "checkpoint.keep=2")
    train(project, "no-step", *HEADS, "steps=1", "optimizer.lr=1e-300")
    before, after = weights(project / "no-step"), weights(project / "heads")
    split, chosen = Fake(examples=90, classes=10, channels=1, size=8).train(), permutation(0, 0, 90)[:20]
    pixels = (split.images[chosen].double() / 255 - 0.5) / 0.25
    parameters: dict[str, Any] = {name: value.clone().requires_grad_() for name, value in before.items()}
    features = torch.tanh(F.linear(pixels.flatten(1), parameters["body.1.weight"], parameters["body.1.bias"]))
    outputs = F.linear(features, parameters["main.weight"], parameters["main.bias"])
    parity = F.linear(features, parameters["parity.weight"], parameters["parity.bias"])
    labels = split.labels[chosen]
    loss = F.cross_entropy(outputs, labels) + 0.3 * F.cross_entropy(parity, labels % 2)
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    expected = {name: before[name] - 0.1 * gradient for name, gradient in zip(parameters, gradients, strict=True)}
    assert largest_difference(expected, after) < 1e-12


def test_a_task_of_ones_own_goes_on_to_the_bit(project: Path) -> None:
    train(project, "whole", *MIRRORED)
    train(project, "part", *MIRRORED, "steps=4", "checkpoint.every=1")
    done = forked("train.py", "resume=part", "steps=7", cwd=project)
    assert done.code == 0, done.err
    assert largest_difference(weights(project / "whole"), weights(project / "part")) == 0
    logged, whole = (figures(project, name, "consistent/distance") for name in ("part", "whole"))
    assert (logged[3], logged[7]) == (whole[3], whole[7])  # the first part has ended with a log point at step 4


OBSERVED = ("model=linear", "logger=[jsonl,tensorboard,gap]", "train.eval_every=3")


def test_an_observer_logs_figures_once_on_any_ranks_and_through_a_stop(project: Path) -> None:
    train(project, "seen", *OBSERVED)
    lines = records(RunDir(project / "seen"))
    train_losses = {line["step"]: line["loss/train"] for line in lines if "loss/train" in line}
    evaluated = {line["step"]: line for line in lines if "loss/val" in line}
    expected = {step: line["loss/val"] - train_losses[step] for step, line in evaluated.items()}
    assert {step: line["gap/loss"] for step, line in evaluated.items()} == expected
    assert [*expected] == [*figures(project, "seen", "gap/best")] == [3, 6, 7]
    assert "gap/loss" in (project / "seen" / "metrics.csv").read_text().partition("\n")[0]
    train(project, "seen-2", *OBSERVED, "strategy=ddp", "launcher.ranks=2")
    assert figures(project, "seen-2", "gap/loss") == pytest.approx(expected, rel=1e-12)
    train(project, "seen-part", *OBSERVED, "steps=6", "checkpoint.every=1")
    assert forked("train.py", "resume=seen-part", "steps=7", cwd=project).code == 0
    for tag in ("gap/loss", "gap/best"):
        assert figures(project, "seen-part", tag) == figures(project, "seen", tag)
        assert sum(tag in line for line in records(RunDir(project / "seen-part"))) == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("task=undeclared",),
            "task: the figure 'nobody/knows' is not declared, expected one of none; name it in the",
        ),
        (("task=mean",), "task: the figure 'own/mean' has the shape (), expected one number for each of the 20 exam"),
        (("task=ours",), "task: the class has the figure 'loss/val', expected names such as my/scalar, which do not"),
        (("logger=gap", "logger.gap.logs=other"), "logger: the figure 'other' is not declared, expected one of gap/"),
        (("logger=gap", "logger.gap.value=text"), "logger: the figure 'gap/loss' is 'text', expected a number"),
    ],
)
def test_a_figure_with_a_wrong_name_or_value_is_one_sentence(
    words: tuple[str, ...], sentence: str, project: Path
) -> None:
    done = train(project, "-".join(words).replace(".", "-").replace("=", "-"), "model=linear", *words, code=2)
    assert sentence in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("words", "score"), [(("task=costly",), "cost"), (("monitor=error",), "error")])
def test_a_sweep_by_a_metric_of_a_user_that_falls_finds_the_lowest(
    project: Path, words: tuple[str, ...], score: str
) -> None:
    objectives = "sweep.objectives=[score,error]" if score == "cost" else "sweep.objectives=[score,loss]"
    line = ("-m", "optimizer.lr=0.001,0.01,0.1", "metric=[error]", objectives, f"hydra.sweep.dir={score}", "steps=4")
    done = forked("train.py", *JOB, *line, *words, cwd=project)
    assert done.code == 0, done.err
    ledger = Ledger(project / score)
    runs = [Run(ledger.folder / record.folder) for record in ledger.records()]
    lowest = [min(value for _, value in run.series(f"metric/{score}")) for run in runs]
    assert [run.score for run in runs] == lowest
    assert str(ledger.identity().monitor) == f"-{score}"
    best = lowest.index(min(lowest))
    assert (ledger.best or "").startswith(f"{best:03}")
    assert f"best: job {best} with {score} " in done.out
    table = forked("lockstep", "compare", str(ledger.folder), f"--sort=metric/{score}", "--json", cwd=project)
    assert [row["jobs"] for row in json.loads(table.out)] == [[n] for n in sorted(range(3), key=lowest.__getitem__)]
