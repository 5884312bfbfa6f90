"""What a Dataset of torch says of its targets, classes and groups, also one composed of others."""

import bisect
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset

from lockstep.core.errors import InputError, LockstepError
from lockstep.core.model_card import class_name

TARGET_NAMES = ("targets", "labels", "label", "target")  # in items that are mappings, and as attributes of a Dataset


def called(owner: Any, method: str, *values: Any) -> Any:
    """What a method of a user's data set returns. Raises InputError with the line where it raises anything else."""
    try:
        return getattr(owner, method)(*values)
    except (LockstepError, MemoryError):
        raise
    except Exception as error:  # the code is not ours
        raised = f"{type(owner).__name__}.{method} raised {type(error).__name__}: {error}"
        raise InputError(f"dataset: {raised} ({line_of(error, owner)})") from error


def line_of(error: Exception, owner: Any) -> str:
    """The line of the user's file where an error comes from; the class of its `owner` if there is none."""
    from lockstep.runtime.user_code import frame_of  # only a mistake needs it

    frame = frame_of(error, Path(__file__).parent, Path(torch.__file__).parent / "utils" / "data")
    return f"{Path(frame.filename).name}, line {frame.lineno}" if frame else type(owner).__name__


def source_of(dataset: Any, index: int) -> tuple[Any, int]:
    """The Dataset that a composed one has an item from, and the index of the item there."""
    if isinstance(dataset, Subset):
        return source_of(dataset.dataset, int(dataset.indices[index]))
    if isinstance(dataset, ConcatDataset):
        part = bisect.bisect_right(dataset.cumulative_sizes, index)
        before = dataset.cumulative_sizes[part - 1] if part else 0
        return source_of(dataset.datasets[part], index - before)
    return dataset, index


def sources(dataset: Any) -> list[Any]:
    """The Datasets that a composed one has its items from, or the Dataset itself."""
    if isinstance(dataset, Subset):
        return sources(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return [source for part in dataset.datasets for source in sources(part)]
    return [dataset]


def stored_targets(dataset: Any) -> list[Any] | None:
    """The targets that a Dataset has as an attribute or a column; None without, or if they are of another number."""
    if isinstance(dataset, Subset):
        whole = stored_targets(dataset.dataset)
        return None if whole is None else [whole[index] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [targets for part in dataset.datasets if (targets := stored_targets(part)) is not None]
        return [target for part in parts for target in part] if len(parts) == len(dataset.datasets) else None
    columns = getattr(dataset, "column_names", None)  # of Hugging Face's datasets
    named = [name for name in TARGET_NAMES if (name in columns if columns else hasattr(dataset, name))]
    try:
        stored = list(dataset[named[0]][:] if columns else getattr(dataset, named[0])) if named else []
    except TypeError:  # it is something else, such as a number or a method
        return None
    return stored if len(stored) == len(dataset) else None


def groups_of(dataset: Any) -> list[str] | None:
    """The group of each item, if a Dataset has a method that says it; other items are groups of their own."""
    grouped = {id(source) for source in sources(dataset) if callable(getattr(source, "group", None))}
    if not grouped:
        return None
    items = [source_of(dataset, index) for index in range(len(dataset))]
    return [
        str(called(source, "group", index)) if id(source) in grouped else f"item {number}"
        for number, (source, index) in enumerate(items)
    ]


def names_in(dataset: Any) -> tuple[str, ...]:
    """The names of the classes that a Dataset has, as torchvision's and Hugging Face's have them.

    Empty without, or if the parts of a composed one have different ones. Where classes share a name, as the two
    cranes of ImageNet do, each is followed by its number.
    """
    first, *others = dict.fromkeys(map(_names_of_one, sources(dataset)))
    return () if others else first


def _names_of_one(dataset: Any) -> tuple[str, ...]:
    features = getattr(dataset, "features", None) or {}
    of_features = [getattr(features[key], "names", None) for key in TARGET_NAMES if key in features]
    names = next(filter(None, of_features), None) or getattr(dataset, "classes", ())
    if not isinstance(names, list | tuple):
        return ()
    texts = [class_name(", ".join(map(str, name)) if isinstance(name, tuple) else str(name)) for name in names]
    count = Counter(texts)
    return tuple(f"{text} ({number})" if count[text] > 1 else text for number, text in enumerate(texts))
