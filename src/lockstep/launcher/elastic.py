"""The launcher that restarts the ranks when one fails."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.core.fields import ranged
from lockstep.launcher.spawn import Spawn


@dataclass(frozen=True, kw_only=True)
class Elastic(Spawn):
    """One fresh interpreter per rank, which shares nothing with a failed attempt.

    Fields:
        restarts: how often the ranks are started again, from the last checkpoint, after one of them failed.
    """

    restarts: int = ranged(0, least=0, most=1_000_000)

    def most_restarts(self) -> int:
        return self.restarts

    def can_fork(self) -> bool:
        return False
