"""What a checkpoint says of its job: the facts on which a run that resumes must agree, and the model card."""

import dataclasses
import hashlib
import json
import math
from typing import Any

import lockstep
from lockstep.checkpoint import difference
from lockstep.config import components
from lockstep.core.errors import InputError
from lockstep.core.fields import LONGEST, PATH, Component, default_of, rule_of
from lockstep.core.model_card import ModelCard
from lockstep.core.plan import Plan, make_plan
from lockstep.core.world import World
from lockstep.data.datasets.files import crops_files
from lockstep.losses import probabilities_of
from lockstep.models import Timm
from lockstep.training.resolved_job import ResolvedJob

# Fields of a model that change how it is computed, not what it is. A resume may change them.
COMPUTE_FIELDS = frozenset({"channels_last", "compile", "compile_mode", "pretrained"})
# Fields of a model that its card leaves out: how training computes it, and how it was initialised.
OF_TRAINING = frozenset({"compile", "compile_mode", "pretrained"})


def describe(component: Any, leave_out: frozenset[str] = frozenset()) -> str:
    """A component in one line: its class, and the fields that differ from their defaults."""
    shown = [
        f"{field.name}={getattr(component, field.name)}"
        for field in dataclasses.fields(component)
        if field.name not in leave_out and getattr(component, field.name) != default_of(field)
    ]
    return f"{type(component).__name__}({', '.join(shown)})"


def named(component: Any, leave_out: frozenset[str] = frozenset()) -> str:
    """`describe` for the user: without empty parentheses, and a model of timm by timm's name."""
    if isinstance(component, Timm):
        return describe(component, leave_out | {"name"}).replace("Timm", component.name, 1).removesuffix("()")
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


def train_longer(job: ResolvedJob, plan: Plan | None = None, step: int = 0) -> str:
    """The override that makes a job twice as long: `steps` if the job has it (it wins over `epochs`).

    For a run of `plan` that stands at `step`, it is twice as long as the longer of the two.
    """
    if job.steps is not None:
        return f"steps={min(LONGEST, 2 * max(job.steps, step))}"
    done = math.ceil(step / plan.steps_per_epoch) if plan is not None else 0
    return f"epochs={min(LONGEST, 2 * max(job.epochs, done))}"


def larger_batch(batch: int, examples: int) -> str | None:
    """The override for a batch of twice the size; None if the training split has too few examples for it."""
    return f"batch={2 * batch}" if 2 * batch <= examples else None


def fingerprint(job: ResolvedJob, examples: int) -> dict[str, Any]:
    """The facts of a job that no resume may change."""
    return {
        "model": describe(job.model, COMPUTE_FIELDS),
        "dataset": type(job.dataset).__name__,
        "classes": job.dataset.classes,
        "class_names": list(job.dataset.class_names),
        **job.dataset.fingerprint(),
        "input_shape": list(job.dataset.input_shape),
        "normalisation": [list(job.input.mean or ()), list(job.input.std or ())],
        "interpolation": job.input.interpolation,
        "crop_from": "file" if crops_files(job.dataset) else "square",
        "examples": examples,
        "batch": job.batch,
        "sampling": job.train.sampling,
        "seed": job.seed,
        "optimizer": getattr(job.optimizer, "opt", type(job.optimizer).__name__),
        "loss": type(job.loss).__name__,
        "average": job.train.ema is not None,
        "repro": describe(job.strategy) if job.strategy.fixed_order else "exact",
    }


def check_same_data(facts: dict[str, Any], world: World) -> None:
    """Raise InputError on every rank if a machine has other data than main, by these facts. Collective."""
    digests = world.gather(hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest())
    if len(set(digests)) == 1:
        return
    all_facts = world.gather(facts)
    main = all_facts[0]
    rank = next(rank for rank, rank_facts in enumerate(all_facts) if rank_facts != main)
    raise InputError(
        f"the data of rank {rank}, here, is not that of rank 0, there ({difference(all_facts[rank], main)}); all "
        "machines need the same files: copy them again, or name a folder that all of them see"
    )


def card_of(job: ResolvedJob) -> ModelCard:
    """The card of a resolved job, before its first step.

    Raises:
        InputError: the names of its classes are too long to be kept with the weights.
    """
    data = job.dataset
    examples = json.dumps(data.fingerprint(), sort_keys=True)
    card = ModelCard(
        model=_node(job.model, OF_TRAINING),
        precision=_node(job.precision),
        loss=_node(job.loss),
        classes=data.classes,
        class_names=tuple(data.class_names),
        image_shape=data.image_shape,
        input_shape=data.input_shape,
        eval_crop=data.eval_crop,
        mean=tuple(job.input.mean),
        std=tuple(job.input.std),
        interpolation=job.input.interpolation,
        probabilities=probabilities_of(job.loss),
        eval_views=job.train.eval_views,
        eval_batch=job.train.eval_batch,
        trained_on={**_node(data, _paths(data)), "sha256": hashlib.sha256(examples.encode()).hexdigest()},
        lockstep=lockstep.__version__,
    )
    card.metadata()  # raises now, not at the first save
    return card


def _node(component: Component, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
    return {key: value for key, value in components.node(component).items() if key not in leave_out}


def _paths(component: Component) -> frozenset[str]:
    """The fields that are paths. The card leaves them out: shared weights must not tell about the user's machine."""
    names = (field.name for field in dataclasses.fields(component))
    return frozenset(name for name in names if rule_of(type(component), name) is PATH)
