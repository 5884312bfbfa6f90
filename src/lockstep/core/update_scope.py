"""What the update of a weight depends on. It decides how the state of an optimizer may be cut over the ranks."""

from __future__ import annotations

import enum

from lockstep.core.errors import InputError


class UpdateScope(enum.IntEnum):
    """The update of a number depends on the gradients of it alone, of its parameter, or of the whole model."""

    element = 0
    parameter = 1
    model = 2


def refuse_wider(optimizer: object, widest: UpdateScope, strategy: str, *, remedy: str) -> None:
    """Refuse an optimizer whose updates look at more than `widest`. One that does not say may look at the model.

    Raises:
        InputError: it looks at more.
    """
    scope = getattr(optimizer, "scope", UpdateScope.model)
    if scope > widest:
        seen = {UpdateScope.parameter: "whole parameters", UpdateScope.model: "all parameters together"}[scope]
        cut = "a part of each parameter" if widest is UpdateScope.element else "some of the parameters"
        raise InputError(
            f"optimizer={type(optimizer).__name__.lower()} looks at {seen}, but under strategy={strategy} a rank has "
            f"{cut}; {remedy}"
        )
