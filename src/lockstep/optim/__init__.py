"""The optimizers, the schedules of the learning rate, and the moving average of the weights."""

from lockstep.optim.muon import Muon
from lockstep.optim.optimizers import SGD, Adam, AdamW, Timm
