"""Checks of the weights on one rank; the comparison between ranks is tested on real ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.core.errors import NumericalError
from lockstep.core.world import World
from lockstep.training.sanity_checks import check_finite, check_replicas, checksum


@pytest.mark.parametrize("bit", [0, 5, 23, 31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_flipped_bit_changes_the_fingerprint(dtype: torch.dtype, bit: int) -> None:
    model = nn.Linear(50, 20, dtype=dtype)
    before = int(checksum(model))
    words = model.weight.data.view(torch.int64 if dtype is torch.float64 else torch.int16).view(-1)
    words[17] ^= 1 << (bit % 15)
    assert int(checksum(model)) != before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_or_a_buffer_that_is_not_finite_is_found(value: float) -> None:
    model = nn.BatchNorm1d(3)
    check_finite(model, World.solo(), 7)
    for tensor in (model.weight.data, model.running_var):
        before = tensor[1].clone()
        tensor[1] = value
        with pytest.raises(NumericalError, match="not finite after step 7") as caught:
            check_finite(model, World.solo(), 7)
        assert caught.value.step == 7
        tensor[1] = before


def test_one_rank_agrees_with_itself() -> None:
    check_replicas(nn.Linear(2, 2), World.solo(), 1)
