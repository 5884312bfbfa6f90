"""The lines that main shows the user before a run and after it."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lockstep.config.commands import key_of, resume_command, shell_command
from lockstep.config.extensions import arguments_of, is_object
from lockstep.core import log
from lockstep.core.errors import percent
from lockstep.core.model_card import CLASSES, VALUES
from lockstep.core.protocols import Optimizer
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir, relative
from lockstep.core.tags import figure_text, part_words, telling
from lockstep.core.world import World
from lockstep.data.datasets.sizes import AUTO, SIZES
from lockstep.runtime.host import format_bytes
from lockstep.telemetry.progress import format_duration
from lockstep.training.build_data import TrainingData
from lockstep.training.resolved_job import ResolvedJob, named, train_longer
from lockstep.training.train_state import TrainState
from lockstep.training.trainer import Trainer

# The most bytes that a checkpoint's files take besides their numbers: in a file, and for a tensor or a class. And a
# factor, because `amount` may round down.
HEADERS, HEADERS_EACH, ROUNDING = 20_000, 500, 1.05
SIDE = 8  # of the small parameters over which an optimizer is tried
NAMED = 3  # of more classes than the next, the first that are named
MOST_CLASS_NAMES = 5  # the most classes that are shown by name
LEAST_SHARE = 0.01  # the smallest share of the time that is shown


def _ranks(job: ResolvedJob, world: World) -> str:
    words = [f"{world.size} process{'es' * (world.size != 1)} on {_device(world)}"]
    if world.has_group:
        words[0] += f" by {type(job.strategy).__name__}"
    if world.device.type == "cpu":
        threads = torch.get_num_threads()
        words.append(f"{threads} thread{'s' * (threads != 1)}{' each' * (world.size > 1)}")
    precision = job.precision
    formats = [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys((precision.storage, precision.dtype))]
    return ", ".join([*words, " and ".join(formats) + " with TF32" * (precision.matmul == "high")])


def _device(world: World) -> str:
    if world.device.type == "cpu":
        return "the CPU"
    gpus = f"{world.local_size} x " if world.local_size > 1 else ""
    return f"{gpus}{torch.cuda.get_device_name(world.device)}"


def _count(parameters: int) -> str:
    """A number of parameters: `850`, `5 k`, `25.6 M`."""
    if parameters < 1000:
        return str(parameters)
    return f"{parameters / 1e3:.0f} k" if parameters < 1e6 else f"{parameters / 1e6:.1f} M"


def _rate_reason(job: ResolvedJob, composed: Mapping[str, Any]) -> str:
    if _setting(composed, "optimizer", "lr") != AUTO:
        return ""
    return f" (usual at batch {job.batch}" + " for trained weights" * job.starts_trained + ")"


def _input_reason(job: ResolvedJob, composed: Mapping[str, Any], auto_sizes: frozenset[str]) -> str:
    """The text behind the shape of the input: which of its settings were chosen, and why."""
    source = job.dataset
    if job.starts_trained:
        words = [
            "size" * ("input_size" in auto_sizes),
            "crop" * ("crop" in auto_sizes),
            "mean and std" * all(_setting(composed, "input", key) is None for key in ("mean", "std")),
            job.input.interpolation * (_setting(composed, "input", "interpolation") == AUTO),
        ]
        origin = "as the weights were trained"
    else:
        words = ["size" * ("input_size" in auto_sizes and source.input_shape != source.image_shape)]
        origin = f"usual for dataset={type(source).__name__.lower()}"
    chosen = ", ".join(word for word in words if word)
    return f" ({chosen} {origin})" if chosen else ""


def _setting(composed: Mapping[str, Any], group: str, key: str) -> Any:
    return (composed.get(group) or {}).get(key)


def _keeps(job: ResolvedJob, state: TrainState) -> str:
    """The files that the run will keep, with sizes estimated from the parameters and the optimizer."""
    size, total = sizes_of_checkpoints(job, state.model)
    newest, best = job.checkpoint.keep, job.checkpoint.keep_best
    keeps = f"the newest {newest} checkpoint{'s' * (newest != 1)} and the best{f' {best}' * (best != 1)}"
    if size is None:
        return f"{keeps}, as large as the optimizer makes them"
    return f"{keeps}, about {format_bytes(size)} each; at most {format_bytes(total)} in all, while one is written"


def sizes_of_checkpoints(job: ResolvedJob, model: nn.Module) -> tuple[float | None, float]:
    """The bytes of a checkpoint (None if the optimizer's are not known), and the most that all of them take."""
    tensors = model.state_dict().values()
    weights = sum(tensor.nbytes for tensor in tensors)
    saved = weights * (1 + job.train.averages)
    state = state_bytes(job.optimizer, model)
    headers = HEADERS + (2 * len(tensors) + job.dataset.classes) * HEADERS_EACH
    number = job.checkpoint.keep + job.checkpoint.keep_best + 1  # one is being written
    total = number * (saved + (state or 0) + 2 * headers) + weights + headers  # the best weights are exported
    return None if state is None else saved + state, ROUNDING * total


def state_bytes(option: Optimizer, model: nn.Module) -> int | None:
    """An estimate of the bytes of an optimizer's state after its first step; None if it cannot be made.

    The optimizer is built over one small parameter for each number of dimensions, and takes a step. The size of its
    state is then scaled to the model's parameters.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    small: Any = nn.Module()
    for parameter in trained:
        name = f"dimensions_{parameter.dim()}"
        if not hasattr(small, name):
            small.register_parameter(name, nn.Parameter(torch.zeros([SIDE] * parameter.dim(), dtype=parameter.dtype)))
    of_layers = {field.name: None for field in dataclasses.fields(option) if field.name in ("layer_decay", "head_lr")}
    changed = dataclasses.replace(cast(Any, option), **of_layers)  # the small module has no layers
    try:
        with torch.random.fork_rng(devices=[]):  # some optimizers draw numbers
            optimizer = changed.build(small)
            for parameter in small.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
    except Exception:  # the optimizer of an extension may need the real model
        return None
    shares = {}
    for parameter in small.parameters():
        state = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
        shares[parameter.dim()] = sum(value.nbytes for value in state if value.dim() > 0) / parameter.numel()
    return round(sum(shares[parameter.dim()] * parameter.numel() for parameter in trained))


def say_start(
    job: ResolvedJob, run_dir: RunDir, world: World, data: TrainingData, state: TrainState, origin: str
) -> None:
    """Show in a dozen lines what is about to run, and its differences from the defaults."""
    plan, run = data.plan, Run(run_dir.path)
    composed = run.composed  # as the user gave it: its values `auto` have been replaced in `job`
    auto_sizes = frozenset(name for name in SIZES if _setting(composed, "dataset", name) == AUTO)
    shape = "x".join(str(size) for size in job.dataset.input_shape)
    if job.train.size is not None or job.train.sizes is not None:
        sizes = (f"{height}x{width}" for height, width in data.transforms.train_sizes.values())
        shape += f" ({', then '.join(sizes)} in training)"
    micro = f" in {plan.micro_batches} micro-batches" if plan.micro_batches > 1 else ""
    epochs = plan.total_steps / plan.steps_per_epoch
    epochs_shown = f"{epochs:,.2f}".rstrip("0").rstrip(".") if epochs >= 0.01 else "less than 0.01"
    epochs_shown += " epoch" if epochs_shown == "1" else " epochs"
    test = "" if data.test is None else f"{len(data.test):,} to test, "
    source = named(job.dataset) if is_object(job.dataset) else type(job.dataset).__name__
    place = f" {relative(Path(job.dataset.path))}" if job.dataset.path else ""
    last_words = {key_of(word): word for word in run.overrides}  # a resume adds its own
    rows = {
        "run": relative(run_dir.path),
        "overrides": " ".join(last_words.values()) or "none, these are the defaults",
        "model": ", ".join(
            [
                named(job.model),
                f"{_count(state.parameters)} parameters",
                *["random weights"] * (not job.starts_trained and not origin),
                *[str(state.freezing)] * bool(str(state.freezing)),
            ]
        ),
        "data": f"{source}{place}, {len(data.train):,} to train on, "
        f"{len(data.val):,} to evaluate, {test}{_classes(job, data)}, {shape}"
        f"{_input_reason(job, composed, auto_sizes)}",
        "input": f"{job.loader} ({data.loader_reason}); augmentation: {job.augment}",
        "ranks": _ranks(job, world),
        "optimizer": f"{named(job.optimizer, frozenset({'lr'}))}, lr {job.optimizer.lr:.3g}"
        f"{_rate_reason(job, composed)}, {named(job.schedule)}",
        "loss": ", ".join([named(job.loss), *([task] if (task := named(job.task)) != "Multiclass" else [])]),
        "steps": f"{plan.total_steps:,} of global batch {plan.batch}{micro}: {epochs_shown} of "
        f"{plan.steps_per_epoch:,}, seed {job.seed}",
        "keeps": _keeps(job, state),
    }
    if origin:
        rows["from"] = origin
    for key, value in rows.items():
        log.say_row(key, str(value))


def _classes(job: ResolvedJob, data: TrainingData) -> str:
    """The outputs: how many, or a few by name, each class and label with its images to train on and to evaluate."""
    number, names, targets = job.dataset.classes, job.dataset.class_names, job.task.targets
    if not names or number > MOST_CLASS_NAMES:
        first = "" if not names or all(map(str.isdecimal, names)) else f" ({', '.join(names[:NAMED])}, ...)"
        return f"{number} {targets}{first}" if number > 1 or targets == CLASSES else f"1 {targets.removesuffix('s')}"
    if targets == VALUES:
        return ", ".join(names)
    splits = [split.labels for split in (data.train, data.val)]
    counts = [
        (labels.bincount(minlength=number) if targets == CLASSES else (labels > 0.5).sum(0)).tolist()
        for labels in splits
    ]
    return ", ".join(f"{name} {train}+{val}" for name, train, val in zip(names, *counts, strict=True))


def say_ending(
    job: ResolvedJob,
    run_dir: RunDir,
    trainer: Trainer,
    seconds: float,
    figures: Mapping[str, Any],
    shares: Mapping[str, float],
    learning: str,
    speed: str,
) -> None:
    """Show how the run went, where its time went, and what to type next."""
    progress, name = trainer.progress, trainer.monitor.name
    state = trainer.state
    average = " of the averaged weights" if state.ema is not None and progress.best_step >= state.ema.start else ""
    best = f"none, {name} never had a value; the weights are those of step {progress.best_step}"
    if progress.best is not None:
        epoch = progress.best_step / trainer.plan.steps_per_epoch
        best = f"{figure_text(name, progress.best)}{average} at step {progress.best_step} (epoch {epoch:.3g})"
    gpu = f", GPU {figures['gpu_util']:.0f} % busy" if "gpu_util" in figures else ""
    rate = f", {figures['img_per_s']:,.0f} img/s" if figures["img_per_s"] else ""  # none before the first log point
    log.say_row("", f"done in {format_duration(seconds)}: best {best}{rate}{gpu}", indent=3)
    chosen = {figure: progress.best_figures.get(figure) for figure in job.metric if figure != name}
    tested_figures = telling(trainer.tested, job.dataset.classes).items()
    shown = (figure for figure in tested_figures if "/" not in figure[0] or figure[0] == name)
    largest = sorted(shares.items(), key=lambda part: part[1], reverse=True)
    parts = (f"{part_words(name)} {percent(share)}" for name, share in largest if share >= LEAST_SHARE)
    rows = {
        "scores": ", ".join(figure_text(figure, value) for figure, value in chosen.items() if value is not None),
        "test": ", ".join(figure_text(*figure) for figure in shown),
        "time": ", ".join(parts),
        "learning": learning,
        "speed": speed,
        "ended": trainer.ended_early,
    }
    for label, text in rows.items():
        if text:
            log.say_row(label, text, indent=16)
    raw, gain = trainer.raw_score, trainer.monitor.gain
    if progress.score is not None and raw is not None and (gain(raw) or 0.0) > (gain(progress.score) or 0.0):
        remedy = "a lower train.ema, or train.ema=null" if job.train.ema_warmup else "train.ema_warmup=true"
        remedy = "a later train.swa_from" if job.train.swa_from is not None else remedy
        scores = f"{figure_text(name, progress.score)} at the last step, and the raw weights {figure_text(name, raw)}"
        log.say_row("average", f"{scores}: it may be over too many steps; use {remedy}", indent=16)
    for command in trainer.telemetry.observer.commands:
        log.say_command("look at it", command)
    patient = ["train.patience=null", *["train.min_delta=0"] * bool(job.train.min_delta)]
    longer = patient if trainer.ended_early else train_longer(job, trainer.plan, progress.step).split()
    if not trainer.ended_early or job.train.patience is not None:  # else by a callback, which would end it again
        log.say_command("train longer", resume_command(run_dir, job, *longer))
    of_program = arguments_of({"model": job.model})
    if of_program:  # no command can build it
        folder = json.dumps(str(relative(run_dir.path)))
        log.say_command("predict", f"lockstep.load({folder}, {of_program[0]}).predict(FILE)")
    elif job.dataset.reads_files:
        for verb, *words in (("evaluate",), ("predict", "FILE"), ("export",), ("demo",)):
            if verb != "evaluate" or not is_object(job.loss):
                log.say_command(verb, shell_command(["lockstep", verb, relative(run_dir.path), *words]))
