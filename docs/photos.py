"""Make a small folder of photos, to try the commands of the documents: `python docs/photos.py [FOLDER]`.

It has `train` and `val` with 40 PNG files of each of two classes. The "cats" are dark and the "dogs" bright, each
under noise, so that a model can tell them apart after a few steps.
"""

import sys
from pathlib import Path

from PIL import Image

SIZE, IMAGES = (32, 24), 40
BRIGHTNESS = {"cat": 60, "dog": 190}


def make(folder: Path) -> None:
    """Write the photos into `folder`. One that exists already may have photos of the user: it stays as it is."""
    if folder.exists():
        sys.exit(f"{folder} exists already: nothing was written; use python docs/photos.py FOLDER for another one")
    for split in ("train", "val"):
        for label, brightness in BRIGHTNESS.items():
            (folder / split / label).mkdir(parents=True)
            for number in range(IMAGES):
                noise = Image.effect_noise(SIZE, 50).convert("RGB")
                plain = Image.new("RGB", SIZE, (brightness,) * 3)
                Image.blend(noise, plain, 0.5).save(folder / split / label / f"{number}.png")


if __name__ == "__main__":
    make(Path(sys.argv[1] if len(sys.argv) > 1 else "photos"))
