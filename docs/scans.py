"""Makes a small medical data set: 60 patients with up to three CT volumes, int16 `.npy` files, and `scans.csv`."""

import csv
from pathlib import Path

import numpy as np


def main() -> None:
    folder, rng = Path("scans"), np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    with (folder / "scans.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "patient", "diagnosis", "split"])
        for patient in range(60):
            diagnosis, split = ("lesion", "healthy")[patient % 2], "test" if patient >= 48 else "train"
            for scan in range(rng.integers(1, 4)):
                volume = rng.normal(40, 60, (rng.integers(12, 20), 24, 24))  # in Hounsfield units
                if diagnosis == "lesion":
                    row, column = rng.integers(2, 16, 2)
                    volume[4:9, row : row + 6, column : column + 6] += 120
                name = f"patient{patient:02}-{scan}.npy"
                np.save(folder / name, volume.astype(np.int16))
                table.writerow([name, patient, diagnosis, split])


if __name__ == "__main__":
    main()
