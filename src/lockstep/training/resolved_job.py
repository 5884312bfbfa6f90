"""The job that ranks get, from `lockstep.job.resolve`, and what a checkpoint and its card say of it.

Only what needs the memory or data of a rank may be `auto`.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Self

import lockstep
from lockstep.checkpoint.reading import describe_differences
from lockstep.config import components
from lockstep.config.extensions import is_object
from lockstep.config.roles import fields_with
from lockstep.config.schema import GROUPS, Job, TrainBlock
from lockstep.core.data_protocols import Source, splits_of
from lockstep.core.errors import InputError
from lockstep.core.fields import (
    MOST_STEPS,
    PATH,
    Component,
    Role,
    default_of,
    former_names,
    is_timed,
    rule_of,
    values_before,
)
from lockstep.core.model_card import CROP, ModelCard, Preprocessing
from lockstep.core.observer import Callback
from lockstep.core.plan import Averaging, Plan, make_plan
from lockstep.core.world import World
from lockstep.losses import probabilities_of

Decisions = Mapping[str, Sequence[int]]  # what a plan decides, in steps by key


@dataclass(frozen=True, kw_only=True)
class ResolvedTrainBlock(TrainBlock):
    """`train.*`. What the memory of the ranks allows is known later: until then, `micro_batches` may be `auto`."""

    eval_batch: int
    ema: float | None
    mixup: float


@dataclass(frozen=True, kw_only=True)
class ResolvedJob(Job):
    """A job for this machine. Only the ranks, which have the data, choose its loader and `train.micro_batches`."""

    epochs: int
    batch: int
    train: ResolvedTrainBlock

    @property
    def preprocessing(self) -> Preprocessing:
        """How a file becomes the input of the model."""
        mean, std = tuple(self.input.mean or ()), tuple(self.input.std or ())
        return replace(self.dataset.preprocessing, mean=mean, std=std, interpolation=self.input.interpolation)

    def micro_batch(self, ranks: int) -> int:
        """The largest number of examples in one forward pass on one of `ranks` ranks."""
        return math.ceil(self.batch / ranks / self.train.passes)

    def metric_notes(self) -> list[str]:
        """What the metrics say of the classes of the data. Raises InputError for a metric that does not fit them."""
        names = self.dataset.class_names or [*map(str, range(self.dataset.classes))]
        return [note for own in self.metric.values() for note in own.notes(names)]

    @classmethod
    def of(cls, job: Job) -> Self:
        """The same job with narrower types."""
        train = ResolvedTrainBlock(**vars(job.train))
        return cls(**{field.name: getattr(job, field.name) for field in fields(Job)} | {"train": train})


def load_job(path: Path) -> ResolvedJob:
    """The resolved job that a run folder's `config.yaml` describes. Raises InputError if it is missing or damaged."""
    return ResolvedJob.of(components.build_job(components.read_config(path)))


def chosen_options(job: Job) -> list[Any]:
    chosen = [getattr(job, group) for group in GROUPS]
    return [option for own in chosen for option in (own.values() if isinstance(own, Mapping) else [own])]


def describe(component: Any, leave_out: frozenset[str] = frozenset(), *, lasting: bool = False) -> str:
    """A component in one line: its class, and the fields that differ from their defaults.

    A `lasting` text is the same in each version: with the first names of keys, without what was done before them.
    """
    cls = type(component)
    names = {new: old for old, new in reversed(former_names(cls).items())} if lasting else {}
    usual = {field.name: default_of(field) for field in fields(component)} | (values_before(cls) if lasting else {})
    values = {name: getattr(component, name) for name in usual if name not in leave_out}
    shown = [f"{names.get(name, name)}={value}" for name, value in values.items() if value != usual[name]]
    return f"{cls.__name__}({', '.join(shown)})"


def described(callbacks: Mapping[str, Callback]) -> dict[str, str]:
    """What each callback is, by its name: with the values of an option, or the class of an object of the user's."""
    return {
        name: describe(callback) if is_dataclass(callback) else type(callback).__qualname__
        for name, callback in callbacks.items()
    }


def named(component: Any, leave_out: frozenset[str] = frozenset()) -> str:
    """`describe` for the user: without empty parentheses, and a model of a library by its name there.

    An object of a program is the name of its class, or of a function.
    """
    if is_object(component):
        return str(component.type)
    if component.library_name is not None:
        text = describe(component, leave_out | {"name"})
        return text.replace(type(component).__name__, component.library_name, 1).removesuffix("()")
    return describe(component, leave_out).removesuffix("()")


def plan_of(job: ResolvedJob, examples: int) -> Plan:
    return make_plan(
        examples=examples,
        batch=job.batch,
        epochs=job.epochs,
        total_steps=job.steps,
        micro_batches=job.train.passes,
        log_every=job.telemetry.interval,
        eval_every=job.train.eval_every,
        save_every=job.checkpoint.every,
    )


def step_settings(job: ResolvedJob) -> dict[str, Any]:
    """What a `TrainStep` takes from a job, besides its task."""
    return {
        "strategy": job.strategy,
        "precision": job.precision,
        "schedule": job.schedule,
        "lr": job.optimizer.lr,
        "clip_norm": job.train.clip_norm,
        "takes_closure": job.optimizer.needs_closure,
    }


def decisions(job: ResolvedJob, plan: Plan) -> Decisions:
    """Each duration of a job in steps of its plan, by key, and the number of its steps."""
    return {"steps": [plan.total_steps]} | {
        f"{block}.{field.name}": [plan.in_steps(field.name, item) for item in (value if several else [value])]
        for block, part in vars(job).items()
        for field in (fields(part) if is_dataclass(part) else ())
        if (rule := rule_of(type(part), field.name)) and rule.durations
        if (value := getattr(part, field.name)) is not None and not is_timed(value)
        for several in [isinstance(value, list | dict)]
    }


def averaging_of(decided: Decisions) -> Averaging:
    """The steps that `train.swa_from` averages."""
    return Averaging(*(max(1, *decided[key]) for key in ("train.swa_from", "train.swa_every", "steps")))


def train_longer(job: ResolvedJob, plan: Plan, step: int = 0) -> str:
    """The overrides that make a job twice as long: `steps` if the job has it (it wins over `epochs`).

    For a run of `plan` that stands at `step`, it is twice as long as the longer of the two, and continues the average
    if another cannot begin.
    """
    key, length, size = ("epochs", job.epochs, plan.steps_per_epoch) if job.steps is None else ("steps", job.steps, 1)
    longer = min(MOST_STEPS, 2 * max(length, math.ceil(step / size)))
    here, later = decisions(job, plan), decisions(job, replace(plan, total_steps=longer * size))
    of_average = job.train.swa_from is not None and averaging_of(later).remedies(averaging_of(here), step)
    return " ".join([f"{key}={longer}", *(of_average or [])[:1]])


def larger_batch(batch: int, examples: int) -> str | None:
    """The override for a batch of twice the size; None if the training split has too few examples for it."""
    return f"batch={2 * batch}" if 2 * batch <= examples else None


def of_training(job: ResolvedJob) -> frozenset[str]:
    """The fields of the model that say how it is computed and how it was initialised, not what it is."""
    return fields_with("model", job.model, Role.start, *(role for role in Role if not role.makes_another_run))


def fingerprint(job: ResolvedJob, examples: int) -> dict[str, Any]:
    """The facts of a job that no resume may change."""
    how, task = job.preprocessing, describe(job.task, _paths(job.task), lasting=True)
    return {
        "model": describe(job.model, of_training(job), lasting=True),
        "dataset": type(job.dataset).__name__,
        "classes": job.dataset.classes,
        "class_names": list(job.dataset.class_names),
        "test": None,
        **job.dataset.fingerprint(),
        "input_shape": list(how.input_shape),
        "normalisation": [list(how.mean), list(how.std)],
        "interpolation": how.interpolation,
        "crop_from": ("file" if job.dataset.crops_files else "square") + f", fit={how.fit}" * (how.fit != CROP),
        "examples": examples,
        "batch": job.batch,
        "sampling": job.train.sampling + f", repeats={job.train.repeats}" * (job.train.repeats > 1),
        "seed": job.seed,
        "optimizer": job.optimizer.algorithm,
        "loss": type(job.loss).__name__,
        # With what identifies its files in the place of their paths.
        "task": " ".join([task, *map(" ".join, job.task.identity().items())]),
        "monitor": job.monitor,
        "average": "mean" if job.train.swa_from is not None else job.train.ema is not None,
        "repro": describe(job.strategy) if job.strategy.fixed_order else "exact",
    }


def check_same_data(facts: dict[str, Any], world: World) -> None:
    """Raise InputError on every rank if a machine has other data than main, by these facts. Collective."""
    digests = world.gather(hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest())
    if len(set(digests)) == 1:
        return
    all_facts = world.gather(facts)
    rank, other = next((rank, other) for rank, other in enumerate(all_facts) if other != all_facts[0])
    raise InputError(
        f"rank {rank} here has different data from rank 0 ({describe_differences(other, all_facts[0])}); all "
        "machines need the same files: copy them again, or name a folder that all of them see"
    )


def card_of(job: ResolvedJob, packages: Mapping[str, str] | None = None) -> ModelCard:
    """The card of a job's weights; `packages` are the extensions that it is trained with, and their hashes."""
    data = job.dataset
    images = {name: len(split) for name, split in splits_of(data).items()}
    return ModelCard(
        **vars(job.preprocessing),
        model=_node(job.model, of_training(job) - {"channels_last"}),  # which is faster in use, too
        precision=_node(job.precision),
        loss=_node(job.loss),
        classes=data.classes,
        class_names=tuple(data.class_names),
        probabilities=probabilities_of(job.task, job.loss),
        targets=job.task.targets,
        monitor=job.monitor,
        eval_views=job.train.eval_views,
        eval_batch=job.train.eval_batch,
        trained_on={**_node(data, _paths(data)), "sha256": fingerprint_of(data), "images": images},
        lockstep=lockstep.__version__,
        packages=packages or {},
    )


def fingerprint_of(data: Source) -> str:
    """The sha256 of what identifies the examples of a data set, wherever they are."""
    return hashlib.sha256(json.dumps(data.fingerprint(), sort_keys=True).encode()).hexdigest()


def _node(component: Component, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
    return {key: value for key, value in components.node(component).items() if key not in leave_out}


def _paths(component: Component) -> frozenset[str]:
    """The fields that are paths. The card leaves them out: shared weights must not tell about the user's machine."""
    names = (field.name for field in fields(component))
    return frozenset(name for name in names if rule_of(type(component), name) is PATH)
