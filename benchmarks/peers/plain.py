"""The tutorials' loop on one device."""
# lockstep ladder calls it plain loop

import time

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tutorial import BATCH, LR, BasicNet, arguments, say, splits, top1

options = arguments()
train, test = splits(options.data_root)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = BasicNet().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
began = time.perf_counter()
for _ in range(options.epochs):
    for images, labels in DataLoader(train, batch_size=BATCH, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
say(options.epochs * len(train), time.perf_counter() - began, top1(model, test))
