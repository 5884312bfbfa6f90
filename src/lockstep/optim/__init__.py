"""The optimizers, and what goes with them: the schedule of the learning rate and the average of the weights."""

from lockstep.optim.muon import Muon
from lockstep.optim.optimizers import SGD, Adam, AdamW, Timm

__all__ = ["SGD", "Adam", "AdamW", "Muon", "Timm"]
