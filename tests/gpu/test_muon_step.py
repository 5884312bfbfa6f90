"""A step of Muon on a CUDA device: bfloat16 inside, the layout of the parameters, no wait for the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.optim.muon import Muon, newton_schulz, orthogonalised

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def test_the_iteration_is_in_bfloat16_unless_the_model_is_in_float64() -> None:
    torch.manual_seed(0)
    update = torch.randn((64, 24, 3, 3), dtype=torch.float64)
    (exact,), (on_gpu,) = orthogonalised([update], 5), orthogonalised([update.cuda()], 5)
    torch.testing.assert_close(on_gpu.cpu(), exact, rtol=1e-10, atol=1e-10)
    (result,) = orthogonalised([update.float().cuda()], 5)
    narrow = newton_schulz(update.float().flatten(1)[None].cuda().bfloat16(), 5)
    assert torch.equal(result, narrow[0].float().view_as(result))


def test_a_step_waits_for_nothing_and_keeps_the_order_in_memory() -> None:
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3, bias=False), nn.Flatten(), nn.Linear(512, 4)]
    model = nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)
    model(torch.randn(2, 3, 12, 12, device="cuda")).square().sum().backward()
    optimizer = Muon(lr=0.1, fixed_norm=True, weight_decay=0.1).build(model)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
