"""The number formats. Each is a frozen value; the scaler is disabled where a format needs none."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch

from lockstep.errors import InputError


@dataclass(frozen=True, kw_only=True)
class FP32:
    """float32 throughout."""

    dtype: ClassVar[torch.dtype] = torch.float32
    matmul: ClassVar[str] = "highest"

    def check(self, device: str) -> None:
        """Every device has float32."""

    def configure(self) -> None:
        torch.set_float32_matmul_precision(self.matmul)
        torch.backends.cudnn.conv.fp32_precision = "tf32" if self.matmul == "high" else "ieee"

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        return torch.autocast(device.type, dtype=self.dtype, enabled=self.dtype is not torch.float32)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type, enabled=False)


@dataclass(frozen=True, kw_only=True)
class TF32(FP32):
    """float32 storage, matrix products and convolutions with 10 mantissa bits (Ampere GPUs and newer)."""

    matmul: ClassVar[str] = "high"

    def check(self, device: str) -> None:
        if device != "cuda":
            raise InputError(f"precision=tf32 needs a CUDA GPU, but device is {device}; use precision=fp32")


@dataclass(frozen=True, kw_only=True)
class BF16(FP32):
    """bfloat16 autocast. As wide as float32 in exponent, so no scaler."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16

    def check(self, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_bf16_supported():
            raise InputError("precision=bf16 is not supported by this GPU; use precision=fp16 or precision=fp32")


@dataclass(frozen=True, kw_only=True)
class FP16(FP32):
    """float16 autocast with a loss scaler (Micikevicius et al. 2018)."""

    dtype: ClassVar[torch.dtype] = torch.float16

    def check(self, device: str) -> None:
        if device != "cuda":
            raise InputError(
                f"precision=fp16 needs a CUDA GPU, but device is {device}; use precision=bf16 or precision=fp32"
            )

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type)
