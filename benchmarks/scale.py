"""What a thousand ranks would cost on the host, measured without a thousand machines.

    python benchmarks/scale.py --json scale.json

Order: the shards of one rank among 1 to 1,024. Host: the work of a rank besides training, at a step, a log point, a
save and a round of the evaluation, in a process group that only pretends to send (torch's `fake` backend), so that
only our own work is measured and not the network. Store: up to 1,024 real clients of a real store, as in torchrun's
launches and ours. Mesh: up to 64 real processes that join a real gloo group over the loopback interface.

docs/scale.md says what follows from the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from itertools import islice
from multiprocessing.context import ForkProcess

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from lockstep.core.observer import Observer
from lockstep.core.plan import Plan
from lockstep.core.world import World
from lockstep.data.loading.sampler import shard_indices
from lockstep.job import worker
from lockstep.launcher.processes import POLL_S
from lockstep.telemetry.display import Display
from lockstep.telemetry.meter import Telemetry
from lockstep.telemetry.time_spent import JUDGED_STEPS, TimeSpent
from lockstep.training.agreement import StopConsensus, checksums, compare_weights
from measure import Figures, Rows, in_turns, parser, report, timed

RANKS = (1, 8, 64, 1024)
IMAGENET = 1_281_167
PER_RANK = 32  # examples of a rank's shard
LOG_EVERY = 20
CLIENTS_OF_A_PROCESS = 128
REQUESTS = 2000  # that one client sends to time the store
PROCESSES = (2, 8, 32, 64)


def plan(ranks: int) -> Plan:
    """An epoch of ImageNet."""
    batch = PER_RANK * ranks
    steps = -(-IMAGENET // batch)
    every = {"log_every": LOG_EVERY, "eval_every": steps, "save_every": steps}
    return Plan(examples=IMAGENET, batch=batch, total_steps=steps, micro_batches=1, **every)


def order(repeats: int) -> Rows:
    """Milliseconds to the first shard of an epoch, and microseconds for each of the following; by ranks."""

    def costs(ranks: int) -> Figures:
        shards = shard_indices(plan(ranks), 0, rank=ranks // 2, ranks=ranks, after=0)
        first = timed(lambda: next(shards))
        several = timed(lambda: list(islice(shards, 32)))
        return {"first shard, ms": 1e3 * first, "a shard, us": 1e6 * several / 32}

    rows: dict[str, list[Figures]] = {f"{ranks:,} ranks": [] for ranks in RANKS}
    for _ in range(repeats):
        for ranks in RANKS:
            rows[f"{ranks:,} ranks"].append(costs(ranks))
    return {
        name: {key: statistics.median(one[key] for one in turns) for key in turns[0]} for name, turns in rows.items()
    }


def host(repeats: int) -> Rows:
    """Microseconds of a rank's work on its host, by the kind of work and the number of ranks."""
    rows: Rows = {}
    for ranks in RANKS:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        control = dist.new_group(backend="fake")
        world = World(rank=0, local_rank=0, size=ranks, local_size=1, device=torch.device("cpu"), control=control)
        for name, seconds in in_turns(work(world), repeats).items():
            rows.setdefault(name, {})[f"{ranks:,} ranks"] = 1e6 * seconds
        dist.destroy_process_group()
    return rows


def work(world: World) -> dict[str, Callable[[], float]]:
    """The work of a rank of `world` on its host besides training; each call returns its seconds."""
    model = nn.Linear(8, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the fake ranks contribute zeros to a sum, so the replicas agree
    consensus = StopConsensus(world)
    telemetry = Telemetry(
        world=world,
        plan=plan(world.size),
        observer=Observer(),
        display=Display(),
        times=TimeSpent(None, world.device, reduces=False, period=20),
        step=0,
    )
    step = 0

    def log_point() -> float:
        nonlocal step
        step += LOG_EVERY
        (tally,) = telemetry.tallies
        tally.steps, tally.counts, tally.losses = [step], [PER_RANK], torch.zeros(1, dtype=torch.float64)
        for _ in range(JUDGED_STEPS):
            telemetry.stragglers.next_step()

        def write() -> None:
            (window,) = telemetry.end_window(step, {}, checksums(model, world))
            compare_weights(window.checksums, step)

        return timed(write)

    def save() -> float:
        (tally,) = telemetry.tallies
        tally.steps, tally.counts = list(range(LOG_EVERY)), [PER_RANK] * LOG_EVERY
        tally.losses = torch.zeros(LOG_EVERY, dtype=torch.float64)
        return timed(telemetry.open_window)

    block = (torch.zeros(64, 1000), torch.zeros(64, dtype=torch.int64))
    return {
        "a step: the message to all": lambda: timed(lambda: consensus.agree(False, False, busy=0.01)),
        "a log point": log_point,
        "a save: the open window": save,
        "a round of an evaluation with a metric, 64 x 1,000": lambda: timed(lambda: world.gather_to_main(block)),
    }


def store() -> Rows:
    """Seconds until every client has connected, met the others and read main's word; requests per second."""
    return {f"{clients:,} clients": serve(clients) for clients in (8, 64, 1024)}


def serve(clients: int) -> Figures:
    """The figures of one store with `clients` clients."""
    port = free_port()
    began = time.perf_counter()
    firsts = range(0, clients, CLIENTS_OF_A_PROCESS)
    processes = forked(partial(join_store, port, clients, first) for first in firsts)
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # its threads must not be forked
    server.set("run_dir", "outputs/run")
    ended(processes)
    joined = time.perf_counter() - began
    seconds = timed(lambda: [server.check(["run_dir"]) for _ in range(REQUESTS)])
    return {
        "all have joined, s": joined,
        "requests a second": REQUESTS / seconds,
        "of them polling": clients / POLL_S,
    }


def join_store(port: int, clients: int, first: int) -> None:
    """Some of the clients, in a process of their own."""
    own = range(first, min(first + CLIENTS_OF_A_PROCESS, clients))
    stores = [TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120)) for _ in own]
    for number, client in zip(own, stores, strict=True):
        client.set(f"rank/{number}", "here")
        if client.add("count", 1) == clients:
            client.set("all", "here")
    for client in stores:
        client.wait(["all", "run_dir"])
        assert client.get("run_dir") == b"outputs/run"


def mesh() -> Rows:
    """Seconds and open files per rank when real ranks join. More ranks than cores make it slower here."""
    return {f"{ranks} ranks": join_all(ranks) for ranks in PROCESSES}


def join_all(ranks: int) -> Figures:
    """The figures of a group of `ranks` ranks. The store is in this process, as in torchrun's: it outlives them."""
    port = free_port()
    read, write = os.pipe()
    processes = forked(partial(join_mesh, rank, ranks, port, write) for rank in range(ranks))
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # its threads must not be forked
    ended(processes)
    del server
    figures: Figures = json.loads(os.read(read, 4096))
    os.close(read)
    os.close(write)
    return figures


def join_mesh(rank: int, ranks: int, port: int, write: int) -> None:
    """One rank: it joins the group, passes a barrier and leaves. Main writes the figures."""
    place = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    began = time.perf_counter()
    with worker.join(device="cpu", backend="gloo", timeout=60, threads=1) as world:
        seconds = time.perf_counter() - began
        if world.is_main:
            files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208, names only
            os.write(write, json.dumps({"seconds": seconds, "open files": files}).encode())
        world.barrier()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def forked(calls: Iterable[Callable[[], None]]) -> list[ForkProcess]:
    """Fork a process for each call."""
    processes = [ForkProcess(target=call) for call in calls]
    for process in processes:
        process.start()
    return processes


def ended(processes: list[ForkProcess]) -> None:
    """Wait for forked processes; all of them must succeed."""
    for process in processes:
        process.join()
    failed = sum(process.exitcode != 0 for process in processes)
    assert not failed, f"{failed} of {len(processes)} processes failed"


def main() -> None:
    arguments: argparse.Namespace = parser(__doc__, repeats=9).parse_args()
    torch.set_num_threads(1)
    report(
        arguments.json,
        {
            "The mesh": mesh,
            "The store": store,
            "A rank's order of an epoch of ImageNet": lambda: order(arguments.repeats),
            "The host, us": lambda: host(arguments.repeats),
        },
    )


if __name__ == "__main__":
    main()
