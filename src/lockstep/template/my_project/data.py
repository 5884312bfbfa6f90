"""A data set that fits in memory: `dataset=stripes dataset.examples=1000`."""

import torch
from torch import Tensor

import lockstep
from lockstep.core.fields import ranged
from lockstep.data.datasets.builtin import ArraySource


@lockstep.option("dataset")
class Stripes(ArraySource):
    """Noisy images of horizontal (0) and vertical (1) stripes.

    Fields:
        examples: number of examples in the training split; the evaluation split has a quarter as many.
    """

    examples: int = ranged(512, least=4, most=1_000_000)

    classes = 2
    class_names = ("horizontal", "vertical")
    image_shape = (1, 8, 8)
    mean = (0.5,)  # mean of each channel, for pixels from 0 to 1
    std = (0.5,)

    def read(self, train: bool) -> tuple[Tensor, Tensor]:
        """uint8 images (N, 1, 8, 8) and int64 labels (N,), the same at each call."""
        number = self.examples if train else self.examples // 4
        generator = torch.Generator().manual_seed(0 if train else 1)
        labels = torch.arange(number) % 2
        rows = (torch.arange(8) // 2 % 2).view(1, 8, 1).expand(number, 8, 8)
        stripes = torch.where(labels.view(-1, 1, 1) == 0, rows, rows.transpose(1, 2))
        noise = 0.4 * torch.randn(stripes.shape, generator=generator)
        return ((stripes + noise).clamp(0, 1) * 255).to(torch.uint8)[:, None], labels
