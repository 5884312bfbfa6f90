"""Trains with CUDA graphs: a step's forward, backward and optimizer are recorded once, and replayed at each step.

The kernels of a small network take a few microseconds, and Python needs longer than that to launch one. A replay
launches all of them at once, with the arguments of the recording: the same addresses in memory, and the same numbers
where Python computed them. So the examples of a step are copied to the addresses of the recording, and the learning
rates are tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.core.data_protocols import Shard
from lockstep.core.errors import InputError
from lockstep.runtime.host import is_out_of_memory
from lockstep.training.train_state import TrainState
from lockstep.training.train_step import StepListener, TrainStep

# Passes before a recording, as torch's notes on CUDA graphs advise: libraries allocate and choose kernels in them.
WARM_UP_PASSES = 3


class CudaGraph:
    """Records the kernels that a function launches, and launches them again."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()

    def warm_up(self, function: Callable[[], None]) -> None:
        """Call a function on a separate stream, as a recording does."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_PASSES):
                function()
        torch.cuda.current_stream().wait_stream(stream)

    def record(self, function: Callable[[], None]) -> None:
        """Call a function; its kernels are recorded and not run.

        torch leaves its stream, its pool and its generator in use after a recording that fails: they are put back.
        """
        device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
        pool = torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[device]
        random_state = generator.clone_state()
        try:
            # By default a recording also forbids other threads to allocate memory, and the loader's threads do.
            with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
                function()
        except BaseException:
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(random_state)
            with suppress(RuntimeError):  # torch has ended it
                torch._C._cuda_endAllocateToPool(device, pool)
                torch._C._cuda_releasePool(device, pool)
            raise

    def replay(self) -> None:
        self.graph.replay()


# The inputs of a micro-batch's forward pass and loss: the replica's inputs, then targets and labels.
Inputs = list[Tensor]


@dataclass
class Recording:
    """The recorded update of a step.

    Fields:
        frozen: whether `train.freeze_until` froze layers in the recorded step.
        inputs: the inputs of each micro-batch, which a replay reads.
        rates: the learning rate of each parameter group, float32 scalars, which a replay reads.
        outputs: the loss and the logits of each micro-batch, which a replay writes.
        grad_norm: the L2 norm of the gradient, which a replay writes.
    """

    frozen: bool
    inputs: list[Inputs]
    rates: list[Tensor]
    graph: CudaGraph
    outputs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    grad_norm: Tensor | None = None


@dataclass(kw_only=True)
class GraphStep(TrainStep):
    """A step that replays the update of every full global batch.

    The short batch at the end of an epoch is computed as without graphs. So the plan alone decides which steps are
    replayed, and a resume has the same bits.
    """

    recording: Recording | None = None

    def update(self, shard: Shard, *, measures_norm: bool = False) -> Tensor | None:
        if shard.count < self.plan.batch:
            return super().update(shard, measures_norm=measures_norm)
        micro_batches = [micro for micro, _ in shard.micro_batches(self.plan.micro_batches)]
        inputs = [self.inputs(micro) for micro in micro_batches]
        if self.recording is None or self.recording.frozen != self.state.freezing.frozen(shard.step):
            self.recording = None  # free its memory before the next recording needs as much
            self.recording = self.recorded(shard, inputs)
        recording = self.recording
        for buffer, values in zip(recording.inputs, inputs, strict=True):
            torch._foreach_copy_(buffer, values)
        for rate, group in zip(recording.rates, self.state.optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        recording.graph.replay()
        for micro, values, (loss, logits) in zip(micro_batches, inputs, recording.outputs, strict=True):
            self.listener.record(loss.clone(), logits.clone(), micro, values[0])
        return recording.grad_norm

    def recorded(self, shard: Shard, inputs: list[Inputs]) -> Recording:
        """Record the update of a shard. The weights and the optimizer's state do not change.

        Raises InputError: the model does something that cannot be recorded, such as reading a tensor as a number.
        """
        recording = Recording(
            frozen=self.state.freezing.frozen(shard.step),
            inputs=[[tensor.clone() for tensor in values] for values in inputs],
            rates=[
                torch.tensor(group["lr"], dtype=torch.float32, device=self.world.device)
                for group in self.state.optimizer.param_groups
            ],
            graph=CudaGraph(),
        )
        step = replace(
            self,
            inputs=lambda micro: recording.inputs[micro.number % self.plan.micro_batches],
            listener=StepListener(record=lambda loss, logits, *_: recording.outputs.append((loss, logits))),
        )

        def update() -> None:
            recording.outputs.clear()
            recording.grad_norm = TrainStep.update(step, shard, measures_norm=True)

        try:
            with reading_rates(self.state.optimizer, recording.rates), unchanged(self.state):
                recording.graph.warm_up(update)
                recording.graph.record(update)
        except RuntimeError as error:
            # The end of a recording that has failed raises again, and does not say why.
            cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            if is_out_of_memory(cause):
                raise cause from None
            raise InputError(
                f"train.cuda_graph is true, but a step of this model cannot be recorded as a CUDA graph "
                f"({str(cause).splitlines()[0]}); use train.cuda_graph=false"
            ) from error
        return recording


@contextmanager
def reading_rates(optimizer: Optimizer, rates: list[Tensor]) -> Iterator[None]:
    """A context in which an optimizer reads its learning rates from tensors, a scalar for each parameter group."""
    before = [dict(group) for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group |= {"lr": rate, "capturable": True}  # torch's Adam refuses to be recorded without `capturable`
    try:
        yield
    finally:
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.clear()
            group |= values


@contextmanager
def unchanged(state: TrainState) -> Iterator[None]:
    """A context that leaves the weights, buffers and optimizer state as they were."""

    def of_optimizer() -> list[Tensor]:
        values = (value for entry in state.optimizer.state.values() for value in entry.values())
        return [value for value in values if isinstance(value, Tensor)]

    tensors = [*state.model.parameters(), *state.model.buffers(), *of_optimizer()]
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
            known = {id(tensor) for tensor in tensors}
            for tensor in of_optimizer():
                if id(tensor) not in known:  # the first step made it; the state of our optimizers begins at zero
                    tensor.zero_()
