"""Logging and saving from every rank: each line appears once per rank, and the ranks write into one another's file.

Both ranks open the same checkpoint. Barriers make the order of their writes the same in every trial: what happens
now and then in a real job happens here always.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ranks import on_ranks, show

STEPS, SIZE = 20, 4096


def log(rank: int, path: Path, main_only: bool) -> int:
    """Write one line per step, and return by how many lines the file has too many."""
    for step in range(STEPS):
        if rank == 0 or not main_only:
            with path.open("a") as file:
                file.write(f"{step},0.5\n")
    dist.barrier()
    return len(path.read_text().splitlines()) - STEPS


def save(rank: int, path: Path, main_only: bool) -> int:
    """Write the state of this rank in two halves, and return how many bytes are not main's."""
    writes = rank == 0 or not main_only
    state = bytes([65 + rank]) * SIZE
    for rank_in_turn in range(2):
        if writes and rank == rank_in_turn:
            file = path.open("wb")  # closed below, after the other rank has written
            file.write(state[: SIZE // 2])
            file.flush()
        dist.barrier()
    if writes:
        if rank == 0:
            file.write(state[SIZE // 2 :])
        file.close()
    dist.barrier()
    return SIZE - path.read_bytes().count(b"A")


def both(folder: Path, rank: int) -> list[int]:
    return [
        write(rank, folder / f"{write.__name__}-{main_only}", main_only)
        for main_only in (False, True)
        for write in (log, save)
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        lines, torn, main_lines, main_torn = on_ranks(partial(both, Path(folder)))[0]
    show("wrong", f"every rank logs, lines too many for {STEPS} steps", lines)
    show("right", f"rank 0 logs, lines too many for {STEPS} steps", main_lines)
    show("wrong", f"every rank saves, bytes of {SIZE} in the checkpoint that are not rank 0's", torn)
    show("right", f"rank 0 saves, bytes of {SIZE} that are not rank 0's", main_torn)
