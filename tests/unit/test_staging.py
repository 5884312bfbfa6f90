"""Copies of a state in host memory. The GPU is faked: its tensors lie on the host; the staging buffer is real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.checkpoint.state import HostCopies, gathered, map_tensors, with_own_storage
from lockstep.core.world import World
from thread_ranks import ThreadRanks


@pytest.fixture
def _staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.checkpoint.state.on_gpu", lambda tensor: True)


def state() -> dict[str, Any]:
    """Tensors of all kinds that occur in a state: scalars, empty tensors, 16-bit formats, channels last."""
    torch.manual_seed(0)
    return {
        "step": torch.tensor(7),
        "weights": [torch.randn(3, 5), torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)],
        "short": {"bf16": torch.randn(7).bfloat16(), "mask": torch.tensor([True, False, True])},
        "none": torch.empty(0, 3),
        "lr": 0.1,
    }


def leaves(tree: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    map_tensors(tree, lambda tensor: tensors.append(tensor) or tensor)
    return tensors


def assert_equal(actual: Any, expected: Any) -> None:
    assert actual["lr"] == expected["lr"]
    for copied, original in zip(leaves(actual), leaves(expected), strict=True):
        assert copied.dtype == original.dtype
        assert torch.equal(copied, original)
        assert copied.is_contiguous()


@pytest.mark.usefixtures("_staged")
def test_staged_copies_are_equal_and_lie_in_one_buffer_that_is_used_again() -> None:
    copies, original = HostCopies(), state()
    first = copies.of(original)
    assert_equal(first, original)
    assert len({leaf.untyped_storage().data_ptr() for leaf in leaves(first) if leaf.numel()}) == 1
    changed = map_tensors(original, lambda tensor: tensor.clone().zero_())
    second = copies.of(changed)
    assert_equal(second, changed)
    assert_equal(first, changed)  # overwritten


def test_copies_of_the_hosts_own_tensors_stay_what_they_are() -> None:
    copies, original = HostCopies(), state()
    first = copies.of(original)
    assert_equal(first, original)
    copies.of(map_tensors(original, lambda tensor: tensor.clone().zero_()))
    assert_equal(first, original)
    assert not {leaf.data_ptr() for leaf in leaves(first)} & {
        leaf.data_ptr() for leaf in leaves(original) if leaf.numel()
    }


@pytest.mark.usefixtures("_staged")
def test_staged_copies_are_written_each_alone(tmp_path: Path) -> None:
    copied = HostCopies().of({"large": torch.zeros(100_000), "small": torch.ones(10)})
    torch.save(map_tensors({"small": copied["small"]}, with_own_storage), tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 10_000
    save_file(copied, tmp_path / "weights.safetensors")
    assert_equal({**load_file(tmp_path / "weights.safetensors"), "lr": 1}, {**copied, "lr": 1})


def test_main_saves_the_tensors_of_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has every second tensor; the others are shapes without numbers there."""
    numbers = [torch.full((2, number + 1), number + 0.5) for number in range(3)]

    def saved(world: World) -> list[Tensor]:
        own = {
            str(number): tensor.clone() if number % 2 == world.rank else tensor.to("meta")
            for number, tensor in enumerate(numbers)
        }
        return leaves(gathered(own, keep=world.is_main))

    main, other = ThreadRanks(2, monkeypatch).run(saved)
    assert [tensor.tolist() for tensor in main] == [tensor.tolist() for tensor in numbers]
    assert [tensor.is_meta for tensor in other] == [True, False, True]
