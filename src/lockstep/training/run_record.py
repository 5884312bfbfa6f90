"""Main shows a run and writes it into its folder, from the banner to the summary."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lockstep.checkpoint.files import save_weights
from lockstep.checkpoint.state import gathered
from lockstep.config import components, extensions
from lockstep.core import log
from lockstep.core.errors import BrokenImage, NumericalError, StorageError
from lockstep.core.figures import figures_of
from lockstep.core.observer import Callback
from lockstep.core.plan import Plan
from lockstep.core.run import Run, candidates
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import absent, make_folder, replacing, write_atomic
from lockstep.core.tags import Monitor, job_directions
from lockstep.core.world import World
from lockstep.runtime import environment, host
from lockstep.telemetry.hardware_watch import rates
from lockstep.training import banner
from lockstep.training.build_data import TrainingData, balance_note
from lockstep.training.resolved_job import ResolvedJob
from lockstep.training.train_state import Progress, TrainState
from lockstep.training.trainer import Trainer

if TYPE_CHECKING:
    from lockstep.runtime.user_code import UserCode

SHORTEST_S = 5  # shorter runs get no sentence about their speed


class RunRecord:
    """Shows and writes a run. Ranks other than main only take part in its collectives."""

    def __init__(self, run_dir: RunDir, world: World, code: Mapping[str, UserCode] | None = None) -> None:
        self.run_dir = run_dir
        self.world = world
        self.code = code  # None if this process can read it
        self.idle_before = host.idle_seconds()
        self.started, self.began = time.time(), time.monotonic()  # the clock may be set while the run lasts

    def announce(self, job: ResolvedJob, data: TrainingData, state: TrainState, origin: str) -> None:
        """Show the banner: the parts of the run, the origin of its weights, and the limits of equal runs."""
        if not self.world.is_main:
            return
        banner.say_start(job, self.run_dir, self.world, data, state, origin)
        for note in self._notes(job, data, state):
            log.warn(note)

    def _notes(self, job: ResolvedJob, data: TrainingData, state: TrainState) -> list[str]:
        """Sentences about the limits of equal runs for this job, and about its speed on this machine."""
        notes = job.dataset.notes() + job.strategy.notes(state.model, self.world, data.plan) + state.notes
        notes += [*job.metric_notes(), *balance_note(job, data.train.labels)]
        on_cpu = self.world.device.type == "cpu"
        if on_cpu and job.precision.dtype is torch.bfloat16 and not host.has_bfloat16():
            notes.append(
                "this processor has no instructions for bfloat16, so a step takes 2 to 47 times as long as in "
                "float32; precision=fp32 is faster (lockstep doctor tries how much)"
            )
        exact = job.precision.dtype is torch.float32 and job.precision.matmul == "highest"
        if job.model.compile and exact and not on_cpu and torch.cuda.get_device_capability() >= (8, 0):
            notes.append("the compiled model multiplies in float32 without tensor cores; precision=tf32 uses them")
        if job.train.sampling == "balanced" and job.loss.class_weights:
            notes.append("train.sampling=balanced balances the classes already, and loss.class_weights apply on top")
        if self.world.device.type == "cuda" and job.repro != "strict":
            notes.append(
                "some kernels of a GPU add in an order that changes from run to run: equal runs agree to rounding; "
                "repro=strict uses other kernels, and its runs agree to the bit"
            )
        return notes

    def user_code(self, job: ResolvedJob) -> Mapping[str, UserCode]:
        """The user's code of a job, by package or module; on main."""
        has_code = self.world.is_main and (extensions.active() or extensions.of_program())
        if self.code is not None or not has_code:
            return self.code or {}
        from lockstep.runtime.user_code import code_of  # few jobs have code of the user

        return code_of(components.plain(job))

    def write_start(
        self, job: ResolvedJob, plan: Plan, progress: Progress, callbacks: Mapping[str, Callback]
    ) -> None:
        """Write a run's config, its environment and the user's code, and mark it as begun."""
        if not self.world.is_main:
            return
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)  # trials have taken more than the run will
        # Write the config again, because every `auto` has a value now.
        write_atomic(self.run_dir.config, components.dump(components.plain(job)))
        facts = {**environment.facts(self.world), "code": {}}
        if codes := self.user_code(job):
            from lockstep.runtime import user_code

            facts |= user_code.write_code(self.run_dir, codes, progress.step)
        write_atomic(self.run_dir.environment, json.dumps(facts, indent=2) + "\n")
        self.run_dir.mark_latest(Path(job.output_root))
        earlier = Run(self.run_dir.path)
        spent = earlier.spent
        spent["hours"] = spent.get("hours", 0.0) + (time.monotonic() - self.began) / 3600  # of the start
        self.run_dir.start_summary(
            run=earlier.id or secrets.token_hex(8),
            monitor=job.monitor,
            directions=job_directions(
                Monitor.parse(job.monitor),
                job.task.counted,
                job.metric,
                figures_of(job.task, *job.logger.values(), *callbacks.values()),
            ),
            started=self.started,
            step=progress.step,
            steps=plan.total_steps,
            steps_per_epoch=plan.steps_per_epoch,
            spent=spent,
            seconds=round(3600 * spent["hours"], 3),
        )

    def keep_progress(self, progress: Progress) -> None:
        """Write the progress of a run that ends before its last step."""
        if not self.world.is_main:
            return
        with suppress(StorageError):  # the error that ends the run is more important
            self.run_dir.write_summary(
                step=progress.step, best=progress.best, best_step=progress.best_step, scores=progress.best_figures
            )

    def keep_incident(self, error: NumericalError, trainer: Trainer) -> None:
        """Keep the batch and the weights behind a loss that is not finite. Collective if the weights are sharded."""
        weights = gathered(trainer.state.model.state_dict(), trainer.checkpointer.whole)
        if not self.world.is_main:
            return
        folder = self.run_dir.incident
        new = absent(folder)
        try:
            write_incident(error, trainer, weights, self.run_dir)
        # A full disk raises any of these. The run ends with its own error.
        except (OSError, RuntimeError, MemoryError, SafetensorError, BrokenImage) as failure:
            log.warn(f"{folder} could not be written ({failure}), so nothing is kept of the bad step")
            if folder in new:  # else it has an earlier incident
                shutil.rmtree(folder, ignore_errors=True)

    def complete(self, job: ResolvedJob, trainer: Trainer, hardware: Mapping[str, float], skipped: int) -> None:
        """Write and show the result of a run that has reached its last step; `hardware` is what `train` returns."""
        if not self.world.is_main:
            return
        progress, telemetry, spent = trainer.progress, trainer.telemetry, Run(self.run_dir.path).spent
        figures, shares = {**rates(spent), **hardware}, telemetry.time_shares()
        seconds = 3600 * spent["hours"]
        of_gpu: dict[str, Any] = {}
        if self.world.device.type == "cuda":
            of_gpu["gpu_memory"] = torch.cuda.max_memory_reserved(self.world.device)
        evidence = Evidence(
            job=job,
            world=self.world,
            plan=trainer.plan,
            model=trainer.state.model,
            steps=trainer.progress.step - telemetry.resumed,
            shares=shares,
            spread=telemetry.times.spread(),
            hardware={
                **hardware,
                "idle_cores": (host.idle_seconds() - self.idle_before) / (time.monotonic() - self.began),
            },
            mfu=telemetry.mfu(rates(telemetry.trained())["img_per_s"]),
            scores=progress.best_figures,
            labels=trainer.loader.eval_labels,
            ended_early=trainer.ended_early,
        )
        findings = telemetry.observer.findings(evidence)
        self.run_dir.write_summary(
            status="completed",
            exit_code=0,
            objective=progress.best,
            scores=progress.best_figures,
            test=trainer.tested or None,
            stopped_early=trainer.ended_early,
            step=progress.step,
            best=progress.best,
            best_step=progress.best_step,
            skipped=skipped,
            **{key: round(value, 3) for key, value in figures.items()},
            time={part: round(share, 4) for part, share in shares.items() if share},
            **findings,
            **of_gpu,
        )
        learning, speed = ((findings.get(key) or {}).get("sentence", "") for key in ("learning", "verdict"))
        speed = speed if seconds >= SHORTEST_S else ""
        banner.say_ending(job, self.run_dir, trainer, seconds, figures, shares, learning, speed)
        telemetry.observer.completed(Run(self.run_dir.path).summary)


def write_incident(error: NumericalError, trainer: Trainer, weights: dict[str, Tensor], run_dir: RunDir) -> None:
    """Write `incident/`: the global batch of the first bad step, as stored, and the present weights.

    `incident.json` names the step, its samples and the last checkpoint before it: a run resumed there comes to the
    step with the same batch.
    """
    step, taken = error.step or trainer.progress.step, trainer.step
    batch = trainer.loader.global_batch(step)
    folder = run_dir.incident
    make_folder(folder)
    tensors = {"images": batch.images.cpu(), "labels": batch.known_labels.cpu(), "indices": batch.indices.cpu()}
    with replacing(folder / "batch.pt") as temporary:
        torch.save(tensors, temporary)
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    with replacing(folder / "model.safetensors") as temporary:
        save_weights(on_host, temporary)
    earlier = [checkpoint_folder.name for checkpoint_folder in candidates(run_dir.checkpoints)]
    facts = {
        "error": str(error),
        "step": step,
        "epoch": batch.epoch,
        "seen_at_step": trainer.progress.step,
        "learning_rate": taken.lr * taken.schedule.factor(step, taken.plan, taken.scores),
        "samples": (batch.indices % trainer.plan.examples).tolist(),
        "checkpoint": earlier[0] if earlier else None,
    }
    write_atomic(folder / "incident.json", json.dumps(facts, indent=2) + "\n")
    log.warn(f"the batch of step {step} and the weights are kept in {folder}")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known of a run at its end.

    Fields:
        shares: the shares of the parts in its time (`TimeSpent`).
        spread: how exact the shares of the parts of a step are.
        hardware: the means of the monitor's figures (`cpu_cores`, `gpu_util` and others), and `idle_cores`: how many
            of the machine's nobody used.
        scores: the figures of the best weights.
        labels: of the evaluation split, as in a `Shard`.
        ended_early: why the run ended before its last step, in a sentence; empty if it did not.
        mfu: percent of the devices' peak rate; 0 if it is not known.
        cores: the CPU cores of this machine that the job may use.
    """

    job: ResolvedJob
    world: World
    plan: Plan
    model: nn.Module
    steps: int
    shares: Mapping[str, float]
    spread: Mapping[str, float]
    hardware: Mapping[str, float]
    mfu: float
    scores: Mapping[str, float] = field(default_factory=dict)
    labels: Tensor = field(default_factory=lambda: torch.empty(0))
    ended_early: str = ""
    cores: int = field(default_factory=host.cores)

    def share(self, *parts: str) -> float:
        return sum(self.shares.get(part, 0.0) for part in parts)

    @property
    def on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    @property
    def local_batch(self) -> int:
        return self.job.micro_batch(self.world.size)
