"""The reports of a run: scalars for files and TensorBoard, live progress, and GPU figures."""

from lockstep.telemetry.metrics import Telemetry
from lockstep.telemetry.tally import WindowState
from lockstep.telemetry.window import Window

__all__ = ["Telemetry", "Window", "WindowState"]
