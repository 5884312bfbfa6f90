"""The reports of a run: scalars for files and TensorBoard, live progress, and GPU figures."""

from lockstep.telemetry.metrics import Telemetry
from lockstep.telemetry.window import Window, WindowState

__all__ = ["Telemetry", "Window", "WindowState"]
