"""The optimizers: SGD, Adam and AdamW of torch, and all others of timm by name."""

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Self

import torch
from torch import nn

from lockstep.config.options import option
from lockstep.core.errors import InputError, did_you_mean
from lockstep.core.fields import TEXT, mapping, ranged, ruled, with_history
from lockstep.core.model import UpdateScope, head_parameters, how_to_group, is_sharded
from lockstep.core.protocols import Optimizer
from lockstep.optim.fused import fused, with_lookahead

ParamGroups = list[dict[str, Any]]
# The factor of `optimizer.lr=auto` for a model that starts from trained weights (Kolesnikov et al. 2020, "Big
# Transfer": 0.03 to train, 0.003 to fine-tune).
FINE_TUNING = 0.1


@dataclass(frozen=True)
class UsualRate:
    """The usual learning rate of an optimizer: `lr` for a global batch of `batch` examples.

    `power` says how the rate grows with the batch: 1 is in proportion, 0.5 with its square root.
    """

    lr: float
    batch: int
    power: float

    def at(self, batch: int) -> float:
        return self.lr * (batch / self.batch) ** self.power


# In proportion to the batch: Goyal et al. 2017, "Accurate, Large Minibatch SGD". With its square root: Malladi et al.
# 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"; 0.001 is the rate of Adam's authors.
OF_SGD, OF_ADAM = UsualRate(0.1, 256, 1), UsualRate(1e-3, 64, 0.5)


@dataclass(frozen=True, kw_only=True)
class OptimizerOption(Optimizer):
    """The base class of all optimizer options: the base learning rate, and the weight decay of each parameter."""

    # base learning rate for the global batch; the schedule multiplies it. `auto`: the optimizer's usual rate for this
    # batch size, see docs/configuration.md#what-auto-becomes
    lr: int | float | str = ranged("auto", above=0.0, most=1e6, words=("auto",))
    # learning rate of the layer that gives the logits; null: `lr`
    head_lr: float | None = ranged(None, above=0.0, most=1e6)
    # not applied to biases and norms (fewer than two dimensions) unless `decay_all` is set
    weight_decay: float = ranged(0.0, least=0, most=1e6)
    decay_all: bool = False  # decay biases and norms too, as a plain torch optimizer does
    # decay what the model names in `no_weight_decay()` too, in timm position embeddings, class tokens and tables of
    # relative positions; null: as `decay_all`, and a resumed run as before
    decay_embeddings: bool | None = with_history(None, before=True)
    # layer-wise decay: a layer's rate is the next layer's rate times this; null: off
    layer_decay: float | None = ranged(None, above=0.0, most=1)
    # look-ahead: every so many steps, e.g. 6, the slow weights move by `lookahead_alpha` of the way to the weights,
    # which continue from there; null: off
    lookahead: int | None = ranged(None, least=1, most=1_000_000)
    lookahead_alpha: float = ranged(0.5, above=0.0, most=1)  # share of the way

    def __post_init__(self) -> None:
        if self.lookahead is None and self.lookahead_alpha != OptimizerOption.lookahead_alpha:
            raise InputError(
                f"optimizer.lookahead_alpha is {self.lookahead_alpha}, but optimizer.lookahead is null, so there are "
                "no slow weights; add optimizer.lookahead=6, or remove it"
            )

    @property
    def usual(self) -> UsualRate:
        """The rate that `lr=auto` starts from. A class without one has Adam's, and a run says so at its start."""
        return OF_ADAM

    @property
    def says_usual(self) -> bool:
        """Whether its class, or the algorithm that it derives from, has a usual rate of its own."""
        return type(self).usual is not OptimizerOption.usual

    @property
    def rate(self) -> float:
        """`lr` as a number; for `auto`, the usual rate for its own batch."""
        return self.usual.lr if isinstance(self.lr, str) else float(self.lr)

    def at_batch(self, batch: int, *, trained: bool) -> Self:
        if self.lr != "auto":
            return self
        return replace(self, lr=self.usual.at(batch) * (FINE_TUNING if trained else 1))

    def groups(self, model: nn.Module) -> ParamGroups:
        """The parameter groups, each with the `scale` of its learning rate (1 without layer decay and head rate)."""
        scales = self.layer_scales(model)
        if self.head_lr is not None:
            names = set(head_parameters(model))
            head = [weight for name, weight in model.named_parameters() if weight.requires_grad and name in names]
            if not head:
                raise InputError(
                    f"optimizer.head_lr is {self.head_lr:g}, but no layer that gives the logits is trained; remove it"
                )
            scales |= dict.fromkeys(head, self.head_lr / self.rate)
        return self.decay_groups(model, scales)

    def layer_scales(self, model: nn.Module) -> dict[nn.Parameter, float]:
        """The scale of the learning rate of each trained parameter by its layer; empty without layer decay."""
        if self.layer_decay is None:
            return {}
        from timm.optim import param_groups_layer_decay

        groups = param_groups_layer_decay(model, layer_decay=self.layer_decay)
        scales = {parameter: group["lr_scale"] for group in groups for parameter in group["params"]}
        head = set(head_parameters(model))
        inner = any(parameter.requires_grad and name not in head for name, parameter in model.named_parameters())
        if inner and self.layer_decay < 1 and len({*scales.values()}) == 1:
            raise InputError(
                f"optimizer.layer_decay is {self.layer_decay}, but the layers of this model are not known; "
                f"use optimizer.layer_decay=null, or a model of timm, or {how_to_group(model)}"
            )
        return scales

    def decay_groups(self, model: nn.Module, scales: Mapping[nn.Parameter, float]) -> ParamGroups:
        """The groups by weight decay and by scale. As in timm, the model's `no_weight_decay` names what has none."""
        embeddings_decay = self.decay_all if self.decay_embeddings is None else self.decay_embeddings
        spared = [] if embeddings_decay else [*getattr(model, "no_weight_decay", list)()]
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                decays = self.decay_all or parameter.dim() >= 2
                decays = decays and not any(fnmatchcase(name, pattern) for pattern in spared)
                key = self.weight_decay if decays else 0.0, scales.get(parameter, 1.0)
                groups.setdefault(key, []).append(parameter)
        ordered = sorted(groups.items(), key=lambda item: -item[0][0])  # the rate of the first group is logged
        return [{"params": params, "weight_decay": decay, "scale": scale} for (decay, scale), params in ordered]

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over a model's parameters. Raises InputError: the optimizer rejects a value."""
        try:
            optimizer = self.make(self.groups(model))
            if not all("scale" in group for group in optimizer.param_groups):
                raise ValueError("make() has to pass on the `scale` of its groups, a factor of the learning rate")
        except (TypeError, ValueError, AssertionError) as error:
            raise InputError(f"optimizer={type(self).__name__.lower()} cannot be built: {error}") from error
        return (
            optimizer if self.lookahead is None else with_lookahead(optimizer, self.lookahead, self.lookahead_alpha)
        )

    @abstractmethod
    def make(self, groups: ParamGroups) -> torch.optim.Optimizer:
        """The optimizer over parameter groups; raises the errors of its library."""


@option("optimizer")
class SGD(OptimizerOption):
    """`torch.optim.SGD`."""

    momentum: float = ranged(0.9, least=0, below=1)  # momentum of the gradient
    nesterov: bool = False  # Nesterov's momentum
    scope: ClassVar[UpdateScope] = UpdateScope.element
    recordable: ClassVar[bool] = True

    @property
    def usual(self) -> UsualRate:
        return OF_SGD

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise InputError(
                "optimizer.nesterov is true, but optimizer.momentum is 0.0, expected one above 0; "
                "use optimizer.momentum=0.9 or optimizer.nesterov=false"
            )

    def make(self, groups: ParamGroups) -> torch.optim.Optimizer:
        options = {"lr": self.rate, "momentum": self.momentum, "nesterov": self.nesterov}
        # The fused kernel does not take tensors that are cut over the ranks; the foreach kernels do.
        options["foreach" if is_sharded(groups[0]["params"][0]) else "fused"] = True
        optimizer = fused(torch.optim.SGD)(groups, **options)
        if self.momentum:
            # torch allocates the momenta at the first step, and leaves them uninitialised if a loss scaler skips that
            # step. Zeros give the same first step: the momentum becomes the gradient.
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer


@option("optimizer")
class Adam(OptimizerOption):
    """`torch.optim.Adam`, with its kernel fused over all parameters."""

    betas: list[float] = ranged([0.9, 0.999], least=0, below=1)  # decay of the two moments
    eps: float = ranged(1e-8, least=0, most=1e3)  # added to the square root of the second moment
    scope: ClassVar[UpdateScope] = UpdateScope.element
    recordable: ClassVar[bool] = True
    original: ClassVar[Any] = torch.optim.Adam

    @property
    def usual(self) -> UsualRate:
        return OF_ADAM

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2:
            raise InputError(f"optimizer.betas is {self.betas}, expected two numbers: optimizer.betas=[0.9,0.999]")

    def make(self, groups: ParamGroups) -> torch.optim.Optimizer:
        return fused(self.original)(groups, lr=self.rate, betas=tuple(self.betas), eps=self.eps, fused=True)


@option("optimizer", "adamw")
class AdamW(Adam):
    """`torch.optim.AdamW`: Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    weight_decay: float = 0.01
    original: ClassVar[Any] = torch.optim.AdamW


@option("optimizer")
class Timm(OptimizerOption):
    """Any optimizer of timm by its name: `optimizer=timm optimizer.opt=lamb`.

    timm passes `momentum` to the optimizer in its own way (for some it is a beta); `options` go to its constructor.
    """

    opt: str = ruled("lamb", TEXT)  # timm's name of the optimizer
    momentum: float = ranged(0.9, least=0, below=1)  # momentum of the gradient
    # further arguments of its constructor: `+optimizer.options.KEY=VALUE`
    options: dict[str, Any] = mapping(most=1e9)

    def __post_init__(self) -> None:
        from timm.optim import get_optimizer_info, list_optimizers

        super().__post_init__()
        if self.opt.startswith("lookahead_"):
            raise InputError(
                f"optimizer.opt is {self.opt}, but look-ahead is a key of every optimizer; use "
                f"optimizer.opt={self.opt.removeprefix('lookahead_')} optimizer.lookahead=6"
            )
        names = [str(name) for name in list_optimizers()]
        if self.opt not in names:
            raise InputError(
                f"optimizer.opt is {self.opt!r}, which timm does not have.{did_you_mean(self.opt, names)}"
            )
        if get_optimizer_info(self.opt).second_order:
            raise InputError(
                f"optimizer.opt is {self.opt!r}, which needs second derivatives: a training step computes none"
            )
        if self.momentum != Timm.momentum and not get_optimizer_info(self.opt).has_momentum:
            raise InputError(
                f"optimizer.momentum is {self.momentum}, but optimizer.opt={self.opt} has none; remove it, and "
                "give what it has with +optimizer.options.KEY=VALUE"
            )

    @property
    def algorithm(self) -> str:
        return self.opt

    @property
    def usual(self) -> UsualRate:
        """The rate of SGD for optimizers derived from it; for others the default of the class, if it has one."""
        from timm.optim import get_optimizer_info

        if any(word in self.opt for word in ("sgd", "momentum", "nesterov")):
            return OF_SGD
        cls = get_optimizer_info(self.opt).opt_class
        own = None if isinstance(cls, str) else inspect.signature(cls).parameters.get("lr")  # str: not installed
        return replace(OF_ADAM, lr=own.default) if own is not None and isinstance(own.default, float) else OF_ADAM

    def make(self, groups: ParamGroups) -> torch.optim.Optimizer:
        from timm.optim import create_optimizer_v2

        return create_optimizer_v2(groups, opt=self.opt, lr=self.rate, momentum=self.momentum, **self.options)
