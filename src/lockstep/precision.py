"""The number formats. Each is a frozen value; the scaler is disabled where a format needs none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch

from lockstep.errors import InputError


@dataclass(frozen=True, kw_only=True)
class FP32:
    """float32 throughout."""

    dtype: ClassVar[torch.dtype] = torch.float32
    """The format of matrix products and convolutions; another one than `storage` means autocast."""
    storage: ClassVar[torch.dtype] = torch.float32
    """The format of parameters, gradients and input images."""
    matmul: ClassVar[str] = "highest"
    """torch's name for the precision of float32 products on CUDA: `highest`, or `high` for TF32."""

    def check(self, device: str) -> None:
        """Every device has float32."""

    def configure(self) -> None:
        torch.set_float32_matmul_precision(self.matmul)
        torch.backends.cudnn.allow_tf32 = self.matmul == "high"

    def autocast(self, device: torch.device) -> AbstractContextManager[None]:
        if self.dtype is self.storage:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)

    def scaler(self, device: torch.device) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type, enabled=False)


@dataclass(frozen=True, kw_only=True)
class FP64(FP32):
    """float64 throughout: slow, and what shows whether two runs differ by more than summation order."""

    dtype: ClassVar[torch.dtype] = torch.float64
    storage: ClassVar[torch.dtype] = torch.float64


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
        if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
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
