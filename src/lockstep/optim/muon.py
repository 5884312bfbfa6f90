"""Muon (Jordan et al. 2024): momentum whose update of a matrix is made orthogonal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.fields import ranged
from lockstep.optim.optimizers import ParamGroups, _Optimizer


@dataclass(frozen=True, kw_only=True)
class Muon(_Optimizer):
    """Orthogonalised momentum for the matrices inside a network, SGD with momentum for all other parameters.

    The update of a convolution or linear layer is its Nesterov momentum with all singular values brought near one
    (Jordan et al. 2024, kellerjordan.github.io/posts/muon); the last linear layer, biases, norms and embeddings take
    Nesterov steps. Weight decay is apart from the gradient and by `lr`, so that all parameters decay alike.
    torch's own Muon takes no convolutions, and timm's steps by Adam elsewhere. On a GPU updates are made orthogonal
    in bfloat16, unless the model is float64.

    Fields:
        lr: of the matrices: how far a step moves each singular value.
        head_lr: of the last linear layer.
        bias_lr: of all others.
        momentum: of the matrices; `sgd_momentum` of the others.
        iterations: of Newton and Schulz; three or five.
        fixed_norm: before each step, scale every matrix to the norm of an orthogonal one. For convolutions that a
            batch norm follows: their scale does nothing but change the rate.
    """

    lr: float = 0.02
    head_lr: float = ranged(0.02, above=0, most=1e6)
    bias_lr: float = ranged(0.02, above=0, most=1e6)
    momentum: float = ranged(0.95, least=0, below=1)
    sgd_momentum: float = ranged(0.9, least=0, below=1)
    iterations: int = ranged(5, least=1, most=20)
    fixed_norm: bool = False

    def groups(self, model: nn.Module) -> ParamGroups:
        layers = [each for each in model.modules() if isinstance(each, (nn.Linear, nn.modules.conv._ConvNd))]
        linear = [id(each.weight) for each in layers if isinstance(each, nn.Linear)]
        heads = set(linear[-1:])
        matrices = {id(each.weight) for each in layers} - heads
        kinds: list[tuple[float, Callable[[Tensor], bool]]] = [
            (self.lr, lambda each: id(each) in matrices),
            (self.head_lr, lambda each: id(each) in heads),
            (self.bias_lr, lambda each: id(each) not in matrices | heads),
        ]
        found = []
        for group in super().groups(model):
            for number, (rate, belongs) in enumerate(kinds):
                if params := [each for each in group["params"] if belongs(each)]:
                    ratio = rate / self.lr
                    decay = group["weight_decay"] / ratio  # the rate takes it back
                    scale = group["scale"] * ratio
                    found.append({"params": params, "orthogonal": number == 0, "scale": scale, "weight_decay": decay})
        return found

    def make(self, groups: ParamGroups) -> torch.optim.Optimizer:
        for group in groups:
            group["momentum"] = self.momentum if group["orthogonal"] else self.sgd_momentum
        return _Muon(groups, {"lr": self.lr, "iterations": self.iterations, "fixed_norm": self.fixed_norm})


class _Muon(torch.optim.Optimizer):
    """The steps of `Muon`. Each group has `orthogonal`, which says whether its parameters are matrices."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            params = [each for each in group["params"] if each.grad is not None]
            if not params:
                continue
            gradients = [each.grad for each in params]
            for each in params:
                if not self.state[each]:
                    self.state[each]["momentum_buffer"] = torch.zeros_like(each)
            buffers = [self.state[each]["momentum_buffer"] for each in params]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, gradients)
            updates = list(torch._foreach_add(gradients, buffers, alpha=group["momentum"]))
            kept = 1 - group["lr"] * group["weight_decay"]
            if group["orthogonal"]:
                updates = orthogonalised(updates, group["iterations"])
            if group["orthogonal"] and group["fixed_norm"]:
                torch._foreach_mul_(params, _factors_to_orthogonal_norm(params, kept))
            elif kept != 1:
                torch._foreach_mul_(params, kept)
            torch._foreach_add_(params, updates, alpha=-group["lr"])


def _factors_to_orthogonal_norm(params: list[Tensor], factor: float) -> tuple[Tensor, ...]:
    """What brings each of `params` (o, ...) to `factor` times the norm of an orthogonal matrix of as many rows.

    They stay on the device: as Python numbers they would make the host wait for it.
    """
    factors = torch._foreach_reciprocal(torch._foreach_norm(params))
    torch._foreach_mul_(factors, [factor * len(each) ** 0.5 for each in params])
    return tuple(factors)


def orthogonalised(updates: list[Tensor], iterations: int) -> list[Tensor]:
    """Each of `updates` (o, ...), taken for a matrix (o, n), with its singular values brought to about one.

    The results have the type of the updates and their order in memory, so that adding them to parameters copies
    nothing. Matrices of one shape are multiplied together, on a GPU in bfloat16 as Jordan does; float64 stays.
    """
    found: list[Tensor] = list(updates)
    alike: dict[tuple[int, int, torch.dtype], list[int]] = {}
    for number, each in enumerate(updates):
        alike.setdefault((len(each), each[0].numel(), each.dtype), []).append(number)
    for (rows, columns, dtype), numbers in alike.items():
        first = updates[numbers[0]]
        inner = torch.bfloat16 if first.is_cuda and dtype != torch.float64 else dtype
        matrices = first.new_empty((len(numbers), rows, columns), dtype=inner)
        torch._foreach_copy_(list(matrices.unbind()), [_as_matrix(updates[number]) for number in numbers])
        results = newton_schulz(matrices, iterations).to(dtype).contiguous()
        for number, result in zip(numbers, results, strict=True):
            found[number] = _in_order_of(updates[number], result)
    return found


def _channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _as_matrix(tensor: Tensor) -> Tensor:
    """A tensor (o, ...) as (o, n), with its columns as they lie in memory: their order changes no singular value."""
    return (tensor.permute(0, 2, 3, 1) if _channels_last(tensor) else tensor).flatten(1)


def _in_order_of(tensor: Tensor, matrix: Tensor) -> Tensor:
    """A view of a matrix (o, n), such as `_as_matrix` makes, with the shape of `tensor` and its order in memory."""
    if _channels_last(tensor):
        return matrix.view(tensor.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
    return matrix.view(tensor.shape)


def newton_schulz(matrices: Tensor, iterations: int) -> Tensor:
    """Matrices (b, o, n) with their singular values brought to about one, in their own type.

    By the quintic iteration of Newton and Schulz with Jordan's coefficients, which stops between 0.7 and 1.2.
    """
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    for _ in range(iterations):
        # x becomes (3.4445 - 4.775 a + 2.0315 a^2) x. No addend is a factor too: `torch.baddbmm` would copy it first.
        a = x @ x.mT
        polynomial = -4.7750 * a
        polynomial.diagonal(dim1=1, dim2=2).add_(3.4445)
        polynomial.baddbmm_(a, a, alpha=2.0315)
        x = polynomial @ x
    return x.mT if tall else x
