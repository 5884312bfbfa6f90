"""The CIFAR-10 speed recipe against a plain loop of the record that it reproduces: accuracy and seconds, same bytes.

    python benchmarks/cifar10_speedrun.py --json cifar10_speedrun.json                   # the data set in data/
    python benchmarks/cifar10_speedrun.py --folder cifar10_jpeg --val-folder test        # images in class folders
    python benchmarks/cifar10_speedrun.py --device cpu --epochs 1 --seeds 0 1            # a smaller comparison
    python benchmarks/cifar10_speedrun.py --device cpu --fake 400 --batch 100 --epochs 1 # shows that it works

The reference, `cifar10_reference.py`, is airbench94_muon (Jordan 2024, arXiv 2404.00498) in PyTorch alone. It shares
the decoded images with Lockstep and nothing else. Both train with each seed, in turns, so that the spread over seeds
is known. For both, the clock includes what the record's clock includes: the whitening, the augmentation, all steps,
and one evaluation with six views. The device is synchronised when the clock starts and stops. The clock does not
include decoding, and everything that is made before training. On a GPU, and whenever something is compiled, both
first train once without being timed; the table shows what is still compiled while a clock runs. Lockstep runs as
`train.py` does, with its telemetry; its checkpoint is written after the clock has stopped.

On a GPU both are compiled, the reference in the same way as the record. On a CPU nothing is compiled, and both train
in float32.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from cifar10_reference import Reference, Split
from lockstep.config import components, composition
from lockstep.core.world import World
from lockstep.data.loading.prefetch import sample
from lockstep.job import resolve
from lockstep.models.whitenet import WhiteNet
from lockstep.training import experiment
from lockstep.training.network import Progress
from lockstep.training.resolved_job import ResolvedJob
from lockstep.training.trainer import Trainer
from measure import Figures, Rows, Stopwatch, console, parser, show, write
from runs import prepared

ROOT = Path(__file__).parent.parent


class Lockstep:
    """Real runs, each in its own folder.

    All runs use one network object, as the reference does, so that it is compiled only once. At the start of each run
    it gets the initial weights of a newly built network.
    """

    def __init__(self, words: Sequence[str], device: torch.device) -> None:
        self.words, self.device = words, device
        self.network: nn.Module | None = None

    def __call__(self, seed: int) -> Figures:
        watch = Stopwatch(self.device)
        build, initialise = WhiteNet.build, WhiteNet.initialise

        def build_once(recipe: WhiteNet, classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
            fresh = build(recipe, classes, input_shape)
            if self.network is None:
                self.network = fresh
            self.network.load_state_dict(fresh.state_dict())
            return self.network

        def whitened(recipe: WhiteNet, model: nn.Module, images: Callable[[int], Tensor]) -> None:
            watch.start()
            initialise(recipe, model, images)
            watch.stop()

        class Timed(Trainer):
            def fit(self) -> Progress:
                watch.start()
                return super().fit()

            def evaluate(self, step: int) -> bool:
                improved = super().evaluate(step)
                watch.stop()
                return improved

        with (
            tempfile.TemporaryDirectory() as folder,
            redirect_stdout(io.StringIO()),
            patch.object(WhiteNet, "build", build_once),
            patch.object(WhiteNet, "initialise", whitened),
            patch.object(experiment, "Trainer", Timed),
        ):
            job, run = prepared(Path(folder) / "run", [*self.words, f"seed={seed}"])
            experiment.run(job, run, World.solo(str(self.device)))
            top1 = float(run.read_summary()["best"])
        return {"top1": top1, "seconds": watch.seconds, "compilations": watch.compilations}


def words(arguments: argparse.Namespace) -> list[str]:
    """The overrides of Lockstep's job."""
    overrides = [
        "experiment=cifar10_speedrun",
        "name=speedrun",
        f"device={arguments.device}",
        f"epochs={arguments.epochs}",
        f"batch={arguments.batch}",
        f"model.compile={str(arguments.compile).lower()}",
        f"data_root={arguments.data_root}",
    ]
    if arguments.compile:
        overrides += [f"model.compile_mode={arguments.compile_mode}"]
    if arguments.device == "cpu":
        overrides += ["precision=fp32"]
    if arguments.folder is not None:
        overrides += [
            "dataset=folder",
            f"dataset.path={arguments.folder}",
            f"dataset.val_folder={arguments.val_folder}",
        ]
        overrides += ["dataset.decode_size=32"]
    if arguments.fake is not None:
        overrides += ["dataset=fake", f"dataset.examples={arguments.fake}", "dataset.classes=10", "dataset.size=32"]
    return overrides


def on_device(split: Any, device: str) -> Split:
    """All images of a split and their labels."""
    return sample(split, len(split)).to(device), split.labels.to(device)


def reference(job: ResolvedJob, arguments: argparse.Namespace) -> Reference:
    """The record on the images of Lockstep's job."""
    job.dataset.prepare()
    train, test = (on_device(split, job.device) for split in (job.dataset.train(), job.dataset.eval()))
    return Reference(
        train,
        test,
        mean=job.dataset.mean,
        std=job.dataset.std,
        epochs=arguments.epochs,
        batch=arguments.batch,
        compiled=arguments.compile,
    )


def compared(figures: dict[str, list[Figures]]) -> Rows:
    """Means over the seeds, their ratios, and the standard deviation over the seeds."""
    rows: Rows = {}
    for name in ("top1", "seconds", "compilations"):
        columns = {contender: [run[name] for run in runs] for contender, runs in figures.items()}
        means = {contender: statistics.mean(values) for contender, values in columns.items()}
        rows[name] = means
        if name != "compilations":
            rows[name] = {**means, "ratio": means["lockstep"] / means["reference"]}
            if all(len(values) > 1 for values in columns.values()):
                rows[f"{name}, over seeds +-"] = {key: statistics.stdev(values) for key, values in columns.items()}
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, help="CLASS/*.jpg in train and the evaluation split's folder")
    options.add_argument("--val-folder", default="val", help="name of that folder")
    options.add_argument("--data-root", default="data", help="where CIFAR-10 is without --folder")
    options.add_argument("--fake", type=int, help="so many random images instead")
    options.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--batch", type=int, default=2000, help="the rates are those of 2000")
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--compile", action=argparse.BooleanOptionalAction, help="both networks [on a GPU]")
    options.add_argument(
        "--compile-mode", default="max_autotune", help="of Lockstep's network; the reference's is this"
    )
    arguments = options.parse_args()
    if arguments.device == "auto":
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.compile is None:
        arguments.compile = arguments.device != "cpu"
    job = resolve.resolve(components.build_job(composition.composed(words(arguments))), sweep=False)
    job.precision.configure()  # now: a later change of this setting would compile the network again
    contenders: dict[str, Callable[[int], Figures]] = {
        "reference": reference(job, arguments),
        "lockstep": Lockstep(words(arguments), torch.device(job.device)),
    }
    if arguments.compile or arguments.device != "cpu":
        for name, contender in contenders.items():
            console.print(f"{name}, to warm up: {contender(arguments.seeds[0])}")
    figures: dict[str, list[Figures]] = {name: [] for name in contenders}
    for seed in arguments.seeds:
        for name, contender in contenders.items():
            figures[name].append(contender(seed))
            console.print(f"seed {seed}, {name}: {figures[name][-1]}")
    title = f"{arguments.epochs} epochs"
    tables = {title: compared(figures)}
    show(title, tables[title], ratios=False)
    write(arguments.json, tables, seeds=arguments.seeds, compiled=arguments.compile, runs=figures)


if __name__ == "__main__":
    main()
