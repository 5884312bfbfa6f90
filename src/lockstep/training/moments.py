"""The moments of a run at which callbacks are called, the stop that all ranks follow, and the callbacks' state."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from lockstep.checkpoint.state import check_plain, host_copies
from lockstep.core.data_protocols import Shard
from lockstep.core.observer import Callback, TrainingRun
from lockstep.runtime.signals import StopNow
from lockstep.training.build_observers import Observers
from lockstep.training.train_state import Progress
from lockstep.training.train_step import StepListener

T = TypeVar("T")
EvaluationFigures = tuple[dict[str, float], dict[str, float]]


class Callbacks(Observers):
    """The observers of this rank: first its callbacks, which have names, and behind them the loggers."""

    def __init__(self, callbacks: Mapping[str, Callback], names: Sequence[str] = ()) -> None:
        super().__init__(*callbacks.values(), names=names)
        self.callbacks = callbacks

    def label(self, observer: Any) -> str:
        names = (f"callback {name}" for name, callback in self.callbacks.items() if callback is observer)
        return next(names, super().label(observer))

    def tell(self, moment: str, *values: Any) -> None:
        """Call a method of each callback. Raises LockstepError: one has raised, with the line of the user's file."""
        with self.lock:
            for callback in self.callbacks.values():
                self.call(callback, moment, *values)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The state of each callback. Raises InputError for a value that no checkpoint can have."""
        states = {}
        for name, callback in self.callbacks.items():
            states[name] = self.call(callback, "state_dict")
            check_plain(states[name], f"callback {name}: state_dict")
        return states

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        for name, callback in self.callbacks.items():
            if name in states:
                self.call(callback, "load_state_dict", host_copies(states[name]))


@dataclass(kw_only=True)
class Moments:
    """Calls the callbacks of a run on this rank. All ranks have one, if the job has callbacks.

    Fields:
        callbacks: those of this rank.
        run: what they get.
        progress: says why the run ends, once all ranks know it.
        saved: the states of the checkpoint that is resumed, by name.
    """

    callbacks: Callbacks
    run: TrainingRun
    progress: Progress
    saved: Mapping[str, dict[str, Any]]

    def start(self) -> None:
        """Begin the run, with the state of its checkpoint. Raises InputError for a state that cannot be saved."""
        self.callbacks.tell("run_start", self.run)
        self.callbacks.load_state_dict(self.saved)
        self.callbacks.state_dict()

    def step(self, take: Callable[[Shard], T], shard: Shard) -> T:
        """Take a step, with what comes before and after it. Collective."""
        run, begins_epoch = self.run, self.run.plan.position(shard.step) == 0
        run.step = shard.step
        run.losses.clear()
        run.outputs.clear()
        with self.undone_by_stop() if begins_epoch else nullcontext():
            if begins_epoch:
                self.callbacks.tell("epoch_start", run)
            scalars = take(shard)
        self.callbacks.tell("step_end", run)
        self.agree()
        return scalars

    def listening(self, listener: StepListener) -> StepListener:
        """What a step calls, with `listener`'s functions first."""

        def record(loss: Tensor, outputs: Tensor, micro: Shard, images: Tensor) -> None:
            listener.record(loss, outputs, micro, images)
            self.run.losses.append(loss)
            self.run.outputs.append(outputs)

        def reduced() -> None:
            listener.reduced()
            self.callbacks.tell("after_backward", self.run)

        return replace(listener, record=record, reduced=reduced)

    def evaluation(self, evaluate: Callable[[], EvaluationFigures]) -> EvaluationFigures:
        """Evaluate, with what comes before and after; `evaluate` returns figures by name and by tag. Collective."""
        with self.undone_by_stop():
            self.callbacks.tell("evaluation_start", self.run)
            figures, scalars = evaluate()
        self.callbacks.tell("evaluation_end", self.run, scalars)
        self.agree()
        return figures, scalars

    def end(self) -> None:
        self.callbacks.tell("run_end", self.run)

    def epoch_end(self) -> None:
        """End the epoch, if the present step is its last one. Collective."""
        if self.run.plan.position(self.run.step + 1) == 0:
            self.callbacks.tell("epoch_end", self.run)
            self.agree()

    def agree(self) -> None:
        """End the run, if a callback of any rank has called `stop`: at the same step on any number of ranks.

        So all ranks wait for each other in each step. Collective.
        """
        run = self.run
        if not self.progress.stopped and run.world.any(bool(run.reason)):
            self.progress.stopped = next(reason for reason in run.world.gather(run.reason) if reason)

    @contextmanager
    def undone_by_stop(self) -> Iterator[None]:
        """A context in which a stop leaves the callbacks as they were, because a resume does it all again."""
        before = copy.deepcopy(self.callbacks.state_dict())
        try:
            yield
        except StopNow:
            self.callbacks.load_state_dict(before)
            raise
