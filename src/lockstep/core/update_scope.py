"""Which gradients the update of a weight depends on. This decides how optimizer state may be cut over the ranks."""

from __future__ import annotations

import enum

from lockstep.core.errors import InputError


class UpdateScope(enum.IntEnum):
    """The update of a number depends on the gradient of that number, of its parameter, or of the whole model."""

    element = 0
    parameter = 1
    model = 2


def refuse_wider(optimizer: object, widest: UpdateScope, strategy: str, *, remedy: str) -> None:
    """Refuse an optimizer with a wider scope than `widest`. Without a `scope`, its scope is the whole model.

    Raises:
        InputError: the scope is wider.
    """
    scope = getattr(optimizer, "scope", UpdateScope.model)
    if scope > widest:
        seen = {UpdateScope.parameter: "whole parameters", UpdateScope.model: "all parameters together"}[scope]
        cut = "a part of each parameter" if widest is UpdateScope.element else "some of the parameters"
        raise InputError(
            f"optimizer={type(optimizer).__name__.lower()} looks at {seen}, but under strategy={strategy} a rank has "
            f"{cut}; {remedy}"
        )
