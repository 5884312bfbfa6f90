"""Which gradients the update of a weight depends on. This decides how optimizer state may be cut over the ranks."""

from __future__ import annotations

import enum


class UpdateScope(enum.IntEnum):
    """The update of a number depends on the gradient of that number, of its parameter, or of the whole model."""

    element = 0
    parameter = 1
    model = 2
