"""What a run says of itself: scalars for TensorBoard and files, live progress, GPU figures."""

from lockstep.telemetry.recorder import OpenWindow, Telemetry
from lockstep.telemetry.window import Window

__all__ = ["OpenWindow", "Telemetry", "Window"]
