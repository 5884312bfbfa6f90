"""Lightning's trainer with its defaults, without a logger, checkpoints and a progress bar."""
# lockstep ladder calls it Lightning

import time
import warnings

import lightning
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tutorial import BATCH, LR, BasicNet, arguments, say, splits, top1

warnings.simplefilter("ignore")


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = BasicNet()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LR)


options = arguments()
train, test = splits(options.data_root)
module = Module()
trainer = lightning.Trainer(
    max_epochs=options.epochs,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
began = time.perf_counter()
trainer.fit(module, DataLoader(train, batch_size=BATCH, shuffle=True))
say(options.epochs * len(train), time.perf_counter() - began, top1(module.net, test))
