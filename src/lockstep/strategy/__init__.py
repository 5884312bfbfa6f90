"""The strategies: how the gradients of several ranks or devices become one update.

Each is a frozen value without state. What a strategy averages is always the mean over ranks; the trainer
scales the loss of a shard so that this mean is the gradient of the global batch's mean loss.
"""

from lockstep.strategy.allreduce import AllReduce, AllReduceHooks
from lockstep.strategy.base import Auto, DataParallel, Single
from lockstep.strategy.ddp import DDP

__all__ = ["DDP", "AllReduce", "AllReduceHooks", "Auto", "DataParallel", "Single"]
