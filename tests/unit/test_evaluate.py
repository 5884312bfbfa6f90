"""Exact evaluation: the same scores as a plain loop over every example."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.core.errors import InputError
from lockstep.core.model import best_classes
from lockstep.core.plan import Plan
from lockstep.core.protocols import Metric
from lockstep.core.tags import Monitor
from lockstep.core.world import World
from lockstep.data.datasets import Digits, Fake, Folder
from lockstep.data.datasets.arrays import ArraySplit
from lockstep.data.datasets.files import LISTINGS
from lockstep.data.loading.loaders import Resident, Streaming
from lockstep.data.loading.shards import EvalLoader
from lockstep.data.transforms.augment import CropFlip
from lockstep.data.transforms.device import DeviceTransforms
from lockstep.inference import evaluate as evaluate_command
from lockstep.inference.evaluate import write_files
from lockstep.inference.scoring import EvaluatedSplit, Evaluation, Part, Predicted, counts, csv_lines
from lockstep.losses import CrossEntropy, MaskedLoss
from lockstep.models import DigitNet
from lockstep.precision import BF16, FP32, FP64
from lockstep.scores import EvaluationBlock, EvaluationObserver, Scores
from lockstep.strategy import Single
from lockstep.tasks import Multiclass
from lockstep.training.evaluate import Patience, evaluate_model, outputs_of, weighted_views
from lockstep.training.predictions import MATRIX_CLASSES
from thread_ranks import ThreadRanks

pytestmark = pytest.mark.numerics


class Mean(nn.Module):
    """Classifies images as dark or bright by their mean."""

    def forward(self, images: Tensor) -> Tensor:
        level = images.mean((1, 2, 3))
        return torch.stack([-level, level], 1)


def two_greys(root: Path) -> Folder:
    """Twelve images of two classes, dark and bright, in each split."""
    for split in ("train", "val"):
        for label, level in (("a", 40), ("b", 220)):
            (root / split / label).mkdir(parents=True)
            for number in range(6):
                pixels = np.full((8, 8, 3), level + number, dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / label / f"{number}.png")
    return Folder(path=str(root), decode_size=8)


USUAL = {"block": 64, "kind": Resident(), "precision": FP64(), "loss": CrossEntropy(), "world": World.solo()}
QUIET = {"observers": (), "between": lambda done, blocks: None}


def scores(model: nn.Module, source: Any, **options: Any) -> Any:
    block, kind, precision, loss, world = ({**USUAL, **options}[key] for key in USUAL)
    val, observed = source.eval(), {key: options.get(key, value) for key, value in QUIET.items()}
    feed = {"eval_labels": val.labels.clone(), "eval_feed": kind.feed(val, world), "skip": val.skip}
    built = loss.build(source.classes, source.train().labels)
    return evaluate_model(
        model,
        task=Multiclass(),
        loss=MaskedLoss(built, tolerates_broken=val.skip > 0),
        loader=EvalLoader(world=options.get("of_loader", world), eval_batch=block, **feed),
        transforms=DeviceTransforms.of(
            source.preprocessing, CropFlip(), device=world.device, precision=precision, seed=0
        ),
        **{"precision": precision, "world": world, "views": 1, **observed},
    )


def digitnet(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return DigitNet(width=8, dropout=0.5).build(10, (1, 8, 8)).double()


def test_the_scores_are_those_of_one_plain_pass() -> None:
    model, split = digitnet(), Digits().eval()
    pixels = (split.images.double() / 255 - Digits.mean[0]) / Digits.std[0]
    with torch.no_grad():
        logits = model.eval()(pixels)
    ranked = logits.argsort(1, descending=True) == split.labels[:, None]
    actual = scores(model.train(), Digits())
    assert actual["loss"] == pytest.approx(F.cross_entropy(logits, split.labels).item(), rel=1e-12)
    assert actual["top1"] == pytest.approx(100 * ranked[:, 0].double().mean().item())
    assert actual["top5"] == pytest.approx(100 * ranked[:, :5].any(1).double().mean().item())


def test_the_loss_has_its_smoothing_back_after_an_evaluation() -> None:
    option = CrossEntropy(label_smoothing=0.3)
    loss = option.build(10, torch.arange(10))
    logits, labels = torch.eye(10), torch.arange(10)
    before = loss(logits, labels)
    scores(digitnet(), Digits(), loss=SimpleNamespace(build=lambda classes, labels: loss))
    assert torch.equal(loss(logits, labels), before)


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_ranks_score_as_one_does_with_mains_running_statistics(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Fake(examples=160, classes=10, channels=1, size=8)

    def normed(rank: int) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 10)).double()
        model[0].running_mean.fill_(rank)
        return model

    models = [normed(rank) for rank in range(3)]

    def evaluated(world: World) -> Any:
        Single().share_buffers(models[world.rank], world)
        return scores(models[world.rank], source, block=block, world=world)

    expected = scores(normed(0), source)
    for actual in ThreadRanks(3, monkeypatch).run(evaluated):
        assert actual == pytest.approx(expected, rel=1e-12)


class Numbered(EvaluationObserver):
    """Keeps the label of each example by its number."""

    def __init__(self) -> None:
        self.labels: dict[int, int] = {}

    def update(self, block: EvaluationBlock) -> None:
        self.labels |= dict(enumerate(block.labels.tolist(), start=block.first))


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_an_example_has_the_same_number_on_any_number_of_ranks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Fake(examples=160, classes=10, channels=1, size=8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()

    def numbered(world: World) -> dict[int, int]:
        predictions = Numbered()
        scores(model, source, block=block, world=world, observers=(predictions,))
        return predictions.labels

    by_rank = ThreadRanks(3, monkeypatch).run(numbered)
    assert by_rank[0] | by_rank[1] | by_rank[2] == dict(enumerate(source.eval().labels.tolist()))


def test_the_numbers_of_examples_are_dealt_to_the_ranks_that_share_the_loader() -> None:
    source = Fake(examples=160, classes=10, channels=1, size=8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
    solo, predictions = World.solo(), Numbered()
    stage: Any = SimpleNamespace(rank=2, size=3, device=solo.device, sum=lambda tensor: tensor)
    scores(model, source, block=7, world=stage, of_loader=solo, observers=(predictions,))
    assert predictions.labels == dict(enumerate(source.eval().labels.tolist()))


class Labels(Metric):
    """A metric, and its score: the labels in the order in which it gets them."""

    def build(self, classes: int) -> Labels:
        self.reset()
        return self

    def update(self, probabilities: Tensor, labels: Tensor) -> None:
        self.labels += labels.tolist()

    def compute(self) -> list[int]:
        return self.labels

    def reset(self) -> None:
        self.labels: list[int] = []


@pytest.mark.parametrize("block", [1, 7, 1000])
def test_a_metric_gets_the_whole_split_in_its_order_and_ranks_without_a_block_take_part(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Fake(examples=160, classes=10, channels=1, size=8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()

    def scored(world: World) -> tuple[list[float], list[tuple[int, int]]]:
        metrics, places = Scores({"labels": Labels()}, 10, [str(n) for n in range(40)], world), []
        scores(model, source, block=block, world=world, observers=(metrics,), between=lambda *at: places.append(at))
        return list(metrics.compute().values()), places

    rounds = -(-40 // (3 * block))
    (labels, places), *second_and_third = ThreadRanks(3, monkeypatch).run(scored)
    assert labels == source.eval().labels.tolist()
    assert places == [(done, rounds) for done in range(1, rounds + 1)]
    assert second_and_third == [([], places)] * 2, "`between` may wait for all ranks"


class Witness(EvaluationObserver):
    """Keeps what an evaluation calls, and whether a graph hangs on it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.graphs: set[bool] = set()

    def start(self) -> None:
        self.calls.append("start")

    def update(self, block: EvaluationBlock) -> None:
        self.calls.append("update")
        self.graphs |= {tensor.requires_grad for tensor in block[:-1]}


def test_an_evaluation_begins_its_predictions_anew_and_keeps_no_graph() -> None:
    witness = Witness()
    for _ in range(2):
        scores(digitnet(), Fake(examples=16, classes=10, channels=1, size=8), block=2, observers=(witness,))
    assert witness.calls == ["start", "update", "update"] * 2
    assert witness.graphs == {False}


def test_ranks_together_leave_out_no_more_images_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_greys(tmp_path)
    for name in ("a/0.png", "b/5.png"):  # the blocks of two ranks
        (tmp_path / "val" / name).write_bytes(b"no image")
    source = Folder(path=str(tmp_path), decode_size=8, skip=1)

    def refuses(world: World) -> bool:
        with pytest.raises(InputError, match=r"dataset\.skip is 1, but 2 images cannot be decoded"):
            scores(Mean(), source, kind=Streaming(workers=0), block=4, world=world)
        return True

    assert ThreadRanks(3, monkeypatch).run(refuses) == [True] * 3


def test_six_views_move_an_image_by_a_pixel_both_ways_for_half_of_the_weight() -> None:
    images = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    weights, views_of_image = zip(*weighted_views(images, 6), strict=True)
    assert weights == (0.25, 0.125, 0.125) * 2
    assert torch.equal(views_of_image[0], images)
    assert torch.equal(views_of_image[1][..., 1:, 1:], images[..., :-1, :-1])
    assert torch.equal(views_of_image[2][..., :-1, :-1], images[..., 1:, 1:])
    for plain, mirrored in zip(views_of_image[:3], views_of_image[3:], strict=True):
        assert torch.equal(plain.flip(-1), mirrored)


@pytest.mark.parametrize("views", [1, 2, 6])
def test_views_of_a_pixel_are_the_pixel_and_their_weights_add_up_to_one(views: int) -> None:
    images = torch.arange(6.0).view(2, 3, 1, 1)
    weighted = weighted_views(images, views)
    assert len(weighted) == views
    assert sum(weight for weight, _ in weighted) == 1
    assert all(torch.equal(view, images) for _, view in weighted)
    line = torch.arange(4.0).view(1, 1, 1, 4)
    for _, view in weighted_views(line, 6):
        assert view.shape == line.shape


class Seen(nn.Module):
    """Keeps the format of its images; its outputs are their means, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.formats: list[tuple[torch.dtype, bool]] = []

    def forward(self, images: Tensor) -> Tensor:
        self.formats.append((images.dtype, images.is_contiguous(memory_format=torch.channels_last)))
        return images.mean((1, 2, 3), dtype=torch.float32)[:, None].expand(-1, 2).bfloat16()


def test_outputs_are_averaged_in_the_wide_format_and_images_have_the_format_of_the_model() -> None:
    model, images = Seen(), torch.zeros(3, 2, 4, 5)
    images[:, :, :, :2] = torch.tensor([1.0, 1.1, 1.2]).view(3, 1, 1, 1)
    outputs = outputs_of(model, images, BF16(), torch.channels_last, 2)
    assert model.formats == [(torch.bfloat16, True)] * 2
    assert (outputs.dtype, outputs.shape) == (torch.float32, (3, 2))
    own = images.bfloat16().float().mean((1, 2, 3)).bfloat16().float()
    assert torch.equal(outputs[:, 0], own)
    assert outputs_of(model, images, FP64(), torch.contiguous_format, 1).dtype is torch.float64
    assert model.formats[-1] == (torch.float64, False)


@pytest.mark.parametrize("cut", [True, False])
def test_a_rank_without_a_block_takes_part_in_the_passes_of_a_model_that_is_cut(
    cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Fake(examples=160, classes=10, channels=1, size=8)

    def passes(world: World) -> int:
        calls = list[int]()
        model: Any = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).double()
        model.register_forward_hook(lambda module, inputs, _: calls.append(len(inputs[0])))
        if cut:
            model[1].bias.full_tensor = lambda: None  # as a tensor has that is cut
        scores(model, source, block=15, world=world)
        return len(calls)

    assert ThreadRanks(4, monkeypatch).run(passes) == [1, 1, 1, int(cut)]


@pytest.mark.parametrize(("total", "every", "numbers"), [(3000, 1500, "2 evaluations"), (1200, 1200, "1 evaluation")])
def test_patience_that_never_ends_a_run_is_refused_with_the_evaluations_of_the_run(
    total: int, every: int, numbers: str
) -> None:
    plan = Plan(
        examples=10, batch=10, total_steps=total, micro_batches=1, log_every=1, eval_every=every, save_every=1
    )
    with pytest.raises(InputError) as refused:
        Patience(limit=2).check(plan)
    assert str(refused.value) == (
        f"train.patience is 2, but the run has {numbers} (one every {every:,} of {total:,} steps), so it never ends "
        "early; use a smaller one, more epochs, or a smaller train.eval_every"
    )
    Patience().check(plan)
    assert Patience().ended([(1, 1.0), (2, 0.0)], Monitor(), plan) == ""
    assert Patience(limit=1).ended([], Monitor(), plan) == ""
    assert Patience(limit="50%").ended([(1500, 45.0), (3000, 44.0)], Monitor(), plan) == (
        "val top-1 has not been better than 45.00 % (step 1,500) for 1 evaluation; train.patience=50% ends the run"
    )


def test_evaluation_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scores(model, Digits(), precision=FP32())
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    scores(model.eval(), Digits(), precision=FP32())
    assert not model.training


@pytest.mark.parametrize("kind", [Resident(), Streaming(workers=0)], ids=repr)
def test_broken_images_do_not_count_and_a_split_of_them_alone_is_refused(tmp_path: Path, kind: Any) -> None:
    whole = two_greys(tmp_path)
    # One image of the dark class is bright: one error in twelve images, and then in ten.
    Image.fromarray(np.full((8, 8, 3), 255, dtype=np.uint8)).save(tmp_path / "val" / "a" / "0.png")
    assert scores(Mean(), whole, kind=kind, block=5)["top1"] == pytest.approx(100 * 11 / 12)
    for name in ("a/3.png", "b/5.png"):
        (tmp_path / "val" / name).write_bytes(b"no image")
    fewer = Folder(path=str(tmp_path), decode_size=8, skip=2)
    actual = scores(Mean(), fewer, kind=kind, block=5)
    for name in ("a/3.png", "b/5.png"):
        (tmp_path / "val" / name).unlink()
    LISTINGS.clear()
    assert actual["top1"] == pytest.approx(90)
    assert actual == pytest.approx(scores(Mean(), whole, kind=kind), rel=1e-12)
    for path in (tmp_path / "val").glob("*/*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(InputError, match="no image of the split can be decoded"):
        scores(Mean(), Folder(path=str(tmp_path), decode_size=8, skip=12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1e-5, 1.0, 311017.26, 1e30])
def test_written_values_are_read_back_to_the_same_number(scale: float, dtype: torch.dtype) -> None:
    values = scale * torch.randn(50, 2, dtype=dtype, generator=torch.Generator().manual_seed(0))
    split = ArraySplit(torch.zeros(50, 1, 1, 1, dtype=torch.uint8), values)
    card: Any = SimpleNamespace(names=("a", "b"), classes=2, targets="values")
    part = Part(EvaluatedSplit(split, values), 1, torch.ones(50, dtype=torch.bool), (values.flip(0),), {})
    _, *lines = csv_lines([Evaluation(card, [part], {}, {})])
    cells = [line.decode().strip().split(",")[1:] for line in lines]
    kind = {torch.float32: np.float32, torch.float64: np.float64}[dtype]
    assert np.array_equal(np.array(cells).astype(kind), torch.cat([values, values.flip(0)], 1).numpy())


def test_the_results_by_class_are_those_of_the_labels_and_leave_out_broken_images() -> None:
    labels = torch.tensor([0, 0, 0, 1, 2, 3])
    split = ArraySplit(torch.zeros(6, 1, 1, 1, dtype=torch.uint8), labels)
    answers = (torch.tensor([0, 1, 1, 1, 0, 0]), torch.tensor([1.0, 0.5, 0.5, 0.5, 1.0, 0.9]))
    card: Any = SimpleNamespace(names=("a", "b", "c", "d"), classes=4, targets="classes")
    result = Evaluation(card, [Part(EvaluatedSplit(split, labels), 1, torch.arange(6) < 5, answers, {})], {}, {})
    rows = [(row["name"], row["images"], row["top1"]) for row in result.rows]
    assert rows == [("a", 3, 100 / 3), ("b", 1, 100.0), ("c", 1, 0.0), ("d", 0, None)]
    assert [*result.lines()][-1] == {"sample": "5", "label": "d", "predicted": "", "probability": ""}
    facts = result.facts()
    assert facts["confusion"] == [[1, 2, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert (facts["images"], facts["skipped"]) == (5, 1)


def part_of(whole: list[bool], **place: str) -> Part:
    labels = torch.zeros(len(whole), dtype=torch.int64)
    split = ArraySplit(torch.zeros(len(whole), 1, 1, 1, dtype=torch.uint8), labels)
    return Part(
        EvaluatedSplit(split, labels, place=place), 1, torch.tensor(whole), (labels, torch.ones(len(whole))), {}
    )


def test_the_images_of_all_parts_are_counted_and_each_part_has_its_columns() -> None:
    parts = [part_of([True, False], fold="0"), part_of([True, False, False], fold="1", seed="2")]
    assert counts(parts) == {"images": 2, "skipped": 3}
    card: Any = SimpleNamespace(names=("a", "b"), classes=2, targets="classes")
    head, *rows = csv_lines([Evaluation(card, [part], {}, {}) for part in parts])
    assert head == b"sample,label,predicted,probability,fold,seed\n"
    assert rows[0] == b"0,a,a,1,0,\n"
    assert rows[-1] == b"2,a,,,1,2\n"


@pytest.mark.parametrize(
    ("word", "of_ranks"),
    [
        *((word, True) for word in ("launcher=inline", "launcher.ranks=2", "+launcher.ranks=2", "device=cpu")),
        *((word, False) for word in ("dataset=fake", "dataset.launcher=a", "data_root=device", "launchers=a")),
    ],
)
def test_a_word_is_about_the_ranks_by_the_group_of_its_key(
    word: str, of_ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(
        evaluate_command, "on_ranks", lambda call, words, device: calls.append((call.args[1], words, device))
    )
    evaluate_command.evaluate("RUN", [word], split="val", device=None, out=None)
    assert calls == [([], [word], None) if of_ranks else ([word], [], None)]


def test_each_split_and_each_other_data_has_its_own_files(tmp_path: Path) -> None:
    card: Any = SimpleNamespace(names=("a", "b"), classes=2, targets="classes")
    for split in ("train", "val", "test"):
        for other in ("", "-dataset.path=a", "-dataset.path=b"):
            write_files(tmp_path, {"split": split}, [Evaluation(card, [part_of([True])], {}, {})], "table", other)
    assert len([*tmp_path.glob("evaluation*.json")]) == len([*tmp_path.glob("predictions*.csv")]) == 9


@pytest.mark.parametrize(("classes", "title"), [(10, "each class:"), (11, "the 10 classes with the lowest top-1:")])
def test_ten_classes_are_all_shown(classes: int, title: str, capsys: pytest.CaptureFixture[str]) -> None:
    labels = torch.arange(classes)
    split = ArraySplit(torch.zeros(classes, 1, 1, 1, dtype=torch.uint8), labels)
    card: Any = SimpleNamespace(names=tuple(map(str, range(classes))), classes=classes, targets="classes")
    part = Part(EvaluatedSplit(split, labels), 1, labels >= 0, (labels, torch.ones(classes)), {})
    Evaluation(card, [part], {}, {}).show()
    assert capsys.readouterr().out.splitlines()[0] == title


@pytest.mark.parametrize(("classes", "columns"), [(MATRIX_CLASSES, 3), (MATRIX_CLASSES + 1, 2)])
def test_a_hundred_classes_have_their_log_odds(classes: int, columns: int) -> None:
    card: Any = SimpleNamespace(probabilities="softmax", targets="classes", classes=classes)
    observer, logits = Predicted(card, World.solo(), lambda number: None), torch.randn(2, classes)
    labels = torch.tensor([0, 1])
    observer.update(EvaluationBlock(labels, logits, best_classes(logits), labels, labels, 0))
    _, _, *answers = observer.blocks[0]
    assert len(answers) == columns


def test_pandas_reads_the_predictions_with_the_names_that_the_classes_have() -> None:
    pandas = pytest.importorskip("pandas")
    names = ("a,b", 'say "x"', "ä;\t|", "-1", "=SUM(1)", " two ")
    labels = torch.arange(6)
    split = ArraySplit(torch.zeros(6, 1, 1, 1, dtype=torch.uint8), labels)
    card: Any = SimpleNamespace(names=names, classes=6, targets="classes")
    answers = labels.flip(0), torch.linspace(0.1, 1.0, 6)
    part = Part(EvaluatedSplit(split, labels, place={"fold": "3"}), 1, labels != 2, answers, {})
    text = b"".join(csv_lines([Evaluation(card, [part], {}, {})])).decode()
    table = pandas.read_csv(StringIO(text), dtype={"label": str, "predicted": str})
    shown = [*names[:2], "ä;\\t|", "-1", "'=SUM(1)", " two "]
    assert table["label"].tolist() == shown
    assert table["predicted"].dropna().tolist() == [name for n, name in enumerate(shown[::-1]) if n != 2]
    assert table["sample"].tolist() == [*range(6)]
    assert np.array_equal(table["probability"].to_numpy(np.float32)[3:], answers[1].numpy()[3:])
    assert table["probability"].isna().tolist() == [False, False, True, False, False, False], "a broken image"
    assert table["fold"].tolist() == [3] * 6
