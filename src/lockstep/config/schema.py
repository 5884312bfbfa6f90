"""The keys of a job with their types, ranges and defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.fields import (
    FOLDER,
    INTERPOLATIONS,
    MOST_STEPS,
    ROLE,
    TEXT,
    Role,
    choice,
    duration,
    pathname,
    personal,
    pixels,
    pixels_by_start,
    ranged,
    ruled,
    sides,
    with_role,
)

if TYPE_CHECKING:
    from lockstep.core.data_protocols import Augment, ImageLoader, Source
    from lockstep.core.observer import Callback, Logger
    from lockstep.core.protocols import Launcher, Loss, Metric, Model, Optimizer, Precision, Schedule, Strategy, Task
else:  # importing them would import torch; to OmegaConf, a group is Any
    Augment = Callback = ImageLoader = Launcher = Logger = Loss = Metric = Model = Optimizer = Any
    Precision = Schedule = Source = Strategy = Task = Any

# The folder with `config.yaml` and the options of each group.
CONF = Path(__file__).parents[1].joinpath("conf").resolve()
# The module, or the package, with the classes of each config group. A node's `_target_` is this name and an option's
# class, in whichever module of the package it is: so modules may move, and saved runs stay readable. It can name no
# other code, because a config can come from somebody else's run folder.
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
    "callback": "lockstep.callbacks",
    "logger": "lockstep.telemetry.loggers",
}
RECIPES = "experiment"  # the group of the files that set keys of the job
GLOBAL = "# @package _global_"  # the first line of such a file, for Hydra
ANNOTATIONS = ("tags", "run_group", "notes")  # keys for people, who find a run by them
FIELDS = "fields"  # the roles of the fields of a group's options, in the metadata of the group
# Groups of which a job can have any number of options: `logger=[jsonl,tensorboard]`.
MANY = frozenset({"metric", "callback", "logger"})


@dataclass(frozen=True)
class TrainBlock:
    """`train.*`: how a step uses its global batch, and how the model is evaluated."""

    micro_batches: int | str = with_role(Role.rounding, ranged(1, least=1, most=1_000_000, words=("auto",)))
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
    swa_images: int = ranged(10_000, least=1, most=MOST_STEPS)
    sampling: str = choice("shuffled", "shuffled", "balanced")
    repeats: int = ranged(1, least=1, most=1_000_000)
    freeze: list[str] = ruled([], TEXT)
    freeze_until: int | str | None = duration(None, words=("auto",))
    patience: int | str | None = duration(None, unit="evaluations", words=("auto",))
    min_delta: float = ranged(0.0, least=0.0, most=1e9)
    eval_every: int | str = duration("1ep")
    eval_batch: int | str = with_role(Role.rounding, ranged("auto", least=1, most=1_000_000, words=("auto",)))
    eval_views: int = choice(1, 1, 2, 6)
    cudnn_benchmark: bool = with_role(Role.rounding, False)
    cuda_graph: bool = with_role(Role.rounding, False)

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


def _group(role: Role = Role.identity, /, *, many: bool = False, **fields_by_role: str) -> Any:
    """A config group: any node in the schema; in a job, the component that `components.build_job` builds from it.

    `role` is the one of its choice and of the fields of its options, except the fields that `fields_by_role` names.
    They stand here and not at the classes of the options, which import torch.
    """
    names = {name: Role(role) for role, text in fields_by_role.items() for name in text.split()}
    metadata = {ROLE: role, FIELDS: names}
    return field(default_factory=dict, metadata=metadata) if many else field(default=None, metadata=metadata)


@dataclass(frozen=True)
class Job:
    """One training run: its keys, of which some may be `auto`, and the component of each group."""

    epochs: int | str = with_role(Role.schedule, ranged(20, least=1, most=MOST_STEPS, words=("auto",)))
    steps: int | None = with_role(Role.schedule, ranged(None, least=1, most=MOST_STEPS))
    batch: int | str = ranged(64, least=1, most=MOST_STEPS, words=("auto",))
    seed: int = with_role(Role.sample, ranged(0, least=0, most=2**63 - 1))
    monitor: str = ruled("auto", TEXT)
    repro: str = choice("exact", "exact", "strict")  # a resume cannot change it: batch norm counts other parts
    device: str = with_role(Role.rounding, choice("auto", "auto", "cpu", "cuda"))
    name: str = with_role(Role.place, ruled("job", TEXT))
    tags: list[str] = with_role(Role.display, ruled([], TEXT))  # noqa: RUF009, a field with a factory
    notes: str | None = with_role(Role.display, ruled(None, TEXT))
    run_group: str | None = with_role(Role.display, ruled(None, TEXT))  # a `group` would be a group of options
    data_root: str = with_role(Role.place, pathname("data"))
    output_root: str = with_role(Role.place, personal(pathname("outputs"), FOLDER))
    resume: str | None = with_role(Role.place, pathname(None))
    init_from: str | None = with_role(Role.start, pathname(None))
    train: TrainBlock = field(default_factory=TrainBlock)
    input: InputBlock = field(default_factory=InputBlock)
    checkpoint: CheckpointBlock = field(default_factory=CheckpointBlock, metadata={ROLE: Role.display})
    telemetry: TelemetryBlock = field(default_factory=TelemetryBlock, metadata={ROLE: Role.display})
    sweep: SweepBlock = field(default_factory=SweepBlock, metadata={ROLE: Role.shared})
    cost: CostBlock = field(default_factory=CostBlock, metadata={ROLE: Role.limit})
    budget: BudgetBlock = field(default_factory=BudgetBlock, metadata={ROLE: Role.limit})
    model: Model = _group(start="pretrained", rounding="channels_last compile compile_mode grad_checkpointing")
    # `path` says which images there are. The content of a `root` follows from the name of the data set.
    dataset: Source = _group(
        sample="fold", place="root", limit="skip", pixels="crop crop_from decode_size fit input_size size"
    )
    task: Task = _group()
    loader: ImageLoader = _group(Role.rounding)
    augment: Augment = _group(rounding="compile")
    # These keys change more than the order of sums: whose statistics batch norm has, and numbers of 16 bits.
    strategy: Strategy = _group(Role.rounding, identity="comm_hook low_precision sync_batchnorm")
    precision: Precision = _group()
    launcher: Launcher = _group(
        Role.rounding,
        place="account at_once dry_run node_rank partition qos rendezvous sbatch setup",
        limit="memory restarts save_before time timeout",
    )
    optimizer: Optimizer = _group(schedule="bias_lr head_lr lr weight_decay")
    schedule: Schedule = _group(Role.schedule)
    loss: Loss = _group()
    metric: dict[str, Metric] = _group(many=True)
    callback: dict[str, Callback] = _group(many=True)  # what one does to a run is not known
    logger: dict[str, Logger] = _group(Role.display, many=True)

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
        return self.init_from is not None or bool(self.model.pretrained)


# The dataclass of each block of keys.
BLOCKS: Mapping[str, type[Any]] = {
    item.name: item.default_factory  # type: ignore[misc]
    for item in fields(Job)
    if is_dataclass(item.default_factory)
}
