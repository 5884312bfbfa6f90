"""The figures of a run, a row each: their tags, their words, and where they are shown. Imports no torch.

Pages, TensorBoard's charts, `metrics.csv`, tables of runs and the terminal read this table, and the code that logs a
figure names it by its tag here. Figures of metrics begin with `METRIC`; other options name their own ones.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAIN_LOSS, EPOCH_LOSS, VAL_LOSS = "loss/train", "loss/train_epoch", "loss/val"
TRAIN_TOP1, EPOCH_TOP1, VAL_TOP1, VAL_TOP5 = "acc/train_top1", "acc/train_epoch_top1", "acc/val_top1", "acc/val_top5"
LEARNING_RATE, GRAD_NORM, SCALE = "optim/lr", "optim/grad_norm", "optim/scale"
RATE, WAIT, STEP_MS, MFU, TIME = "perf/img_per_s", "perf/data_wait_pct", "perf/step_ms", "perf/mfu_pct", "perf/time/"
ACCURACY, METRIC, TEST, CPU, GPU = "acc/", "metric/", "test/", "cpu/", "gpu/"  # the beginnings of several tags

# The category of the charts in TensorBoard, by the beginning of a tag. Tags of options begin in another way.
PAGES = {"loss": "Learning", "acc": "Learning", "metric": "Learning", "test": "", "perf": "Throughput"}
PAGES |= {"cpu": "CPU", "gpu": "GPU", "optim": "Optimisation"}
# The names of the figures of an evaluation that are no metrics, and of one that `lockstep evaluate` adds.
LOSS, TOP1, TOP5, CALIBRATION_ERROR = "loss", "top1", "top5", "calibration_error"
BLUE, ORANGE, GREEN, DARK_GREY = "#1f5fb4", "#d95f02", "#1b9e77", "#666666"
SO_FAR, AVERAGE = "training, epoch so far", "validation, averaged weights"


@dataclass(frozen=True)
class Figure:
    """A row of the table.

    Fields:
        tag: its tag in `metrics.jsonl`. At the end of one with `/` comes a part of the time, a class or a local rank.
        words, unit: the title of its chart.
        column: its name in `metrics.csv`.
        curve, colour: the label and the colour of its curve on the run's page. No colour is the next of the palette;
            with None, the page does not have it.
        delay: by how many steps it is later than its step: an evaluation follows its step, a test all evaluations.
    """

    tag: str
    words: str
    unit: str = ""
    column: str = ""
    curve: str = ""
    colour: str | None = None
    delay: float = 0.0

    @property
    def page(self) -> str:
        """The category of its chart; empty without one."""
        return PAGES[self.tag.partition("/")[0]]

    @property
    def title(self) -> str:
        return f"{self.words}, {self.unit}" if self.unit else self.words

    def covers(self, tag: str) -> bool:
        return tag.startswith(self.tag) if self.tag.endswith("/") else tag == self.tag


FIGURES = (
    Figure(TRAIN_LOSS, "Loss", curve="training", colour="#f3b98c"),
    Figure(EPOCH_LOSS, "Loss", column="train_loss", curve=SO_FAR, colour=ORANGE, delay=0.5),
    Figure(TRAIN_TOP1, "Accuracy", "%"),
    Figure(EPOCH_TOP1, "Accuracy", "%", "train_top1", SO_FAR, ORANGE),
    Figure(VAL_LOSS, "Loss", column="val_loss", curve="validation", colour=BLUE, delay=0.5),
    Figure(VAL_TOP1, "Accuracy", "%", "val_top1", "validation", BLUE),
    Figure(VAL_TOP5, "Accuracy", "%", "val_top5", "validation, top-5", "#9ab8dd"),
    Figure("loss/val_ema", "Loss", curve=AVERAGE, colour=GREEN, delay=0.5),
    Figure("acc/val_ema_top1", "Accuracy", "%", "val_ema_top1", AVERAGE, GREEN),
    Figure("acc/val_ema_top5", "Accuracy", "%"),
    Figure(METRIC, "Metrics"),
    Figure(TEST, "Test", delay=0.75),
    Figure(LEARNING_RATE, "Learning rate", column="lr", colour=DARK_GREY),
    Figure(GRAD_NORM, "Gradient norm"),
    Figure(SCALE, "Loss scale"),
    Figure(RATE, "Images per second", column="img_per_s"),
    Figure(WAIT, "Waiting for data", "%", "data_wait_pct"),
    Figure(STEP_MS, "Step", "ms"),
    Figure(TIME, "Where the time goes", "%", delay=0.5),
    Figure(MFU, "Model FLOPs utilisation", "%", colour=DARK_GREY),
    Figure(CPU + "cores", "CPU cores in use"),
    Figure(CPU + "mem_gb", "CPU memory", "GB"),
    Figure(CPU + "power_w", "CPU power", "W"),
    Figure(CPU + "read_mb_s", "CPU read", "MB/s"),
    Figure(CPU + "write_mb_s", "CPU written", "MB/s"),
    Figure(GPU + "util/", "GPU utilisation", "%", colour=""),
    Figure(GPU + "mem_gb/", "GPU memory", "GB", colour=""),
    Figure(GPU + "power_w/", "GPU power", "W", colour=""),
    Figure(GPU + "temp_c/", "GPU temperature", "°C"),
    Figure(GPU + "sm/", "GPU clock", "MHz"),
    Figure(GPU + "slowed/", "GPU slowed by heat or the power limit", "share of the time"),
    Figure(GPU + "sm_active/", "GPU multiprocessors at work", "%"),
    Figure(GPU + "tensor_active/", "GPU tensor cores at work", "%"),
    Figure(GPU + "memory_active/", "GPU memory at work", "%"),
)
TAGS = {LOSS: VAL_LOSS, TOP1: VAL_TOP1, TOP5: VAL_TOP5}
AVERAGED = {name: tag.replace("val", "val_ema") for name, tag in TAGS.items()}  # of the averaged weights
PERCENT = {TOP1: "top-1", TOP5: "top-5", CALIBRATION_ERROR: "calibration error"}  # in words, by name


def part_words(part: str) -> str:
    """A part of the time of a run (`TIME`) in words."""
    return "waiting for data" if part == "data" else part.replace("_", " ")
