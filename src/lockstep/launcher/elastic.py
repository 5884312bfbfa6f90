"""The launcher that restarts the ranks when one fails."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.core.fields import ranged
from lockstep.core.protocols import Entry
from lockstep.core.run_dir import RunDir
from lockstep.launcher.base import Inline


@dataclass(frozen=True, kw_only=True)
class Elastic(Inline):
    """One fresh interpreter per rank, under torch's elastic agent in this process.

    Fields:
        restarts: how often the ranks are started again, from the last checkpoint, after one of them failed.
    """

    restarts: int = ranged(0, least=0, most=1_000_000)

    def run(self, entry: Entry, run_dir: RunDir) -> None:
        from lockstep.launcher.agent import watch  # imports much of torch that other launchers do without

        assert isinstance(self.ranks, int)
        watch(entry, run_dir, ranks=self.ranks, restarts=self.restarts)
