"""What the experiments of this folder share: start ranks on this machine, and some made-up data."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Result = TypeVar("Result")


def on_ranks(work: Callable[[int], Result], ranks: int = 2) -> list[Result]:
    """Call `work(rank)` in `ranks` processes of one process group (gloo, on the CPU), and return the results."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    torch.set_num_threads(1)  # a process with several threads cannot be forked safely
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, get_context("fork")) as processes:
        as_rank = partial(_as_rank, work, ranks, Path(folder) / "store")
        results = [processes.submit(as_rank, rank) for rank in range(ranks)]
        for result in as_completed(results):
            result.result()  # raises the first error; later ones are connections that broke because of it
        return [result.result() for result in results]


def _as_rank(work: Callable[[int], Result], ranks: int, store: Path, rank: int) -> Result:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        return work(rank)
    finally:
        dist.destroy_process_group()


def examples(number: int, features: int = 16, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Points around one centre per class, in float64, sorted by class as the files of a folder are."""
    generator = torch.Generator().manual_seed(7)
    centres = torch.randn(classes, features, generator=generator, dtype=torch.float64)
    labels = torch.arange(number) * classes // number
    noise = torch.randn(number, features, generator=generator, dtype=torch.float64)
    return centres[labels] + noise, labels


def relative(difference: Tensor, reference: Tensor) -> float:
    """The length of `difference` in percent of the length of `reference`; rounding errors of float64 count as 0."""
    percent = 100 * float(difference.norm() / reference.norm())
    return percent if percent > 1e-9 else 0.0


def show(name: str, text: str, damage: float) -> None:
    """One line of the result: `wrong` or `right`, what was counted, and how much damage there is."""
    print(f"{name}  {text}: {damage:.4g}")
