"""A pipeline: the layers of a model are divided over the ranks, and micro-batches pass from rank to rank.

`torch.distributed.pipelining` needs a model that it can trace or that is cut by hand, and micro-batches of one size.
Here a rank runs the model's own forward, with the parameters of other stages on torch's meta device: it computes
shapes only up to its own stage, where it receives the numbers from the previous rank, and ends the forward pass at
the next stage, to whose rank it sends them. Gradients go back the same way.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.config.options import option
from lockstep.core.errors import InputError, percent, reason_of
from lockstep.core.fields import TEXT, choice, ranged, ruled
from lockstep.core.model import UpdateScope, forward_on_meta, wire
from lockstep.core.plan import Plan
from lockstep.core.protocols import M, Optimizer, Precision
from lockstep.core.world import World
from lockstep.strategy.base import Single, share_weights
from lockstep.strategy.cutting import Stages, cut, named_tensors
from lockstep.strategy.zero import OwnedOptimizer

MOST_STAGES = 1000
# The kinds of messages; each is also its tag.
ACTIVATIONS, GRADIENTS = 0, 1


@option("strategy")
class Pipeline(Single):
    """Each rank has a stage, which is some consecutive layers of the model, and micro-batches pass from rank to rank:
    for models that do not fit one device. Use several `train.micro_batches`.

    Every rank reads the whole global batch. The first stage uses its images, the last stage its labels.
    """

    # number of stages, the same as of ranks; null: one for each rank
    stages: int | None = ranged(None, least=1, most=MOST_STAGES)
    # the first module of each stage but the first, such as [blocks.6]; null: stages with about equally many
    # parameters
    cuts: list[str] | None = ruled(None, TEXT)
    # `1f1b` (PipeDream, Narayanan et al. 2019) starts each backward pass as soon as possible and holds few
    # activations; `gpipe` (Huang et al. 2019) does all forward passes first. Both give the same numbers
    schedule: str = choice("1f1b", "1f1b", "gpipe")
    recordable: ClassVar[bool] = False
    whole_model: ClassVar[bool] = False
    one_pass: ClassVar[bool] = False
    same_work: ClassVar[bool] = False
    widest: ClassVar[UpdateScope] = UpdateScope.parameter
    no_scaler: ClassVar[str] = "and under strategy=pipeline each stage would skip other steps"

    def ranks(self, gpus: int) -> int:
        return self.stages or gpus or 2

    def check(self, ranks: int, device: str) -> None:
        if self.stages not in (None, ranks):
            raise InputError(
                f"strategy.stages is {self.stages}, but launcher.ranks makes {ranks} ranks, and each rank has one "
                "stage: a pipeline is not data parallel as well; remove strategy.stages or launcher.ranks"
            )
        if self.cuts is not None and len(self.cuts) != ranks - 1:
            raise InputError(
                f"strategy.cuts is [{','.join(self.cuts)}], which makes {len(self.cuts) + 1} stages, but there are "
                f"{ranks} ranks with one each; use launcher.ranks={len(self.cuts) + 1}, or remove strategy.cuts"
            )

    def check_compile(self, ranks: int, device: str) -> None:
        if ranks > 1:
            raise InputError(
                "model.compile is true, but under strategy=pipeline a rank runs a part of the model that ends in its "
                "middle; use model.compile=false, or strategy=fsdp"
            )

    def data_world(self, world: World) -> World:
        return replace(world, rank=0, size=1)

    def wrap(self, model: nn.Module, world: World, plan: Plan, example: tuple[Any, ...]) -> nn.Module:
        if world.size > 1:
            share_weights(model)
        return model

    def shard(self, model: nn.Module, world: World, precision: Precision, images: Tensor) -> None:
        if world.size == 1:
            return
        try:
            forward_on_meta(model, tuple(images.shape[1:]))
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            raise InputError(
                "strategy=pipeline computes the shapes of the stages before a rank's own, and this model's depend on "
                f"numbers ({reason_of(error)}); use strategy=fsdp"
            ) from error
        with precision.autocast(world.device):
            become_stage(model, cut(model, images.to(precision.dtype), world.size, self.cuts), world)

    def build_optimizer(self, optimizer: Optimizer, model: nn.Module, world: World) -> torch.optim.Optimizer:
        whole = optimizer.build(model)
        if world.size == 1:
            return whole
        assert isinstance(model.forward, Stage)
        homes = model.forward.stages.homes
        return OwnedOptimizer(whole, {tensor: homes[name] for name, tensor in model.named_parameters()}, world)

    def grad_divisor(self, world: World) -> int:
        return 1  # every rank has the whole batch, so there is no sum over ranks

    def run_micro_batches(
        self,
        replica: nn.Module,
        micro_batches: Iterable[tuple[M, bool]],
        world: World,
        *,
        forward: Callable[[M], Tensor],
        backward: Callable[[Tensor], None],
        between: Callable[[], None],
    ) -> None:
        # `between` waits for all ranks, which would empty the pipeline: a stop comes at the end of the step.
        most = world.size - world.rank if self.schedule == "1f1b" else None
        losses: deque[Tensor] = deque()
        for micro, _ in micro_batches:
            losses.append(forward(micro))
            if len(losses) == most:
                backward(losses.popleft())
        while losses:
            backward(losses.popleft())

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        norm = super().gradient_norm(parameters)
        own = [parameter for parameter in parameters if not parameter.is_meta]
        if len(own) == len(parameters):
            return norm
        squared = norm.to(own[0].device, torch.float64).square()
        dist.all_reduce(squared)
        return squared.sqrt().to(own[0].dtype)

    def whole_tensors(self, tensors: Sequence[Tensor], *, keep: bool) -> Iterable[Tensor]:
        if not any(tensor.is_meta for tensor in tensors):
            return tensors
        example = next(tensor for tensor in tensors if not tensor.is_meta)
        lacking = torch.tensor([tensor.is_meta for tensor in tensors], dtype=torch.int32, device=example.device)
        lacking_by_rank = [torch.empty_like(lacking) for _ in range(dist.get_world_size())]
        dist.all_gather(lacking_by_rank, lacking)
        owners = torch.stack(lacking_by_rank).argmin(0).tolist()
        whole_tensors = []
        for own, owner in zip(tensors, owners, strict=True):
            tensor = own
            if keep and owner != dist.get_rank():
                message = torch.empty(own.shape, dtype=own.dtype, device=wire(example.device))
                dist.recv(message, owner)
                tensor = message.cpu()
            elif not keep and owner == dist.get_rank():
                dist.send(own.detach().to(wire(example.device)).contiguous(), 0)
            whole_tensors.append(tensor)
        return whole_tensors

    def share_buffers(self, model: nn.Module, world: World) -> None:
        """Do nothing: each stage has its own."""

    def notes(self, model: nn.Module, world: World, plan: Plan) -> list[str]:
        notes = super().notes(model, world, plan)
        if world.size > 1 and plan.micro_batches < 2 * world.size:
            idle = (world.size - 1) / (plan.micro_batches + world.size - 1)
            notes.append(
                f"with train.micro_batches={plan.micro_batches} each of {world.size} stages waits {percent(idle)} "
                f"of a step for the others; train.micro_batches={4 * world.size} leaves "
                f"{percent((world.size - 1) / (5 * world.size - 1))}"
            )
        return notes


class Neighbours:
    """Messages between neighbouring ranks. Activations go to the next rank, gradients to the previous rank.

    A send does not wait for its receiver, but the next send of the same kind does. So a rank holds one message of
    each kind, and there is no deadlock if all ranks take the micro-batches in the same order. Creating it is
    collective.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        # In one group of NCCL, one direction would wait for the other; gloo has tags.
        own_groups = dist.get_backend() == "nccl"
        self.groups: list[Any] = [dist.new_group() if own_groups else None for _ in (ACTIVATIONS, GRADIENTS)]
        self.pending: dict[int, tuple[Any, Tensor]] = {}

    def send(self, tensor: Tensor, kind: int) -> None:
        if kind in self.pending:
            self.pending.pop(kind)[0].wait()
        if tensor.numel():
            message = tensor.detach().to(wire(self.world.device)).contiguous()
            target = self.world.rank + (1 if kind == ACTIVATIONS else -1)
            self.pending[kind] = (dist.isend(message, target, group=self.groups[kind], tag=kind), message)

    def receive(self, shape: torch.Size, dtype: torch.dtype, kind: int) -> Tensor:
        message = torch.empty(shape, dtype=dtype, device=wire(self.world.device))
        if message.numel():
            dist.recv(message, self.world.rank - (1 if kind == ACTIVATIONS else -1), self.groups[kind], tag=kind)
        return message.to(self.world.device)


class _Receive(torch.autograd.Function):
    """Receives activations; backward, which autograd calls for `anchor`, sends their gradient to their stage."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, neighbours: Neighbours, shape: torch.Size, dtype: torch.dtype) -> Tensor:
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
    def forward(ctx: Any, activations: Tensor, anchor: Tensor, neighbours: Neighbours, classes: int) -> Tensor:
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

    def __init__(self, model: nn.Module, stages: Stages, neighbours: Neighbours) -> None:
        self.stages = stages
        self.neighbours = neighbours
        self.whole_forward = model.forward
        self.number = neighbours.world.rank
        self.anchor = torch.zeros((), device=neighbours.world.device, requires_grad=True)
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
def become_stage(model: nn.Module, stages: Stages, world: World) -> None:
    """Make a model the stage of this rank, in place: other stages' tensors lose their numbers. Collective."""
    replaced: dict[int, Any] = {}
    for name, tensor in named_tensors(model):
        if stages.homes[name] != world.rank:
            empty = torch.empty_like(tensor, device="meta")
            parameter = isinstance(tensor, nn.Parameter)
            replaced[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if parameter else empty
    for module in model.modules():
        for slots in (module.named_parameters, module.named_buffers):
            for name, own in list(slots(recurse=False, remove_duplicate=False)):
                setattr(module, name, replaced.get(id(own), own))
    model.forward = Stage(model, stages, Neighbours(world))
