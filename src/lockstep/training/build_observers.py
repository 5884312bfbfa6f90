"""Builds everything that records a run: telemetry of each rank, main's observers and its watch on the hardware."""

import itertools
import json
import math
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.config import components
from lockstep.config.extensions import is_object
from lockstep.config.options import is_ours, option_name
from lockstep.config.roles import TARGET
from lockstep.config.schema import GROUPS, MANY
from lockstep.core.data_protocols import Shard
from lockstep.core.errors import InputError, LockstepError, reason_of, shown
from lockstep.core.fields import leaves
from lockstep.core.figures import Predictions, check_declared, figures_of, read_figures
from lockstep.core.log import close_all
from lockstep.core.model_card import VALUES
from lockstep.core.observer import Observer, Outcome, RunInfo, listeners
from lockstep.core.plan import Plan
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.tags import LOSS, TOP1, Monitor, tagged
from lockstep.core.world import World
from lockstep.data.datasets.sizes import SIZES
from lockstep.runtime.signals import StopRequest
from lockstep.telemetry import sinks
from lockstep.telemetry.display import TimeLeft, display
from lockstep.telemetry.hardware import parts_of, watched_gpus
from lockstep.telemetry.hardware_watch import HardwareWatch, Spending
from lockstep.telemetry.meter import Telemetry
from lockstep.telemetry.profile import profiled
from lockstep.telemetry.sinks import Samples
from lockstep.telemetry.time_spent import TimeSpent
from lockstep.training.build_data import TrainingData
from lockstep.training.resolved_job import ResolvedJob, named
from lockstep.training.train_state import Progress, TrainState

# A loss above this many times the loss of guessing (the logarithm of the number of classes) counts as diverged.
MAX_LOSS_RATIO = 1000


class Observers(Observer):
    """Several observers as one. A lock lets one thread in at a time: GPU samples come from another thread.

    `names` are the figures that the observers log. One that is logged is written with the next figures.
    """

    def __init__(self, *observers: Observer, names: Sequence[str] = ()) -> None:
        self.observers, self.names = observers, names
        self.lock = threading.RLock()
        self.step, self.logged = 0, dict[str, float]()

    def log(self, name: str, value: float, group: str = "logger") -> None:
        """Log a figure of an observer. Raises InputError for another name, or for anything but a number."""
        check_declared(group, name, self.names)
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"{group}: the figure {name!r} is {shown(value)}, expected a number") from None
        with self.lock:
            self.logged[name] = number

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        with self.lock:
            self.step, written = step, dict(scalars)
            for observer in self.observers:
                written |= self.logged
                self.logged.clear()
                self.call(observer, "write", step, dict(written))

    def findings(self, evidence: Any) -> Mapping[str, Any]:
        facts: dict[str, Any] = {}
        for observer in self.observers:
            facts |= self.call(observer, "findings", evidence)
        return facts

    @property
    def commands(self) -> Sequence[str]:
        return [command for observer in self.observers for command in self.call(observer, "commands")]

    def label(self, observer: Any) -> str:
        """The name of an observer, or of the logger that builds it, in a sentence."""
        return f"logger {option_name(type(observer))}"

    def call(self, observer: Any, method: str, *values: Any) -> Any:
        """What a method or a property of an observer or a logger returns.

        Raises LockstepError: a user's one has raised, in this method and line. An error of ours keeps its traceback.
        """
        try:
            member = getattr(observer, method)
            return member(*values) if callable(member) else member
        except LockstepError:
            raise
        except Exception as error:
            if is_ours(type(observer)):
                raise
            from lockstep.runtime.user_code import frame_of  # only a mistake needs it

            frame = frame_of(error, Path(__file__).parent)
            place = f"{frame.filename}:{frame.lineno}: " if frame else ""
            raised = f"{method} raised {type(error).__name__}: {reason_of(error)}"
            raise LockstepError(f"{place}{self.label(observer)}: {raised}") from error

    def _tell(self, method: str, *values: Any) -> None:
        with self.lock:
            for observer in self.observers:
                self.call(observer, method, *values)

    def first_batch(self, micro: Shard, images: Tensor) -> None:
        self._tell("first_batch", micro, images)

    def write_gpu(self, step: int, scalars: Mapping[str, float]) -> None:
        self._tell("write_gpu", step, scalars)

    def evaluated(self, step: int, scores: Mapping[str, float], best: bool) -> None:
        self._tell("evaluated", step, scores, best)

    def predicted(self, predictions: Predictions) -> None:
        self._tell("predicted", predictions)

    def saved(self, step: int, checkpoint: Path) -> None:
        self._tell("saved", step, checkpoint)

    def completed(self, summary: Mapping[str, Any]) -> None:
        self._tell("completed", summary)

    def write_logged(self) -> None:
        """Write the figures that wait for the next ones."""
        if self.logged:
            self.write(self.step, {})

    def flush(self) -> None:
        with self.lock:
            self.write_logged()
            self._tell("flush")

    def end(self, outcome: Outcome) -> None:
        ends = (partial(self.call, observer, "end", outcome) for observer in self.observers)
        with self.lock, close_all(self.write_logged, *ends):
            pass


def build_observers(
    job: ResolvedJob,
    run_dir: RunDir,
    world: World,
    data: TrainingData,
    state: TrainState,
    progress: Progress,
    stop: StopRequest,
    observer: Observers,
) -> tuple[Telemetry, HardwareWatch | None]:
    """The telemetry of this rank with its `observer`, and on main the watch on the hardware. Collective."""
    plan, times = data.plan, _times(job, world, data.plan, state, progress)
    left = TimeLeft(plan, times.clock, progress.step)
    gpus = watched_gpus(state.replica, world)
    if world.is_main:
        _observe(observer, job, run_dir, world, plan, state, progress)
    loss_limit = MAX_LOSS_RATIO * math.log(max(2, job.dataset.classes))
    if job.task.targets == VALUES:  # nothing is known of their size
        loss_limit = sys.float_info.max
    telemetry = Telemetry(
        world=world,
        plan=plan,
        observer=observer,
        display=display(plan, left, Monitor.parse(job.monitor), is_main=world.is_main),
        samples=_samples(job, run_dir, world, progress),
        times=times,
        step=progress.step,
        opened=progress.window,
        peak_rate=state.peak_rate,
        loss_limit=loss_limit,
        hits=job.task.hits if TOP1 in job.task.counted else None,
        names=[*figures_of(job.task)],
        comparable=job.strategy.same_work,
    )
    if not world.is_main:
        return telemetry, None
    if job.telemetry.profile:
        on_gpu = world.device.type == "cuda"
        folder, steps = run_dir.logs / "profile", plan.total_steps - progress.step
        telemetry.profile = partial(profiled, folder=folder, total=steps, on_gpu=on_gpu)
    processes = [os.getpid(), *world.local_peer_pids.values()]
    watch = HardwareWatch(
        parts=parts_of(gpus=gpus if job.telemetry.gpu else [], path=run_dir.gpu, processes=processes),
        observer=observer,
        step=lambda: telemetry.step,
    )
    spending = Spending(
        run_dir=run_dir,
        gpus=max(len(gpus), world.size) if gpus else 0,
        usd_per_gpu_hour=job.cost.usd_per_gpu_hour,
        budget=job.budget,
        watch=watch,
        counts_energy=world.local_size == world.size,
        stop=stop,
        trained=telemetry.trained,
    )
    watch.sampled = spending.check
    observer.observers = (*observer.observers, spending)
    return telemetry, watch


def _times(job: ResolvedJob, world: World, plan: Plan, state: TrainState, progress: Progress) -> TimeSpent:
    """Where the time goes, with the parts of a step where they can be distinguished."""
    whole, one_pass = job.strategy.whole_model, job.strategy.one_pass or world.size == 1
    # The gradients of a sharded model are not computed where torch calls hooks, and several micro-batches need them.
    divided = one_pass and not job.train.cuda_graph and (whole or plan.micro_batches == 1)
    reduces = whole and world.size > 1
    model = state.model if divided else None
    return TimeSpent(model, world.device, reduces=reduces, period=plan.log_every, first=progress.step)


def _observe(
    observers: Observers,
    job: ResolvedJob,
    run_dir: RunDir,
    world: World,
    plan: Plan,
    state: TrainState,
    progress: Progress,
) -> None:
    """Give main's observers the loggers, the table of evaluations, and the file of predictions."""
    loggers = sorted(job.logger.values(), key=lambda logger: not logger.figures)
    evaluated = tagged(dict.fromkeys([LOSS, *job.task.counted, *job.metric], 0.0))
    tags = [*evaluated, *figures_of(job.task), *observers.names]
    record = Run(run_dir.path)
    run = RunInfo(
        run_dir=run_dir,
        plan=plan,
        step=progress.step,
        after=progress.after,
        config=components.plain(job),
        hyperparameters=hyperparameters(job, world, record.swept),
        tags=tags,
        model=state.model,
        id=record.id or "",
        log=observers.log,
    )
    own = [observers.call(logger, "build", run) for logger in loggers]
    listening = [listener(run) for listener in listeners()]
    logged = read_figures(run_dir.metrics, progress.after)
    latest = {tag: value for _, scalars in logged for tag, value in scalars.items()}
    table = sinks.CsvTable(run_dir.table, plan, progress.after, latest, tags)
    observers.observers = (*observers.observers, *own, table, sinks.PredictionsFile(run_dir.validation), *listening)


def _samples(job: ResolvedJob, run_dir: RunDir, world: World, progress: Progress) -> Samples | None:
    """The log of the samples of this rank. The files of ranks that no longer exist after a resume are cut as well."""
    if not job.telemetry.samples:
        return None
    ranks = itertools.count(world.rank, world.size)
    files = list(itertools.takewhile(lambda path: path.exists(), map(run_dir.rank_samples, ranks)))
    for path in files[1:]:
        Samples(path, progress.step).close()
    return Samples(run_dir.rank_samples(world.rank), progress.step)


def hyperparameters(job: ResolvedJob, world: World, swept: Iterable[str] = ()) -> dict[str, str | float]:
    """What TensorBoard's HParams page shows of a job: keys and options as they are typed, in short texts.

    TensorBoard cuts longer texts. Each key of a user's option, and each `swept` key, is a column of its own. The jobs
    of a sweep have the same other keys.
    """
    places = frozenset({"root", "path"})
    folder = Path(job.dataset.path or "").name
    groups = ("model", "augment", "strategy", "precision", "schedule", "loss")
    plain = {key: value for key, value in components.plain(job).items() if key not in MANY}
    own = {group for group in GROUPS if group in plain and not is_ours(type(getattr(job, group)))}
    plain = {group: _without_class(node) for group, node in plain.items()}
    numbers = ("micro_batches", "mixup", "cutmix", "erase", "repeats", "clip_norm", "ema")
    return {
        **{group: _typed(getattr(job, group)) for group in groups},
        "dataset": " ".join(filter(None, (_typed(job.dataset, places | set(SIZES)), folder))),
        "input": "x".join(str(size) for size in job.dataset.input_shape),
        "optimizer": _typed(job.optimizer, frozenset({"lr", "weight_decay"})),
        "optimizer.lr": job.optimizer.lr,
        "optimizer.weight_decay": job.optimizer.weight_decay,
        "task": _typed(job.task, frozenset({"teacher"})),
        **{key: getattr(job, key) for key in ("batch", "epochs", "monitor", "seed")},
        **{f"train.{key}": getattr(job.train, key) or 0.0 for key in numbers},
        "train.swa_from": str(job.train.swa_from or ""),
        "ranks": world.size,
        **{key: _short(value) for key, value in leaves(plain) if key in swept or key.partition(".")[0] in own},
    }


def _without_class(node: Any) -> Any:
    return {key: value for key, value in node.items() if key != TARGET} if isinstance(node, dict) else node


def _short(value: object) -> str | float:
    return value if isinstance(value, str | int | float) else json.dumps(value)


def _typed(component: Any, leave_out: frozenset[str] = frozenset()) -> str:
    """`named` with the name of the option, such as `adamw`, in the place of the class."""
    cls = type(component)
    if not is_ours(cls) and not is_object(component):
        return option_name(cls)
    return named(component, leave_out).replace(cls.__name__, option_name(cls), 1)
