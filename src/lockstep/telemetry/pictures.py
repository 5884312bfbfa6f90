"""Pictures, drawn in milliseconds: images in a grid, and a confusion matrix."""

import base64
import math
from collections.abc import Sequence
from io import BytesIO

import numpy as np
from PIL import Image, ImageDraw

from lockstep.core.figures import Predictions

LINE = 13  # pixels of a line of text
NAMED = 20  # the most classes whose names and counts are in a confusion matrix
CELL, MARGIN = 24, 80  # pixels of a cell with a count, and of a name; TensorBoard shows 300 without clicking


def sheet(images: Sequence[np.ndarray] | np.ndarray, captions: Sequence[str] = (), columns: int = 4) -> bytes:
    """Images uint8 (C, H, W) in rows as PNG, each enlarged if it is small, with the lines of its caption below."""
    tiles = [_as_image(image) for image in images]
    factor = max(1, 288 // columns // max(tiles[0].size))
    width, height = (side * factor for side in tiles[0].size)
    step = height + 4 + 2 * LINE * bool(captions)
    page = Image.new("RGB", ((width + 4) * min(columns, len(tiles)), step * math.ceil(len(tiles) / columns)), "white")
    for number, tile in enumerate(tiles):
        x, y = number % columns * (width + 4), number // columns * step
        page.paste(tile.resize((width, height), Image.Resampling.NEAREST), (x, y))
        for line, text in enumerate(captions[number].split("\n") if captions else ()):
            ImageDraw.Draw(page).text((x, y + height + LINE * line), _fitting(text, width), fill="black")
    return _png(page)


def worst(predictions: Predictions) -> bytes:
    """The examples with the highest losses: what each is, and what the model says."""
    images, captions = [], []
    for example in predictions.worst:
        with Image.open(BytesIO(base64.b64decode(example["png"]))) as image:
            images.append(np.asarray(image.convert("RGB")).transpose(2, 0, 1))
        share = "" if example["probability"] is None else f" ({100 * example['probability']:.0f} %)"
        true, said = (_name(predictions.names, example[key]) for key in ("label", "predicted"))
        captions.append(f"is {true}\nsaid {said}{share}")
    return sheet(images, captions, columns=3)


def heat(predictions: Predictions) -> bytes:
    """The confusion matrix as PNG: a row for each true class, a column for each predicted one."""
    counts, names = np.array(predictions.confusion), predictions.names
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    named = len(names) <= NAMED
    cell, margin = (CELL, MARGIN) if named else (max(3, 300 // len(names)), 0)
    colours = (255 - np.sqrt(shares)[..., None] * [247, 207, 148]).astype(np.uint8)
    page = Image.new("RGB", (margin + cell * len(names),) * 2, "white")
    page.paste(Image.fromarray(colours).resize((cell * len(names),) * 2, Image.Resampling.NEAREST), (margin, margin))
    draw = ImageDraw.Draw(page)
    for label in range(len(names) if named else 0):
        at = margin + cell * label + cell // 2
        title = Image.new("RGB", (MARGIN - 4, LINE), "white")
        ImageDraw.Draw(title).text((0, 0), _fitting(_name(names, label), MARGIN - 4), fill="black")
        page.paste(title, (2, at - LINE // 2))
        page.paste(title.rotate(90, expand=True), (at - LINE // 2, 2))
        for other in np.flatnonzero(counts[label]):
            colour = "white" if shares[label, other] > 0.25 else "black"
            draw.text((margin + cell * (other + 0.5), at), str(counts[label, other]), fill=colour, anchor="mm")
    return _png(page)


def in_base64(image: np.ndarray) -> str:
    """An image uint8 (C, H, W) as PNG in base64."""
    return base64.b64encode(_png(_as_image(image))).decode()


def _as_image(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image[:3].transpose(1, 2, 0).copy() if len(image) >= 3 else image[0])


def _name(names: Sequence[str], label: int) -> str:
    """The name of a class; its label if the font of the pictures does not have the letters."""
    return names[label] if max(names[label], default=" ") < "\u0180" else f"class {label}"


def _fitting(text: str, width: int) -> str:
    """A text in one line, cut where the picture has no room for more."""
    text, most = " ".join(text.split()), width // 6
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _png(page: Image.Image) -> bytes:
    buffer = BytesIO()
    page.save(buffer, "PNG")
    return buffer.getvalue()
