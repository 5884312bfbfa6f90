r"""Lightning in `benchmarks/photos.py`: a classifier of timm on a folder of photos, with the settings of its guides.

    python benchmarks/peers/lightning_photos.py PHOTOS resnet18 --batch 32 --workers 2 --precision fp32 \
        --device cpu --every 1

PHOTOS has `train/CLASS/*` and `val/CLASS/*`. The number of every so many steps is printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import timm
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

PRECISIONS: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed"}  # Lightning's words for them
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Classifier(lightning.LightningModule):
    """A network, its loss and its optimizer; logs the loss."""

    def __init__(self, model: str, classes: int) -> None:
        super().__init__()
        self.network = timm.create_model(model, num_classes=classes)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.log("val_top1", (self.network(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Progress(lightning.Callback):
    """Print the number of every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            print(f"\nstep {trainer.global_step}", flush=True)


def loader(photos: Path, crop: list[Any], arguments: argparse.Namespace, *, shuffle: bool) -> DataLoader[Any]:
    """Photos of class folders; decoded by Pillow, transformed as tensors of uint8."""
    last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return DataLoader(
        ImageFolder(str(photos), v2.Compose([v2.PILToTensor(), *crop, *last])),
        batch_size=arguments.batch,
        shuffle=shuffle,
        num_workers=arguments.workers,
        persistent_workers=arguments.workers > 0,
        pin_memory=arguments.device == "cuda",
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("photos", type=Path)
    options.add_argument("model")
    options.add_argument("--batch", type=int, required=True)
    options.add_argument("--workers", type=int, required=True)
    options.add_argument("--precision", choices=PRECISIONS, required=True)
    options.add_argument("--device", choices=("cpu", "cuda"), required=True)
    options.add_argument("--every", type=int, required=True)
    arguments = options.parse_args()
    torch.set_float32_matmul_precision("high")
    crop, centre = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()], [v2.Resize(256), v2.CenterCrop(224)]
    train = loader(arguments.photos / "train", crop, arguments, shuffle=True)
    module = Classifier(arguments.model, len(train.dataset.classes))  # type: ignore[attr-defined]
    if arguments.device == "cuda":
        module = module.to(memory_format=torch.channels_last)
    trainer = lightning.Trainer(
        accelerator=arguments.device,
        devices=1,
        precision=PRECISIONS[arguments.precision],
        benchmark=arguments.device == "cuda",
        max_epochs=1,
        callbacks=[Progress(arguments.every)],
    )
    trainer.fit(module, train, loader(arguments.photos / "val", centre, arguments, shuffle=False))


if __name__ == "__main__":
    main()
