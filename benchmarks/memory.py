"""Megabytes of parameters, gradients and AdamW's state of resnet50 in float32, on the rank with most.

torchrun --nproc-per-node 4 benchmarks/memory.py
"""

import timm
import torch
from torch import distributed as dist

from lockstep.core.model import own_parts, tensors_in
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.optim.optimizers import AdamW
from lockstep.precision import FP32
from lockstep.strategy.base import Distributed
from lockstep.strategy.ddp import DDP
from lockstep.strategy.zero import FSDP, ZeRO
from measure import Figures, show

STRATEGIES = {"ddp": DDP(), "zero": ZeRO(), "fsdp": FSDP(), "fsdp, replicas=2": FSDP(replicas=2)}
PLAN = Plan(examples=8, batch=8, total_steps=1, micro_batches=1, log_every=1, eval_every=1, save_every=1)


def counted(strategy: Distributed, world: World) -> Figures:
    """The megabytes of this rank's parts."""
    model, images = timm.create_model("resnet50"), torch.zeros(2, 3, 224, 224)
    replica = strategy.wrap(model, world, PLAN, (images,))
    strategy.shard(model, world, FP32(), images)
    optimizer = strategy.build_optimizer(AdamW(lr=1e-3), model, world)
    replica(images).sum().backward()
    strategy.reduce(replica)
    optimizer.step()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    trees = {"parameters": list(model.parameters()), "gradients": gradients, "state": list(optimizer.state.values())}
    return {part: sum(tensor.nbytes for tensor in own_parts(tensors_in(tree))) / 1e6 for part, tree in trees.items()}


def main() -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, local_rank=rank, size=size, local_size=size, device=torch.device("cpu"))
    rows = {title: world.gather(counted(strategy, world)) for title, strategy in STRATEGIES.items()}
    if world.is_main:
        show("resnet50", {title: max(ranks, key=lambda parts: sum(parts.values())) for title, ranks in rows.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
