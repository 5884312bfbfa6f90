"""A table of CT volumes: a reader of its own, patients as groups, and a test split."""

import csv
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

import lockstep
from lockstep.core.fields import pathname, ranged
from lockstep.data.datasets.items import DatasetOption

LOWEST, HIGHEST = -160, 240  # Hounsfield units that are shown as 0 and 1


class Volumes(Dataset):
    def __init__(self, folder: Path, split: str, slices: int) -> None:
        with (folder / "scans.csv").open(newline="") as table:
            self.rows = [row for row in csv.DictReader(table) if row["split"] == split]
        self.labels = [row["diagnosis"] for row in self.rows]
        self.folder, self.slices = folder, slices

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, str]:
        volume = np.load(self.folder / self.rows[index]["file"])  # (slices, height, width)
        chosen = volume[np.linspace(0, len(volume) - 1, self.slices).round().astype(int)]
        return ((chosen - LOWEST) / (HIGHEST - LOWEST)).clip(0, 1).transpose(1, 2, 0), self.labels[index]

    def group(self, index: int) -> str:
        return self.rows[index]["patient"]


@lockstep.option("dataset")
class CT(DatasetOption):
    """Volumes that `scans.csv` names; their slices are the channels of an image."""

    path: str = pathname("scans")  # folder of the table and the volumes
    slices: int = ranged(8, least=1, most=32)  # slices of a volume, evenly spaced

    names = ("healthy", "lesion")

    @property
    def mean(self) -> tuple[float, ...]:
        return (0.5,) * self.slices

    @property
    def std(self) -> tuple[float, ...]:
        return (0.25,) * self.slices

    def train_dataset(self) -> Volumes:
        return Volumes(Path(self.path), "train", self.slices)

    def test_dataset(self) -> Volumes:
        return Volumes(Path(self.path), "test", self.slices)
