"""The strategies: how the gradients of several ranks or devices become one update.

Each is a frozen value without state. The result is always the gradient of the global batch's mean loss: the trainer
scales the loss by the number that the strategy divides the ranks' sum by (`grad_divisor`).
"""

from lockstep.config.options import lazy_classes

__getattr__, __dir__ = lazy_classes("strategy")
