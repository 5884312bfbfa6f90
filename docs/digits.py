"""Makes two small data sets from scikit-learn's digits, to try the tasks: `python docs/digits.py`.

`turned/` has 1,797 digits, each turned by -45 to 45 degrees, with the angle in `turned.csv`. `pairs/` has 1,800
images of two digits beside each other, with both in `pairs.csv`. Every fifth image is for validation.
"""

import csv
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

SIDE = 24  # pixels


def main() -> None:
    digits, rng = load_digits(), np.random.default_rng(0)
    shades = (digits.images * (255 / 16)).astype(np.uint8)
    large = [Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for image in shades]
    turned, pairs = Path("turned"), Path("pairs")
    for folder in (turned, pairs):
        folder.mkdir(exist_ok=True)
    rows = []
    for number, image in enumerate(large):
        angle = float(rng.uniform(-45, 45))
        image.rotate(angle, Image.Resampling.BILINEAR).save(turned / f"{number}.png")
        rows.append([f"{number}.png", f"{angle:.2f}", split_of(number)])
    write(turned / "turned.csv", ["path", "angle", "split"], rows)
    rows = []
    for number, (one, other) in enumerate(rng.integers(0, len(large), (1800, 2)).tolist()):
        both = Image.new("L", (2 * SIDE, SIDE))
        both.paste(large[one], (0, 0))
        both.paste(large[other], (SIDE, 0))
        both.resize((SIDE, SIDE)).save(pairs / f"{number}.png")
        labels = sorted({str(digits.target[one]), str(digits.target[other])})
        rows.append([f"{number}.png", ";".join(labels), split_of(number)])
    write(pairs / "pairs.csv", ["path", "label", "split"], rows)


def split_of(number: int) -> str:
    return "val" if number % 5 == 0 else "train"


def write(path: Path, columns: list[str], rows: list[list[str]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


if __name__ == "__main__":
    main()
