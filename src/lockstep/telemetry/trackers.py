"""The experiment trackers W&B and MLflow as loggers. Both are extras: `pip install lockstep[wandb]`, `[mlflow]`."""

import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lockstep.core.errors import InputError
from lockstep.core.fields import choice, pathname, ruled
from lockstep.core.observer import Observer, Outcome, RunInfo
from lockstep.core.rules import Text
from lockstep.core.safe_write import storing
from lockstep.telemetry.sinks import finite, read_figures

PROJECT = "lockstep"
KIND = {"mlflow.experimentKind": "custom_model_development"}  # MLflow's page opens with runs, not with traces
EXIT_CODES: Mapping[Outcome, int] = {"completed": 0, "stopped": 75, "failed": 70}


def identifier(run: RunInfo) -> str:
    """The identifier of a run: it stays the same when the run is resumed, and no other run has it."""
    return hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class WandB:
    """Weights & Biases.

    Fields:
        project: the project in which the run appears.
        entity: user or team; null is the account's own.
        mode: `offline` writes files only, which `wandb sync` sends later; `online` sends them at once.
    """

    project: str = ruled(PROJECT, Text())
    entity: str | None = ruled(None, Text())
    mode: str = choice("offline", "offline", "online")

    package: ClassVar[str] = "wandb"

    def build(self, run: RunInfo) -> Observer:
        return WandBRun(self, run)


class WandBRun(Observer):
    """The run at W&B, with its files in `wandb` below `output_root`.

    A resumed run keeps its identifier. Offline it starts a new folder and first copies the steps of `metrics.jsonl`
    into it, because W&B loses unwritten steps when it is killed. So the newest folder has the whole run.
    """

    def __init__(self, logger: WandB, run: RunInfo) -> None:
        import wandb

        try:
            self.run = wandb.init(
                project=logger.project,
                entity=logger.entity,
                mode="offline" if logger.mode == "offline" else "online",
                id=identifier(run),
                name=run.name,
                resume="allow",
                dir=run.config["output_root"],  # not in the run folder, which must not have links: W&B makes some
                config={**run.config, "hyperparameters": dict(run.hyperparameters)},
                # No messages of W&B, and no copies of the terminal's output, the repository or the code.
                settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
            )
        except wandb.Error as error:
            raise InputError(
                f"logger.wandb: W&B cannot begin the run ({error}); use logger.wandb.mode=offline"
            ) from error

        if logger.mode == "offline":
            for step, scalars in read_figures(run.run_dir.metrics, run.after):
                self.write(step, scalars)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.run.log(finite(scalars), step=step)

    write_gpu = write

    def evaluated(self, step: int, scores: Mapping[str, float], best: bool) -> None:
        if best:
            figures = {"step": step, **finite(scores)}
            self.run.summary.update({f"best/{tag}": value for tag, value in figures.items()})

    def end(self, outcome: Outcome) -> None:
        self.run.finish(exit_code=EXIT_CODES[outcome])


@dataclass(frozen=True, kw_only=True)
class MLflow:
    """MLflow, in a database of this machine.

    Fields:
        experiment: the experiment in which the run appears.
        folder: the folder of the database and the artifacts; null is `mlflow` in `output_root`.
    """

    experiment: str = ruled(PROJECT, Text())
    folder: str | None = pathname(None)

    package: ClassVar[str] = "mlflow"

    def build(self, run: RunInfo) -> Observer:
        named = self.folder if self.folder is not None else Path(run.config["output_root"], "mlflow")
        return MLflowRun(self.experiment, Path(named).expanduser().absolute(), run)


class MLflowRun(Observer):
    """The run at MLflow. Every figure is written once, however often the run is killed and resumed."""

    def __init__(self, experiment: str, folder: Path, run: RunInfo) -> None:
        from filelock import FileLock
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs every table that it creates
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):  # two jobs must not both make the tables
            self.client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
            known = self.client.get_experiment_by_name(experiment)
            place = (folder / "artifacts").as_uri()
            number = known.experiment_id if known else self.client.create_experiment(experiment, place, tags=KIND)
            self.id = self._run(number, run)
        self.last_steps = {
            tag: max(point.step for point in self.client.get_metric_history(self.id, tag))
            for tag in self.client.get_run(self.id).data.metrics
        }

    def _run(self, experiment: str, run: RunInfo) -> str:
        """MLflow's identifier of the run, which is created there if it is new."""
        tag = identifier(run)
        existing = self.client.search_runs([experiment], f"tags.`lockstep.run` = '{tag}'")
        if existing:
            existing_id: str = existing[0].info.run_id
            self.client.set_terminated(existing_id, "RUNNING")
            return existing_id
        run_id: str = self.client.create_run(experiment, run_name=run.name, tags={"lockstep.run": tag}).info.run_id
        for key, value in {"folder": run.folder, **run.hyperparameters}.items():
            self.client.log_param(run_id, key, value)
        return run_id

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        points = [
            Metric(tag, value, now, step)
            for tag, value in finite(scalars).items()
            if step > self.last_steps.get(tag, -1)
        ]
        if points:
            self.client.log_batch(self.id, metrics=points)

    write_gpu = write

    def evaluated(self, step: int, scores: Mapping[str, float], best: bool) -> None:
        if best:
            self.client.set_tag(self.id, "best.step", step)

    def end(self, outcome: Outcome) -> None:
        status: Mapping[Outcome, str] = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
        self.client.set_terminated(self.id, status[outcome])
