"""The optimizers, the schedules of the learning rate, and the moving average of the weights."""

from lockstep.config.options import lazy_classes

__getattr__, __dir__ = lazy_classes("optimizer")
