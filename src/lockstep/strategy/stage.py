"""One stage of a model that is cut over the ranks layer by layer: its part of the forward and backward pass.

A rank runs the model's own forward, so any model can be used. The parameters of other stages are on torch's meta
device, where a tensor has a shape but no numbers. So up to the first module of its own stage a rank computes shapes
only. There it receives the numbers from the previous rank. Before the first module of the next stage it ends the
forward pass and sends the numbers to the next rank. Gradients go back the same way during backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.errors import InputError
from lockstep.core.model import model_mode, wire
from lockstep.core.world import World
from lockstep.strategy.cutting import Stages, named_tensors

# The kinds of messages; each is also its tag.
ACTIVATIONS, GRADIENTS = 0, 1


class NoNeighbours:
    """The neighbours of a stage that is tried alone: it receives zeros, and its messages are dropped."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, tensor: Tensor, kind: int) -> None:
        """Nothing to do."""

    def receive(self, shape: torch.Size, dtype: torch.dtype, kind: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


class Neighbours(NoNeighbours):
    """Messages between neighbouring ranks. Activations go to the next rank, gradients to the previous rank.

    A send does not wait for its receiver, but the next send of the same kind does. So a rank holds one message of
    each kind, and there is no deadlock if all ranks take the micro-batches in the same order.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world.device)
        self.world = world
        # NCCL processes the messages of a group in the order of the calls, so one direction would wait for the other;
        # gloo has tags. `new_group` is collective.
        own_groups = dist.get_backend() == "nccl"
        self.groups: list[Any] = [dist.new_group() if own_groups else None for _ in (ACTIVATIONS, GRADIENTS)]
        self.pending: dict[int, tuple[Any, Tensor]] = {}

    def send(self, tensor: Tensor, kind: int) -> None:
        if kind in self.pending:
            self.pending.pop(kind)[0].wait()
        if tensor.numel():
            message = tensor.detach().to(wire(self.device)).contiguous()
            target = self.world.rank + (1 if kind == ACTIVATIONS else -1)
            self.pending[kind] = (dist.isend(message, target, group=self.groups[kind], tag=kind), message)

    def receive(self, shape: torch.Size, dtype: torch.dtype, kind: int) -> Tensor:
        message = torch.empty(shape, dtype=dtype, device=wire(self.device))
        if message.numel():
            dist.recv(message, self.world.rank - (1 if kind == ACTIVATIONS else -1), self.groups[kind], tag=kind)
        return message.to(self.device)


class _Receive(torch.autograd.Function):
    """Receives activations from the previous stage; backward sends their gradient there.

    `anchor` needs a gradient, so that autograd calls this backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, neighbours: NoNeighbours, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        ctx.neighbours = neighbours
        return neighbours.receive(shape, dtype, ACTIVATIONS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.neighbours.send(gradients[0], GRADIENTS)
        return None, None, None, None


class _Send(torch.autograd.Function):
    """Sends activations to the next stage and returns logits of no examples; backward receives their gradient.

    With `anchor`, autograd also calls this backward if no layer before it is trained. Then no gradient is sent.
    """

    @staticmethod
    def forward(ctx: Any, activations: Tensor, anchor: Tensor, neighbours: NoNeighbours, classes: int) -> Tensor:
        neighbours.send(activations, ACTIVATIONS)
        ctx.neighbours, ctx.shape, ctx.dtype = neighbours, activations.shape, activations.dtype
        return activations.new_empty((0, classes))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        own = ctx.neighbours.receive(ctx.shape, ctx.dtype, GRADIENTS) if ctx.needs_input_grad[0] else None
        return own, None, None, None


class _NextStageError(Exception):
    """Ends a forward pass where the next stage begins, and carries the input of that stage. Caught by `Stage`."""

    def __init__(self, activations: Tensor) -> None:
        super().__init__()
        self.activations = activations


class Stage:
    """The forward of a model on one rank, which replaces the model's own.

    It takes images (b, C, H, W); only the first stage reads their numbers. It returns logits: (b, classes) in the
    last stage, (0, classes) in the others, connected to the graph in every stage. Collective.
    """

    def __init__(self, model: nn.Module, stages: Stages, world: World) -> None:
        self.stages = stages
        self.neighbours = NoNeighbours(world.device)
        self.whole_forward = model.forward
        self.number = world.rank
        self.anchor = torch.zeros((), device=world.device, requires_grad=True)
        self.storage = next(model.parameters()).dtype
        modules = dict(model.named_modules())
        if self.number > 0:
            modules[stages.entries[self.number - 1]].register_forward_pre_hook(self._enter)
        if self.number < len(stages.entries):
            modules[stages.entries[self.number]].register_forward_pre_hook(self._leave)

    def __call__(self, images: Tensor) -> Tensor:
        if self.number > 0:  # cast them here, because autocast does not support the meta device
            images = images.to("meta", self.storage)
        try:
            return self.whole_forward(images)
        except _NextStageError as end:
            return _Send.apply(end.activations, self.anchor, self.neighbours, self.stages.classes)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the shape of the input by the numbers of the previous stage."""
        shape_only, *other_args = args
        dtype = self.stages.formats[self.number - 1]
        if shape_only.requires_grad:  # a layer before is trained, so the previous stage waits for a gradient
            numbers = _Receive.apply(self.anchor, self.neighbours, shape_only.shape, dtype)
        else:
            numbers = self.neighbours.receive(shape_only.shape, dtype, ACTIVATIONS)
        if shape_only.dim() == 4 and not shape_only.is_contiguous():
            numbers = numbers.contiguous(memory_format=torch.channels_last)
        return numbers, *other_args

    def _leave(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        raise _NextStageError(args[0])


@torch.no_grad()
def become_stage(model: nn.Module, stages: Stages, images: Tensor, world: World) -> None:
    """Make a model the stage of this rank, in place: other stages' tensors lose their numbers. Collective.

    Raises:
        InputError: on every rank; the model does not run without the numbers of the stages before.
    """
    replaced: dict[int, Any] = {}
    for name, tensor in named_tensors(model):
        if stages.homes[name] != world.rank:
            empty = torch.empty_like(tensor, device="meta")
            parameter = isinstance(tensor, nn.Parameter)
            replaced[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if parameter else empty
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({name: replaced[id(own)] for name, own in tensors.items() if id(own) in replaced})
    stage = Stage(model, stages, world)
    model.forward = stage
    _try_alone(model, images, world)
    stage.neighbours = Neighbours(world)


def _try_alone(model: nn.Module, images: Tensor, world: World) -> None:
    problem = ""
    try:
        with model_mode(model, training=False):
            model(images)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        problem = str(error).partition("\n")[0]
    for rank, rank_problem in enumerate(world.gather(problem)):
        if rank_problem:
            raise InputError(
                f"strategy=pipeline: stage {rank} of this model does not run without the numbers of the stages "
                f"before it ({rank_problem}); cut elsewhere with strategy.cuts=[MODULE], or use strategy=fsdp"
            )


def stage_of(model: nn.Module) -> Stage:
    assert isinstance(model.forward, Stage)
    return model.forward
