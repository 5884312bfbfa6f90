"""Shared by the benchmarks that train with Lockstep in their own process."""

from __future__ import annotations

from pathlib import Path

from lockstep.config import components, composition
from lockstep.core.run_dir import RunDir
from lockstep.job.resolve import resolve
from lockstep.training.resolved_job import ResolvedJob

CONF = Path(__file__).parent.parent / "conf"


def prepared(folder: Path, overrides: list[str]) -> tuple[ResolvedJob, RunDir]:
    """A job, and its run folder, in which it can be started or resumed in this process."""
    words = [*overrides, f"output_root={folder.parent}"]
    job = resolve(components.build_job(composition.composed(words)), sweep=False)
    run = RunDir.at(folder)
    run.config.write_text(components.dump(components.plain(job)))
    run.overrides.write_text(components.dump(words))
    return job, run
