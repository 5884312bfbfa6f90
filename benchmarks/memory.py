"""Memory of the strategies: bytes of each rank for a model of 100 M parameters, over gloo, on this machine.

    python benchmarks/memory.py --json memory.json
    python benchmarks/memory.py --ranks 2 --width 512

Each strategy takes two steps of AdamW on a batch of blank images, in new processes. *Counted* are the bytes of a
rank's parameters, gradients and optimizer state after the second backward pass, when all three exist. *Peak* is the
largest resident memory that the operating system has seen (`ru_maxrss`), minus the resident memory before the model
was built: it includes the activations, the buffers of the collectives and the copy of the whole model before it is
cut. Both are the largest value of any rank.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockstep.core.native_threads import configure_native_threads

configure_native_threads()  # before NumPy and torch: with their threads this process could not be forked into ranks

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.config import components
from lockstep.core.plan import Plan
from lockstep.core.protocols import Strategy
from lockstep.core.run_dir import RunDir
from lockstep.core.sharding import own_parts
from lockstep.job.process_group import join
from lockstep.launcher.spawn import Spawn
from lockstep.optim import AdamW
from lockstep.precision import FP32
from measure import Rows, parser, show, write

STRATEGIES = ("ddp", "zero", "fsdp", "pipeline")
LAYERS, CLASSES, BATCH = 4, 10, 8
PLAN = Plan(examples=BATCH, batch=BATCH, total_steps=2, micro_batches=1, log_every=1, eval_every=1, save_every=1)


def network(width: int) -> nn.Module:
    """`LAYERS` layers of `width` x `width`, which have nearly all parameters, for images of 1 x `width` pixels."""
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, CLASSES))


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Parameters, gradients and optimizer state of this rank."""
    yield from own_parts(model.parameters())
    yield from own_parts(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    for entries in optimizer.state.values():
        yield from own_parts(value for value in entries.values() if isinstance(value, Tensor))


def resident() -> int:
    """The largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rank_entry(folder: Path) -> None:
    """Measure as one rank; main writes the figures in GB."""
    name, width = json.loads(Path(folder, "request.json").read_text())
    strategy: Strategy = components.build_option("strategy", name)
    with join(device="cpu", backend="gloo", timeout=600, threads=1) as world:
        batch = BATCH // strategy.data_world(world).size
        before = resident()
        model, example = network(width), torch.zeros(2, 1, 1, width)
        replica = strategy.wrap(model, world, PLAN, (example,))
        strategy.shard(model, world, FP32(), example)
        optimizer = strategy.build_optimizer(AdamW(), model, world)
        for step in (1, 2):
            optimizer.zero_grad()
            with strategy.accumulate(replica, True):
                logits = replica(torch.zeros(batch, 1, 1, width))
                F.cross_entropy(logits, torch.zeros(len(logits)).long(), reduction="sum").backward()
            strategy.reduce(replica)
            if step == 2:
                counted = sum(tensor.nbytes for tensor in tensors(model, optimizer))
            optimizer.step()
        figures = world.gather((counted / 1e9, (resident() - before) / 1e9))
        if world.is_main:
            most = [max(column) for column in zip(*figures, strict=True)]
            Path(folder, "figures.json").write_text(json.dumps(most))


def exit_as_rank(folder: Path) -> None:
    """The entry point that the spawn launcher calls in a rank."""
    rank_entry(folder)
    sys.exit(0)


def measured(ranks: int, width: int) -> Rows:
    """GB per rank of each strategy on `ranks` ranks: counted, and at the peak."""
    rows: Rows = {}
    for name in STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "request.json").write_text(json.dumps([name, width]))
            Spawn(ranks=ranks, threads=1).run(rank_entry, RunDir.at(Path(folder)))
            counted, peak = json.loads(Path(folder, "figures.json").read_text())
        rows[name] = {"counted": counted, "peak": peak}
    return rows


def main() -> None:
    options = parser(__doc__, repeats=1)
    options.add_argument("--ranks", type=int, nargs="+", default=[2])
    options.add_argument("--width", type=int, default=5000)
    arguments = options.parse_args()
    tables: dict[str, Rows] = {}
    for ranks in arguments.ranks:
        parameters = sum(parameter.numel() for parameter in network(arguments.width).parameters())
        title = f"{ranks} ranks, {parameters / 1e6:.1f} M parameters, GB per rank"
        tables[title] = measured(ranks, arguments.width)
        show(title, tables[title])
    write(arguments.json, tables)


if __name__ == "__main__":
    main()
