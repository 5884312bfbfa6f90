"""The loggers (`logger=`) write the figures of a run. Any number of them may be chosen.

The experiment trackers W&B and MLflow are extras: `pip install 'lockstep[wandb]'`, `[mlflow]`.
"""

from typing import ClassVar

from lockstep.config.options import option
from lockstep.core.errors import InputError
from lockstep.core.fields import FOLDER, TEXT, choice, pathname, personal, ruled
from lockstep.core.observer import Logger, Observer, RunInfo
from lockstep.telemetry import tensorboard
from lockstep.telemetry.sinks import JsonLines


@option("logger")
class JSONL(Logger):
    """`metrics.jsonl` in the run folder: a line of JSON for each log point and evaluation."""

    def build(self, run: RunInfo) -> Observer:
        return JsonLines(run.run_dir.metrics, run.after)


@option("logger", "tensorboard")
class TensorBoard(Logger):
    """TensorBoard's event files in the run folder: figures, charts, images, curves of precision and recall, texts."""

    histograms: bool = False  # also show the weights as histograms, after each evaluation that is the best so far

    imports: ClassVar[tuple[str, ...]] = (
        "torch.utils.tensorboard",
        "tensorboard.plugins.hparams.metadata",
        "PIL.PngImagePlugin",
    )

    def build(self, run: RunInfo) -> Observer:
        return tensorboard.TensorBoardWriter(run, histograms=self.histograms)


@option("logger", "wandb")
class WandB(Logger):
    """Weights & Biases, with its files in `wandb` in `output_root`. An extra: `pip install 'lockstep[wandb]'`."""

    # the project that the run appears in; null: `WANDB_PROJECT`, or `lockstep`
    project: str | None = personal(ruled(None, TEXT))
    entity: str | None = personal(ruled(None, TEXT))  # user or team; null: `WANDB_ENTITY`, or the account's default
    # `offline` writes files only, which `wandb sync` sends later; `online` sends them at once; null: `WANDB_MODE`, or
    # `offline`
    mode: str | None = personal(choice(None, "offline", "online"))

    package: ClassVar[str] = "wandb"

    def build(self, run: RunInfo) -> Observer:
        from lockstep.telemetry.trackers import WandBRun  # few jobs have a tracker

        return WandBRun(run, project=self.project, entity=self.entity, mode=self.mode)


@option("logger")
class MLflow(Logger):
    """MLflow, with a database on this machine or at `MLFLOW_TRACKING_URI`. An extra:
    `pip install 'lockstep[mlflow]'`.
    """

    # the experiment that the run appears in; null: `MLFLOW_EXPERIMENT_NAME`, or `lockstep`
    experiment: str | None = personal(ruled(None, TEXT))
    # folder of the database and the artifacts; null: the store at `MLFLOW_TRACKING_URI`, or `mlflow` in `output_root`
    folder: str | None = personal(pathname(None), FOLDER)

    package: ClassVar[str] = "mlflow"

    def build(self, run: RunInfo) -> Observer:
        from mlflow.exceptions import MlflowException

        from lockstep.telemetry.trackers import MLflowRun  # few jobs have a tracker

        try:
            return MLflowRun(run, experiment=self.experiment, folder=self.folder)
        except MlflowException as error:
            raise InputError(
                f"logger.mlflow: MLflow cannot begin the run ({error}); check logger.mlflow.* and MLFLOW_TRACKING_URI"
            ) from error
