"""The experiment trackers W&B and MLflow: what `logger=wandb` and `logger=mlflow` build."""

import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.commands import shell_command
from lockstep.config.options import annotations_of
from lockstep.core.errors import InputError
from lockstep.core.figures import finite, read_figures
from lockstep.core.observer import Observer, Outcome, RunInfo
from lockstep.core.run_dir import relative
from lockstep.core.safe_write import append, check_names, locked, make_folder, storing

PROJECT = "lockstep"
KIND = {"mlflow.experimentKind": "custom_model_development"}  # MLflow's page opens with runs, not with traces
EXIT_CODES: Mapping[Outcome, int] = {"completed": 0, "stopped": 75, "failed": 70}
# What MLflow refuses in a name: some characters, and what is not a relative path in its shortest form.
NOT_FOR_MLFLOW = r"[^\w./ :-]|(?<![^/])\.{1,2}(?![^/])|/(?=/|$)|^/"
LONGEST_NAME = 230  # MLflow takes 250 characters


def accepted(name: str) -> str:
    """A name without what MLflow refuses. One that differs ends with a hash, so that two names stay two."""
    clean = re.sub(NOT_FOR_MLFLOW, "_", name)[:LONGEST_NAME]
    return name if clean == name else f"{clean}-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:8]}"


class WandBRun(Observer):
    """The run at W&B, with its files in `wandb` below `output_root`.

    A resumed run keeps its identifier. Offline it starts a new folder and first copies the steps of `metrics.jsonl`
    into it, because W&B loses unwritten steps when it is killed. So the newest folder has the whole run.
    """

    def __init__(self, run: RunInfo, *, project: str | None, entity: str | None, mode: str | None) -> None:
        import wandb

        if "WANDB_DIR" not in os.environ:
            with storing(folder := Path(run.config["output_root"], "wandb")):
                make_folder(folder)
        chosen: Any = mode or os.environ.get("WANDB_MODE") or "offline"
        try:
            self.run = wandb.init(
                project=project or os.environ.get("WANDB_PROJECT") or PROJECT,
                entity=entity,
                mode=chosen,
                id=run.id,
                name=os.environ.get("WANDB_NAME", run.name),
                # What is not set is W&B's: `WANDB_TAGS`, `WANDB_NOTES` and `WANDB_RUN_GROUP`.
                tags=run.config.get("tags") or None,
                notes=run.config.get("notes"),
                group=run.config.get("run_group"),
                resume="allow",
                # Not in the run folder, which must not have links: W&B makes some.
                dir=os.environ.get("WANDB_DIR", run.config["output_root"]),
                config={**run.config, "hyperparameters": dict(run.hyperparameters)},
                # No messages of W&B, and no copies of the terminal's output, the repository or the code.
                settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
            )
        except (wandb.Error, ValueError) as error:  # a ValueError for a mode that it does not have
            raise InputError(
                f"logger.wandb: W&B cannot begin the run ({error}); use logger.wandb.mode=offline"
            ) from error

        if chosen == "offline":
            for step, scalars in read_figures(run.run_dir.metrics, run.after):
                self.write(step, scalars)

    @property
    def commands(self) -> Sequence[str]:
        return [shell_command(["wandb", "sync", relative(Path(self.run.dir).parent)])] if self.run.offline else []

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.run.log(finite(scalars), step=step)

    write_gpu = write

    def evaluated(self, step: int, scores: Mapping[str, float], best: bool) -> None:
        if best:
            best_ones = {f"best/{tag}": value for tag, value in finite(scores).items()}
            self.run.summary.update({"best/step": step, **best_ones})

    def end(self, outcome: Outcome) -> None:
        self.run.finish(exit_code=EXIT_CODES[outcome])


class MLflowRun(Observer):
    """The run at MLflow. Every figure is written once, however often the run is killed and resumed."""

    def __init__(self, run: RunInfo, *, experiment: str | None, folder: str | None) -> None:
        from mlflow import MlflowClient

        name = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        store = "" if folder else os.environ.get("MLFLOW_TRACKING_URI", "")
        root = Path(run.config["output_root"])
        place = root if store else Path(folder or root / "mlflow").expanduser().absolute()
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it logs every table that it creates
        with storing(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            make_folder(place)
        check_names(place, "*mlflow.[dl]*")
        with locked(place / ".mlflow.lock", waits=True):  # two jobs must not both make the tables
            if not store:
                append(place / "mlflow.db").close()  # SQLite would allow no group to write
            self.store = store or f"sqlite:///{place / 'mlflow.db'}"
            self.client = MlflowClient(tracking_uri=self.store)
            known = self.client.get_experiment_by_name(name)
            artifacts = None if store else (place / "artifacts").as_uri()
            number = known.experiment_id if known else self.client.create_experiment(name, artifacts, tags=KIND)
            self.id = self._run(number, run)
        for key, text in annotations_of(run.config).items():
            self.client.set_tag(self.id, "mlflow.note.content" if key == "notes" else key, text)
        self.last_steps = {
            tag: max(point.step for point in self.client.get_metric_history(self.id, tag))
            for tag in self.client.get_run(self.id).data.metrics
        }

    def _run(self, experiment: str, run: RunInfo) -> str:
        """MLflow's identifier of the run, which is created there if it is new."""
        existing = self.client.search_runs([experiment], f"tags.`lockstep.run` = '{run.id}'")
        if existing:  # it keeps the hyperparameters of its first start: MLflow refuses another value
            run_id: str = existing[0].info.run_id
            self.client.set_terminated(run_id, "RUNNING")
            return run_id
        new_id: str = self.client.create_run(experiment, run_name=run.name, tags={"lockstep.run": run.id}).info.run_id
        for key, value in {"folder": run.folder, **run.hyperparameters}.items():
            self.client.log_param(new_id, key, str(value))
        return new_id

    @property
    def commands(self) -> Sequence[str]:
        is_served = self.store.startswith(("http:", "https:"))
        return [] if is_served else [shell_command(["mlflow", "ui", "--backend-store-uri", self.store])]

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        named = {accepted(tag): value for tag, value in finite(scalars).items()}
        points = [
            Metric(tag, value, now, step) for tag, value in named.items() if step > self.last_steps.get(tag, -1)
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
