"""Batch norm with statistics over the micro-batches of all ranks, on any device.

One layer works with gloo and NCCL, so the tests on the CPU cover what runs on GPUs. Unlike torch's `SyncBatchNorm` it
works on the CPU, allows a rank without examples in any dtype, never waits for the device, and can be traced
by the compiler.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.model import BatchNorm


class _SyncNormalize(torch.autograd.Function):
    """Batch norm with statistics over all ranks. Equations: Ioffe and Szegedy 2015, algorithm 1.

    Statistics of 16-bit inputs are in float32, so that ranks never exchange numbers of different widths.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # The compiler fuses plain operations, and cannot trace the kernels for eager CUDA.
        kernels = CUDAKernels if x.is_cuda and not torch.compiler.is_compiling() else PlainKernels
        x = _dense(x)
        local_mean, local_variance = kernels.moments(x, eps) if x.numel() else _zeros(x).unbind()
        local_count = torch.full_like(local_mean[:1], x.numel() // x.shape[1])
        means, variances, counts = _gathered(local_mean, local_variance, local_count)
        count = counts.sum()
        # A micro-batch can be empty on every rank, if the last global batch of an epoch is short enough.
        shares = counts / count.clamp(min=1)
        mean = (shares * means).sum(0)
        variance = (shares * (variances + (means - mean).square())).sum(0)
        scale = torch.rsqrt(variance + eps)
        ctx.kernels = kernels
        ctx.save_for_backward(x, weight, mean, scale, counts)
        ctx.mark_non_differentiable(mean, variance, count)
        output = kernels.normalize(x, weight, bias, mean, scale, eps) if x.numel() else torch.empty_like(x)
        return output, mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight, mean, scale, counts = ctx.saved_tensors
        grad = _dense(grads[0])
        sums = ctx.kernels.sums(grad, x, mean, scale) if x.numel() else _zeros(x)
        grad_weight, grad_bias = (None, None) if weight is None else (sums[1] * scale, sums[0].clone())
        dist.all_reduce(sums)
        own = ctx.kernels.gradient(grad, x, weight, mean, scale, sums, counts) if x.numel() else torch.empty_like(x)
        return own, grad_weight, grad_bias, None


class PlainKernels:
    """The arithmetic of the layer in plain operations, for any device and for the compiler.

    `x` and gradients have the shape (examples, channels, ...), statistics the shape (channels,).
    """

    @staticmethod
    def moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Mean and (biased) variance per channel."""
        variance, mean = torch.var_mean(_wide(x), _all_but_channels(x), correction=0)
        return mean, variance

    @staticmethod
    def normalize(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor, eps: float
    ) -> Tensor:
        """`(x - mean) * scale * weight + bias`, in the dtype of `x`."""
        output = (_wide(x) - _channels(mean, x)) * _channels(scale if weight is None else scale * weight, x)
        output = output if bias is None else output + _channels(bias, x)
        # No cast that does nothing: behind one, the compiler of torch 2.11 gives the output a gradient of zero.
        return output if output.dtype == x.dtype else output.to(x.dtype)

    @staticmethod
    def sums(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """The sums of `grad` and of `grad * (x - mean)` per channel, (2, channels)."""
        wide, dims = _wide(grad), _all_but_channels(x)
        return torch.stack([wide.sum(dims), (wide * (_wide(x) - _channels(mean, x))).sum(dims)])

    @staticmethod
    def gradient(
        grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, sums: Tensor, counts: Tensor
    ) -> Tensor:
        """The gradient of the input, from the sums over all ranks and the counts of each rank, (ranks, 1)."""
        (total, projection), count = sums.unbind(), counts.sum()
        slope = projection * scale.square() / count
        centred = _wide(grad) - _channels(total / count, x) - (_wide(x) - _channels(mean, x)) * _channels(slope, x)
        return (centred * _channels(scale if weight is None else scale * weight, x)).to(x.dtype)


class CUDAKernels(PlainKernels):
    """The same with torch's kernels for synchronised batch norm: each is one pass over the activations."""

    @staticmethod
    def moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        mean, scale = torch.batch_norm_stats(x, eps)
        return mean, (scale.square().reciprocal() - eps).clamp(min=0)

    @staticmethod
    def normalize(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, scale: Tensor, eps: float
    ) -> Tensor:
        return torch.batch_norm_elemt(x, weight, bias, mean, scale, eps)

    @staticmethod
    def sums(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        total, projection, _, _ = torch.batch_norm_backward_reduce(grad, x, mean, scale, None, True, False, False)
        return torch.stack([total, projection])

    @staticmethod
    def gradient(
        grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, sums: Tensor, counts: Tensor
    ) -> Tensor:
        counts = counts.flatten().to(torch.int32)
        return torch.batch_norm_backward_elemt(grad, x, mean, scale, weight, sums[0], sums[1], counts)


def _gathered(mean: Tensor, variance: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics of all ranks: means and variances of shape (ranks, channels), counts of shape (ranks, 1)."""
    own = torch.cat([mean, variance, count])
    gathered = own.new_empty((dist.get_world_size(), len(own)))
    # torch 2.14 has renamed it, and warns of the old name.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(gathered, own[None])
    means, variances, counts = gathered.split([len(mean), len(variance), 1], dim=1)
    return means, variances, counts


def _dense(x: Tensor) -> Tensor:
    """`x` in a memory format without gaps: channels-last if it already is, else contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()]):
        return x
    return x.contiguous()


def _wide(x: Tensor) -> Tensor:
    """`x` in the format of statistics: float32, or float64 for float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _zeros(x: Tensor) -> Tensor:
    """Both sums over no examples, (2, channels)."""
    return _wide(x.new_zeros((2, x.shape[1])))


def _all_but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _channels(vector: Tensor, x: Tensor) -> Tensor:
    """A vector with a number per channel, in a shape that broadcasts over `x`."""
    return vector.view(1, -1, *[1] * (x.dim() - 2))


class SyncBatchNorm(BatchNorm):
    """Batch norm over the micro-batches of all ranks, with the names, buffers and evaluation of torch's BatchNorm.

    A rank with an empty micro-batch takes part in every sum and gets an empty output. A micro-batch that is empty on
    every rank leaves the running statistics as they are. With `blank` set, the input stands for an empty micro-batch,
    and is passed on.
    """

    blank = False

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        if self.blank:
            return input + self._normalised(input[:0]).sum()
        return self._normalised(input)

    def _normalised(self, input: Tensor) -> Tensor:
        output, mean, variance, count = _SyncNormalize.apply(input, self.weight, self.bias, self.eps)
        if self.num_batches_tracked is not None:  # None while a block is computed again
            with torch.no_grad():
                self._track(mean, variance, count)
        return output

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics by a batch of `count` values per channel, without a device sync."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        not_empty = count > 0
        self.num_batches_tracked += not_empty
        weight = not_empty.to(self.running_mean.dtype)
        # Without a momentum the statistics are the plain means of all batches.
        weight = weight / self.num_batches_tracked.clamp(min=1) if self.momentum is None else weight * self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)


class SyncBatchNormAct(SyncBatchNorm):
    """The same, for timm's fused layers of norm and activation (`BatchNormAct2d`)."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Make every batch norm of `model` a synchronised one, in place, by changing its class; returns the model."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            fused = None not in (getattr(module, "act", None), getattr(module, "drop", None))
            module.__class__ = SyncBatchNormAct if fused else SyncBatchNorm
    return model
