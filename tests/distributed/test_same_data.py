"""Every run sees the same data: one global sequence of samples and pixels, and each evaluation example once.

The first part cuts the real loader and preprocessing into ranks in this process, since the data path has no
collectives; the second trains and evaluates in real ranks.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import FAKE, NARROW, launch, losses, run_dir, run_until, train_here
from lockstep.core.data_protocols import Augment, Crop, Source, Split
from lockstep.core.plan import Plan
from lockstep.core.rng import permutation
from lockstep.core.run_dir import RunDir
from lockstep.core.tags import tagged
from lockstep.core.world import World
from lockstep.data.datasets.builtin import Digits, Fake
from lockstep.data.datasets.folder import Folder
from lockstep.data.loading.loaders import Resident, Streaming
from lockstep.data.loading.shards import Loader
from lockstep.data.transforms.augment import CropFlip
from lockstep.data.transforms.crops import RandomResizedCrop
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.data.transforms.mixing import Mix
from lockstep.job import worker
from lockstep.losses import CrossEntropy, MaskedLoss
from lockstep.metrics import AUROC, F1, Calibration, Recall
from lockstep.models import DigitNet
from lockstep.precision import FP32, FP64
from lockstep.scores import Scores
from lockstep.tasks import Multiclass
from lockstep.telemetry.sinks import fingerprints
from lockstep.training.evaluate import evaluate_model

pytestmark = pytest.mark.slow

# Six steps an epoch, the last of three examples; fourteen cross into the third epoch.
PLAN = Plan(examples=103, batch=20, total_steps=14, micro_batches=1, log_every=1, eval_every=1, save_every=1)
LOADERS = [Resident(), *(Streaming(workers=workers) for workers in (0, 3))]
Log = list[tuple[int, int, int, int]]


@dataclass(frozen=True)
class Data:
    """What is read and what is done to it."""

    source: Source
    split: Split
    augment: Augment
    mix: Mix | None

    @property
    def loaders(self) -> list[Any]:
        return LOADERS[1:] if self.source.crops_files else LOADERS


MIX = Mix(classes=10, mixup=0.4, cutmix=1.0)


def digits(_: Path) -> Data:
    return Data(Digits(), Digits().train(), CropFlip(), None)


def mixed_digits(_: Path) -> Data:
    return Data(Digits(), Digits().train(), CropFlip(), MIX)


def boxes_of_files(folder: Path) -> Data:
    """JPEG files of many sizes, boxes cut from them while they are read, mixed."""
    for split in ("train", "val"):
        (folder / split / "a").mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(folder / "val" / "a" / "only.png")
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    for number in range(PLAN.examples):
        image = Image.fromarray(noise[: 24 + number, : 128 - number])
        image.save(folder / "train" / "a" / f"{number:03}.jpg")
    source = Folder(path=str(folder), decode_size=16, crop_from="file")
    augment = RandomResizedCrop()
    return Data(source, replace(source.train(), crop=Crop(augment.boxes, 3, (16, 16))), augment, MIX)


def sequence(data: Data, ranks: int, kind: Any, parts: int, after: int = 0) -> Log:
    """(step, epoch, index, hash of the pixels) of every example behind a step, in global order."""
    split = data.split
    form = {"device": torch.device("cpu"), "precision": FP32()}
    transforms = DeviceTransforms.of(
        data.source.preprocessing, data.augment, seed=3, mix=data.mix, cropped=data.source.crops_files, **form
    )
    log: Log = []
    for rank in range(ranks):
        here = World(rank=rank, local_rank=rank, size=ranks, local_size=ranks, device=torch.device("cpu"))
        feed = kind.feed(split, here)
        loader = Loader(
            world=here,
            plan=PLAN,
            seed=3,
            eval_batch=8,
            train_labels=split.labels,
            eval_labels=split.labels,
            train_feeds={0: feed},
            eval_feed=feed,
            partners=data.mix is not None,
            stride=parts,
        )
        for shard in transforms.train(loader.train(after=after)):
            for micro, _ in shard.micro_batches(parts):
                hashes = fingerprints(transforms.mixed(micro)[0]).tolist()
                examples = zip(micro.indices.tolist(), hashes, strict=False)
                log += [(micro.step, micro.epoch, index, seen) for index, seen in examples]
    return sorted(log, key=lambda line: line[0])  # stable: within a step, the ranks in order


@pytest.fixture(scope="module", params=[digits, mixed_digits, boxes_of_files], ids=lambda make: make.__name__)
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Data:
    return request.param(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def reference(data: Data) -> Log:
    """One rank, nothing in parallel, one micro-batch."""
    return sequence(data, 1, data.loaders[0], 1)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_ranks_loader_workers_and_micro_batches_do_not_change_the_data(
    reference: Log, data: Data, ranks: int
) -> None:
    for kind in data.loaders:
        for parts in (1, 4):
            assert sequence(data, ranks, kind, parts) == reference, (kind, parts)


def test_going_on_with_fewer_ranks_goes_on_with_the_same_sequence(reference: Log, data: Data) -> None:
    first = [line for line in sequence(data, 4, data.loaders[0], 1) if line[0] <= 4]
    then = [line for line in sequence(data, 2, Streaming(workers=1), 4, after=4) if line[0] <= 9]
    assert first + then + sequence(data, 1, data.loaders[0], 3, after=9) == reference


def test_an_epoch_of_the_sequence_has_each_sample_once_in_the_order_of_its_permutation(reference: Log) -> None:
    for epoch in (0, 1):
        assert [index for _, of, index, _ in reference if of == epoch] == permutation(3, epoch, 103).tolist()
    assert len({(epoch, index, seen) for _, epoch, index, seen in reference}) == len(reference)


# Real ranks. Dropout, mixing, and a last batch of two examples.
COMMON = (
    *FAKE,
    "dataset.examples=362",
    "batch=15",
    "steps=28",
    "precision=fp64",
    NARROW,
    "model.dropout=0.3",
    "optimizer=sgd",
    "train.mixup=0.4",
    "train.cutmix=1",
    "loss.label_smoothing=0.1",
    "telemetry.samples=true",
    "checkpoint.every=5",
)
PIECES = {2: 3, 4: 1}
SIZES = [(1, 1), (1, 256), (7, 1), (7, 3), (1003, 50), (1003, 256)]


def scores(here: World, n: int, block: int) -> dict[str, float]:
    """A fixed network's scores on `n` examples."""
    source = Fake(examples=4 * n, classes=10, channels=1, size=8)
    train, val = source.train(), source.eval()
    torch.manual_seed(0)
    metrics = {"calibration": Calibration(), "f1": F1(), "recall": Recall(average="none")}
    if n > 100:  # the metric warns of classes without examples
        metrics["auroc"] = AUROC()
    further = Scores(metrics, 10, (), here)
    figures = dict(
        evaluate_model(
            DigitNet(width=8).build(10, (1, 8, 8)).double(),
            task=Multiclass(),
            loss=MaskedLoss(CrossEntropy().build(10, train.labels), tolerates_broken=False),
            loader=Loader(
                world=here,
                plan=PLAN,
                seed=0,
                eval_batch=block,
                train_labels=train.labels,
                eval_labels=val.labels,
                train_feeds={0: Resident().feed(train, here)},
                eval_feed=Resident().feed(val, here),
            ),
            transforms=DeviceTransforms.of(
                source.preprocessing, CropFlip(), device=here.device, precision=FP64(), seed=0
            ),
            precision=FP64(),
            world=here,
            observers=(further,),
        )
    )
    return {**figures, **tagged(further.compute())}


def exit_as_rank(folder: Path) -> None:
    """What a rank does: its part of the runs that are listed, then every evaluation."""
    with worker.join(device="cpu", backend="gloo", timeout=240, threads=1) as here:
        for path, stop_at in json.loads((folder / "cases.json").read_text()):
            run_until(here, RunDir(Path(path)), stop_at)
        figures = [scores(here, n, block) for n, block in SIZES]
        (folder / f"scores{here.rank}.json").write_text(json.dumps(figures))
    sys.exit(0)


def ranks_do(root: Path, ranks: int, cases: dict[Path, int | None]) -> list[list[dict[str, float]]]:
    """Train the runs, each to where it is asked to stop, and evaluate; the scores of each rank."""
    folder = root / f"gang{ranks}"
    folder.mkdir()
    for path in cases:
        micro = f"train.micro_batches={PIECES[ranks]}"
        run_dir(path, f"launcher.ranks={ranks}", "launcher.threads=1", "strategy=ddp", *COMMON, micro)
    (folder / "cases.json").write_text(json.dumps([(str(path), stop_at) for path, stop_at in cases.items()]))
    launch(exit_as_rank, folder, ranks)
    return [json.loads((folder / f"scores{rank}.json").read_text()) for rank in range(ranks)]


def samples(path: Path) -> list[tuple[int, ...]]:
    """What the ranks of a run have logged, in global order."""
    files = sorted((path / "logs").glob("rank*.samples.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [tuple(line[key] for key in ("step", "epoch", "index", "hash")) for line in sorted(lines, key=by_step)]


def by_step(line: dict[str, int]) -> int:
    return line["step"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on 1, 2 and 4 ranks, one that goes from 4 to 2 to 1, and the scores on each number of ranks."""
    root = tmp_path_factory.mktemp("runs")
    scores_by_ranks = {4: ranks_do(root, 4, {root / "4": None, root / "resumed": 12})}
    assert len((root / "resumed" / "logs" / "rank3.samples.jsonl").read_text().splitlines()) > 10 * 3
    # As after a kill: the newest checkpoint is older than the last steps that were logged.
    shutil.rmtree(max((root / "resumed" / "checkpoints").glob("step-*")))
    scores_by_ranks[2] = ranks_do(root, 2, {root / "2": None, root / "resumed": 9})
    train_here(root / "resumed", *COMMON, "train.micro_batches=4")
    train_here(root / "1", *COMMON, "train.micro_batches=4")
    (root / "scores.json").write_text(json.dumps(scores_by_ranks))
    return root


@pytest.mark.parametrize("run", ["2", "4", "resumed"])
def test_the_logs_of_real_ranks_are_one_sequence(root: Path, run: str) -> None:
    expected = samples(root / "1")
    assert len(expected) == 362 + 45
    assert samples(root / run) == expected


@pytest.mark.parametrize("run", ["2", "4", "resumed"])
def test_so_are_the_losses_with_dropout_and_mixing(root: Path, run: str) -> None:
    assert losses(root / run) == pytest.approx(losses(root / "1"), rel=1e-12)


# Three ranks are in test_equal_runs.py.
@pytest.mark.parametrize("ranks", ["2", "4"])
def test_evaluation_is_that_of_one_process_on_any_number_of_ranks(root: Path, ranks: str) -> None:
    expected = [scores(World.solo(), n, block) for n, block in SIZES]
    for rank, figures in enumerate(json.loads((root / "scores.json").read_text())[ranks]):
        metrics = [{tag: value for tag, value in sample.items() if tag.startswith("metric/")} for sample in expected]
        means = [{tag: value for tag, value in sample.items() if "/" not in tag} for sample in expected]
        # Sums of losses are equal to summation order, metrics to the bit. Only main has them.
        assert [{tag: figure[tag] for tag in means[0]} for figure in figures] == [
            pytest.approx(sample, rel=1e-12) for sample in means
        ]
        main_has = [{tag: figure[tag] for tag in figure if tag.startswith("metric/")} for figure in figures]
        assert repr(main_has) == repr(metrics if rank == 0 else [{}] * len(SIZES))  # a class without examples is NaN
