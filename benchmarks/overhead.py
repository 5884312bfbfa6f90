"""What the loop costs: microseconds per step of Lockstep's whole run, of bare loops, and of other frameworks.

    python benchmarks/overhead.py --json overhead.json
    pip install -r benchmarks/requirements-peers.txt        # for the peers; without them their rows are left out

All contenders train the same network on the same 60,000 images of 28x28, batch 64, AdamW, one epoch at a time and in
turns, each in its own process with one thread. The data set is a tensor in memory for all of them. With a linear
model a step consists mostly of the framework's own work. Lockstep runs as `train.py` does, with its default
telemetry, exact metrics and checkpoints; its time is that of the second epoch, with the save and the log points,
without the evaluation. The bare loops are the tutorial's (slices of a permutation, AdamW with default settings), the
same with the fused AdamW, and one that gathers and normalises uint8 images many batches at a time, as Lockstep does.
The peers get float tensors; "no logging" means that everything is switched off that the peer allows to switch off.

Other work on the machine changes the times, but not the calls of Python and C (cProfile) in a step: the mean over an
epoch, whose figures are counted in an epoch of their own. The calls of a thread besides the loop's do not count.
"""

from __future__ import annotations

import contextlib
import cProfile
import functools
import importlib
import importlib.util
import logging
import multiprocessing
import pstats
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lockstep.config import components, composition
from lockstep.core import console
from lockstep.core.world import World
from lockstep.training import experiment
from measure import Rows, in_turns, parser, scaled, show, write
from runs import prepared

ROOT = Path(__file__).parent.parent
EXAMPLES, BATCH, CLASSES = 60_000, 64, 10
STEPS = -(-EXAMPLES // BATCH)
CHUNK = 20  # batches that the chunked bare loop gathers at a time

Epoch = Callable[[], float]
PROFILE = cProfile.Profile()
counts_calls = False  # whether the epoch under way is one in which calls are counted, not timed


def began() -> float:
    """Begin to time or count an epoch; returns the time."""
    if counts_calls:
        PROFILE.enable()
    return time.perf_counter()


def ended() -> float:
    """End what `began` has begun; returns the time."""
    PROFILE.disable()
    return time.perf_counter()


def network(name: str) -> nn.Module:
    """The network that Lockstep builds for `model=name`."""
    job = components.build_job(composition.composed([f"model={name}", "name=overhead"]))
    return job.model.build(CLASSES, (1, 28, 28))


def data() -> tuple[Tensor, Tensor]:
    """uint8 images and labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (EXAMPLES, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return images, torch.randint(CLASSES, (EXAMPLES,), generator=generator)


def tensors() -> tuple[Tensor, Tensor]:
    """Images that are normalised in advance, and labels."""
    images, labels = data()
    return (images.float() / 255 - 0.5) / 0.25, labels


Batches = Iterable[tuple[Tensor, Tensor]]


class Slices:
    """The tutorials' batches of tensors in memory: slices of a new permutation in each epoch."""

    def __init__(self) -> None:
        self.images, self.labels = tensors()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(EXAMPLES)
        for at in range(0, EXAMPLES, BATCH):
            chosen = order[at : at + BATCH]
            yield self.images[chosen], self.labels[chosen]


class Chunks:
    """Lockstep's input pipeline in its simplest form: uint8 images gathered and normalised many batches at a time."""

    def __init__(self) -> None:
        self.images, self.labels = data()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(EXAMPLES)
        for at in range(0, EXAMPLES, CHUNK * BATCH):
            chosen = order[at : at + CHUNK * BATCH]
            pixels = self.images.index_select(0, chosen).float().mul_(1 / (255 * 0.25)).sub_(2.0)
            yield from zip(pixels.split(BATCH), self.labels[chosen].split(BATCH), strict=True)


def through_a_loader() -> Batches:
    """A DataLoader over the same tensors."""
    return DataLoader(TensorDataset(*tensors()), batch_size=BATCH, shuffle=True)


def adamw(model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None)


def loop(
    batches: Batches, model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], object]
) -> Epoch:
    """The loop of the tutorials."""

    def epoch() -> float:
        start = began()
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            backward(loss)
            optimizer.step()
        return ended() - start

    return epoch


def bare(name: str, batches: Batches, *, fused: bool = False) -> Epoch:
    """PyTorch alone."""
    model = network(name)
    return loop(batches, model, adamw(model, fused=fused), Tensor.backward)


def accelerate(name: str, batches: Batches) -> Epoch:
    """Accelerate wraps the model, the optimizer and, if there is one, the DataLoader."""
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    model = network(name)
    wrapped, optimizer = accelerator.prepare(model, adamw(model))
    if isinstance(batches, DataLoader):
        batches = accelerator.prepare(batches)
    return loop(batches, wrapped, optimizer, accelerator.backward)


def fabric(name: str, batches: Batches) -> Epoch:
    """Lightning Fabric wraps the model and the optimizer."""
    wrapper = importlib.import_module("lightning.fabric").Fabric(accelerator="cpu")
    model = network(name)
    wrapped, optimizer = wrapper.setup(model, adamw(model))
    return loop(batches, wrapped, optimizer, wrapper.backward)


def lightning(name: str, *, logs: bool) -> Epoch:
    """Lightning's Trainer: without logger, checkpoint and progress bar, or with its defaults and `self.log`."""
    peer = importlib.import_module("lightning.pytorch")
    batches = through_a_loader()

    class Module(peer.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = network(name)
            self.seconds = 0.0

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            loss = F.cross_entropy(self.network(batch[0]), batch[1])
            if logs:
                self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

        def on_train_epoch_start(self) -> None:
            self.seconds = -began()

        def on_train_epoch_end(self) -> None:
            self.seconds += ended()

    def epoch() -> float:
        off = {} if logs else {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
        with tempfile.TemporaryDirectory() as folder:
            module = Module()
            options: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False, **off}
            peer.Trainer(default_root_dir=folder, **options).fit(module, batches)
            return module.seconds

    return epoch


def hf_trainer(name: str, *, logs: bool) -> Epoch:
    """The HF Trainer: without logging and saving, or with its defaults. It never shows its progress bar here."""
    peer = importlib.import_module("transformers")

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network(name)

        def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.network(images)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    class Examples(torch.utils.data.Dataset[Any]):
        def __init__(self) -> None:
            self.images, self.labels = tensors()

        def __len__(self) -> int:
            return EXAMPLES

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"images": self.images[index], "labels": self.labels[index]}

        def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
            return self.images[indices], self.labels[indices]

    class Clock(peer.TrainerCallback):  # type: ignore[name-defined]
        seconds = 0.0

        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.seconds = -began()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            self.seconds += ended()

    examples = Examples()

    def epoch() -> float:
        off = {} if logs else {"logging_strategy": "no", "save_strategy": "no"}
        with tempfile.TemporaryDirectory() as folder:
            clock = Clock()
            quiet: dict[str, Any] = {"disable_tqdm": True, "use_cpu": True, "report_to": "none", **off}
            one: dict[str, Any] = {"num_train_epochs": 1, "per_device_train_batch_size": BATCH, "learning_rate": 1e-3}
            peer.Trainer(
                model=Module(),
                args=peer.TrainingArguments(folder, **quiet, **one),
                train_dataset=examples,
                data_collator=lambda both: {"images": both[0], "labels": both[1]},
                callbacks=[clock],
            ).train()
            return clock.seconds

    return epoch


def lockstep(name: str, *overrides: str) -> Epoch:
    """The real run, each time in a new folder; the second epoch is timed."""

    def epoch() -> float:
        with tempfile.TemporaryDirectory() as folder:
            data = ("dataset=fake", "dataset.channels=1", "dataset.size=28", "augment=none", f"batch={BATCH}")
            sizes = (f"dataset.examples={EXAMPLES}", f"dataset.classes={CLASSES}", f"steps={2 * STEPS + 1}")
            plain = ("train.eval_every=100%", "optimizer.decay_all=true", "schedule=constant", "device=cpu")
            words = [f"model={name}", "name=overhead", *data, *sizes, *plain, *overrides]
            job, run = prepared(Path(folder) / "run", words)
            signs, seconds = 0, 0.0

            def heartbeat() -> None:
                nonlocal signs, seconds
                signs += 1
                # A save also calls it: here that of the first epoch, which is written during the second epoch.
                if signs == STEPS + 1:
                    seconds = -began()
                if signs == 2 * STEPS + 2:
                    seconds += ended()

            with console.terminal.capture():
                experiment.run(job, run, World.solo(), heartbeat=heartbeat)
            return seconds

    return epoch


# By name: the package that a contender needs, and how its epoch is built.
CONTENDERS: dict[str, tuple[str, Callable[[str], Epoch]]] = {
    "bare": ("torch", lambda name: bare(name, Slices())),
    "bare, fused": ("torch", lambda name: bare(name, Slices(), fused=True)),
    "bare, DataLoader": ("torch", lambda name: bare(name, through_a_loader())),
    "chunked, fused": ("torch", lambda name: bare(name, Chunks(), fused=True)),
    "Lockstep, no logging": ("torch", lambda name: lockstep(name, "telemetry.interval=100%", "logger=jsonl")),
    "Lockstep": ("torch", lockstep),
    "Accelerate": ("accelerate", lambda name: accelerate(name, Slices())),
    "Accelerate, DataLoader": ("accelerate", lambda name: accelerate(name, through_a_loader())),
    "Fabric": ("lightning", lambda name: fabric(name, Slices())),
    "Lightning, no logging": ("lightning", lambda name: lightning(name, logs=False)),
    "Lightning": ("lightning", lambda name: lightning(name, logs=True)),
    "HF Trainer, no logging": ("transformers", lambda name: hf_trainer(name, logs=False)),
    "HF Trainer": ("transformers", lambda name: hf_trainer(name, logs=True)),
}


def serve(contender: str, model: str, examples: int, turns: Connection) -> None:
    """The process of one contender: trains one epoch per turn and sends its seconds, or the calls of a step."""
    global EXAMPLES, STEPS, counts_calls
    EXAMPLES, STEPS = examples, -(-examples // BATCH)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # peers warn about their own defaults
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(None):
        epoch = CONTENDERS[contender][1](model)
        while turn := turns.recv():
            counts_calls = turn == "count"
            seconds = epoch()
            turns.send(pstats.Stats(PROFILE).total_calls / STEPS if counts_calls else seconds)  # type: ignore[attr-defined]
            PROFILE.clear()


@contextlib.contextmanager
def contenders(model: str, examples: int) -> Iterator[dict[str, Callable[[str], float]]]:
    """All installed contenders, each in its own process, because a framework's imports can slow torch down.

    Each takes a turn: `time` an epoch, or `count` the calls of a step in one.
    """
    context = multiprocessing.get_context("spawn")
    lines: dict[str, Connection] = {}
    for name, (package, _) in CONTENDERS.items():
        if importlib.util.find_spec(package):
            lines[name], theirs = context.Pipe()
            context.Process(target=serve, args=(name, model, examples, theirs), daemon=True).start()

    def turn(line: Connection, kind: str) -> float:
        line.send(kind)
        return float(line.recv())

    yield {name: functools.partial(turn, line) for name, line in lines.items()}
    for line in lines.values():
        line.send("")


def main() -> None:
    options = parser(__doc__, repeats=5, of="epochs of each contender")
    options.add_argument("--model", default="linear", help="of Lockstep, such as basicnet [linear]")
    options.add_argument("--examples", type=int, default=EXAMPLES, help=f"of an epoch [{EXAMPLES:,}]")
    arguments = options.parse_args()
    with contenders(arguments.model, arguments.examples) as turns:
        calls = {name: turn("count") for name, turn in turns.items()}
        epochs = {name: functools.partial(turn, "time") for name, turn in turns.items()}
        seconds = in_turns(epochs, arguments.repeats)
    costs = scaled(seconds, 1e6 / -(-arguments.examples // BATCH))
    rows: Rows = {
        name: {"us per step": cost, "of bare": cost / costs["bare"], "calls per step": calls[name]}
        for name, cost in costs.items()
    }
    title = f"{arguments.model}, batch {BATCH}"
    show(title, rows, ratios=False)
    write(arguments.json, {title: rows})


if __name__ == "__main__":
    main()
