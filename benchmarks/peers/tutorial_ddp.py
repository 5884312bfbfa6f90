"""The tutorials' DDP: a process for each GPU, or two on a CPU, each with its share of the global batch."""
# lockstep ladder calls it plain DDP

import argparse
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tutorial import BATCH, LR, BasicNet, arguments, say, splits, top1


def run(rank: int, ranks: int, port: int, options: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=address, rank=rank, world_size=ranks)
    torch.manual_seed(options.seed)
    train, test = splits(options.data_root)
    model = DistributedDataParallel(BasicNet().to(device), device_ids=[rank] if on_gpu else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    sampler: DistributedSampler[object] = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=BATCH // ranks, sampler=sampler)
    dist.barrier()
    began = time.perf_counter()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
    dist.barrier()
    seconds = time.perf_counter() - began
    if rank == 0:
        say(options.epochs * len(train), seconds, top1(model.module, test))
    dist.destroy_process_group()


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    ranks = torch.cuda.device_count() or 2
    mp.spawn(run, args=(ranks, port, arguments()), nprocs=ranks)
