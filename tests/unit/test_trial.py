"""Steps that are tried before a run: what they tell, and that they leave nothing."""

from __future__ import annotations

import torch

from helpers import built
from lockstep.trial import training_rate
from lockstep.world import World


def test_a_smaller_network_has_a_higher_rate() -> None:
    small, large = (training_rate(built(f"model.width={width}"), World.solo()) for width in (8, 256))
    assert small is not None
    assert large is not None
    assert small > 2 * large


def test_a_trial_leaves_the_random_numbers_of_the_run_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    training_rate(built("model.dropout=0.5", "train.ema=0.9"), World.solo())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_is_compiled_is_not_tried() -> None:
    assert training_rate(built("model.compile=true"), World.solo()) is None
