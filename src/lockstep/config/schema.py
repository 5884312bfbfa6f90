"""The keys of a job with their types, ranges and defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.fields import (
    FOLDER,
    LONGEST,
    TEXT,
    choice,
    duration,
    pathname,
    personal,
    pixels,
    pixels_by_start,
    ranged,
    ruled,
    sides,
)
from lockstep.core.model_card import INTERPOLATIONS

if TYPE_CHECKING:
    from lockstep.core.data_protocols import Augment, ImageLoader, Source
    from lockstep.core.observer import Logger
    from lockstep.core.protocols import Launcher, Loss, Metric, Model, Optimizer, Precision, Schedule, Strategy, Task
else:  # importing them would import torch; to OmegaConf, a group is Any
    Augment = ImageLoader = Launcher = Logger = Loss = Metric = Model = Optimizer = Any
    Precision = Schedule = Source = Strategy = Task = Any

# The folder with `config.yaml` and the options of each group.
CONF = Path(__file__).parents[1].joinpath("conf").resolve()
# The module with the classes of each config group. A node's `_target_` must be a public dataclass of that module: a
# config can come from somebody else's run folder, so it must not name arbitrary code.
GROUPS: Mapping[str, str] = {
    "model": "lockstep.models",
    "dataset": "lockstep.data.datasets",
    "task": "lockstep.tasks",
    "loader": "lockstep.data.loading",
    "augment": "lockstep.data.transforms",
    "strategy": "lockstep.strategy",
    "precision": "lockstep.precision",
    "launcher": "lockstep.launcher",
    "optimizer": "lockstep.optim",
    "schedule": "lockstep.optim.schedule",
    "loss": "lockstep.losses",
    "metric": "lockstep.metrics",
    "logger": "lockstep.telemetry.loggers",
}
# Groups of which a job can have any number of options: `logger=[jsonl,tensorboard]`.
MANY = frozenset({"metric", "logger"})


@dataclass(frozen=True)
class TrainBlock:
    """`train.*`: how a step uses its global batch, and how the model is evaluated."""

    micro_batches: int | str = ranged(1, least=1, most=1_000_000, words=("auto",))
    size: Any = pixels(None, None)
    sizes: Any = pixels_by_start()
    mixup: int | float | str = ranged(0.0, least=0, most=1000, words=("auto",))
    cutmix: float = ranged(0.0, least=0, most=1000)
    mix_by: str = choice("example", "example", "batch")
    mix_switch: float = ranged(0.5, above=0.0, below=1)
    mix_prob: float = ranged(1.0, above=0.0, most=1)
    mix_until: int | str | None = duration(None)
    cutout: int = ranged(0, least=0, most=16_384)
    erase: float = ranged(0.0, least=0, most=1)
    erase_mode: str = choice("const", "const", "rand", "pixel")
    clip_norm: float | None = ranged(None, above=0.0, most=1e12)
    ema: int | float | str | None = ranged(None, above=0.0, below=1, words=("auto",))
    ema_warmup: bool = True
    ema_every: int = ranged(1, least=1, most=1_000_000_000)
    swa_from: int | str | None = duration(None)
    swa_every: int | str = duration("1ep")
    swa_images: int = ranged(10_000, least=1, most=LONGEST)
    sampling: str = choice("shuffled", "shuffled", "balanced")
    repeats: int = ranged(1, least=1, most=1_000_000)
    freeze: list[str] = ruled([], TEXT)
    freeze_until: int | str | None = duration(None, words=("auto",))
    patience: int | str | None = duration(None, unit="evaluations", words=("auto",))
    min_delta: float = ranged(0.0, least=0.0, most=1e9)
    eval_every: int | str = duration("1ep")
    eval_batch: int | str = ranged("auto", least=1, most=1_000_000, words=("auto",))
    eval_views: int = choice(1, 1, 2, 6)
    cudnn_benchmark: bool = False
    cuda_graph: bool = False

    @property
    def averages(self) -> bool:
        return self.ema is not None or self.swa_from is not None

    @property
    def passes(self) -> int:
        """The micro-batches of a step; 1 while `auto` is not chosen, which is when a rank knows its memory."""
        return 1 if self.micro_batches == "auto" else int(self.micro_batches)


@dataclass(frozen=True)
class InputBlock:
    """`input.*`: how the pixels of the data set become the input of the model."""

    mean: list[float] | None = ranged(None, least=-1e6, most=1e6)
    std: list[float] | None = ranged(None, least=1e-6, most=1e6)
    interpolation: str = choice("auto", "auto", *INTERPOLATIONS)


@dataclass(frozen=True)
class CheckpointBlock:
    """`checkpoint.*`: when a checkpoint is written and how many are kept."""

    every: int | str = duration("1ep", timed=True)
    keep: int = ranged(3, least=1, most=1_000_000)
    keep_best: int = ranged(1, least=1, most=1_000_000)


@dataclass(frozen=True)
class TelemetryBlock:
    """`telemetry.*`: which figures are measured and written during training."""

    interval: int | str = duration(20)
    gpu: bool = True
    samples: bool = False
    profile: bool = False
    report: str = choice("auto", "auto", "always", "never")


@dataclass(frozen=True)
class SweepBlock:
    """`sweep.*`: how a rerun of a sweep command resumes the sweep."""

    resume: str = pathname("auto")
    retry: bool = False
    halving: int | None = ranged(None, least=2, most=1000)
    objectives: list[str] = ruled(["score"], TEXT)
    gpu_share: bool = False


@dataclass(frozen=True)
class CostBlock:
    """`cost.*`: prices, from which the cost of a run is computed."""

    usd_per_gpu_hour: float | None = ranged(None, least=0.0, most=1e6)


@dataclass(frozen=True)
class BudgetBlock:
    """`budget.*`: what a run may cost, over all its parts, before it stops and can be resumed."""

    hours: float | None = ranged(None, above=0.0, most=1e6)
    kwh: float | None = ranged(None, above=0.0, most=1e9)
    usd: float | None = ranged(None, above=0.0, most=1e9)


def _group() -> Any:
    """A config group: any node in the schema; in a job, the component that `components.build_job` builds from it."""
    return field(default=None)


@dataclass(frozen=True)
class Job:
    """One training run: its keys, of which some may be `auto`, and the component of each group."""

    epochs: int | str = ranged(20, least=1, most=LONGEST, words=("auto",))
    steps: int | None = ranged(None, least=1, most=LONGEST)
    batch: int | str = ranged(64, least=1, most=LONGEST, words=("auto",))
    seed: int = ranged(0, least=0, most=2**63 - 1)
    monitor: str = ruled("auto", TEXT)
    repro: str = choice("exact", "exact", "strict")
    device: str = choice("auto", "auto", "cpu", "cuda")
    name: str = ruled("job", TEXT)
    data_root: str = pathname("data")
    output_root: str = personal(pathname("outputs"), FOLDER)
    resume: str | None = pathname(None)
    init_from: str | None = pathname(None)
    train: TrainBlock = field(default_factory=TrainBlock)
    input: InputBlock = field(default_factory=InputBlock)
    checkpoint: CheckpointBlock = field(default_factory=CheckpointBlock)
    telemetry: TelemetryBlock = field(default_factory=TelemetryBlock)
    sweep: SweepBlock = field(default_factory=SweepBlock)
    cost: CostBlock = field(default_factory=CostBlock)
    budget: BudgetBlock = field(default_factory=BudgetBlock)
    model: Model = _group()
    dataset: Source = _group()
    task: Task = _group()
    loader: ImageLoader = _group()
    augment: Augment = _group()
    strategy: Strategy = _group()
    precision: Precision = _group()
    launcher: Launcher = _group()
    optimizer: Optimizer = _group()
    schedule: Schedule = _group()
    loss: Loss = _group()
    metric: dict[str, Metric] = field(default_factory=dict)
    logger: dict[str, Logger] = field(default_factory=dict)

    @property
    def train_shapes(self) -> list[tuple[int, int, int]]:
        """(channels, height, width) of the images that the model gets in training, one after another."""
        shape, sizes = self.dataset.input_shape, (self.train.sizes or {0: self.train.size}).values()
        return [shape if size is None else (shape[0], *sides(size)) for size in sizes]

    @property
    def train_shape(self) -> tuple[int, int, int]:
        """The largest of `train_shapes`."""
        return max(self.train_shapes, key=math.prod)

    @property
    def starts_trained(self) -> bool:
        """Whether the model starts from trained weights, and not from random ones."""
        return self.init_from is not None or bool(getattr(self.model, "pretrained", False))


# The dataclass of each block of keys.
BLOCKS: Mapping[str, type[Any]] = {
    item.name: item.default_factory  # type: ignore[misc]
    for item in fields(Job)
    if is_dataclass(item.default_factory)
}
