"""The HF Trainer with its defaults, without reports and checkpoints."""
# lockstep ladder calls it HF Trainer

import tempfile
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from tutorial import BATCH, LR, BasicNet, arguments, say, splits, top1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = BasicNet()

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(images)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def collate(examples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    images, labels = zip(*examples, strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}


options = arguments()
train, test = splits(options.data_root)
model = Model()
with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        folder,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=BATCH // max(1, torch.cuda.device_count()),
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=train, data_collator=collate)
    began = time.perf_counter()
    trainer.train()
say(options.epochs * len(train), time.perf_counter() - began, top1(model.net, test))
