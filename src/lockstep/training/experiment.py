"""The composition root: builds the parts of a run in order, each from the parts above it, alike on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.checkpoint.reading import LoadedCheckpoint
from lockstep.checkpoint.writing import Checkpointer
from lockstep.config import components
from lockstep.config.commands import resume_command
from lockstep.core.data_protocols import Shard
from lockstep.core.errors import NumericalError, Stopped
from lockstep.core.figures import figures_of
from lockstep.core.log import close_all
from lockstep.core.model import is_broken
from lockstep.core.model_card import ModelCard
from lockstep.core.observer import Callback, TrainingRun
from lockstep.core.run_dir import RunDir
from lockstep.core.tags import Monitor
from lockstep.core.world import World
from lockstep.data.loading.shards import Loader
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.runtime.host import is_out_of_memory, keep_freed_memory
from lockstep.runtime.signals import StopRequest
from lockstep.scores import Scores
from lockstep.stochastic.convert import ForwardDraws
from lockstep.telemetry.hardware_watch import HardwareWatch
from lockstep.telemetry.meter import Telemetry
from lockstep.training import train_state
from lockstep.training.build_data import TrainingData, build_data, build_loader, build_test_loader
from lockstep.training.build_observers import Observers, build_observers
from lockstep.training.evaluate import Patience
from lockstep.training.predictions import COLLECTED
from lockstep.training.resolved_job import ResolvedJob, card_of, described, named, step_settings
from lockstep.training.run_record import RunRecord
from lockstep.training.train_state import Progress, TrainState
from lockstep.training.train_step import StepListener, TrainStep
from lockstep.training.trainer import Trainer

if TYPE_CHECKING:
    from lockstep.runtime.user_code import UserCode
    from lockstep.training.moments import Moments


def run(
    job: ResolvedJob,
    run_dir: RunDir,
    world: World,
    *,
    stop: StopRequest | None = None,
    heartbeat: Callable[[], None] = lambda: None,
    callbacks: Mapping[str, Callback] | None = None,
    code: Mapping[str, UserCode] | None = None,
) -> None:
    """Train or resume a resolved job in its folder as one rank of `world`, to its end or until `stop` is requested.

    `heartbeat` is called while the job advances. `callbacks` are objects of the user's, by name, besides those of the
    job, of which each run has copies. `code` is the user's code, by package; by default what this process can read of
    it. Raises InputError: the data, the model or the checkpoint do not fit;
    Stopped: the job was asked to stop, and is saved; NumericalError: a loss is not finite.
    """
    stop = stop or StopRequest()
    record = RunRecord(run_dir, world, code)
    callbacks = {**copy.deepcopy(job.callback), **(callbacks or {})}
    configure_torch(job, world)

    job, data = build_data(job, world)
    torch.manual_seed(job.seed)  # the items of a data set may have drawn numbers
    card = card_of(job, {package: code.facts["sha256"] for package, code in record.user_code(job).items()})
    loss = train_state.build_loss(job, data.train.labels, world, skip=data.skip)
    task = train_state.ready_task(job, card, loss, world)
    images = partial(data.normalised, world=world)
    state, loaded = train_state.build_and_load_state(job, run_dir, world, data.plan, images)
    train_state.compile_model(state.model, job, world, stop)
    checkpointer = build_checkpointer(job, run_dir, world, data, card)
    progress, origin = train_state.restore(job, data.plan, state, checkpointer, loaded, described(callbacks))
    checkpointer.repair_export(progress.best_step)

    record.announce(job, data, state, origin)
    loader = build_loader(job, data, world)  # may refuse the data, so the run begins after it
    record.write_start(job, data.plan, progress, callbacks)
    observer = own_observers(job, callbacks, world)
    telemetry, watch = build_observers(job, run_dir, world, data, state, progress, stop, observer)
    checkpointer.on_saved = telemetry.observer.saved
    step = step_class(job, world)(
        world=world,
        plan=data.plan,
        state=state,
        **step_settings(job),
        task=task,
        loss=loss,
        inputs=partial(inputs_of, data.transforms, state.draws),
    )
    trainer = Trainer(
        step=step,
        loader=loader,
        test_loader=build_test_loader(job, data, world),
        transforms=data.transforms,
        scores=Scores(job.metric, card.classes, card.class_names, world, card.probabilities, card.targets),
        predictions=COLLECTED[card.targets](card, data.val, world, telemetry.observer),
        checkpointer=checkpointer,
        telemetry=telemetry,
        stop=stop,
        heartbeat=heartbeat,
        interrupts_compiling=job.model.compile and world.size == 1,
        progress=progress,
        moments=build_moments(job, run_dir, world, telemetry, state, progress, loaded) if callbacks else None,
        monitor=Monitor.parse(job.monitor),
        patience=Patience(limit=job.train.patience, min_delta=job.train.min_delta),
        eval_views=job.train.eval_views,
    )
    hardware = train(trainer, watch, explaining(job, trainer, record))
    record.complete(job, trainer, hardware, skipped=trainer.count_skipped())


def own_observers(job: ResolvedJob, callbacks: Mapping[str, Callback], world: World) -> Observers:
    """The callbacks of this rank. They come before other observers, which write what they log."""
    names = [*figures_of(*job.logger.values(), *callbacks.values())]
    if not callbacks:
        return Observers(names=names)
    from lockstep.training.moments import Callbacks  # few jobs have any

    own = {name: callback for name, callback in callbacks.items() if world.is_main or callback.every_rank}
    return Callbacks(own, names=names)


def build_moments(
    job: ResolvedJob,
    run_dir: RunDir,
    world: World,
    telemetry: Telemetry,
    state: TrainState,
    progress: Progress,
    loaded: LoadedCheckpoint | None,
) -> Moments:
    """What calls the callbacks of this rank, with their states in the checkpoint that is resumed."""
    from lockstep.training.moments import Callbacks, Moments  # few jobs have any

    callbacks = telemetry.observer
    assert isinstance(callbacks, Callbacks)
    run = TrainingRun(
        folder=run_dir.path,
        config=components.plain(job),
        plan=telemetry.plan,
        world=world,
        model=state.model,
        optimizer=state.optimizer,
        log=partial(callbacks.log, group="callback"),
        step=progress.step,
    )
    saved = {} if loaded is None else loaded.state.get("callbacks", {})
    return Moments(callbacks=callbacks, run=run, progress=progress, saved=saved)


def build_checkpointer(
    job: ResolvedJob, run_dir: RunDir, world: World, data: TrainingData, card: ModelCard
) -> Checkpointer:
    """The checkpointer, which saves the run on main and restores it on every rank."""
    return Checkpointer(
        run_dir=run_dir,
        fingerprint=data.fingerprint,
        keep=job.checkpoint.keep,
        keep_best=job.checkpoint.keep_best,
        writes=world.is_main,
        whole=partial(job.strategy.whole_tensors, keep=world.is_main),
        every_s=data.plan.save_every_s,
        card=card,
        needed=(run_dir.config, run_dir.overrides, *([run_dir.metrics] if "jsonl" in job.logger else [])),
    )


def inputs_of(transforms: DeviceTransforms, draws: ForwardDraws, micro: Shard) -> list[Tensor]:
    """The `inputs` of a step in training: with mixed images, and with the keys of the model's random numbers."""
    images, targets = transforms.mixed(micro)
    return [images, *draws.keys_of(micro), targets, micro.labels]


def step_class(job: ResolvedJob, world: World) -> type[TrainStep]:
    """The step of a job: one that replays CUDA graphs, if the job requests it and the device has them."""
    if job.train.cuda_graph and world.device.type == "cuda":
        from lockstep.training.graph_step import GraphStep  # few jobs request it

        return GraphStep
    return TrainStep


def train(
    trainer: Trainer, watch: HardwareWatch | None, explaining: AbstractContextManager[None]
) -> dict[str, float]:
    """Train to the end, test the best weights, and close everything; returns the means of the hardware, on main."""
    hardware: dict[str, float] = {}
    closes = [trainer.checkpointer.close, trainer.telemetry.close]
    if watch is not None:
        watch.start()
        closes.insert(0, lambda: hardware.update(watch.close()))
    with close_all(*closes), explaining:
        trainer.fit()
        trainer.test()
        trainer.telemetry.outcome = "completed"
    return hardware


def configure_torch(job: ResolvedJob, world: World) -> None:
    """Set torch's process-wide options for this job; an earlier job of the process may have left others."""
    torch.manual_seed(job.seed)
    keep_freed_memory(world, keep=job.train.micro_batches == 1)
    job.precision.configure()
    torch.backends.cudnn.benchmark = job.train.cudnn_benchmark
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)  # only if needed, because it is slow: it imports the compiler


@contextmanager
def explaining(job: ResolvedJob, trainer: Trainer, record: RunRecord) -> Iterator[None]:
    """Explain an error of training: keep the batch behind bad numbers, or find a number of micro-batches that fits.

    Raises NumericalError, LockstepError: the error that ended training, explained.
    """
    try:
        yield
    except Stopped as error:
        trainer.telemetry.outcome = "stopped"
        record.keep_progress(trainer.progress)
        raise Stopped(f"{error}; `{resume_command(record.run_dir, job)}` continues the run") from error
    except NumericalError as error:
        record.keep_progress(trainer.progress)
        record.keep_incident(error, trainer)
        # All ranks raise this at the same step. The launcher ends the others when one leaves, so all wait until main
        # has written.
        record.world.barrier()
        raise
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            from lockstep.training.dry_run import oom_advice  # few runs need it

            raise oom_advice(error, job, record.world, trainer.state, trainer.progress.step + 1) from None
        raise


@dataclass(kw_only=True)
class Parts(TrainStep):
    """A job in parts, on one device.

    Fields:
        job: the job, with a value for every `auto`.
        plan: the plan in steps.
        model: the model, on the device.
        optimizer: the optimizer of the model's parameters, at the base learning rate.
        criterion: the loss: from logits (b, classes) and targets to one loss per example, (b,).
        set_keys: has to be called before a forward pass over examples that are not a whole batch of `batches`,
            so that the model's random layers draw the numbers of these examples.
        loader: reads the images of both splits.
        transforms: from stored uint8 images to the input of the model.
    """

    job: ResolvedJob
    loader: Loader
    transforms: DeviceTransforms

    def __post_init__(self) -> None:
        super().__post_init__()
        self.model, self.optimizer, self.criterion = self.state.model, self.state.optimizer, self.loss.loss
        self.set_keys = self.state.draws.set_keys

    def __repr__(self) -> str:
        data = named(self.job.dataset, frozenset({"root"}))
        return (
            f"Parts: {named(self.job.model)} on {self.world.device}, {self.state.parameters:,} parameters\n"
            f"  data   {data}, {len(self.loader.eval_labels):,} images to evaluate\n"
            f"  steps  {self.plan.total_steps:,} of global batch {self.plan.batch}"
        )

    def batches(self, after: int = 0) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The global batches of the steps after step `after`: the step, images and targets, on the device.

        `lockstep train` has the same batches, order and augmentation: float images (b, C, H, W), and labels (b,), or
        shares of the classes (b, classes) under Mixup and CutMix.
        """
        for shard in self.transforms.train(self.loader.train(after=after)):
            images, targets = self.transforms.mixed(shard)
            self.set_keys(shard)
            yield shard.step, images, targets

    def loss_of_step(self, shard: Shard) -> float:
        """Update the weights on a global batch; returns the mean loss of its unbroken images."""
        losses: list[Tensor] = []
        self.listener = StepListener(record=lambda loss, *_: losses.append(loss))
        self.update(shard)
        return float(torch.stack(losses).sum()) / max(1, int((~is_broken(shard.labels)).sum()))

    def evaluation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The evaluation split in blocks: float images (b, C, H, W) and labels (b,), on the device."""
        for images, labels in self.loader.eval():
            yield self.transforms.eval(images).to(self.transforms.dtype), labels


def build_parts(job: ResolvedJob) -> Parts:
    """The parts of a resolved job. Raises InputError: the data or the model do not fit."""
    world = World.solo("cuda:0" if job.device == "cuda" else job.device)
    job.precision.configure()
    job, data = build_data(job, world)
    torch.manual_seed(job.seed)  # the items of a data set may have drawn numbers
    state = train_state.build_state(job, world, data.plan, lambda number: data.normalised(number, world))
    loss = train_state.build_loss(job, data.train.labels, world, skip=data.skip)
    return Parts(
        job=job,
        world=world,
        plan=data.plan,
        state=state,
        **step_settings(job),
        task=train_state.ready_task(job, card_of(job), loss, world),
        loss=loss,
        inputs=partial(inputs_of, data.transforms, state.draws),
        loader=build_loader(job, data, world),
        transforms=data.transforms,
    )
