"""The strategies: how the gradients of several ranks or devices become one update.

Each is a frozen value without state. The result is always the gradient of the global batch's mean loss: the trainer
scales the loss by the number that the strategy divides the ranks' sum by (`grad_divisor`).
"""

from lockstep.strategy.base import Auto, DataParallel, Single
from lockstep.strategy.ddp import DDP, Accelerate, AllReduce, AllReduceHooks
from lockstep.strategy.pipeline import Pipeline
from lockstep.strategy.strict import Strict
from lockstep.strategy.zero import FSDP, ZeRO
