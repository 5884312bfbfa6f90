"""What a job changes of its network: frozen layers, recomputed activations, and micro-batches without an example.

The step alone decides which layers are frozen, so that a resume cannot get it wrong. Frozen batch norms keep their
running statistics and use them, as in an evaluation.

Gradient checkpointing (Chen et al. 2016, arXiv 1604.06174) takes less memory and about a third more time: a block
keeps its input alone, and the backward pass computes the rest again. torch's function restores its generators and
autocast. Keyed draws come out the same, because they follow from the keys of the examples.

The last global batch of an epoch may have fewer examples than all ranks have micro-batches. Many networks with
attention then ask torch for a size that it cannot infer from a tensor without elements.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.core.errors import InputError, did_you_mean
from lockstep.core.model import BatchNorm, blocks, head_layers, how_to_group, within
from lockstep.core.plan import Plan
from lockstep.core.protocols import Strategy
from lockstep.core.world import World
from lockstep.stochastic.convert import untouched
from lockstep.strategy.base import DataParallel

BACKBONE = "backbone"  # all layers but the head, if no layer has this name
MOST_LAYERS = 30


@dataclass(frozen=True)
class Freezing:
    """The frozen layers of a model, and their last frozen step.

    Fields:
        switched: the parameters that are frozen at first and trained later.
        norms: the batch norms that keep their running statistics.
        until: the last step in which they are frozen; None is the last step of the run.
        numbers: how many single weights are frozen.
    """

    switched: tuple[nn.Parameter, ...] = ()
    norms: tuple[nn.Module, ...] = ()
    until: int | None = None
    numbers: int = 0

    @classmethod
    def of(cls, model: nn.Module, names: frozenset[str], until: int | None) -> Self:
        """The freezing of a wrapped model, by the names that `frozen_names` returns."""
        norms = []
        for name, module in model.named_modules():
            own = [f"{name}.{parameter}" for parameter, _ in module.named_parameters(recurse=False)]
            if isinstance(module, BatchNorm) and (names.issuperset(own) if own else name in names):
                norms.append(module)
        parameters = [parameter for name, parameter in model.named_parameters() if name in names]
        switched = tuple(parameter for parameter in parameters if parameter.requires_grad)
        return cls(switched, tuple(norms), until, sum(parameter.numel() for parameter in parameters))

    def frozen(self, step: int) -> bool:
        """Whether the layers are frozen in a step, counted from 1."""
        return self.until is None or step <= self.until

    def freeze_for(self, step: int) -> None:
        """Freeze or thaw the layers for a step, counted from 1."""
        if not self.switched and not self.norms:
            return
        frozen = self.frozen(step)
        for parameter in self.switched:
            parameter.requires_grad_(not frozen)
        for norm in self.norms:  # an evaluation leaves the whole model in training mode
            norm.train(not frozen)

    def __str__(self) -> str:
        when = "" if self.until is None else f" until step {self.until:,}"
        return f"{self.numbers:,} of them frozen{when}" if self.numbers else ""


def freeze_for_good(model: nn.Module, names: frozenset[str]) -> None:
    """Freeze parameters for the whole run, so that strategies and optimizers ignore them."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def frozen_names(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """The names of the parameters and batch norms that `patterns` freeze (see `train.freeze`).

    Raises InputError: a pattern fits nothing, or nothing would be left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    names += [name for name, module in model.named_modules() if isinstance(module, BatchNorm)]
    frozen: set[str] = set()
    for pattern in patterns:
        fitting = {name for name in names if _fits(name, pattern)}
        if not fitting and pattern == BACKBONE:
            head = head_layers(model)
            fitting = {name for name in names if not any(within(name, layer) for layer in head)}
        if not fitting:
            raise _unknown(model, pattern)
        frozen |= fitting
    if all(name in frozen for name, parameter in model.named_parameters() if parameter.requires_grad):
        if not frozen:
            raise InputError(f"the model {type(model).__name__} has no parameter that requires a gradient")
        raise InputError(f"train.freeze is [{','.join(patterns)}], which leaves nothing to train; freeze less")
    return frozenset(frozen)


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern fits a dotted name, or the name of a module that contains it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: number + 1]), pattern) for number in range(len(parts)))


def _unknown(model: nn.Module, pattern: str) -> InputError:
    modules = {name: module for name, module in model.named_modules() if name and any(map(id, module.parameters()))}
    top = [f"{name} ({type(module).__name__})" for name, module in modules.items() if "." not in name]
    shown = ", ".join(top[:MOST_LAYERS]) + ", ..." * (len(top) > MOST_LAYERS)
    return InputError(
        f"train.freeze: {pattern!r} matches no layer of the model, expected {BACKBONE} (all but the head, "
        f"{' and '.join(head_layers(model)) or 'which it does not have'}), or layers by name, with * for any text: "
        f"{shown}.{did_you_mean(pattern, [BACKBONE, *modules])}"
    )


def recompute_blocks(model: nn.Module) -> None:
    """Make each block of `model` compute its activations again, in place, by changing its class.

    Raises InputError: the model has fewer than two blocks of several layers.
    """
    recomputed = [*blocks(model, large=math.inf)]  # a single layer has nothing to compute again
    if len(recomputed) < 2:
        raise InputError(
            "model.grad_checkpointing is true, but this model has no blocks of layers to compute again; remove it, "
            f"or put its layers into modules, and {how_to_group(model)}"
        )
    for block in recomputed:
        original = type(block)
        block.__class__ = type(original.__name__, (original,), {"forward": _recomputed(original.forward)})


def _recomputed(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return plain(self, *args, **kwargs)
        args = tuple(list(value) if isinstance(value, list) else value for value in args)  # DenseNet adds to its list
        return checkpoint(
            partial(plain, self),
            *args,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), _counted_once(self)),
            **kwargs,
        )

    return forward


@contextmanager
def _counted_once(block: nn.Module) -> Iterator[None]:
    """The running statistics of batch norms are not updated a second time."""
    norms = [module for module in block.modules() if isinstance(module, BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


class BlankExample(nn.Module):
    """Calls a network with a blank example, which no batch norm counts, if there is none, and drops its logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Tensor) -> Any:
        images, *keys = inputs
        if len(images):
            return self.network(*inputs)
        from lockstep.strategy.sync_batchnorm import SyncBatchNorm  # few runs have a rank without an example

        norms = [module for module in self.modules() if isinstance(module, BatchNorm) and module.training]
        for norm in norms:
            norm.training, norm.blank = isinstance(norm, SyncBatchNorm), True  # type: ignore[assignment]
        # Not of one colour: a network may divide by the deviation of its pixels.
        ramp = torch.linspace(-1, 1, math.prod(images.shape[1:]), dtype=images.dtype, device=images.device)
        logits = self.network(ramp.view(1, *images.shape[1:]), *(key.new_zeros((1, *key.shape[1:])) for key in keys))
        for norm in norms:
            norm.training, norm.blank = True, False  # type: ignore[assignment]
        return logits[:0]


def for_empty_micro_batches(network: nn.Module, inputs: tuple[Tensor, ...], plan: Plan, world: World) -> nn.Module:
    """The network, or a `BlankExample` for it where it needs one: it is tried on none of `inputs`."""
    if (plan.examples % plan.batch or plan.batch) >= world.size * plan.micro_batches:
        return network
    with torch.no_grad(), untouched(network, inputs[0].device):
        try:
            network(*(tensor[:0] for tensor in inputs))
        except Exception:  # any error of any network; a full batch shows the user whether it works at all
            return BlankExample(network)
    return network


def batch_norm_counts(strategy: Strategy, count: int, ranks: int, micro_batches: int) -> set[int]:
    """The numbers of examples over which a batch norm counts in a step on a global batch of `count` examples."""
    ends = [piece * count // (ranks * micro_batches) for piece in range(ranks * micro_batches + 1)]
    sizes = [end - start for start, end in pairwise(ends)]
    if strategy.sync_batchnorm:
        return {sum(sizes[part::micro_batches]) for part in range(micro_batches)}
    gpus = max(1, torch.cuda.device_count()) if isinstance(strategy, DataParallel) else 1
    return {len(chunk) for size in {*sizes} for chunk in torch.empty(size, device="meta").chunk(gpus)}


def batches_without_single(plan: Plan, strategy: Strategy, ranks: int) -> Iterator[int]:
    """The global batches of which no batch norm counts over one example: the plan's own, smaller and larger ones."""
    ends_epoch = plan.total_steps >= plan.steps_per_epoch
    for batch in chain(range(plan.batch, 0, -1), range(plan.batch + 1, plan.examples + 1)):
        counts = (batch, plan.examples % batch if ends_epoch else 0)
        if not any(1 in batch_norm_counts(strategy, count, ranks, plan.micro_batches) for count in counts):
            yield batch


def check_single_examples(
    network: nn.Module, inputs: tuple[Tensor, ...], plan: Plan, strategy: Strategy, ranks: int, freezing: Freezing
) -> None:
    """Refuse, before the first step, a plan in which a batch norm counts over one example, and that is too few.

    It is too few for a layer that has one value per channel of an example. Frozen batch norms count nothing. Raises
    InputError: a batch norm would have one value per channel in a step of the plan.
    """
    better = next(batches_without_single(plan, strategy, ranks), None)
    if better == plan.batch:
        return
    try:
        with torch.no_grad(), untouched(network, inputs[0].device):
            for norm in freezing.norms:
                norm.train(not freezing.frozen(plan.total_steps))
            network(*(tensor[:1] for tensor in inputs))
    except Exception as error:  # any error of any network; a full batch shows the user whether it works at all
        if "more than 1 value per channel" not in str(error):
            return
        remedy = f"batch={better}" if better else "fewer ranks or micro-batches, or a model without batch norm"
        raise InputError(
            f"batch is {plan.batch}, which leaves a micro-batch of one of the {plan.examples} examples, too few for "
            f"the batch norm of this model; use {remedy}"
        ) from None
