"""The precisions (`precision=`). Each is a frozen value; those that need no loss scaler have a disabled one."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from lockstep.config.options import option
from lockstep.core.errors import InputError
from lockstep.core.model import BatchNorm
from lockstep.core.protocols import Precision


@option("precision")
class FP32(Precision):
    """float32 throughout, also in convolutions, where torch's own default is TF32."""


@option("precision")
class FP64(FP32):
    """float64 throughout. Slow; shows whether two runs differ by more than summation order."""

    dtype: ClassVar[torch.dtype] = torch.float64
    storage: ClassVar[torch.dtype] = torch.float64
    sums: ClassVar[torch.dtype] = torch.float64


@option("precision")
class TF32(FP32):
    """float32 storage, products with 10 bits of mantissa. CUDA only (Ampere GPUs and newer)."""

    matmul: ClassVar[str] = "high"

    def check(self, device: str) -> None:
        if device != "cuda":
            raise InputError(f"precision=tf32 needs a CUDA GPU, but device is {device}; use precision=fp32")


@option("precision")
class BF16(FP32):
    """bfloat16 autocast; needs no loss scaler, because it has float32's range of exponents."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def check(self, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise InputError("precision=bf16 is not supported by this GPU; use precision=fp16 or precision=fp32")


@option("precision")
class BF16Pure(BF16):
    """bfloat16 throughout, also the weights and the optimizer's state; batch norm stays in float32. For short runs at
    a high learning rate, such as the speed records on CIFAR-10: an update of less than 1/256 of a weight is lost.

    Half the memory and memory traffic. The running statistics of batch norm change by less than bfloat16 can
    represent.
    """

    storage: ClassVar[torch.dtype] = torch.bfloat16

    def convert(self, model: nn.Module) -> nn.Module:
        model = super().convert(model)
        for module in model.modules():
            if isinstance(module, BatchNorm):
                module.float()
        return model


@option("precision")
class FP16(FP32):
    """float16 autocast with a loss scaler (Micikevicius et al. 2018). CUDA only."""

    dtype: ClassVar[torch.dtype] = torch.float16
    needs_loss_scaler: ClassVar[bool] = True

    def check(self, device: str) -> None:
        if device != "cuda":
            raise InputError(
                f"precision=fp16 needs a CUDA GPU, but device is {device}; use precision=bf16 or precision=fp32"
            )
