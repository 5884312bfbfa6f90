"""Image files in class folders: `PATH/train/CLASS/*.jpg` and `PATH/val/CLASS/*.jpg`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.errors import InputError
from lockstep.core.fields import pathname, ranged
from lockstep.data.datasets.class_folders import class_names, list_split, list_with_share
from lockstep.data.datasets.files import CropFrom, FileSource
from lockstep.data.datasets.listing import Listing


@dataclass(frozen=True, kw_only=True)
class Folder(FileSource):
    """Any data set with one folder per class.

    Fields:
        path: the folder of the splits.
        train_folder, val_folder: the names of the folders of the splits.
        val_share: for a data set without a validation folder: the share of each class of the training folder that is
            evaluated, chosen by the names of the files.
    """

    path: str = pathname("???")
    train_folder: str = pathname("train")
    val_folder: str = pathname("val")
    val_share: float | None = ranged(None, above=0.0, below=1)

    @property
    def place(self) -> Hashable:
        return Folder, self.path, self.train_folder, self.val_folder, self.val_share

    @property
    def class_names(self) -> tuple[str, ...]:
        return class_names(Path(self.path, self.train_folder))

    def list_files(self) -> tuple[Listing, Listing]:
        train, val = Path(self.path, self.train_folder), Path(self.path, self.val_folder)
        class_names(train)  # raises if there is no such folder
        if self.val_share is None:
            if not val.is_dir():
                raise InputError(
                    f"dataset.val_folder: there is no folder {val}; name the one of the validation split with "
                    f"dataset.val_folder=NAME, or hold out a share of {train} with dataset.val_share=0.1"
                )
            return list_split(train, train), list_split(val, train)
        if val.exists():
            raise InputError(
                f"dataset.val_share is {self.val_share:g}, but there is a validation folder too, {val}; leave out "
                "dataset.val_share, or move that folder away"
            )
        return list_with_share(train, self.val_share)


@dataclass(frozen=True, kw_only=True)
class ImageNet(Folder):
    """ImageNet-1k in class folders: trained at 224 pixels, evaluated on the central 224 pixels of a square of 256."""

    crop_from: CropFrom = CropFrom.file
