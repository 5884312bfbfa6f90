"""The images that weights were trained on. A model that starts from the weights gets images of the same kind."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.core.model_card import ModelCard


@dataclass(frozen=True, kw_only=True)
class TrainedInput:
    """The images of a model's earlier training.

    Fields:
        size: the side of the model's input, in pixels.
        crop: the central part of a stored image that was evaluated, as a share of its side.
        mean, std: the mean and standard deviation of each channel, for pixels from 0 to 1.
        interpolation: how images were resized.
        stored: the side of a stored image, in pixels; None if it is not known.
    """

    size: int
    crop: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    stored: int | None = None

    @classmethod
    def of_card(cls, card: ModelCard) -> TrainedInput:
        return cls(
            size=max(card.input_shape[1:]),
            crop=card.eval_crop,
            mean=card.mean,
            std=card.std,
            interpolation=card.interpolation,
            stored=max(card.image_shape[1:]),
        )

    def normalisation(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and standard deviation for images with `channels` channels; None if they cannot be derived.

        A grey image gets the average over the channels.
        """
        if len(self.mean) == channels:
            return self.mean, self.std
        if channels == 1:
            return (sum(self.mean) / len(self.mean),), (sum(self.std) / len(self.std),)
        return None
