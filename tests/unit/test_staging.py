"""Copies of a state in host memory."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint.state import gathered, host_copies, map_tensors
from lockstep.core.world import World
from lockstep.strategy import Pipeline
from thread_ranks import ThreadRanks


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


def test_copies_of_the_hosts_own_tensors_stay_what_they_are() -> None:
    original = state()
    first = host_copies(original)
    assert_equal(first, original)
    own, copied = ({leaf.data_ptr() for leaf in leaves(tree) if leaf.numel()} for tree in (original, first))
    assert not own & copied


def test_copies_of_a_gpus_tensors_are_there_when_they_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(Tensor):
        is_cuda, device = True, torch.device("cuda", 1)  # type: ignore[assignment]

    def empty(*shape: Any, pin_memory: bool, **options: Any) -> Tensor:
        events.append(f"a copy, pinned: {pin_memory}")
        return host(*shape, **options)

    def stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: events.append(f"wait for {device}"))

    events, host, numbers = list[str](), torch.empty, torch.rand(3)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    copies = host_copies([numbers, numbers.as_subclass(OnGpu), numbers.as_subclass(OnGpu)])
    assert events == ["a copy, pinned: True"] * 2 + ["wait for cuda:1"]
    assert all(torch.equal(copied, numbers) for copied in copies)


def test_a_tensor_that_is_at_two_places_of_a_state_is_made_whole_for_both() -> None:
    shared, own = torch.tensor([1.0]), torch.tensor([2.0])
    state = {"encoder": [shared], "decoder": {"weight": shared, "bias": own}, "buffer": shared}
    doubled = gathered(state, lambda tensors: [2 * tensor for tensor in tensors])
    assert doubled == {
        "encoder": [torch.tensor([2.0])],
        "decoder": {"weight": torch.tensor([2.0]), "bias": torch.tensor([4.0])},
        "buffer": torch.tensor([2.0]),
    }


def test_main_saves_the_tensors_of_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has every second tensor; the others are shapes without numbers there."""
    numbers = [torch.full((2, number + 1), number + 0.5) for number in range(3)]
    numbers += [torch.rand(2, 3, 2, 2).to(memory_format=torch.channels_last) for _ in range(2)]

    def saved(world: World) -> list[Tensor]:
        own = {str(n): tensor.to("cpu" if n % 2 == world.rank else "meta") for n, tensor in enumerate(numbers)}
        return leaves(gathered(own, partial(Pipeline().whole_tensors, keep=world.is_main)))

    main, other = ThreadRanks(2, monkeypatch).run(saved)
    assert [tensor.tolist() for tensor in main] == [tensor.tolist() for tensor in numbers]
    assert [tensor.is_meta for tensor in other] == [True, False, True, False, True]


def test_main_gets_the_tensors_of_three_stages_in_their_formats_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second tensor is on two ranks; the last rank has the most."""
    homes = [(0,), (1, 2), (2,), (2,), (1,), (2,)]
    dtypes = [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.float32, torch.bool]
    numbers = [torch.arange(n + 1).to(dtype) for n, dtype in enumerate(dtypes)]

    def saved(world: World) -> list[Tensor]:
        # Of the copies of one tensor, that of the first rank that has it is taken.
        own = [
            (tensor + (world.rank == 2 and n == 1)).to("cpu" if world.rank in ranks else "meta")
            for n, (tensor, ranks) in enumerate(zip(numbers, homes, strict=True))
        ]
        own[5] = numbers[5].to(own[5].device)
        return [*Pipeline().whole_tensors(own, keep=world.is_main)]

    main, *elsewhere = ThreadRanks(3, monkeypatch).run(saved)
    for tensor, expected in zip(main, numbers, strict=True):
        assert (tensor.dtype, tensor.device.type) == (expected.dtype, "cpu")
        assert torch.equal(tensor, expected)
    assert [[tensor.is_meta for tensor in tensors] for tensors in elsewhere] == [
        [1 + rank not in ranks for ranks in homes] for rank in range(2)
    ]
