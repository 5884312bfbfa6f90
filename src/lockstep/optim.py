"""The optimizers: torch's own for the usual three, Muon, timm's factory for the rest, and weight averaging."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lockstep.errors import InputError, did_you_mean
from lockstep.fields import Options, ranged, ruled

ParamGroups = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class _Optimizer(ABC):
    """What all have: the base learning rate, and which parameters decay how.

    Fields:
        lr: base learning rate for the whole global batch; the schedule multiplies it.
        weight_decay: not applied to parameters of fewer than two dimensions (biases, norms) unless
            `decay_all` is set, which is what the tutorials do.
        layer_decay: the rate of each layer is this times that of the next one (timm); null is off.
    """

    lr: float = ranged(1e-3, above=0, most=1e6)
    weight_decay: float = ranged(0.0, least=0, most=1e6)
    decay_all: bool = False
    layer_decay: float | None = ranged(None, above=0.0, most=1)

    def groups(self, model: nn.Module) -> ParamGroups:
        """The parameter groups, each with the `scale` of its learning rate (1 without layer decay)."""
        trained = [each for each in model.parameters() if each.requires_grad]
        if self.layer_decay is not None:
            from timm.optim import param_groups_layer_decay

            groups = param_groups_layer_decay(model, weight_decay=self.weight_decay, layer_decay=self.layer_decay)
            if self.layer_decay < 1 and len({group["lr_scale"] for group in groups}) == 1:
                raise InputError(
                    f"optimizer.layer_decay is {self.layer_decay}, but the layers of this model are not known; "
                    "use optimizer.layer_decay=null, or a model of timm"
                )
            return [
                {
                    "params": group["params"],
                    "weight_decay": self.weight_decay if self.decay_all else group["weight_decay"],
                    "scale": group["lr_scale"],
                }
                for group in groups
            ]
        if self.decay_all or self.weight_decay == 0:
            return [{"params": trained, "weight_decay": self.weight_decay, "scale": 1.0}]
        decay = [each for each in trained if each.dim() >= 2]
        plain = [each for each in trained if each.dim() < 2]
        both = [(decay, self.weight_decay), (plain, 0.0)]
        return [
            {"params": params, "weight_decay": weight_decay, "scale": 1.0} for params, weight_decay in both if params
        ]

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over a model's parameters.

        Raises:
            InputError: a value is not one that the optimizer takes.
        """
        try:
            return self.make(self.groups(model))
        except (TypeError, ValueError, AssertionError) as error:
            raise InputError(f"optimizer={type(self).__name__.lower()} cannot be built: {error}") from error

    @abstractmethod
    def make(self, groups: ParamGroups) -> torch.optim.Optimizer:
        """The same over parameter groups, with the errors of its library."""


@dataclass(frozen=True, kw_only=True)
class SGD(_Optimizer):
    """`torch.optim.SGD`."""

    lr: float = 0.1
    momentum: float = ranged(0.9, least=0, below=1)
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and self.momentum == 0:
            raise InputError(
                "optimizer.nesterov is true, but optimizer.momentum is 0.0, and there is nothing to look ahead with; "
                "use optimizer.momentum=0.9 or optimizer.nesterov=false"
            )

    def make(self, groups: ParamGroups) -> torch.optim.Optimizer:
        options = {"lr": self.lr, "momentum": self.momentum, "nesterov": self.nesterov, "fused": True}
        optimizer = direct(torch.optim.SGD)(groups, **options)
        if self.momentum:
            # Torch makes them at the first step, and leaves in them what was in memory if a loss scaler skips that
            # step. From zero the first step is the same: the momentum becomes the gradient.
            for each in (each for group in optimizer.param_groups for each in group["params"]):
                optimizer.state[each]["momentum_buffer"] = torch.zeros_like(each)
        return optimizer


@dataclass(frozen=True, kw_only=True)
class Adam(_Optimizer):
    """`torch.optim.Adam`, with its kernel fused over all parameters."""

    betas: list[float] = ranged([0.9, 0.999], least=0, below=1)
    eps: float = ranged(1e-8, least=0, most=1e3)

    def __post_init__(self) -> None:
        if len(self.betas) != 2:
            raise InputError(f"optimizer.betas is {self.betas}, expected two numbers: optimizer.betas=[0.9,0.999]")

    def _options(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": (self.betas[0], self.betas[1]), "eps": self.eps, "fused": True}

    def make(self, groups: ParamGroups) -> torch.optim.Optimizer:
        return direct(torch.optim.Adam)(groups, **self._options())


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """`torch.optim.AdamW`: weight decay apart from the gradient (Loshchilov and Hutter 2019)."""

    weight_decay: float = 0.01

    def make(self, groups: ParamGroups) -> torch.optim.Optimizer:
        return direct(torch.optim.AdamW)(groups, **self._options())


@dataclass(frozen=True, kw_only=True)
class Timm(_Optimizer):
    """Any other optimizer of timm by its name, e.g. `optimizer=timm optimizer.opt=lamb`.

    `momentum` is what timm makes of it for the optimizer in question; `options` go to its constructor.
    """

    opt: str = "lamb"
    momentum: float = ranged(0.9, least=0, below=1)
    options: dict[str, Any] = ruled({}, Options(most=1e9))

    def __post_init__(self) -> None:
        from timm.optim import get_optimizer_info, list_optimizers

        names = [str(name) for name in list_optimizers()]
        if self.opt not in names:
            raise InputError(
                f"optimizer.opt is {self.opt!r}, which timm does not have.{did_you_mean(self.opt, names)}"
            )
        if get_optimizer_info(self.opt).second_order:
            raise InputError(f"optimizer.opt is {self.opt!r}, which needs second derivatives: a step has none")
        if self.momentum != Timm.momentum and not get_optimizer_info(self.opt.split("_")[-1]).has_momentum:
            raise InputError(
                f"optimizer.momentum is {self.momentum}, but optimizer.opt={self.opt} has none; leave it out, and "
                "give what it has with +optimizer.options.KEY=VALUE"
            )

    def make(self, groups: ParamGroups) -> torch.optim.Optimizer:
        from timm.optim import create_optimizer_v2

        built: torch.optim.Optimizer = create_optimizer_v2(
            groups, opt=self.opt, lr=self.lr, momentum=self.momentum, **self.options
        )
        return built


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


@functools.cache
def direct(optimizer: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """One of torch's optimizers without the wrappers that let it be part of a compiled function.

    No optimizer is compiled here, and the wrappers import torch's compiler at the first call: 0.8 to 1.2 s. Nor has a
    step the profiler's range and the hooks that torch puts around it, a quarter of a small one's time.
    """
    names = ("add_param_group", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(getattr(optimizer, name)) for name in names}
    step = torch.no_grad()(inspect.unwrap(optimizer.step))  # `no_grad` is the rest of what its wrapper does
    step.hooked = True  # torch's word for one that has its hooks already
    return type(optimizer.__name__, (optimizer,), {**methods, "step": step, "zero_grad": _forget_gradients})


def _forget_gradients(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """`zero_grad` as it is by default, without a profiler's range around it: 1 instead of 14 us."""
    assert set_to_none
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = None


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group `lr` times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]


class Average(AveragedModel):
    """An exponential moving average of a model's parameters and buffers.

    Of torch's own it changes the update alone: one kernel over all floats and one over all counters. Torch's gathers
    their lists anew at each step and copies its counter to the device, which waits for the device.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, use_buffers=True)
        self.decay = decay
        here, there = ([*each.parameters(), *each.buffers()] for each in (self.module, model))
        pairs = [(mine.detach(), theirs.detach()) for mine, theirs in zip(here, there, strict=True)]
        self.floats = [pair for pair in pairs if pair[0].is_floating_point()]
        self.counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        weight = 1 - self.decay if self.n_averaged > 0 else 1.0
        torch._foreach_lerp_([mine for mine, _ in self.floats], [theirs for _, theirs in self.floats], weight)
        if self.counters:  # torch takes no empty list
            torch._foreach_copy_([mine for mine, _ in self.counters], [theirs for _, theirs in self.counters])
        self.n_averaged += 1


def make_ema(model: nn.Module, decay: float) -> AveragedModel:
    """An exponential moving average of the model's parameters and buffers, which begins as they are after a step."""
    return Average(model, decay)


def gradient_norm(model: nn.Module) -> Tensor:
    """The L2 norm over all gradients, as a scalar on the device."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return nn.utils.get_total_norm(gradients)
