"""Makes the model card of a job, which its files of weights contain."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import lockstep
from lockstep.config import components
from lockstep.core.component import Component
from lockstep.core.fields import rule_of
from lockstep.core.model_card import ModelCard
from lockstep.core.rules import PathText
from lockstep.losses import probabilities_of
from lockstep.training.resolved_job import ResolvedJob

# Fields of a model that its card leaves out: how training computes it, and how it was initialised.
OF_TRAINING = frozenset({"compile", "compile_mode", "pretrained"})


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
    return frozenset(name for name in names if isinstance(rule_of(type(component), name), PathText))
