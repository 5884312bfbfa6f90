"""Builds the data of a run: its splits, its plan, the loader that reads them and the transforms on the device."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from lockstep.core.data_protocols import Crop, ImageReader, LoaderContext, Split
from lockstep.core.model_card import CLASSES
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.data.loading.loaders import read_once
from lockstep.data.loading.sampler import balanced_order, repeated_order
from lockstep.data.loading.shards import EvalLoader, Loader
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.runtime.host import GB
from lockstep.training.resolved_job import ResolvedJob, check_same_data, fingerprint, plan_of

UNEQUAL = 10  # times as many images of the largest class as of the smallest are worth a note


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data that a run is trained on and evaluated with.

    Fields:
        test: the split that only the best weights see, once the run has ended; None if the data has none.
        fingerprint: the facts on which a checkpoint and a run that resumes from it must agree.
        loader_reason: why this loader was chosen, for the banner.
    """

    train: Split
    val: Split
    test: Split | None
    plan: Plan
    fingerprint: dict[str, Any]
    transforms: DeviceTransforms
    loader_reason: str

    @property
    def skip(self) -> int:
        """The largest number of images of a split that may be broken."""
        return max(split.skip for split in (self.train, self.val, self.test) if split is not None)

    def normalised(self, number: int, world: World) -> Tensor:
        """`number` training images (n, C, H, W), processed as in an evaluation, on the rank's device."""
        from lockstep.data.loading.reading import sample  # few models look at images before they train

        return self.transforms.eval(sample(self.train, number).to(world.device))


def build_data(job: ResolvedJob, world: World) -> tuple[ResolvedJob, TrainingData]:
    """The data of a job, and the job with its `auto` micro-batches and loader chosen. Collective.

    Raises InputError: the data does not fit the job, or differs between ranks.
    """
    train, val, test = _splits(job, world)
    context = _loader_context(job, train, val, world)
    if job.train.micro_batches == "auto":
        from lockstep.training.dry_run import choose_micro_batches  # few jobs need it

        chosen = choose_micro_batches(job, world, held_gb=job.loader.held_gb(context))
        job = replace(job, train=replace(job.train, micro_batches=chosen))
        context = replace(context, training_rate=partial(_training_rate, job, world))
    facts = fingerprint(job, len(train))
    check_same_data(facts, world)
    loader, reason = world.broadcast(job.loader.choose(context))
    job = replace(job, loader=loader)
    plan = plan_of(job, len(train))
    data = TrainingData(
        train=train,
        val=val,
        test=test,
        plan=plan,
        fingerprint=facts,
        transforms=_transforms(job, plan, world),
        loader_reason=reason,
    )
    return job, data


def build_loader(job: ResolvedJob, data: TrainingData, world: World) -> Loader:
    """The loader of both splits. A resident one reads every image here.

    Raises InputError: more images cannot be decoded than may be skipped.
    """
    order_of = None
    if job.train.sampling == "balanced":
        order_of = partial(balanced_order, job.seed, labels=data.train.labels)
    elif job.train.repeats > 1:
        order_of = partial(repeated_order, job.seed, plan=data.plan, repeats=job.train.repeats)
    own = job.strategy.data_world(world)
    values = max(math.prod(shape) for shape in (job.dataset.image_shape, job.dataset.input_shape, job.train_shape))
    feed = job.loader.feed(data.train, world)

    def cropping_to(size: tuple[int, int]) -> ImageReader:
        return job.loader.feed(_cropped(job, data.train, size), world) if job.dataset.crops_files else feed

    return Loader(
        world=own,
        plan=data.plan,
        seed=job.seed,
        eval_batch=job.train.eval_batch,
        # Copied, because the loader marks broken images in the labels.
        train_labels=data.train.labels.to(world.device, copy=True),
        eval_labels=data.val.labels.to(world.device, copy=True),
        train_feeds={start: cropping_to(size) for start, size in data.transforms.train_sizes.items()},
        eval_feed=job.loader.feed(data.val, world),
        partners=data.transforms.mix is not None,
        stride=job.loader.stride(data.plan.batch // own.size, values, world),
        order_device=job.loader.order_device(world),
        order_of=order_of,
        crops=job.dataset.crops_files,
        skip=data.train.skip,
    )


def build_test_loader(job: ResolvedJob, data: TrainingData, world: World) -> EvalLoader | None:
    """The loader of the test split, which reads no image before it is used; None without one."""
    if data.test is None:
        return None
    return EvalLoader(
        world=job.strategy.data_world(world),
        eval_batch=job.train.eval_batch,
        eval_labels=data.test.labels.to(world.device, copy=True),
        eval_feed=read_once(data.test, world),
        skip=data.test.skip,
    )


def _splits(job: ResolvedJob, world: World) -> tuple[Split, Split, Split | None]:
    """The splits. One rank of each machine prepares the files; the others wait for it."""
    if world.local_rank == 0:
        job.dataset.prepare()
    world.barrier()
    source, how = job.dataset, job.preprocessing
    test = None if (split := source.test()) is None else source.read_as(split, how)
    return _cropped(job, source.train(), job.train_shapes[0][1:]), source.read_as(source.eval(), how), test


def _cropped(job: ResolvedJob, train: Split, size: tuple[int, int]) -> Split:
    """The training split; with `dataset.crop_from=file` boxes of its images, of this (height, width)."""
    crop = None
    if job.dataset.crops_files:
        from lockstep.data.transforms.crops import RandomResizedCrop  # few jobs crop files

        assert isinstance(job.augment, RandomResizedCrop)
        crop = Crop(job.augment.boxes, job.seed, size)
    return job.dataset.read_as(train, job.preprocessing, crop)


def _loader_context(job: ResolvedJob, train: Split, val: Split, world: World) -> LoaderContext:
    plan, own = plan_of(job, len(train)), job.strategy.data_world(world)
    evaluations = math.ceil(plan.total_steps / plan.eval_every)
    return LoaderContext(
        world=world,
        splits=(train, val),
        gigabytes=(len(train) + len(val)) * math.prod(job.dataset.image_shape) / GB,
        reads=(plan.total_steps * plan.batch + evaluations * len(val)) * world.local_size // own.size,
        changes=job.dataset.changes,
        training_rate=partial(_training_rate, job, world),
    )


def _training_rate(job: ResolvedJob, world: World) -> float | None:
    from lockstep.training.dry_run import training_rate  # images in memory need no measurement

    return training_rate(job, world)


def _transforms(job: ResolvedJob, plan: Plan, world: World) -> DeviceTransforms:
    starts = (plan.in_steps("train.sizes", start) for start in job.train.sizes or (0,))
    return DeviceTransforms.of(
        job.preprocessing,
        job.augment,
        device=world.device,
        precision=job.precision,
        memory_format=job.model.memory_format,
        seed=job.seed,
        cropped=job.dataset.crops_files,
        train_sizes=dict(sorted(zip(starts, (shape[1:] for shape in job.train_shapes), strict=True))),
        **_mixing(job, plan),
    )


def _mixing(job: ResolvedJob, plan: Plan) -> dict[str, Any]:
    """The cutout, the random erasing and the mixing of `DeviceTransforms`; few jobs have any."""
    train = job.train
    if not (train.cutout or train.erase or train.mixup or train.cutmix):
        return {}
    from lockstep.data.transforms.mixing import Cutout, Erase, Mix

    mix = Mix(
        classes=job.dataset.classes,
        mixup=train.mixup,
        cutmix=train.cutmix,
        by=train.mix_by,
        switch=train.mix_switch,
        prob=train.mix_prob,
        until=math.inf if train.mix_until is None else plan.in_steps("train.mix_until", train.mix_until),
    )
    return {
        "cutout": Cutout(train.cutout) if train.cutout else None,
        "erase": Erase(train.erase, train.erase_mode) if train.erase else None,
        "mix": mix if train.mixup or train.cutmix else None,
    }


def balance_note(job: ResolvedJob, labels: Tensor) -> list[str]:
    """A sentence if some classes have many times the training images of others, and nothing makes up for it."""
    is_weighed = job.train.sampling != "shuffled" or job.loss.balanced or job.loss.class_weights is not None
    if job.task.targets != CLASSES or is_weighed:
        return []
    counts = labels[labels >= 0].bincount(minlength=job.dataset.classes)
    seen = counts.where(counts > 0, counts.max())
    if seen.min() * UNEQUAL > counts.max():
        return []
    rarest = int(seen.argmin())
    name = job.dataset.class_names[rarest] if job.dataset.class_names else f"class {rarest}"
    return [
        f"{name} has {counts[rarest]:,} of {len(labels):,} images to train on, the largest class {counts.max():,}: "
        "train.sampling=balanced or loss.balanced=true has each class count alike"
    ]
