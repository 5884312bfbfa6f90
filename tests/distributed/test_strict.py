"""What is the same to the last bit: resumes on the same ranks, and `repro=strict` on any of its ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from helpers import FAKE, NARROW, Case, gang, losses, train_here, weights
from lockstep.checkpoint import reading
from lockstep.checkpoint.reading import latest_valid

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

# 242 examples in batches of 50: five steps an epoch, the last of 42. Six steps cross into the second.
COMMON = (
    *FAKE,
    "dataset.examples=242",
    "batch=50",
    "steps=6",
    "optimizer=sgd",
    "optimizer.lr=0.05",
    "train.ema=0.9",
    "train.clip_norm=5",
)
DIGITS = (NARROW, "model.dropout=0.3")
STRICT = (*COMMON, *DIGITS, "precision=bf16", "repro=strict")
# Not in bfloat16: on some CPUs torch 2.15 computes the weight gradient of a strided convolution over a 1x1 map
# from memory that was never written.
MEAN = ("train.ema=null", "train.swa_from=1", "train.swa_every=1", "train.eval_batch=48")
NORMED = (*COMMON, "repro=strict", "model=test_resnet", "dataset.size=16", "steps=3", *MEAN)
EXACT = (*COMMON, *DIGITS, "precision=fp64", "strategy=ddp")
DDP = (*COMMON, *DIGITS, "precision=bf16", "strategy=ddp")


def fingerprint(run: Path) -> str:
    """A hash over parameters, buffers, average, optimizer, scaler and counters of the newest checkpoint."""
    newest = latest_valid(run / "checkpoints")
    assert newest is not None
    digest = hashlib.sha256()
    loaded = reading.read_checkpoint(newest)
    progress = loaded.facts["progress"]
    digest.update(repr([progress[key] for key in ("step", "best", "best_step")]).encode())
    digest.update(repr((loaded.state["scaler"], loaded.state.get("ema_updates"))).encode())
    for tensors in (loaded.model, loaded.ema or {}):
        for name, tensor in sorted(tensors.items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    for number, entry in sorted(loaded.state["optimizer"]["state"].items()):
        digest.update(repr(number).encode() + entry["momentum_buffer"].contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Strict runs on 1, 2 and 4 ranks, and one that was stopped on four and on two and ended on one.

    Beside them an exact one in float64 that goes on from one to three.
    """
    root = tmp_path_factory.mktemp("strict")
    moved, exact = root / "moved", root / "exact moved"

    def on(ranks: int) -> list[Case]:
        stopped = [
            Case(moved, STRICT, stop_at=2),
            Case(exact, EXACT, stop_at=2),
        ]
        return [Case(root / f"{ranks}", STRICT), Case(root / f"bn{ranks}", NORMED), *stopped]

    gang(root / "gang4", 4, on(4))
    gang(root / "gang2", 2, on(2))
    train_here(moved, *STRICT)
    train_here(exact, *EXACT, "strategy=single", "train.micro_batches=5", stop_at=1)
    gang(root / "gang3", 3, [Case(exact, EXACT)])
    return {
        "moved": moved,
        "exact moved": exact,
        "exact": train_here(root / "exact", *EXACT, "strategy=single").path,
        **{str(ranks): root / str(ranks) for ranks in (2, 4)},
        **{f"bn{ranks}": root / f"bn{ranks}" for ranks in (2, 4)},
        "1": train_here(root / "1", *STRICT).path,
        "bn1": train_here(root / "bn1", *NORMED).path,
    }


@pytest.mark.parametrize("other", ["2", "4", "moved"])
def test_strict_runs_end_with_the_same_bits_on_any_ranks(strict: dict[str, Path], other: str) -> None:
    assert fingerprint(strict[other]) == fingerprint(strict["1"])
    pairs = zip(losses(strict[other]), losses(strict["1"]), strict=True)
    assert max(abs(a - b) / b for a, b in pairs) < 1e-15, "the logged mean adds the ranks' sums in their order"


@pytest.mark.parametrize("ranks", [2, 4])
def test_strict_runs_with_batch_norm_end_with_the_same_bits(strict: dict[str, Path], ranks: int) -> None:
    assert fingerprint(strict[f"bn{ranks}"]) == fingerprint(strict["bn1"])


def test_an_exact_run_goes_on_from_four_ranks_to_two_one_and_three_to_summation_order(
    strict: dict[str, Path],
) -> None:
    pairs = list(zip(losses(strict["exact moved"]), losses(strict["exact"]), strict=True))
    assert len(pairs) == 6
    assert max(abs(a - b) / b for a, b in pairs) < 1e-12
    expected = weights(strict["exact"])
    for name, tensor in weights(strict["exact moved"]).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12)


def test_three_ranks_resume_to_the_bit(tmp_path: Path) -> None:
    """On two, a sum has one order; on three it depends on the bucket of DDP."""
    stops = (1, 4)
    first = [Case(tmp_path / f"stop{stop}", DDP, stop_at=stop) for stop in stops]
    gang(tmp_path / "first", 3, [Case(tmp_path / "whole", DDP), *first])
    gang(tmp_path / "second", 3, [Case(tmp_path / f"stop{stop}", DDP) for stop in stops])
    for stop in stops:
        assert fingerprint(tmp_path / f"stop{stop}") == fingerprint(tmp_path / "whole")
        assert losses(tmp_path / f"stop{stop}") == losses(tmp_path / "whole")
