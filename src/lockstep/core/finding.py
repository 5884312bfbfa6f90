"""What a check before a run tells."""

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """Whether a run would start: yes, with a doubt, or not."""

    ok = "ok"
    warning = "warning"
    error = "error"


@dataclass(frozen=True)
class Finding:
    """A sentence of a check, with what mends a problem; `amount` is the seconds or bytes that it tells."""

    check: str
    text: str
    level: Level = Level.ok
    amount: float = 0.0
