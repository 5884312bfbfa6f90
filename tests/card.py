"""The marks of the tests that need a CUDA device, be it a pretended one."""

from __future__ import annotations

import os

import pytest
import torch

PRETENDED = "PRETENDED_GPUS" in os.environ  # jobs are smaller there: it is a CPU
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def needs_card(reason: str) -> pytest.MarkDecorator:
    """The mark of a test that means nothing on a pretended GPU; docs/performance.md has the reasons."""
    return pytest.mark.skipif(PRETENDED, reason=reason)


COMPILED = needs_card("the compiler generates code for the CPU")
KERNELS = needs_card("the CPU has no such kernels")
DRIVER = needs_card("torch or NCCL calls the driver")
