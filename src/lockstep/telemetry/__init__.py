"""The figures of a run: scalars for files and TensorBoard, live progress, the hardware, and reports of them."""

from lockstep.telemetry.metrics import Telemetry
from lockstep.telemetry.window import Window, WindowState

__all__ = ["Telemetry", "Window", "WindowState"]
