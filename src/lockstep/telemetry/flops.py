"""How much arithmetic a training step is, and how much the device could do: what MFU is made of."""

from __future__ import annotations

import re

import torch
from torch import nn

# Dense peak rates in 1e12 operations per second, from NVIDIA's data sheets: (fp32, tf32, bf16 and fp16).
PEAK_TFLOPS: dict[str, tuple[float, float, float]] = {
    "H200": (67, 494, 989),
    "H100 PCIe": (51, 378, 756),
    "H100": (67, 494, 989),
    "A100": (19.5, 156, 312),
    "L40S": (91.6, 183, 366),
    "L4": (30.3, 60, 121),
    "A10G": (35, 35, 70),
    "V100": (15.7, 15.7, 125),
    "T4": (8.1, 8.1, 65),
    "RTX 4090": (82.6, 82.6, 165),
    "RTX 3090": (35.6, 35.6, 71),
}


def training_flops(model: nn.Module, input_shape: tuple[int, int, int], device: torch.device) -> float:
    """Floating-point operations of one example's forward and backward pass: three times its forward."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    training = model.training
    model.eval()
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.zeros((1, *input_shape), device=device, dtype=next(model.parameters()).dtype))
    model.train(training)
    return 3.0 * counter.get_total_flops()


def peak_flops(device: torch.device, dtype: torch.dtype, *, tf32: bool) -> float:
    """Peak operations per second of one GPU in a number format; 0 for one that is not in the table."""
    if device.type != "cuda" or dtype is torch.float64:
        return 0.0
    name = torch.cuda.get_device_name(device)
    # Whole words: an L40 is no L4.
    found = (rates for part, rates in PEAK_TFLOPS.items() if re.search(rf"\b{part}\b", name))
    rates = next(found, (0.0, 0.0, 0.0))
    return 1e12 * rates[2 if dtype is not torch.float32 else 1 if tf32 else 0]
