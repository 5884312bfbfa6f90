"""What a run says of itself: scalars for TensorBoard and files, live progress, GPU figures."""

from lockstep.telemetry.metrics import Telemetry, WindowState
from lockstep.telemetry.window import Window

__all__ = ["Telemetry", "Window", "WindowState"]
