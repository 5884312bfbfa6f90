"""The base classes of observers and callbacks, what they get, the protocol of loggers, and who reads every run."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from lockstep.core.fields import Component

if TYPE_CHECKING:  # importing the package must be fast
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from lockstep.core.data_protocols import Shard
    from lockstep.core.figures import Predictions
    from lockstep.core.plan import Plan
    from lockstep.core.run_dir import RunDir
    from lockstep.core.world import World

Outcome = Literal["completed", "stopped", "failed"]
# Modules whose `Listener` observes every run. Training needs none of them: an absent package does not listen.
LISTENERS = ("lockstep.diagnostics.listener", "lockstep.report.listener")


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The run that an observer watches.

    Fields:
        run_dir: the folder of the run.
        plan: the plan of the run, in steps.
        step: the last finished step. An observer that wrote later steps before a kill removes or skips them.
        after: `step`, and half a step more if it was evaluated: the evaluation may have been written before a kill,
            and will be made again.
        config: the resolved config, as in `config.yaml`.
        hyperparameters: the values to compare between runs; every run has the same keys.
        tags: the tags of what its evaluations, its task and its loggers log; a metric that has a score for each class
            is one tag.
        model: the model on main, which has only a part of the weights where the strategy cuts them.
        id: what no other run has, and a resume keeps, wherever the folder is.
        log: logs a number under one of the `figures` of a logger. In `Observer.write` it joins the figures that are
            written, in `Observer.evaluated` the figures of the evaluation; otherwise it is written with the next
            figures, or before the next checkpoint.
    """

    run_dir: RunDir
    plan: Plan
    step: int
    after: float
    config: Mapping[str, Any]
    hyperparameters: Mapping[str, str | float]
    tags: Sequence[str] = ()
    model: nn.Module | None = None
    id: str = ""
    log: Callable[[str, float], None] = lambda name, value: None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.run_dir.path

    @property
    def name(self) -> str:
        """The name of the run folder, which is unique under one `output_root`."""
        return self.folder.name


class Observer:
    """The base class of observers. Main calls them between two steps; a subclass overrides the methods that it needs.

    An observer is created when the run starts or is resumed. If it raises, the run ends and can be resumed.
    """

    @property
    def commands(self) -> Sequence[str]:
        """What a user types to look at what was written; shown at the end of the run."""
        return ()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the figures of a log point or of an evaluation, by tag. A figure without a value is NaN."""

    def first_batch(self, micro: Shard, images: Tensor) -> None:
        """Take the images (b, C, H, W) of a micro-batch of the first step, as the model gets them."""

    def write_gpu(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take a sample of the GPUs, by tag; called at most once for a step."""

    def evaluated(self, step: int, scores: Mapping[str, float], best: bool) -> None:
        """An evaluation is done, and its scores are written next. `best` is whether no earlier step was better."""

    def predicted(self, predictions: Predictions) -> None:
        """An evaluation is the best so far: take what the model predicts, after `evaluated`."""

    def saved(self, step: int, checkpoint: Path) -> None:
        """The checkpoint in the folder `checkpoint` is on the disk."""

    def flush(self) -> None:
        """Flush everything to the files, because a checkpoint is about to be saved."""

    def end(self, outcome: Outcome) -> None:
        """The run ends; only a completed run calls more. A `stopped` run can be resumed."""

    def findings(self, evidence: Any) -> Mapping[str, Any]:
        """Return what `summary.json` should say of a completed run, by key, from its `run_record.Evidence`."""
        return {}

    def completed(self, summary: Mapping[str, Any]) -> None:
        """The run is complete and shown, and `summary` is what `summary.json` says of it; this is the last call."""


@dataclass(kw_only=True, eq=False)
class TrainingRun:
    """The run that a callback takes part in, as it stands on this rank.

    Fields:
        folder: the run folder.
        config: the resolved config, as in `config.yaml`.
        plan: the run in steps: `total_steps`, `steps_per_epoch`, the global `batch`.
        world: the `rank` of this process, the `size` (the number of ranks), `is_main`, the `device`, and the
            collectives `sum`, `any`, `gather` and `broadcast`.
        model: the model; under `fsdp` and `pipeline`, with this rank's part of the weights.
        optimizer: the optimizer. A step has the schedule's learning rates, unless `after_backward` sets others.
        log: `log(name, value)` logs a number under one of the callback's `figures`, as `RunInfo.log` does.
        step: the last finished step; in `epoch_start` and `after_backward`, the step under way.
        losses: the summed loss of each micro-batch of this step on this rank, scalars on the device.
        outputs: the outputs (b, classes) of each of them, on the device, valid until the next step.
        reason: what `stop` was called with on this rank; empty if it was not.
    """

    folder: Path
    config: Mapping[str, Any]
    plan: Plan
    world: World
    model: nn.Module
    optimizer: Optimizer
    log: Callable[[str, float], None]
    step: int = 0
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    reason: str = ""

    @property
    def epoch(self) -> int:
        """The epoch of `step`, counted from 0."""
        return self.plan.epoch(max(1, self.step))

    @property
    def lr(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def loss(self) -> Any:
        """The mean loss of this rank's examples of the step, a scalar on the device; 0 without examples."""
        return sum(self.losses) / max(1, sum(len(outputs) for outputs in self.outputs))

    def stop(self, reason: str) -> None:
        """End the run after the step under way, or the last finished one, on all ranks: evaluated and completed."""
        self.reason = self.reason or reason


class Callback(Observer, Component):
    """The base class of callbacks, which take part in training. A subclass overrides the moments that it needs.

    Main alone has it, or, with `every_rank`, each rank. It is an observer too: these methods are called on the same
    ranks, but `write_gpu`, `predicted`, `saved`, `findings` and `completed` on main alone. Collectives: either
    all ranks call one or none does, so only `every_rank` callbacks may call them, and not behind a test of the rank.
    """

    every_rank: ClassVar[bool] = False
    """Whether each rank has the callback. What it does to gradients or weights must then be the same on all."""
    figures: ClassVar[tuple[str, ...]] = ()
    """The figures that it logs, as `Task.figures`."""

    def run_start(self, run: TrainingRun) -> None:
        """The run begins, or is resumed after `run.step` steps; `load_state_dict` follows."""

    def epoch_start(self, run: TrainingRun) -> None:
        """The first step of an epoch is next."""

    def after_backward(self, run: TrainingRun) -> None:
        """The gradients are complete: averaged over all ranks, unscaled, not clipped; the optimizer's step is next.

        A parameter that is frozen, or of another stage of a pipeline, has none. Main alone may read them, but only
        an `every_rank` callback may change them. Under `fsdp` each rank has a part of each.
        """

    def step_end(self, run: TrainingRun) -> None:
        """The optimizer's step is done."""

    def evaluation_start(self, run: TrainingRun) -> None:
        """An evaluation is next."""

    def evaluation_end(self, run: TrainingRun, scores: Mapping[str, float]) -> None:
        """An evaluation is done, with these scores, by tag as in `metrics.jsonl`; they are written next."""

    def epoch_end(self, run: TrainingRun) -> None:
        """All steps of an epoch are done, and the evaluation after them, if there is one."""

    def run_end(self, run: TrainingRun) -> None:
        """The run has done its last step and is saved. A run that is interrupted, or fails, does not call it."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to have of the callback: tensors, numbers and texts, in lists and dictionaries.

        The state of main is saved, so `every_rank` callbacks have the same one on all ranks.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state_dict` of the checkpoint that is resumed, if it has one of this callback."""


class Logger(Component, Protocol):
    """A place for the figures of a run. Any number of them may be chosen."""

    figures: ClassVar[tuple[str, ...]] = ()
    """The figures that its observer logs, as `Task.figures`; such an observer is called before others."""
    package: ClassVar[str | None] = None
    """The package that it needs."""

    @abstractmethod
    def build(self, run: RunInfo) -> Observer:
        """The observer that writes the figures, on main only. Raises InputError without a package that it needs."""


def listeners() -> list[Callable[[RunInfo], Observer]]:
    """The classes of `LISTENERS`, of the packages that are here."""
    present = [name for name in LISTENERS if importlib.util.find_spec(name.rpartition(".")[0])]
    return [importlib.import_module(name).Listener for name in present]
