"""Tests of the model, the data set, the loss and the recipe, with real runs of a few steps."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from my_project.data import Stripes
from my_project.loss import Poly
from my_project.model import SmallConv

ROOT = Path(__file__).parent.parent


def train(folder: Path, *overrides: str) -> dict[str, object]:
    """The summary of a run of `train.py`."""
    command = [sys.executable, "train.py", "experiment=first", f"hydra.run.dir={folder}", *overrides]
    subprocess.run(command, cwd=ROOT, check=True)
    return json.loads((folder / "summary.json").read_text())


def test_the_model_gives_a_logit_for_each_class() -> None:
    model = SmallConv(width=4).build(classes=3, input_shape=(1, 8, 8))
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 3)


def test_the_data_set_is_the_same_at_each_call() -> None:
    first, second = (Stripes(examples=8).read(train=True) for _ in range(2))
    assert first[0].equal(second[0])
    assert first[1].equal(second[1])


def test_the_loss_of_a_certain_prediction_is_zero() -> None:
    labels = torch.tensor([0, 1])
    loss = Poly().build(classes=2, labels=labels)
    assert torch.allclose(loss(torch.tensor([[99.0, 0.0], [0.0, 99.0]]), labels), torch.zeros(2))


def test_the_experiment_learns(tmp_path: Path) -> None:
    assert train(tmp_path / "run")["objective"] > 95


def test_a_fast_run_takes_ten_steps(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "debug=fast")["steps"] == 10


def test_two_ranks_train_as_one_does(tmp_path: Path) -> None:
    exact = ("precision=fp64", "steps=4")
    one = train(tmp_path / "one", *exact)
    two = train(tmp_path / "two", *exact, "strategy=ddp", "launcher.ranks=2", "device=cpu")
    assert one["objective"] == two["objective"]
