"""The training loop. It knows protocols, the world and the plan: no rank, no path, no device by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from lockstep.checkpoint.reading import load_exported
from lockstep.checkpoint.writing import Checkpointer
from lockstep.core.data_protocols import Shard
from lockstep.core.errors import NumericalError, Stopped, as_unicode
from lockstep.core.figures import finite
from lockstep.core.tags import SCALE, TEST, Monitor, tagged
from lockstep.data.loading.shards import EvalLoader, Loader
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.runtime.signals import StopNow, StopRequest
from lockstep.scores import EvaluationObserver, Scores
from lockstep.telemetry.meter import Telemetry
from lockstep.telemetry.window import Window
from lockstep.training import agreement
from lockstep.training.evaluate import Patience, evaluate_model, outputs_of
from lockstep.training.train_state import Progress
from lockstep.training.train_step import StepListener, TrainStep

if TYPE_CHECKING:
    from lockstep.training.moments import Moments


@dataclass(kw_only=True)
class Trainer:
    """Trains a network by a plan.

    All ranks act on a stop at the same place: between two steps, micro-batches or evaluation blocks.
    `interrupts_compiling` says that it may also come while a step is compiled: not with several ranks, which compile
    at different times. `moments` calls the callbacks, if there are any.
    """

    step: TrainStep
    loader: Loader
    test_loader: EvalLoader | None = None
    transforms: DeviceTransforms
    scores: Scores
    checkpointer: Checkpointer
    telemetry: Telemetry
    stop: StopRequest
    heartbeat: Callable[[], None]
    interrupts_compiling: bool = False
    eval_views: int = 1
    predictions: EvaluationObserver = field(default_factory=EvaluationObserver)
    progress: Progress = field(default_factory=Progress)
    monitor: Monitor = field(default_factory=Monitor)
    patience: Patience = field(default_factory=Patience)
    moments: Moments | None = None
    raw_score: float | None = field(init=False, default=None)  # of the last evaluation, without averaged weights
    tested: Mapping[str, float] = field(init=False, default_factory=dict)  # the figures of the test split
    forms: set[tuple[torch.Size, bool]] = field(init=False, default_factory=set)  # see `step_or_undo`

    def __post_init__(self) -> None:
        self.world, self.plan, self.state = self.step.world, self.step.plan, self.step.state
        telemetry, between = self.telemetry, self.between_micro_batches
        listener = StepListener(
            record=telemetry.record, reduced=telemetry.reduced, between=between, log=telemetry.log
        )
        self.step.listener = listener if self.moments is None else self.moments.listening(listener)
        self.consensus = agreement.StopConsensus(self.world)
        gains = ((step, self.monitor.gain(score)) for step, score in self.progress.scores)
        self.step.scores[:] = [(step, gain) for step, gain in gains if gain is not None]

    def fit(self) -> Progress:
        """Train to the plan's last step.

        Raises Stopped: a rank was asked to stop, and the state is saved; NumericalError: a loss is not finite.
        """
        try:
            if self.moments is not None:
                self.moments.start()
            self.make_up_evaluation()
            if not self.ended_early:  # else a run that has ended was resumed
                self.take_steps()
        except StopNow as request:
            self.leave(request, saves=True)
        self.consensus.close()
        if self.moments is not None:
            self.moments.end()
        return self.progress

    def take_steps(self) -> None:
        """Take the steps that are left. Raises StopNow: on every rank, if one was asked to stop."""
        take = self.step_or_undo if self.interrupts_compiling or self.plan.micro_batches > 1 else self.step
        take = take if self.moments is None else partial(self.moments.step, take)
        groups = self.loader.train(after=self.progress.step)
        for shard in self.telemetry.watch(groups, self.transforms.train):
            scalars = take(shard)
            step = self.progress.step = shard.step
            self.stop.step_done()
            self.heartbeat()
            if scalars:
                self.log(step, scalars)
            improved = ends_rung = ends = False
            if self.plan.due("eval", step):
                improved, ends_rung = self.evaluate(step), self.ends_rung(step)
                ends = bool(self.ended_early)
            if self.moments is not None:
                improved = self.end_by_callback(step) or improved
                ends = bool(self.ended_early)
            stop, overdue = self.consensus.agree(
                self.stop.requested_after_step(), self.checkpointer.overdue(), busy=self.telemetry.stragglers.busy
            )
            if (stop or ends_rung) and step < self.plan.total_steps:
                raise StopNow
            if improved or overdue or ends or self.plan.due("save", step):
                self.save()
            if ends:
                break

    def end_by_callback(self, step: int) -> bool:
        """End the epoch for callbacks, and evaluate a run that one has ended; whether it is the best so far."""
        assert self.moments is not None
        self.moments.epoch_end()
        if not self.progress.stopped:
            return False
        return self.settle() if self.progress.is_evaluated else self.evaluate(step)

    def ends_rung(self, step: int) -> bool:
        """Whether the job has finished its round of successive halving. Ranks of other machines do not know."""
        return self.world.any(step / self.plan.total_steps >= self.stop.rung_end)

    def log(self, step: int, scalars: dict[str, Any]) -> None:
        """End the window of a log point. A GPU is not waited for: its figures are read at the next log point."""
        scaler = self.state.scaler
        if scaler.is_enabled():
            scalars[SCALE] = scaler.scale(torch.ones((), device=self.world.device))  # get_scale() would wait
        self.check(self.telemetry.end_window(step, scalars, agreement.checksums(self.state.model, self.world)))

    def check(self, windows: list[Window]) -> None:
        """Check the losses and the weights of windows.

        Raises NumericalError, LockstepError: a loss is not finite, or the weights of the ranks differ.
        """
        for window in windows:
            # A loss that overflows is normal under a loss scaler: it halves the scale and skips the step.
            tolerated = window.scalars.get(SCALE, 0) >= 1
            if window.first_bad_step is not None and not tolerated:
                limit = f"above {self.telemetry.loss_limit:,.0f}, 1,000 times the loss of a guess, it has diverged"
                raise NumericalError(
                    f"the loss is {window.loss:.4g} between steps {window.first} and {window.last}, first at step "
                    f"{window.first_bad_step}{f' ({limit})' * math.isfinite(window.loss)}; {agreement.REMEDIES}",
                    step=window.first_bad_step,
                )
            agreement.compare_weights(window.checksums, window.last)

    def evaluate(self, step: int) -> bool:
        """Evaluate the model, and its average where there is one; whether it is the best so far."""
        self.check(self.telemetry.write_windows())
        with self.telemetry.pause("evaluation"):
            measure = partial(self.measure, step)
            figures, scalars = measure() if self.moments is None else self.moments.evaluation(measure)
            improved = self.judge(figures)
            self.telemetry.evaluated(step, scalars, best=improved)
            if improved:
                self.predictions.finish(step)
        return improved

    def measure(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """The figures of an evaluation by name, of the average where there is one; and all of them by tag."""
        averaged = self.state.averaged
        observers = (self.scores, self.predictions)
        raw = figures = self._evaluate(self.state.model, self.loader, observers if averaged is None else ())
        scalars = tagged(raw)
        if averaged is not None:
            self._renew_statistics(step)
            figures = self._evaluate(averaged, self.loader, observers)
            scalars |= tagged(figures, averaged=True)
        further = self.world.broadcast(self.scores.compute())
        self.raw_score = raw.get(self.monitor.name)
        return {**figures, **further}, scalars | tagged(further)

    def judge(self, figures: Mapping[str, float]) -> bool:
        """Note the figures of an evaluation; whether the monitored one is better than all before."""
        value, progress = figures.get(self.monitor.name), self.progress
        gain, best = self.monitor.gain(value), self.monitor.gain(progress.best)
        if gain is None and best is None and not any(score is not None for _, score in progress.scores):
            self.telemetry.display.warn(f"{self.monitor.name} has no value after step {progress.step}: no best yet")
        improved = gain is not None and (best is None or gain > best)
        progress.evaluated(None if gain is None else value, figures, better=improved)
        if progress.step == self.plan.total_steps or self.ended_early:
            improved = self.settle() or improved
        if gain is not None:
            self.step.scores.append((progress.step, gain))
        return improved

    def settle(self) -> bool:
        """Take the present weights of a run that ends, if no evaluation had a score; whether it was so."""
        progress = self.progress
        if progress.best is None:
            progress.best_step, progress.best_figures = progress.step, progress.figures
        return progress.best is None

    @property
    def ended_early(self) -> str:
        """Why the run ends before its last step, in a sentence; empty if it continues."""
        if self.progress.stopped:
            return f"a callback ends the run: {self.progress.stopped}"
        averaged = self.state.ema is not None and self.progress.step >= self.state.ema.start
        return self.patience.ended(self.progress.scores, self.monitor, self.plan, averaged=averaged)

    def _evaluate(
        self, model: nn.Module, loader: EvalLoader, observers: Sequence[EvaluationObserver]
    ) -> Mapping[str, float]:
        self.step.strategy.share_buffers(model, self.world)
        # An evaluation changes no state, so a lone rank may stop anywhere in it.
        with self.stop.interrupting(self.world.size == 1):
            return evaluate_model(
                model,
                task=self.step.task,
                loss=self.step.loss,
                loader=loader,
                transforms=self.transforms,
                precision=self.step.precision,
                world=self.world,
                views=self.eval_views,
                observers=observers,
                between=self.between_blocks,
            )

    def _renew_statistics(self, step: int) -> None:
        """Compute the statistics of a mean of weights over images of the epoch, augmented as in it, but not mixed."""
        average, transforms = self.state.ema, self.transforms
        if average is None or not average.norms:
            return
        # Whole blocks, which count alike.
        number = max(1, min(average.images, self.plan.examples) // self.loader.eval_batch)
        rounds = math.ceil(number / self.loader.world.size)

        def blocks() -> Iterator[Tensor]:
            groups = self.loader.blocks_of_epoch(self.plan.epoch(step), number)
            for done, group in enumerate(groups, start=1):
                yield transforms.augmented(group.images, group.epoch, group.indices, group.steps[0].step)
                self.between_blocks(done, rounds)

        forward = partial(outputs_of, precision=self.step.precision, memory_format=transforms.memory_format, views=1)
        freezing = self.state.freezing
        frozen = freezing.norms if freezing.frozen(step) else ()
        with self.stop.interrupting(self.world.size == 1):
            average.renew_statistics(frozen, blocks(), number, forward, self.loader.world)

    def test(self) -> None:
        """Evaluate the best weights of a run that has ended on its test split, if it has one. Nothing is saved after.

        Raises Stopped: a rank was asked to stop; a resume does it again.
        """
        if self.test_loader is None or not self.progress.best_step:
            return
        self.checkpointer.wait()
        if self.world.any(bool(self.checkpointer.failure)):  # closing will raise it
            return
        model = self.state.model if self.state.ema is None else self.state.ema.module
        load_exported(model, self.checkpointer.run_dir.weights)
        try:
            with self.telemetry.pause("evaluation"):
                figures = self._evaluate(model, self.test_loader, (self.scores,))
                figures = {**figures, **self.world.broadcast(self.scores.compute())}
        except StopNow as request:
            self.leave(request, saves=False)
        self.tested = finite(figures)
        scalars = {as_unicode(TEST + name): value for name, value in figures.items()}
        self.telemetry.observer.write(self.progress.step, scalars)

    def count_skipped(self) -> int:
        """The number of broken images so far. Collective."""
        return sum(loader.count_skipped() for loader in (self.loader, self.test_loader) if loader is not None)

    def make_up_evaluation(self) -> None:
        """Evaluate the step that a run resumes from, if a stop interrupted its evaluation."""
        step, due = self.progress.step, self.plan.due("eval", self.progress.step)
        if step and not self.progress.is_evaluated and (due or self.progress.stopped):
            self.step.set_learning_rate(step)  # the learning rates are saved too
            self.evaluate(step)
            if due and self.moments is not None:  # one that a callback has asked for comes behind the epoch's end
                self.end_by_callback(step)
            self.save()

    def between_blocks(self, done: int, blocks: int) -> None:
        """Between two blocks of an evaluation: show how far it is, and what `between` does."""
        self.telemetry.evaluating(done, blocks)
        self.between()

    def between_micro_batches(self) -> None:
        """Do what `between` does, where steps are so long that waiting for all ranks costs little."""
        if self.consensus.can_wait:
            self.between()

    def between(self) -> None:
        """Between two micro-batches or blocks: give a sign of life, and act on a stop of any rank. Collective.

        Raises StopNow: on every rank, if one was asked to stop.
        """
        self.heartbeat()
        if self.world.any(self.stop.requested):
            raise StopNow

    def step_or_undo(self, shard: Shard) -> dict[str, Any]:
        """Take a step, and restore the buffers (running statistics, counts) if a stop comes within it.

        It may come between two micro-batches, or while the first step of its form is compiled.
        """
        form = shard.images.shape, self.state.freezing.frozen(shard.step)
        compiles = self.interrupts_compiling and form not in self.forms
        if not compiles and not (self.plan.micro_batches > 1 and self.consensus.can_wait):
            return self.step(shard)
        buffers = [*self.state.model.buffers()]
        before = [torch.empty_like(buffer) for buffer in buffers]
        copy_all(buffers, before)
        self.stop.undoes = compiles
        try:
            scalars = self.step(shard)
        except StopNow:
            copy_all(before, buffers)
            self.telemetry.forget(after=self.progress.step)
            raise
        finally:
            self.stop.undoes = False
        self.forms.add(form)
        return scalars

    def leave(self, request: StopNow, *, saves: bool) -> NoReturn:
        """End on all ranks together, with the state after the last finished step saved.

        Raises `request` if there is nothing to save, or no time to; else Stopped.
        """
        if self.stop.force or not self.stop.begun:
            raise request
        self.stop.leaving = True
        self.consensus.close()
        if saves:
            self.save()
        # The launcher ends the other ranks when one leaves, so all wait until main has written.
        self.checkpointer.wait()
        self.world.barrier()
        reason = self.world.broadcast(self.stop.reason)
        reason = f": {reason}" * bool(reason)
        raise Stopped(f"stopped at step {self.progress.step} of {self.plan.total_steps} and saved{reason}")

    def save(self) -> None:
        """Save the state after the last finished step. Training waits only for the copy to host memory.

        Raises NumericalError, LockstepError: the weights are not finite or differ between ranks; nothing is saved.
        """
        self.check(self.telemetry.write_windows())
        with self.telemetry.pause("checkpoint"):
            if not self.plan.due("log", self.progress.step):  # a log point has compared them
                agreement.check_replicas(self.state.model, self.world, self.progress.step)
            agreement.check_finite(self.state.model, self.world, self.progress.step, self.state.infinite)
            self.progress.window = self.telemetry.open_window()
            self.checkpointer.save(
                model=self.state.model,
                ema=self.state.ema,
                optimizer=self.state.optimizer,
                scaler=self.state.scaler,
                progress={**vars(self.progress), "scores": [*self.progress.scores]},  # it is written while these grow
                callbacks=None if self.moments is None else self.moments.callbacks.state_dict(),
            )
        self.heartbeat()


def copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each of `sources` to the tensor at its place in `targets`; on a GPU with one kernel for each dtype."""
    for dtype in {source.dtype for source in sources}:
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[1].dtype is dtype]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
