"""What fits into memory: the number of `train.micro_batches=auto`."""

from __future__ import annotations

import re
import resource
import sys
from typing import Any

import pytest
import torch

from helpers import resolved
from lockstep.core.errors import InputError
from lockstep.core.world import World
from lockstep.runtime.host import GB
from lockstep.training import micro_batch_search
from lockstep.training.micro_batch_search import choose_micro_batches, fits, oom_advice
from thread_ranks import ThreadRanks

# A global batch of 64 is 22 examples on the largest of three shards.
WORLD = World(rank=0, local_rank=0, size=3, local_size=3, device=torch.device("cpu"))
PLENTY = 10**6


# With the margin, 22 examples need the room of 27 (21 would need that of 26), 11 of 14, 6 of 8, and one that of two.
@pytest.mark.parametrize(
    ("rooms", "micro_batches"),
    [((27, 27, 27), 1), ((27, 26, 27), 2), ((27, 14, 13), 4), ((100, 100, 2), 22), ((100, 1, 100), None)],
)
def test_all_ranks_take_the_micro_batches_that_the_smallest_one_needs(
    rooms: tuple[int, ...], micro_batches: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = resolved("batch=65", "train.micro_batches=auto", "device=cpu", "launcher.ranks=1")

    def fits(job: Any, world: World, examples: int, held_gb: float) -> bool:
        assert held_gb == 0.5, "the images stay on the device beside each step"
        return examples <= rooms[world.rank]

    def choice(world: World) -> int | str:
        try:
            return choose_micro_batches(job, world, held_gb=0.5)
        except InputError as error:
            return str(error)

    monkeypatch.setattr(micro_batch_search, "fits", fits)
    choices = ThreadRanks(3, monkeypatch).run(choice)
    if micro_batches is not None:
        assert choices == [micro_batches] * 3
    else:
        assert len(set(choices)) == 1
        assert "does not fit into the memory of rank 1 with a single example" in str(choices[0])


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux only")
@pytest.mark.parametrize(
    ("held_gb", "step_gb", "fitting"), [(0, 3, True), (0, 5, False), (2, 1, True), (2, 3, False)]
)
def test_a_step_fits_if_it_has_room_in_a_ranks_share_of_the_memory_beside_what_is_held(
    held_gb: float, step_gb: int, fitting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = World(rank=0, local_rank=0, size=2, local_size=2, device=torch.device("cpu"))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr(micro_batch_search, "available_memory", lambda: 8 * GB)  # 4 GB for each rank
    monkeypatch.setattr(
        micro_batch_search,
        "dry_run_step",
        lambda job, world, examples: lambda: torch.empty(int(step_gb * GB), dtype=torch.uint8),
    )
    assert fits(resolved("device=cpu"), two, 1, held_gb) == fitting
    assert resource.getrlimit(resource.RLIMIT_AS) == limits, "training itself is not bounded"


def evaluate() -> None:
    """Run out of memory in a frame of the name of an evaluation."""
    raise MemoryError


def train() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("place", "room", "sentence"),
    [
        (evaluate, PLENTY, r"^out of memory in the evaluation after step 6; use train\.eval_batch=50$"),
        (train, PLENTY, r"at step 7 with micro-batches of 22 examples; train\.micro_batches=4 fits"),
        (train, 1, r"at step 7 with micro-batches of 22 examples; not even single examples fit"),
    ],
)
def test_a_rank_that_ran_out_of_memory_is_told_what_fits(
    place: Any, room: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch_search, "fits", lambda job, world, examples, held_gb: examples <= room)
    job = resolved("batch=130", "train.micro_batches=2", "train.eval_batch=100", "device=cpu", "launcher.ranks=1")
    with pytest.raises(MemoryError) as caught:
        place()
    assert re.search(sentence, str(oom_advice(caught.value, job, WORLD, 7)))
