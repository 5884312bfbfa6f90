"""Checks of a job with its data present: of the data, the plan, the memory and the figure that decides."""

import json
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.core.errors import InputError
from lockstep.core.launch_env import local_size
from lockstep.core.model_card import CLASSES, LABELS, NAMES_LIMIT, VALUES
from lockstep.core.plan import Plan
from lockstep.core.tags import Monitor
from lockstep.core.world import World
from lockstep.losses import probabilities_of
from lockstep.models.nets import check_model_size, sketch
from lockstep.runtime.host import check_room
from lockstep.scores import EvaluationBlock, Scores
from lockstep.training.evaluate import Patience
from lockstep.training.resolved_job import ResolvedJob, averaging_of, decisions, plan_of
from lockstep.training.train_step import factor_at

FLOAT32 = 4  # bytes
NAMED_CLASSES = 3  # classes that a sentence names
TRIED_LABELS = 4096  # images, from all parts of a split, that usually show that a metric has a value
LARGE_SIDE = 1024  # the side of images for which the layers of some networks of timm take long to make


def check_plan(job: ResolvedJob) -> Plan:
    """The plan of a job with its data present. Raises InputError if the job does not fit the data or the memory."""
    if job.task.targets == CLASSES and job.dataset.classes < 2:
        named = "".join(f", {name}," for name in job.dataset.class_names)
        raise InputError(f"dataset: it has one class{named} so there is nothing to tell apart, expected two or more")
    if (length := len(json.dumps(job.dataset.class_names))) > NAMES_LIMIT:
        raise InputError(
            f"dataset: the names of its {job.dataset.classes:,} classes take {length:,} characters, expected at most "
            f"{NAMES_LIMIT:,}, because weights keep them; shorten them, or name the column or key of the labels"
        )
    if job.task.targets == LABELS and not job.dataset.train().labels.any():
        raise InputError(
            "dataset: no image to train on has a label, so there is nothing to learn; correct the labels, or use "
            "another task"
        )
    plan = plan_of(job, len(job.dataset.train()))
    check_memory(job, plan)
    for step in (1, plan.total_steps):  # raises if the schedule does not fit the plan
        factor_at(job.schedule, step, plan, ())
    check_monitor(job)
    job.metric_notes()  # raises for a metric that does not fit the classes
    if job.train.swa_from is not None:
        averaging_of(decisions(job, plan)).check(job.train.swa_from)
    Patience(limit=job.train.patience, min_delta=job.train.min_delta).check(plan)
    return plan


def check_memory(job: ResolvedJob, plan: Plan) -> None:
    """Refuse a job that does not fit into memory: the kernel would kill its processes without a message."""
    on_cpu = job.device == "cpu"
    if not job.model.has_usual_size or max(job.dataset.input_shape) > LARGE_SIDE:  # to import timm takes seconds
        copies = local_size(job.launcher.ranks) * (1 + on_cpu)  # the gradients are on the device
        check_model_size(sketch(job.model, job.dataset.classes, job.dataset.input_shape), copies)
    for purpose, size, remedy in _needs(job, plan) if on_cpu else ():
        check_room(purpose, size, remedy)


def _needs(job: ResolvedJob, plan: Plan) -> Iterator[tuple[str, float, str]]:
    """The parts of a job that need memory on this machine: a name, the bytes, and a remedy."""
    seen, evaluated = math.prod(job.train_shape), math.prod(job.dataset.input_shape)
    micro_batches = plan.batch if job.train.micro_batches == "auto" else plan.micro_batches
    batch = math.ceil(plan.batch / micro_batches)
    smaller = "a smaller dataset.input_size"
    yield f"a micro-batch of {batch} images", FLOAT32 * seen * batch, f"train.micro_batches=auto or {smaller}"
    block = min(job.train.eval_batch, plan.examples)
    yield f"an evaluation block of {block} images", FLOAT32 * evaluated * block, f"train.eval_batch=1 or {smaller}"
    if job.loader.workers not in (0, "auto"):
        ahead = min(int(job.loader.workers) * job.loader.prefetch, plan.total_steps) * plan.batch
        bytes_ahead = ahead * math.prod(job.dataset.image_shape)
        yield f"{ahead} images that are read ahead", bytes_ahead, "loader.prefetch=2"


def check_monitor(job: ResolvedJob) -> None:
    """Refuse a monitor that no evaluation of this job logs, or that has no value on the images to evaluate."""
    name, outputs = Monitor.parse(job.monitor).name, job.dataset.class_names or map(str, range(job.dataset.classes))
    by_class = {name for name, metric in job.metric.items() if metric.average == "none"}
    known = ["loss", *job.task.counted, *(name for name in job.metric if name not in by_class)]
    of_classes = [f"{metric}/{output}" for metric in job.metric if metric in by_class for output in outputs]
    if name not in (*known, *of_classes):
        few = of_classes[:NAMED_CLASSES]
        more = " and so on for each class" * (len(of_classes) > len(few))
        metric, by_output = name.partition("/")[::2]
        has_average = by_output and metric in job.metric and job.metric[metric].average not in ("", "none")
        remedy = f"set metric.{metric}.average=none" if has_average else "add a metric with metric=[NAME]"
        raise InputError(
            f"monitor is {name or job.monitor}, which an evaluation of this job does not log, expected one of "
            f"{', '.join([*known, *few])}{more}; {remedy}"
        )
    if name.partition("/")[0] not in job.metric:
        return
    labels, targets = job.dataset.eval().labels, job.task.targets
    if not any(has_value(job, name, tried) for tried in (labels[:: max(1, len(labels) // TRIED_LABELS)], labels)):
        present = labels.unique().numel() if targets == CLASSES else int((labels > 0.5).any(0).sum())
        of_outputs = f" ({present} of {job.dataset.classes} {targets})" * (targets != VALUES)
        raise InputError(
            f"monitor is {name}, which has no value on the {len(labels):,} images to evaluate{of_outputs}, whatever "
            "is predicted; use monitor=loss, or other images to evaluate"
        )


def has_value(job: ResolvedJob, name: str, labels: Tensor) -> bool:
    """Whether a figure of a metric has a value for predictions of these labels that are drawn at random."""
    metric, kind = name.partition("/")[0], probabilities_of(job.task, job.loss)
    world, data = World.solo(), job.dataset
    scores = Scores({metric: job.metric[metric]}, data.classes, data.class_names, world, kind, job.task.targets)
    logits = torch.randn(len(labels), data.classes, generator=torch.Generator().manual_seed(0))
    scores.update(EvaluationBlock(logits, logits, logits, labels, logits[:, 0], 0))
    return not math.isnan(scores.compute()[name])
