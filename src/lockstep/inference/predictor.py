"""A trained model and everything that it needs for use. Evaluation, prediction, export and the demo use it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lockstep.core.model import probabilities
from lockstep.core.model_card import ModelCard
from lockstep.core.protocols import Precision
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.inference.images import ImageLike, stored_images
from lockstep.training.evaluate import best_classes, logits_of


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of a model for an image.

    Fields:
        label: the most probable class.
        names: the names of all classes, by label.
        probabilities: float (classes,) on the CPU, by label. They add up to 1, unless the model judges each class by
            itself (`Predictor.card.probabilities` is `sigmoid`, as after `loss=bce`).
    """

    label: int
    names: tuple[str, ...]
    probabilities: Tensor

    @property
    def name(self) -> str:
        """The name of the most probable class."""
        return self.names[self.label]

    @property
    def probability(self) -> float:
        """The probability of the most probable class."""
        return float(self.probabilities[self.label])

    def top(self, k: int) -> list[tuple[int, str, float]]:
        """The `k` most probable classes (or all, if there are fewer): label, name and probability."""
        order = self.probabilities.clone()
        order[self.label] += 1  # the first of equal ones
        best = order.topk(min(k, len(order))).indices.tolist()
        return [(label, self.names[label], float(self.probabilities[label])) for label in best]


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """A trained model on its device, with the preprocessing of its evaluation.

    Fields:
        card: the model card in its weights.
        model: the module, in evaluation mode: normalised images (B, C, h, w) to logits (B, classes).
        precision: the number format that it was evaluated in.
        transforms: from stored uint8 images (B, C, H, W) to the input of the model.
    """

    card: ModelCard
    model: nn.Module
    precision: Precision
    transforms: DeviceTransforms

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.transforms.scale.device

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each class, by label."""
        return self.card.names

    def stored(self, images: ImageLike | Iterable[ImageLike]) -> Tensor:
        """Images as the data set stored its own, uint8 (B, C, H, W) on the CPU; see `stored_images`."""
        return stored_images(images, self.card.image_shape, self.card.interpolation)

    def cropped(self, stored: Tensor) -> Tensor:
        """The pixels that the model sees of stored images: uint8 (B, C, h, w), cropped to the centre and resized."""
        pixels = replace(self.transforms, scale=torch.ones(()), shift=torch.zeros(())).eval(stored)
        return pixels.round().clamp(0, 255).to(torch.uint8)

    def preprocess(self, images: ImageLike | Iterable[ImageLike]) -> Tensor:
        """The input of `model` for these images, float (B, C, h, w) on the device: cropped, normalised, resized.

        Raises:
            InputError: one is no image.
        """
        pixels = self.transforms.eval(self.stored(images).to(self.device))
        return pixels.to(self.precision.dtype, memory_format=self.transforms.memory_format)

    @torch.no_grad()
    def logits(self, stored: Tensor) -> Tensor:
        """The logits (B, classes) of stored images, uint8 (B, C, H, W), with the same bits as in an evaluation."""
        return logits_of(
            self.model,
            stored.to(self.device),
            transforms=self.transforms,
            precision=self.precision,
            views=self.card.eval_views,
        )

    def predict(self, images: ImageLike | Iterable[ImageLike]) -> list[Prediction]:
        """The model's prediction for each image.

        Args:
            images: one image, several, or a uint8 tensor (B, C, H, W). An image is the path of a file, its bytes, a
                Pillow image, a uint8 array (H, W) or (H, W, C), or a uint8 tensor (C, H, W).

        Raises:
            InputError: one is no image.
        """
        predictions: list[Prediction] = []
        stored = self.stored(images)
        for block in stored.split(self.card.eval_batch) if len(stored) else ():
            logits = self.logits(block)
            labels = best_classes(logits)[:, 0].tolist()
            shares = probabilities(logits, self.card.probabilities).cpu()
            predictions += [
                Prediction(label=label, names=self.names, probabilities=row)
                for label, row in zip(labels, shares, strict=True)
            ]
        return predictions
