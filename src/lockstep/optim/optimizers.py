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

from lockstep.core.errors import InputError, did_you_mean
from lockstep.core.fields import Options, ranged, ruled

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


def gradient_norm(model: nn.Module) -> Tensor:
    """The L2 norm over all gradients, as a scalar on the device."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return nn.utils.get_total_norm(gradients)
