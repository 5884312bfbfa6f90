"""The protocol of all components, whatever their config group."""

from __future__ import annotations

from dataclasses import Field
from typing import Any, ClassVar, Protocol


class Component(Protocol):
    """One option of a config group: a frozen dataclass, whose fields are the keys."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
