"""Accelerate's loop on the devices that `accelerate` finds."""
# lockstep ladder calls it Accelerate's loop

import time

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tutorial import BATCH, LR, BasicNet, arguments, say, splits, top1

options = arguments()
train, test = splits(options.data_root)
accelerator = Accelerator()
model = BasicNet()
model, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.AdamW(model.parameters(), lr=LR),
    DataLoader(train, batch_size=BATCH // accelerator.num_processes, shuffle=True),
)
began = time.perf_counter()
for _ in range(options.epochs):
    for images, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
seconds = time.perf_counter() - began
if accelerator.is_main_process:
    say(options.epochs * len(train), seconds, top1(accelerator.unwrap_model(model), test))
