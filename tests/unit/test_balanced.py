"""Balanced sampling: every class equally often, and the same on any number of ranks and through a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers import NARROW, losses, train_here
from lockstep.data.loading.sampler import balanced_order

COUNTS = (3, 50, 0, 7, 11)
LABELS = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))[torch.randperm(sum(COUNTS))]


@pytest.mark.parametrize("epoch", [0, 5])
def test_every_class_comes_equally_often_and_no_example_twice_before_all_of_its_class(epoch: int) -> None:
    n = len(LABELS)
    order = balanced_order(1, epoch, LABELS)
    assert len(order) == n
    assert len(order.unique()) == n
    examples = order % n
    assert sorted(torch.bincount(LABELS[examples], minlength=len(COUNTS)).tolist()) == [0, 17, 18, 18, 18]
    for label, count in enumerate(COUNTS):
        comes = torch.bincount(examples, minlength=n)[label == LABELS]
        assert count == 0 or int(comes.max() - comes.min()) <= 1


def test_classes_come_mixed_and_take_turns_in_coming_once_more() -> None:
    n, more, halves = len(LABELS), torch.zeros(len(COUNTS)), torch.zeros(len(COUNTS))
    for epoch in range(60):
        labels = LABELS[balanced_order(1, epoch, LABELS) % n]
        more += torch.bincount(labels, minlength=len(COUNTS)) == 18
        halves += torch.bincount(labels[: n // 2], minlength=len(COUNTS))
    # Three of the four classes with examples come 18 times, the fourth 17 times.
    assert ((more - 45).abs() < 15)[torch.tensor(COUNTS) > 0].all()
    assert ((halves / 60 - n / 8).abs() < 1.5)[torch.tensor(COUNTS) > 0].all()


def test_the_order_is_that_of_the_seed_and_the_epoch() -> None:
    orders = [balanced_order(*place, LABELS) for place in ((1, 0), (1, 1), (2, 0), (1, 0))]
    assert torch.equal(orders[0], orders[3])
    assert not any(torch.equal(orders[0], order) for order in orders[1:3])
    large = [set((order % len(LABELS))[LABELS[order % len(LABELS)] == 1].tolist()) for order in orders[:2]]
    assert large[0] != large[1]


def test_a_resume_goes_on_in_the_balanced_order(tmp_path: Path) -> None:
    words = (NARROW, "batch=600", "steps=4", "train.sampling=balanced", "precision=fp64", "augment=crop_flip")
    words += ("train.eval_every=100%",)
    whole = train_here(tmp_path / "whole", *words)
    train_here(tmp_path / "stopped", *words, stop_at=2)
    resumed = train_here(tmp_path / "stopped", *words, "loader=streaming", "loader.workers=0")
    assert losses(resumed) == losses(whole)
    assert losses(whole) != losses(train_here(tmp_path / "other", *words, "train.sampling=shuffled"))


def test_class_weights_on_balanced_classes_are_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("model=linear", "steps=1", "train.sampling=balanced")
    for name, more, notes in (("a", (), 0), ("b", (f"loss.class_weights={[1.0] * 10}",), 1)):
        train_here(tmp_path / name, *words, *more)
        captured = capsys.readouterr()
        assert (captured.out + captured.err).count("loss.class_weights apply on top") == notes
