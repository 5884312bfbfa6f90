"""What the loop costs: microseconds per step of Lockstep's whole run, of bare loops, and of other frameworks.

    python benchmarks/overhead.py --json overhead.json
    pip install -r benchmarks/requirements-peers.txt        # for the peers; without them their rows are left out

All contenders train the same network on the same 60,000 images of 28x28, batch 64, AdamW, one epoch at a time and in
turns, on one thread. The data set is a tensor in memory for all of them. With a linear model the step is mostly what
the framework adds. Lockstep runs as `train.py` does, with its default telemetry, exact metrics and checkpoints; the
time of an epoch is that of the second, with its save and its log points, without evaluation. The bare loops are the
tutorial's (slices of a permutation, AdamW as it comes), the same with the fused AdamW, and one that gathers and
normalises uint8 images many batches at a time, as Lockstep does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep import config, experiment, resolve
from lockstep.rundir import RunDir
from lockstep.world import World
from measure import Rows, console, in_turns, show, write

ROOT = Path(__file__).parent.parent
EXAMPLES, BATCH, CLASSES = 60_000, 64, 10
STEPS = -(-EXAMPLES // BATCH)
CHUNK = 20  # batches that the chunked bare loop gathers at a time

Epoch = Callable[[], float]


def network(name: str) -> nn.Module:
    """The network that Lockstep builds for `model=name`."""
    job = config.build_all(config.composed(ROOT / "conf", [f"model={name}", "name=overhead"]))
    return job.model.build(CLASSES, (1, 28, 28))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (EXAMPLES, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return images, torch.randint(CLASSES, (EXAMPLES,), generator=generator)


def bare(name: str, *, fused: bool) -> Epoch:
    """The loop of the tutorials over tensors."""
    model, (stored, labels) = network(name), data()
    images = (stored.float() / 255 - 0.5) / 0.25
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None)

    def epoch() -> float:
        began = time.perf_counter()
        order = torch.randperm(EXAMPLES)
        for at in range(0, EXAMPLES, BATCH):
            chosen = order[at : at + BATCH]
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.perf_counter() - began

    return epoch


def chunked(name: str) -> Epoch:
    """What Lockstep's step comes down to: uint8 images gathered and normalised many batches at a time."""
    model, (images, labels) = network(name), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def epoch() -> float:
        began = time.perf_counter()
        order = torch.randperm(EXAMPLES)
        for at in range(0, EXAMPLES, CHUNK * BATCH):
            chosen = order[at : at + CHUNK * BATCH]
            pixels = images.index_select(0, chosen).float().mul_(1 / (255 * 0.25)).sub_(2.0)
            known = labels[chosen]
            for inputs, targets in zip(pixels.split(BATCH), known.split(BATCH), strict=True):
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return time.perf_counter() - began

    return epoch


def lockstep(name: str, *overrides: str) -> Epoch:
    """The real run, in a folder of its own each time; the second epoch is timed."""

    def epoch() -> float:
        with tempfile.TemporaryDirectory() as folder:
            run = RunDir.at(Path(folder) / "run")
            job = config.composed(
                ROOT / "conf",
                [
                    f"model={name}",
                    "dataset=fake",
                    f"dataset.examples={EXAMPLES}",
                    f"dataset.classes={CLASSES}",
                    "dataset.channels=1",
                    "dataset.size=28",
                    "augment=none",
                    f"batch={BATCH}",
                    f"steps={2 * STEPS + 1}",
                    "train.eval_every=100%",
                    "optimizer.decay_all=true",
                    "schedule=constant",
                    "device=cpu",
                    "name=overhead",
                    f"output_root={folder}",
                    *overrides,
                ],
            )
            run.config.write_text(config.dump(resolve.resolve(job, sweep=False)))
            run.overrides.write_text(config.dump_list([]))
            ends: list[float] = []
            with console.capture():
                experiment.run(
                    World.solo(),
                    run,
                    stop_requested=lambda: False,
                    alive=lambda: ends.append(time.perf_counter()),
                )
            # A save shows life too: of the first epoch, in whose background part the second one begins.
            return ends[2 * STEPS + 1] - ends[STEPS]

    return epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="epochs of each contender")
    parser.add_argument("--json", type=Path, help="where the figures go")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    contenders: dict[str, Epoch] = {
        "bare": bare("linear", fused=False),
        "bare, fused": bare("linear", fused=True),
        "chunked, fused": chunked("linear"),
        "lockstep": lockstep("linear"),
    }
    for epoch in contenders.values():
        epoch()
    found = in_turns(contenders, arguments.repeats)
    tables: dict[str, Rows] = {"us per step": {"linear": {k: 1e6 * v / STEPS for k, v in found.items()}}}
    for title, rows in tables.items():
        show(title, rows)
    write(arguments.json, tables)


if __name__ == "__main__":
    main()
