"""Ranks: milliseconds per step of Lockstep's strategies and of plain and hand-tuned DDP, over gloo, on this machine.

    python benchmarks/scaling.py --json scaling.json
    python benchmarks/scaling.py --ranks 2 --nets basicnet mlp-102

All contenders take the same steps (forward, backward, gradients averaged, fused SGD) on the same batch, one thread
per rank, in turns. `alone` sends nothing, so no contender can be faster. `pipeline` takes the batch in
`PIPELINED` micro-batches, the others in one. `DDP` is DistributedDataParallel with default settings. `tuned` has the
settings of a careful user: gradients in the buckets, a static graph, no buffers sent in forward. The others are
Lockstep's strategies. Batch norm counts per rank for all of them. The batch is that of one step over all ranks, so
with more ranks each has less. With fewer cores than ranks the figures show what sending costs, and no speed-up.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.core.native_threads import configure_native_threads

configure_native_threads()  # before NumPy and torch: with their threads this process could not be forked into ranks

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lockstep.core.plan import Plan
from lockstep.core.protocols import Strategy
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.job.process_group import join
from lockstep.launcher.spawn import Spawn
from lockstep.models import BasicNet, Timm
from lockstep.optim import SGD
from lockstep.precision import FP32
from lockstep.strategy import DDP, FSDP, Accelerate, AllReduce, AllReduceHooks, Pipeline, Single, ZeRO
from lockstep.strategy.ddp import NO_BUFFERS
from measure import Rows, in_turns, parser, scaled, show, write

BATCH, CLASSES, PIPELINED = 128, 10, 8
PLAN = Plan(
    examples=BATCH,
    batch=BATCH,
    total_steps=10**9,
    micro_batches=1,
    log_every=1,
    eval_every=1,
    save_every=1,
)
Replicate = Callable[[nn.Module], nn.Module]


def mlp(width: int, layers: int, size: int) -> nn.Module:
    sizes = [size, *[width] * (layers - 1), CLASSES]
    hidden = [layer for a, b in itertools.pairwise(sizes[:-1]) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(sizes[-2], CLASSES))


# By name: how the network is built, the shape of an image, and the steps per turn.
NETS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, int, int], int]] = {
    "basicnet": (lambda: BasicNet().build(CLASSES, (1, 28, 28)), (1, 28, 28), 2),
    "mlp-102": (lambda: mlp(64, 51, 64), (1, 8, 8), 20),
    "mlp-10M": (lambda: mlp(2048, 4, 784), (1, 28, 28), 2),
    "resnet18": (lambda: Timm(name="resnet18").build(CLASSES, (3, 32, 32)), (3, 32, 32), 1),
}


class Stepper:
    """Steps of one contender; each call is one turn, and returns the seconds per step."""

    def __init__(
        self, net: str, world: World, strategy: Strategy, replicate: Callable[[nn.Module], nn.Module]
    ) -> None:
        make, shape, self.steps = NETS[net]
        torch.manual_seed(world.rank)
        mine = max(1, BATCH // strategy.data_world(world).size)
        self.images, self.labels = torch.rand(mine, *shape), torch.randint(CLASSES, (mine,))
        parts = PIPELINED if isinstance(strategy, Pipeline) else 1
        self.micro_batches = list(zip(self.images.chunk(parts), self.labels.chunk(parts), strict=True))
        torch.manual_seed(0)
        self.model = make()
        self.replica, self.world, self.strategy = replicate(self.model), world, strategy
        strategy.shard(self.model, world, FP32(), torch.zeros(2, *shape))
        self.optimizer = strategy.build_optimizer(SGD(lr=1e-3), self.model, world)

    def step(self) -> None:
        self.strategy.run_micro_batches(
            self.replica,
            zip(self.micro_batches, [*[False] * (len(self.micro_batches) - 1), True], strict=True),
            self.world,
            forward=self.forward,
            backward=lambda loss: loss.backward(),
            between=lambda: None,
        )
        self.strategy.reduce(self.replica)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward(self, micro: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        logits = self.replica(micro[0])
        return F.cross_entropy(logits, micro[1][: len(logits)], reduction="sum") / len(self.labels)

    def __call__(self) -> float:
        self.world.barrier()
        began = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        self.world.barrier()
        return (time.perf_counter() - began) / self.steps


def contenders(net: str, world: World) -> dict[str, Stepper]:
    """All contenders for a network."""
    example = torch.zeros(2, *NETS[net][1])
    stepper = partial(Stepper, net, world)

    def lockstep(strategy: Strategy) -> Stepper:
        return stepper(strategy, lambda model: strategy.wrap(model, world, PLAN, (example,)))

    steppers = {"alone": stepper(Single(), lambda model: model)}
    if world.size > 1:
        tuned: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True, **NO_BUFFERS}
        steppers |= {
            "DDP": stepper(Single(), DistributedDataParallel),
            "tuned": stepper(Single(), lambda model: DistributedDataParallel(model, **tuned)),
            "ddp": lockstep(DDP(sync_batchnorm=False)),
            "allreduce": lockstep(AllReduce(sync_batchnorm=False)),
            "allreduce_hooks": lockstep(AllReduceHooks(sync_batchnorm=False)),
            "accelerate": lockstep(Accelerate(sync_batchnorm=False)),
            "fsdp": lockstep(FSDP(sync_batchnorm=False)),
            "zero": lockstep(ZeRO(sync_batchnorm=False)),
            "pipeline": lockstep(Pipeline()),
        }
    return steppers


def rank_entry(folder: Path) -> None:
    """Measure as one rank; main writes the figures."""
    request = json.loads(Path(folder, "request.json").read_text())
    rows: Rows = {}
    with join(device="cpu", backend="gloo", timeout=600, threads=1) as world:
        torch.set_flush_denormal(True)
        for net in request["nets"]:
            torch.set_num_threads(1)
            turns = contenders(net, world)
            in_turns(turns, 2)  # warm-up: DDP rebuilds its buckets
            rows[net] = scaled(in_turns(turns, request["repeats"]), 1000)
        if world.is_main:
            Path(folder, "figures.json").write_text(json.dumps(rows))


def exit_as_rank(folder: Path) -> None:
    """The entry point that the spawn launcher calls in a rank."""
    rank_entry(folder)
    sys.exit(0)


def measured(ranks: int, nets: list[str], repeats: int) -> Rows:
    """Milliseconds per step on `ranks` ranks, by network and contender."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "request.json").write_text(json.dumps({"nets": nets, "repeats": repeats}))
        Spawn(ranks=ranks, threads=1).run(rank_entry, RunDir.at(Path(folder)))
        rows: Rows = json.loads(Path(folder, "figures.json").read_text())
    return rows


def main() -> None:
    options = parser(__doc__, repeats=12)
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    options.add_argument("--nets", nargs="+", choices=NETS, default=[*NETS])
    arguments = options.parse_args()
    tables: dict[str, Rows] = {}
    for ranks in arguments.ranks:
        title = f"{ranks} rank{'s' * (ranks != 1)}, ms per step"
        tables[title] = measured(ranks, arguments.nets, arguments.repeats)
        show(title, tables[title])
    write(arguments.json, tables)


if __name__ == "__main__":
    main()
