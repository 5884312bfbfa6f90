"""Batch norm that counts over all ranks: torch's on CUDA, a small one of our own on the CPU.

torch's SyncBatchNorm refuses CPU tensors. Ours serves the gloo ranks, so that the promise of equal runs on
any world size holds, and is tested, for models with batch norm too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _SyncNormalize(torch.autograd.Function):
    """Batch norm with statistics over all ranks. Equations: Ioffe and Szegedy 2015, algorithm 1."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims, shape = _reduction(x)
        # Sums of the values first and of the centred squares second: one all-reduce more than summing
        # squares at once, and none of its cancellation.
        total = torch.cat([x.sum(dims), x.new_tensor([x.numel() / max(1, x.shape[1])])])
        dist.all_reduce(total)
        count = total[-1]
        # A micro-batch is empty on every rank when the last global batch of an epoch is short enough.
        divisor = count.clamp(min=1)
        mean = total[:-1] / divisor
        square = (x - mean.view(shape)).square_().sum(dims)
        dist.all_reduce(square)
        variance = square / divisor
        scale = torch.rsqrt(variance + eps)
        normal = (x - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, weight, scale, divisor)
        ctx.mark_non_differentiable(mean, variance, count)
        return normal * weight.view(shape) + bias.view(shape), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        normal, weight, scale, divisor = ctx.saved_tensors
        grad = grads[0]
        dims, shape = _reduction(grad)
        grad_bias, grad_weight = grad.sum(dims), (grad * normal).sum(dims)
        sums = torch.cat([grad_bias, grad_weight])
        dist.all_reduce(sums)
        mean_grad, mean_projection = (sums / divisor).chunk(2)
        centred = grad - mean_grad.view(shape) - normal * mean_projection.view(shape)
        return centred * (scale * weight).view(shape), grad_weight, grad_bias, None


def _reduction(x: Tensor) -> tuple[list[int], list[int]]:
    """The dimensions that batch norm sums over, and the shape that broadcasts a channel vector."""
    return [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)


class CPUSyncBatchNorm(_BatchNorm):
    """Synchronised batch norm for CPU ranks; keeps the names, the buffers and the evaluation of BatchNorm.

    A rank whose shard is empty takes part in every sum and gets an empty output.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        # bf16 activations (autocast) are counted in the layer's own precision.
        own = self.running_mean if self.weight is None else self.weight
        wide = input if own is None else input.to(own.dtype)
        ones, zeros = wide.new_ones(self.num_features), wide.new_zeros(self.num_features)
        output, mean, variance, count = _SyncNormalize.apply(
            wide,
            ones if self.weight is None else self.weight,
            zeros if self.bias is None else self.bias,
            self.eps,
        )
        if self.running_mean is None or self.running_var is None:
            return output.to(input.dtype)
        with torch.no_grad():
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            if count:
                self.running_mean.lerp_(mean, momentum)
                self.running_var.lerp_(variance * (count / (count - 1).clamp(min=1)), momentum)
        return output.to(input.dtype)


class CPUSyncBatchNormAct(CPUSyncBatchNorm):
    """The same for timm's fused norm and activation layers (`BatchNormAct2d`)."""

    def __init__(self, *args: Any, drop: nn.Module, act: nn.Module, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drop = drop
        self.act = act

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(input)))
        return output


def has_batchnorm(model: nn.Module) -> bool:
    """Whether any layer of the model counts over the batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def convert_sync_batchnorm(model: nn.Module, device: torch.device) -> nn.Module:
    """`model` with every batch norm synchronised over the ranks; parameters and state-dict keys are kept."""
    if device.type == "cuda":
        from timm.layers import convert_sync_batchnorm as convert

        converted: nn.Module = convert(model)
        return converted
    return _convert_cpu(model)


def _convert_cpu(module: nn.Module) -> nn.Module:
    if isinstance(module, _BatchNorm):
        return _replacement(module)
    for name, child in module.named_children():
        module.add_module(name, _convert_cpu(child))
    return module


def _replacement(norm: _BatchNorm) -> CPUSyncBatchNorm:
    options = (norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    act, drop = getattr(norm, "act", None), getattr(norm, "drop", None)
    replaced = (
        CPUSyncBatchNorm(*options)
        if act is None or drop is None
        else CPUSyncBatchNormAct(*options, drop=drop, act=act)
    )
    replaced.weight, replaced.bias = norm.weight, norm.bias
    replaced.running_mean, replaced.running_var = norm.running_mean, norm.running_var
    replaced.num_batches_tracked = norm.num_batches_tracked
    return replaced.train(norm.training)
