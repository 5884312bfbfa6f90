"""The first promise: the same losses and weights, to summation order, on any number of ranks.

In float64, where summation order is worth 1e-15: a wrong scale, sample, mask or statistic cannot hide there. In
float32 a difference of 1e-7 flips a ReLU now and then and grows, on each CPU in its own way, so only the first steps
are compared, and by the largest error that sums of this length can have.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import FAKE, NARROW, Case, Gang, losses, records, train_here, weights

pytestmark = [pytest.mark.slow, pytest.mark.numerics]

# 182 examples in batches of 60: four steps an epoch, the last of two examples, so that of three ranks one has an
# empty shard. Six steps cross into the second epoch.
BATCH = 60
BASE = (
    *FAKE,
    "dataset.examples=182",
    f"batch={BATCH}",
    "steps=6",
    "optimizer=sgd",
    "optimizer.lr=0.05",
    "train.clip_norm=5",
    "train.ema=0.9",
)
COMMON = (*BASE, "loss.label_smoothing=0.1")
DIGITS = (NARROW, "model.dropout=0.3")
PLAIN = (*DIGITS, "precision=fp64")
NORMED = (
    "model=test_resnet",
    "model.drop_rate=0.2",
    "model.drop_path_rate=0.2",
    "dataset.size=16",
    "batch=24",
    "steps=4",
    "train.eval_every=4",
    "precision=fp64",
)
# No vision transformer takes the empty shard of the last global batch.
ATTENTION = ("model=test_vit", "batch=24", "steps=4", "model.drop_rate=0.2", "dataset.size=32", "precision=fp64")
STRATEGIES = ("ddp", "allreduce", "allreduce_hooks", "fsdp", "zero", "accelerate", "pipeline")
# Shards with other classes have other weights; the last global batch has two examples.
WEIGHTS = "loss.class_weights=[1,2,0.5,1,4,1,0,1,1,3]"
# Frozen batch norms keep their statistics; layers are thawed after two steps, and others have rates of their own.
TUNED = (
    *NORMED,
    "train.freeze=[conv1,bn1,layer1]",
    "optimizer.layer_decay=0.7",
    "optimizer.head_lr=0.1",
    "train.sampling=balanced",
)
FROZEN = {
    "frozen": (*TUNED, "train.freeze=[backbone]", "train.micro_batches=2"),
    "thawed": (*TUNED, "train.freeze_until=2"),
}
LOSSES = {
    "weights": (WEIGHTS, "loss.label_smoothing=0.1"),
    "balanced": ("loss.balanced=true", "train.mixup=0.4", "train.micro_batches=2"),
    "bce": ("loss=bce", "loss.label_smoothing=0.1", "loss.sum_classes=true", "train.micro_batches=4"),
    "bce-mixed": ("loss=bce", "loss.threshold=0.2", "train.cutmix=1"),
    "repeated": (
        *("train.repeats=3", "train.erase=0.5", "train.erase_mode=pixel", "train.micro_batches=2"),
        *("train.mixup=0.4", "train.cutmix=1", "train.mix_by=batch", "train.mix_prob=0.8", "train.mix_until=5"),
    ),
    "focal": ("loss=focal", WEIGHTS, "train.micro_batches=2"),
}


# Which strategy is tried in what on how many ranks: each in everything. A thawed network has batch norm, and whole
# batches on two ranks, under all of them.
MICRO_BATCHES = [("ddp", 1, 2), ("ddp", 1, 3), *((strategy, 4, 3) for strategy in STRATEGIES)]
BATCH_NORM = [("ddp", 3), ("fsdp", 2), ("pipeline", 2)]
# Where the backbone is frozen, a pipeline has stages that train nothing.
FREEZING = [
    ("ddp", "frozen", 2),
    ("pipeline", "frozen", 3),
    *((strategy, "thawed", 2) for strategy in STRATEGIES),
]

# What a hook or a switch does to a bucket does not depend on the ranks.
TWO = {
    f"hook-{hook}": (*COMMON, *DIGITS, "steps=4", "strategy=ddp", f"strategy.comm_hook={hook}")
    for hook in ("none", "fp16", "bf16")
}
TWO["tuned"] = (
    *COMMON,
    *PLAIN,
    "strategy=ddp",
    "strategy.bucket_mb=0.1",
    "strategy.gradient_as_bucket_view=false",
    "strategy.static_graph=false",
    "strategy.find_unused_parameters=true",
)
AGAIN = (*COMMON, *NORMED, "model.grad_checkpointing=true")
TWO["again-fsdp"] = (*AGAIN, "strategy=fsdp")
SIZES = (*COMMON, *NORMED, "train.sizes={0: 8, 2: [16,12], 75%: 16}")
TWO |= {f"sizes-{strategy}": (*SIZES, f"strategy={strategy}") for strategy in ("fsdp", "pipeline")}
# Five blocks of images for the statistics of batch norm: of two ranks, one has a block fewer.
MEAN = (*COMMON, *NORMED, "train.ema=null", "train.swa_from=2", "train.swa_every=1", "train.eval_batch=36")
TWO |= {f"mean-{strategy}": (*MEAN, f"strategy={strategy}") for strategy in ("ddp", "fsdp", "pipeline")}
TWO["bn-replicas"] = (*COMMON, *NORMED, "strategy=fsdp", "strategy.replicas=2")
# With an empty shard.
STAGED = ("strategy=pipeline", "strategy.cuts=[3,9]")
THREE = {
    "fp32": (*COMMON, *DIGITS, "strategy=ddp"),
    "streaming": (*COMMON, *PLAIN, "strategy=ddp", "loader=streaming", "loader.workers=2"),
    **{f"loss-{name}": (*BASE, *PLAIN, *words, "strategy=ddp") for name, words in LOSSES.items()},
    "attention": (*COMMON, *ATTENTION, "strategy=ddp"),
    "attention-stages": (*COMMON, *ATTENTION, "strategy=pipeline", "train.micro_batches=4"),
    "gpipe": (*COMMON, *PLAIN, *STAGED, "strategy.schedule=gpipe", "train.micro_batches=4"),
    "1f1b": (*COMMON, *PLAIN, *STAGED, "strategy.schedule=1f1b", "train.micro_batches=4"),
    "again-ddp": (*AGAIN, "strategy=ddp"),
    "pipeline-mixed": (*BASE, *PLAIN, *LOSSES["balanced"], *STAGED),
}


# On one rank.
REFERENCES = {
    "plain": (*COMMON, *PLAIN),
    "micro": (*COMMON, *PLAIN, "train.micro_batches=4"),
    "attention": (*COMMON, *ATTENTION),
    "bn": (*COMMON, *NORMED),
    "again": AGAIN,
    "sizes": SIZES,
    "mean": MEAN,
    **{name: (*BASE, *PLAIN, *words) for name, words in LOSSES.items()},
    **{name: (*BASE, *words) for name, words in FROZEN.items()},
}


def cases(folder: Path, ranks: int) -> dict[str, Case]:
    """What is tried on so many ranks."""
    jobs = {
        f"{strategy}-{micro}": (*COMMON, *PLAIN, f"strategy={strategy}", f"train.micro_batches={micro}")
        for strategy, micro, on in MICRO_BATCHES
        if on == ranks
    }
    jobs |= {
        f"{strategy}-bn": (*COMMON, *NORMED, f"strategy={strategy}") for strategy, on in BATCH_NORM if on == ranks
    }
    jobs |= {
        f"{name}-{strategy}": (*BASE, *FROZEN[name], f"strategy={strategy}")
        for strategy, name, on in FREEZING
        if on == ranks
    }
    jobs |= TWO if ranks == 2 else THREE
    return {name: Case(folder / name, overrides) for name, overrides in jobs.items()}


class Runs(dict[str, Path]):
    """The runs on some ranks, by their names, each trained when a test first asks for it."""

    def __init__(self, folder: Path, gang: Gang | None) -> None:
        super().__init__()
        self.folder, self.gang = folder, gang
        self.cases = cases(folder, gang.ranks) if gang else {}

    def __missing__(self, name: str) -> Path:
        if self.gang is None:
            self[name] = train_here(self.folder / name, *REFERENCES[name]).path
        else:
            self.gang.train(self.cases[name])
            self[name] = self.cases[name].path
        return self[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Runs]]:
    """The runs on one, two and three ranks."""
    root = tmp_path_factory.mktemp("runs")
    with Gang(root / "gang2", 2) as two, Gang(root / "gang3", 3) as three:
        yield {1: Runs(root / "1", None), 2: Runs(root / "2", two), 3: Runs(root / "3", three)}


def largest_difference(one: Path, other: Path) -> float:
    """The largest relative difference of the losses of two runs, step by step."""
    pairs = zip(losses(one), losses(other), strict=True)
    return max(abs(a - b) / abs(a) for a, b in pairs)


# The run on one rank, the ranks, and the run on them.
ALIKE = [
    *(("plain", ranks, f"{strategy}-{micro}") for strategy, micro, ranks in MICRO_BATCHES),
    *((name, 3, f"loss-{name}") for name in LOSSES),
    *(("bn", ranks, f"{strategy}-bn") for strategy, ranks in BATCH_NORM),
    *(("attention", 3, cut) for cut in ("attention", "attention-stages")),
    ("plain", 1, "micro"),
    ("plain", 2, "tuned"),
    ("bn", 2, "again-fsdp"),
    ("bn", 2, "bn-replicas"),
    ("again", 3, "again-ddp"),
    ("sizes", 2, "sizes-fsdp"),
    ("sizes", 2, "sizes-pipeline"),
]


@pytest.mark.parametrize(("alone", "ranks", "name"), ALIKE)
def test_losses_do_not_depend_on_strategy_ranks_accumulation_or_the_cut_of_a_batch(
    runs: dict[int, Runs], alone: str, ranks: int, name: str
) -> None:
    assert largest_difference(runs[1][alone], runs[ranks][name]) < 1e-12


def test_activations_that_are_computed_again_change_no_bit(runs: dict[int, Runs]) -> None:
    assert losses(runs[1]["again"]) == losses(runs[1]["bn"])
    actual, expected = weights(runs[1]["again"]), weights(runs[1]["bn"])
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("strategy", "name", "ranks"), FREEZING)
def test_what_is_frozen_is_so_on_any_number_of_ranks(
    runs: dict[int, Runs], strategy: str, name: str, ranks: int
) -> None:
    assert largest_difference(runs[1][name], runs[ranks][f"{name}-{strategy}"]) < 1e-12
    expected, actual = weights(runs[1][name]), weights(runs[ranks][f"{name}-{strategy}"])
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_a_plain_mean_and_its_statistics_do_not_depend_on_the_ranks(runs: dict[int, Runs], strategy: str) -> None:
    alone, several = runs[1]["mean"], runs[2][f"mean-{strategy}"]
    expected, actual = (load_file(run / "checkpoints/step-00000004/ema.safetensors") for run in (alone, several))
    for key, tensor in expected.items():
        torch.testing.assert_close(actual[key], tensor, rtol=1e-9, atol=1e-9)
    (reference,), (ours,) = ([line["loss/val_ema"] for line in records(run)[-1:]] for run in (alone, several))
    assert ours == pytest.approx(reference, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 3])
def test_weights_and_evaluation_agree_at_the_end(runs: dict[int, Runs], ranks: int) -> None:
    expected = weights(runs[1]["plain"])
    actual = weights(runs[ranks]["ddp-1"])
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-9, atol=1e-9)
    reference = [line["acc/val_top1"] for line in records(runs[1]["plain"]) if "acc/val_top1" in line]
    ours = [line["acc/val_top1"] for line in records(runs[ranks]["ddp-1"]) if "acc/val_top1" in line]
    assert ours == reference
    epochs = [
        [line["loss/train_epoch"] for line in records(run) if "loss/train_epoch" in line]
        for run in (runs[1]["plain"], runs[ranks]["ddp-1"])
    ]
    assert len(epochs[0]) > 1
    assert epochs[1] == pytest.approx(epochs[0], rel=1e-12)


def test_float32_begins_as_float64_does_on_one_rank(runs: dict[int, Runs]) -> None:
    # The longest sum is a gradient of the first layer: over the 64 pixels of each image of a batch.
    bound = BATCH * 64 * torch.finfo(torch.float32).eps
    assert losses(runs[3]["fp32"])[:3] == pytest.approx(losses(runs[1]["plain"])[:3], rel=bound)


def test_streaming_gives_the_losses_of_resident_to_the_bit(runs: dict[int, Runs]) -> None:
    assert losses(runs[3]["streaming"]) == losses(runs[3]["ddp-1"])


@pytest.mark.parametrize("hook", ["fp16", "bf16"])
def test_a_communication_hook_changes_the_gradients_by_rounding_only(runs: dict[int, Runs], hook: str) -> None:
    difference = largest_difference(runs[2]["hook-none"], runs[2][f"hook-{hook}"])
    # A step along a gradient of at most 5 lowers the loss, which stays above 1, by 0.05 * 5**2 at the most, and a
    # rounding to bfloat16 changes that by 2**-9: in four steps by 0.01.
    assert 0 < difference < 0.01


def test_both_schedules_of_a_pipeline_give_the_same_bits(runs: dict[int, Runs]) -> None:
    assert largest_difference(runs[1]["plain"], runs[3]["gpipe"]) < 1e-12
    assert losses(runs[3]["1f1b"]) == losses(runs[3]["gpipe"])
    actual, expected = weights(runs[3]["1f1b"]), weights(runs[3]["gpipe"])
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_a_pipeline_evaluates_and_mixes_as_one_rank_does(runs: dict[int, Runs]) -> None:
    assert largest_difference(runs[1]["balanced"], runs[3]["pipeline-mixed"]) < 1e-12
    for key in ("acc/val_top1", "acc/val_ema_top1", "loss/val", "loss/train_epoch", "optim/grad_norm"):
        expected, actual = (
            [line[key] for line in records(run) if key in line] for run in (runs[1]["plain"], runs[3]["1f1b"])
        )
        assert len(expected) > 1
        assert actual == pytest.approx(expected, rel=1e-12)


def test_data_parallel_without_a_gpu_is_the_single_run_and_says_so(
    runs: dict[int, Runs], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train_here(tmp_path / "run", *COMMON, *PLAIN, "strategy=dp")
    assert losses(run) == losses(runs[1]["plain"])
    assert "strategy=dp has no second GPU to split a batch over" in capsys.readouterr().out
