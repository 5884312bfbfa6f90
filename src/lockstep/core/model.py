"""Helpers for any nn.Module, also with its tensors cut over the ranks, or on torch's meta device in other stages.

A cut tensor (`DTensor`) is recognised by its methods, because an import of its class takes a second.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lockstep.core.model_card import SIGMOID, SOFTMAX, VALUES

# The base classes of all batch norms and of all convolutions, torch's and timm's. They have no public names.
BatchNorm = _BatchNorm
Convolution = _ConvNd
# A layer with at least so many parameters is gathered on its own: a call costs as much as about 100 kB.
LARGE_LAYER = 2**17


@contextmanager
def model_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model in training or evaluation mode, and restore the mode of each of its modules afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def forward_on_meta(model: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Run a model on a blank image of torch's meta device, in evaluation mode: nothing is computed or changed."""
    # Each tensor where its module holds it, once: `functional_call` would leave a module that several parts share on
    # the meta device, if it were named by each of them.
    shapes = {
        f"{path}.{name}".lstrip("."): torch.empty_like(tensor, device="meta")
        for path, module in model.named_modules()
        for slots in (module.named_parameters, module.named_buffers)
        for name, tensor in slots(recurse=False, remove_duplicate=False)
    }
    dtype = next((tensor.dtype for tensor in shapes.values() if tensor.is_floating_point()), torch.float32)
    image = torch.empty((1, *input_shape), device="meta", dtype=dtype)
    with model_mode(model, training=False), torch.no_grad():
        torch.func.functional_call(model, shapes, (image,), tie_weights=False)


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(module, BatchNorm) for module in model.modules())


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested mappings, lists and tuples, in their order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(item)


def head_layers(model: nn.Module) -> tuple[str, ...]:
    """The layers of a model's head: those that timm names, or else the last linear layer or convolution."""
    modules = dict(model.named_modules())
    if layers := tuple(name for name in named_layers(model, "classifier") if name in modules):
        return layers
    return tuple(name for name, module in modules.items() if isinstance(module, nn.Linear | Convolution))[-1:]


def named_layers(model: nn.Module, role: str) -> tuple[str, ...]:
    """The layers that timm names in the description of its models, as `classifier` or `first_conv`."""
    facts = getattr(model, "pretrained_cfg", None)
    names = facts.get(role) if isinstance(facts, Mapping) else None
    return (names,) if isinstance(names, str) else tuple(names or ())


def head_parameters(model: nn.Module) -> tuple[str, ...]:
    layers = head_layers(model)
    return tuple(name for name, _ in model.named_parameters() if any(within(name, layer) for layer in layers))


def within(name: str, module: str) -> bool:
    """Whether `name` is the name of `module`, or of a parameter or module inside it."""
    return name == module or not module or name.startswith(f"{module}.")


def blocks(model: nn.Module, large: float = LARGE_LAYER) -> Iterator[nn.Module]:
    """The modules of a model to gather as units: the parameters of each are gathered together.

    They are the largest modules within one of timm's groups (`group_matcher`), or else the model's children and those
    in its lists of modules. A single layer of fewer than `large` parameters is gathered with the rest of the model.
    """
    groups = _groups(model)

    def visit(module: nn.Module, prefix: str) -> Iterator[nn.Module]:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            own = [parameter for parameter in groups if parameter.startswith(f"{path}.")]
            if not own:
                continue
            # A list of modules has no forward, before which its parameters could be gathered.
            together = len({groups[parameter] for parameter in own}) == 1 and not isinstance(child, nn.ModuleList)
            size = sum(map(Tensor.numel, child.parameters()))
            if not together:
                yield from visit(child, f"{path}.")
            elif len({parameter.rpartition(".")[0] for parameter in own}) > 1 or size >= large:
                yield child

    yield from visit(model, "")


def _groups(model: nn.Module) -> dict[str, int | str]:
    if hasattr(model, "group_matcher"):
        from timm.models import group_parameters

        matcher = cast(Any, model).group_matcher(coarse=False)
        return group_parameters(model, matcher, reverse=True)
    lists = {name for name, child in model.named_children() if isinstance(child, nn.ModuleList)}
    paths = {name: name.split(".") for name, _ in model.named_parameters()}
    return {name: ".".join(path[: 1 + (path[0] in lists)]) for name, path in paths.items()}


def how_to_group(model: nn.Module) -> str:
    """What a network of the user's lacks for a job that needs to know its layers."""
    return (
        f"define group_matcher(self, coarse) in {type(model).__name__}, which returns regular expressions of layers "
        r'in their order, such as {"stem": r"stem", "blocks": r"blocks\.(\d+)"}'
    )


def infinite_buffers(model: nn.Module) -> frozenset[str]:
    """The buffers of a new model that are infinite by design, such as the bounds of a clamp that limits nothing."""
    return frozenset(name for name, tensor in model.named_buffers() if bool(tensor.isinf().any()))


def is_sound(tensor: Tensor, *, infinite: bool) -> Tensor:
    """Whether all numbers of a tensor are finite, or, if it may be `infinite`, at least numbers: a bool scalar."""
    return (~tensor.isnan() if infinite else tensor.isfinite()).all()


def probabilities(logits: Tensor, kind: str) -> Tensor:
    """The probabilities of logits (B, classes), in the same shape; `kind` is one of `model_card.PROBABILITIES`."""
    if kind == VALUES:
        return logits
    return logits.sigmoid() if kind == SIGMOID else logits.softmax(1)


def log_odds(logits: Tensor, kind: str) -> Tensor:
    """log(p / (1 - p)) of the `probabilities` p of logits (B, classes): float64, finite or NaN, in the same shape.

    They keep the order of examples and of classes where probabilities round to 0 or 1. For softmax they are the logit
    minus the log-sum-exp of the others, computed so that equal logits stay equal. Values stay as they are.
    """
    if kind == VALUES:
        return logits
    logits = logits.double()
    if kind == SOFTMAX:
        top, best = logits.max(1, keepdim=True)
        others = logits.scatter(1, best, -torch.inf)
        shares = (others - top).exp()
        below = logits - top - (shares.sum(1, keepdim=True) - shares).log1p()
        logits = torch.where(logits == top, top - others.logsumexp(1, keepdim=True), below)
    return logits.nan_to_num(torch.nan)


def is_broken(labels: Tensor) -> Tensor:
    """Which examples have a broken image: bool (n,). Their label is negative, or not a number among floats (n, k)."""
    return labels < 0 if labels.ndim == 1 else labels.isnan().any(1)


def best_classes(logits: Tensor, number: int = 5) -> Tensor:
    """The classes with the highest logits (all, if there are fewer), int64 (B, number), the prediction first.

    Logits may be equal, often in 16-bit formats; of these `argmax`, or `topk` of another number, may choose others.
    """
    return logits.topk(min(max(5, number), logits.shape[1])).indices[:, :number]


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has only a part of `tensor`."""
    return hasattr(tensor, "full_tensor")


def has_shards(model: nn.Module) -> bool:
    """Whether a rank lacks some parameters of `model`. The forward pass is then collective."""
    return any(is_sharded(parameter) or parameter.is_meta for parameter in model.parameters())


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without a copy."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's parts of tensors, without gradients or a copy; tensors on other ranks are skipped."""
    return [own_part(tensor.detach()) for tensor in tensors if not tensor.is_meta]


def wire(device: torch.device) -> torch.device:
    """The device for sending a tensor to one rank and for receiving it: gloo uses host memory only."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on the device, from the parts of all ranks; collective if it is cut."""
    if not is_sharded(tensor):
        return tensor
    return tensor.detach().to(tensor.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]


def part_like(example: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of the whole `tensor`, cut like `example`. Every rank has the whole, so nothing is sent."""
    if example.is_meta:
        return tensor.to("meta")
    if not is_sharded(example):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    on_device = tensor.to(example.device_mesh.device_type)  # type: ignore[attr-defined]
    return distribute_tensor(on_device, example.device_mesh, example.placements, src_data_rank=None)  # type: ignore[attr-defined]


class UpdateScope(enum.IntEnum):
    """What the update of a number depends on: the gradient of that number, of its parameter, or of the model."""

    element = 0
    parameter = 1
    model = 2


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of a whole model. `own` is the optimizer of this rank's parameters, with the same groups."""

    own: torch.optim.Optimizer


@torch.no_grad()
def load_whole(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """`model.load_state_dict` for whole tensors. A sharded model takes its parts. Raises RuntimeError."""
    current = model.state_dict()
    model.load_state_dict(
        {name: part_like(current[name], tensor) if name in current else tensor for name, tensor in tensors.items()}
    )
