"""Make a small folder of photos, to try the commands of the documents: `python docs/photos.py [FOLDER [CHANNELS]]`.

It has `train` and `val` with 40 PNG files of each of two classes. The "cats" are dark and the "dogs" bright, each
under noise, so that a model can tell them apart after a few steps. With CHANNELS they are `.npy` files of so many.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIZE, IMAGES = (32, 24), 40
BRIGHTNESS = {"cat": 60, "dog": 190}


def make(folder: Path, channels: int | None) -> None:
    """Write the photos into `folder`. One that exists already may have photos of the user: it stays as it is."""
    if folder.exists():
        sys.exit(f"{folder} exists already: nothing was written; use python docs/photos.py FOLDER for another one")
    for split in ("train", "val"):
        for label, brightness in BRIGHTNESS.items():
            (folder / split / label).mkdir(parents=True)
            for number in range(IMAGES):
                plain, file = Image.new("L", SIZE, brightness), folder / split / label / str(number)
                grey = [Image.blend(Image.effect_noise(SIZE, 50), plain, 0.5) for _ in range(channels or 1)]
                if channels is None:
                    grey[0].convert("RGB").save(f"{file}.png")
                else:
                    np.save(f"{file}.npy", np.stack([np.asarray(band) for band in grey], axis=-1))
    sys.stdout.write(f"{folder}: {IMAGES} images of a {' and '.join(BRIGHTNESS)} each in train and val\n")


if __name__ == "__main__":
    make(Path(sys.argv[1] if len(sys.argv) > 1 else "photos"), int(sys.argv[2]) if len(sys.argv) > 2 else None)
