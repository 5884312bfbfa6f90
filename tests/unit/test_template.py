"""The classes of the project that `lockstep new` writes: the numbers that they give."""

import importlib
import inspect
import math
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.cli.new import NAME, TEMPLATE
from lockstep.config import options


@pytest.fixture
def project(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package of the template, of which nothing is left after a test."""
    monkeypatch.setattr(options, "_DECLARED", {**options._DECLARED})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a new project is a copy of the folder
    monkeypatch.syspath_prepend(TEMPLATE)
    yield importlib.import_module(NAME)
    for name in [module for module in sys.modules if module.partition(".")[0] == NAME]:
        del sys.modules[name]


def test_the_model_of_a_new_project_has_twice_as_many_channels_in_its_second_layer(project: Any) -> None:
    assert project.model.SmallConv().width == 8
    network = project.model.SmallConv(width=3).build(classes=5, input_shape=(2, 9, 7))
    layers = [layer for layer in network if isinstance(layer, nn.Conv2d)]
    shapes = [(layer.in_channels, layer.out_channels, layer.padding) for layer in layers]
    assert shapes == [(2, 3, (1, 1)), (3, 6, (1, 1))]
    assert [type(layer) for layer in network].count(nn.ReLU) == 2
    assert network(torch.zeros(4, 2, 9, 7)).shape == (4, 5)


@pytest.mark.numerics
def test_the_stripes_of_a_new_project_are_horizontal_and_vertical_in_turn_and_others_in_an_evaluation(
    project: Any,
) -> None:
    source = project.data.Stripes(examples=402)
    images, labels = source.read(train=True)
    assert (images.shape, images.dtype, labels.dtype) == ((402, 1, 8, 8), torch.uint8, torch.int64)
    assert labels.tolist() == [0, 1] * 201
    mean = torch.stack([images[labels == label, 0].double().mean(0) for label in (0, 1)])
    assert (mean[0] > 127).tolist() == [[row in (2, 3, 6, 7)] * 8 for row in range(8)]
    assert (mean[1] > 127).tolist() == [[column in (2, 3, 6, 7) for column in range(8)]] * 8
    evaluated, known = source.read(train=False)
    assert (evaluated.shape, known.tolist()) == ((100, 1, 8, 8), [0, 1] * 50)
    assert not torch.equal(evaluated, images[:100])
    assert torch.equal(source.read(train=True)[0], images)
    dark = mean[0, [0, 1, 4, 5]].mean() / 255
    assert float(dark) == pytest.approx(0.4 / math.sqrt(2 * math.pi), abs=0.015), "the mean of noise, cut below 0"
    facts = (source.classes, source.class_names, source.image_shape, source.mean, source.std)
    assert facts == (2, ("horizontal", "vertical"), (1, 8, 8), (0.5,), (0.5,))


@pytest.mark.numerics
@pytest.mark.parametrize("epsilon", [None, 0.0, -1.0, 2.5])
def test_the_loss_of_a_new_project_is_the_formula_of_its_paper_for_each_example(
    project: Any, epsilon: float | None
) -> None:
    words = {} if epsilon is None else {"epsilon": epsilon}
    logits = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    losses = project.loss.Poly(**words).build(3, labels)(logits, labels)
    shares = logits.softmax(1)[torch.arange(6), labels]
    weight = 1.0 if epsilon is None else epsilon
    expected = F.cross_entropy(logits, labels, reduction="none") + weight * (1 - shares)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)


@pytest.mark.usefixtures("project")
def test_the_tests_of_a_new_project_pass_that_train_nothing() -> None:
    functions = runpy.run_path(str(TEMPLATE / "tests" / "test_my_project.py"))
    tests = [function for name, function in functions.items() if name.startswith("test_")]
    quick = [test for test in tests if not inspect.signature(test).parameters]
    assert (len(quick), len(tests)) == (3, 6)
    for test in quick:
        test()


@pytest.mark.usefixtures("project")
def test_the_tests_of_a_new_project_fail_where_their_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = runpy.run_path(str(TEMPLATE / "tests" / "test_my_project.py"))["train"]
    (tmp_path / "summary.json").write_text('{"steps": 10}')
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(subprocess.CalledProcessError):
        train(tmp_path)
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    assert train(tmp_path) == {"steps": 10}


@pytest.mark.usefixtures("project")
def test_the_two_runs_that_a_new_project_compares_have_folders_of_their_own(tmp_path: Path) -> None:
    compare = runpy.run_path(str(TEMPLATE / "tests" / "test_my_project.py"))["test_two_ranks_train_as_one_does"]
    objectives = dict[Path, int]()
    compare.__globals__["train"] = lambda folder, *_: {"objective": objectives.setdefault(folder, len(objectives))}
    with pytest.raises(AssertionError):
        compare(tmp_path)
