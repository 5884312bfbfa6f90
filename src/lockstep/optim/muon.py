"""Muon (Jordan et al. 2024): SGD with momentum, in which the update of a matrix is made orthogonal."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lockstep.config.options import option
from lockstep.core.fields import ranged
from lockstep.core.model import Convolution, UpdateScope
from lockstep.optim.optimizers import OF_ADAM, OptimizerOption, ParamGroups, UsualRate


@option("optimizer")
class Muon(OptimizerOption):
    """Orthogonalised momentum for convolutions and inner linear layers, Nesterov SGD for all other parameters.

    The update of a convolution or linear layer is its Nesterov momentum with all singular values moved near one
    (Jordan et al. 2024, kellerjordan.github.io/posts/muon); the last linear layer, biases, norms and embeddings take
    Nesterov steps. Weight decay is decoupled from the gradient and multiplied by `lr`, so that all parameters decay
    at the same rate. torch's Muon does not support convolutions, and timm's uses Adam for the other parameters. On a
    GPU updates are made orthogonal in bfloat16, unless the model is float64.
    """

    head_lr: float | None = 0.02  # learning rate of the last linear layer; null: `lr`
    bias_lr: float = ranged(0.02, above=0, most=1e6)  # learning rate of biases, norms and embeddings
    momentum: float = ranged(0.95, least=0, below=1)  # momentum of the matrices
    sgd_momentum: float = ranged(0.9, least=0, below=1)  # momentum of all other parameters
    iterations: int = ranged(5, least=1, most=20)  # Newton-Schulz iterations, which make an update orthogonal
    # before each step, scale every matrix to the norm of an orthogonal one; for convolutions before a batch norm
    fixed_norm: bool = False
    # decoupled from the gradient: a step multiplies a parameter by 1 - `lr` times this. Not applied to biases and
    # norms (fewer than two dimensions) unless `decay_all` is set
    weight_decay: float = 0.0
    scope: ClassVar[UpdateScope] = UpdateScope.parameter
    recordable: ClassVar[bool] = True

    @property
    def usual(self) -> UsualRate:
        return replace(OF_ADAM, lr=0.02)

    def groups(self, model: nn.Module) -> ParamGroups:
        layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, Convolution))]
        linear = [id(layer.weight) for layer in layers if isinstance(layer, nn.Linear)]
        heads = set(linear[-1:])
        matrices = {id(layer.weight) for layer in layers} - heads
        others = {id(parameter) for parameter in model.parameters()} - matrices - heads
        head_lr = self.rate if self.head_lr is None else self.head_lr
        groups = []
        for group in self.decay_groups(model, self.layer_scales(model)):
            for kind, rate in ((matrices, self.rate), (heads, head_lr), (others, self.bias_lr)):
                if params := [parameter for parameter in group["params"] if id(parameter) in kind]:
                    ratio = rate / self.rate
                    decay = group["weight_decay"] / ratio  # a step multiplies it by the group's rate
                    scale, orthogonal = group["scale"] * ratio, kind is matrices
                    groups.append({"params": params, "orthogonal": orthogonal, "scale": scale, "weight_decay": decay})
        return groups

    def make(self, groups: ParamGroups) -> torch.optim.Optimizer:
        for group in groups:
            group["momentum"] = self.momentum if group["orthogonal"] else self.sgd_momentum
        return MuonOptimizer(groups, {"lr": self.rate, "iterations": self.iterations, "fixed_norm": self.fixed_norm})


class MuonOptimizer(torch.optim.Optimizer):
    """The torch optimizer of `Muon`. The key `orthogonal` of a group says whether its parameters are matrices."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not params:
                continue
            gradients = [parameter.grad for parameter in params]
            for parameter in params:
                if not self.state[parameter]:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            buffers = [self.state[parameter]["momentum_buffer"] for parameter in params]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, gradients)
            updates = list(torch._foreach_add(gradients, buffers, alpha=group["momentum"]))
            decay_factor = 1 - group["lr"] * group["weight_decay"]
            if group["orthogonal"]:
                updates = orthogonalised(updates, group["iterations"])
            if group["orthogonal"] and group["fixed_norm"]:
                # To the norm of an orthogonal matrix of as many rows, without reading the norms from the device.
                factors = torch._foreach_reciprocal(torch._foreach_norm(params))
                torch._foreach_mul_(factors, [decay_factor * len(parameter) ** 0.5 for parameter in params])
                torch._foreach_mul_(params, factors)
            elif group["weight_decay"] != 0:
                torch._foreach_mul_(params, decay_factor)
            if isinstance(group["lr"], Tensor):  # `alpha` would read the tensor, and wait for the device
                torch._foreach_mul_(updates, -group["lr"])
                torch._foreach_add_(params, updates)
            else:
                torch._foreach_add_(params, updates, alpha=-group["lr"])


def orthogonalised(updates: list[Tensor], iterations: int) -> list[Tensor]:
    """Bring the singular values of each of `updates` (o, ...), seen as a matrix (o, n), to about one.

    The results have the dtype and memory layout of the updates, so that adding them to the parameters needs no copy.
    Matrices of one shape are multiplied together: on a GPU in bfloat16, as Jordan does, unless they are float64.
    """
    # Views with the columns of each matrix in memory order, which does not change the singular values.
    in_memory_order = [update.permute(0, 2, 3, 1) if _is_channels_last(update) else update for update in updates]
    orthogonal: list[Tensor] = list(updates)
    by_shape: dict[tuple[int, int, torch.dtype], list[int]] = {}
    for number, update in enumerate(updates):
        by_shape.setdefault((len(update), update[0].numel(), update.dtype), []).append(number)
    for (rows, columns, dtype), numbers in by_shape.items():
        first = updates[numbers[0]]
        inner = torch.bfloat16 if first.is_cuda and dtype != torch.float64 else dtype
        matrices = first.new_empty((len(numbers), rows, columns), dtype=inner)
        torch._foreach_copy_(list(matrices.unbind()), [in_memory_order[number].flatten(1) for number in numbers])
        results = newton_schulz(matrices, iterations).to(dtype).contiguous()
        for number, result in zip(numbers, results, strict=True):
            view = result.view(in_memory_order[number].shape)
            orthogonal[number] = view.permute(0, 3, 1, 2) if _is_channels_last(updates[number]) else view
    return orthogonal


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def newton_schulz(matrices: Tensor, iterations: int) -> Tensor:
    """Bring the singular values of matrices (b, o, n) to about one, in their own dtype.

    This is the quintic iteration of Newton and Schulz with Jordan's coefficients; values end up between 0.7 and 1.2.
    """
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    for _ in range(iterations):
        # x becomes (3.4445 - 4.775 a + 2.0315 a^2) x. The diagonal adds 3.4445 x: `torch.baddbmm` would copy x.
        a = x @ x.mT
        polynomial = -4.7750 * a
        polynomial.diagonal(dim1=1, dim2=2).add_(3.4445)
        polynomial.baddbmm_(a, a, alpha=2.0315)
        x = polynomial @ x
    return x.mT if tall else x
