"""The test split: the best weights see it once, at the end of a run, with the figures of `lockstep evaluate`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers import NARROW, Case, gang, records, train_here
from lockstep.checkpoint.weights import read_card
from lockstep.core.errors import InputError
from lockstep.core.tags import figure_text
from lockstep.data.datasets import Digits
from lockstep.inference.evaluate import evaluate
from lockstep.training.run_record import RunRecord
from lockstep.training.trainer import Trainer

pytestmark = pytest.mark.numerics

# 288 images to evaluate and 355 to test, in eight and nine blocks.
HELD_OUT = ("dataset.val_share=0.2", "train.eval_batch=40")
JOB = (*HELD_OUT, NARROW, "model.dropout=0.3", "steps=4", "train.eval_every=4", "optimizer=sgd", "train.ema=0.9")
TOGETHER = ("ddp", "fsdp", "zero", "pipeline")
IN_THE_TEST = 12  # the place of `StopAfter`, behind ten of the evaluation; twice as many with averaged weights


def summary(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return content


def evaluated(run: Path, split: str = "test") -> dict[str, float]:
    """The figures of `lockstep evaluate`, without those that the run does not have."""
    evaluate(str(run), (), split=split, device="cpu", out=None)
    facts = json.loads((run / ("evaluation.json" if split == "val" else f"evaluation-{split}.json")).read_text())
    return {name: facts[name] for name in summary(run)["test"] if name in facts}


def logged(run: Path) -> list[tuple[int, dict[str, float]]]:
    """The lines of the log about the test split."""
    lines = ((line["step"], {tag[5:]: line[tag] for tag in line if tag.startswith("test/")}) for line in records(run))
    return [(step, figures) for step, figures in lines if figures]


def test_a_run_ends_with_the_figures_of_evaluate_and_its_best_weights_alone_see_the_test_split(
    tmp_path: Path,
) -> None:
    run = train_here(tmp_path / "run", *JOB, "metric=f1").path
    figures = summary(run)["test"]
    assert evaluated(run) == figures
    assert logged(run) == [(4, figures)]
    assert set(figures) == {"loss", "top1", "top5", "f1"}
    assert figures != summary(run)["scores"]
    facts = json.loads((run / "evaluation-test.json").read_text())
    assert facts["images"] == len(Digits().eval()) == 355


@pytest.mark.parametrize("monitor", ["top1", "loss", "f1", "recall/3"])
def test_the_last_lines_have_the_monitored_figure_and_no_speed_that_was_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monitor: str
) -> None:
    early = ("train.eval_every=1", "train.patience=1", "train.min_delta=1000", "steps=8", "telemetry.interval=8")
    metrics = ("metric=[f1,recall]", "metric.recall.average=none", f"monitor={monitor}")
    run = train_here(tmp_path / "run", *JOB, *early, *metrics).path
    ending, value = capsys.readouterr().out.partition("done in")[2], summary(run)["test"][monitor]
    assert figure_text(monitor, value) in next(line for line in ending.splitlines() if " test  " in line)
    assert "img/s" not in ending
    assert "for 1 evaluation;" in ending
    assert "train.patience=null train.min_delta=0\n" in ending


@pytest.mark.slow
def test_ranks_and_strategies_do_not_change_what_a_test_split_gives(tmp_path: Path) -> None:
    still = (*JOB, "optimizer.lr=1e-30", "metric=f1")  # the initial weights, to the bit
    expected = summary(train_here(tmp_path / "still-1", *still).path)["test"]
    two = {name: (*JOB, f"strategy={name}") for name in TOGETHER}
    for ranks, jobs in ((2, {"still": (*still, "strategy=fsdp"), **two}), (3, {"still": (*still, "strategy=ddp")})):
        gang(
            tmp_path / f"gang{ranks}", ranks, [Case(tmp_path / f"{name}-{ranks}", job) for name, job in jobs.items()]
        )
        assert summary(tmp_path / f"still-{ranks}")["test"] == expected
        for name in jobs:
            own = tmp_path / f"{name}-{ranks}"
            assert evaluated(own) == summary(own)["test"], name


@pytest.mark.parametrize("average", ["train.ema=null", "train.ema=0.9"])
def test_a_run_that_is_stopped_in_its_test_does_it_when_it_is_resumed(tmp_path: Path, average: str) -> None:
    job = (*JOB, average)
    whole = train_here(tmp_path / "whole", *job).path
    place = IN_THE_TEST * (1 if average.endswith("null") else 2)
    run = train_here(tmp_path / "run", *job, stop_in=place).path
    assert "test" not in summary(run)
    assert logged(run) == []
    train_here(run, *job)
    assert summary(run)["test"] == summary(whole)["test"] == evaluated(run)
    last = (run / "checkpoints" / "last").read_text()
    for name in ("model.safetensors", f"checkpoints/{last}/model.safetensors"):
        one, other = load_file(run / name), load_file(whole / name)
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_one_rank_of_several_stops_a_test_for_all(tmp_path: Path) -> None:
    job = (*JOB, "train.ema=null", "strategy=fsdp")
    gang(tmp_path / "gang", 2, [Case(tmp_path / "whole", job), Case(tmp_path / "run", job, stop_in=6)])
    assert "test" not in summary(tmp_path / "run")
    gang(tmp_path / "again", 2, [Case(tmp_path / "run", job)])
    assert summary(tmp_path / "run")["test"] == summary(tmp_path / "whole")["test"] == evaluated(tmp_path / "run")


@pytest.mark.parametrize("last", [(Trainer, "test"), (RunRecord, "complete")], ids=["before", "after"])
def test_a_run_that_is_killed_around_its_test_has_it_once(
    tmp_path: Path, last: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(*last, killed)
        with pytest.raises(KeyboardInterrupt):
            train_here(tmp_path / "run", *JOB)
    assert "test" not in summary(tmp_path / "run")
    run = train_here(tmp_path / "run", *JOB).path
    assert logged(run) == [(4, summary(run)["test"])]
    run = train_here(run, *JOB, "steps=8").path
    assert logged(run) == [(8, summary(run)["test"])]
    assert summary(run)["test"] == evaluated(run)


def test_a_run_that_ends_early_tests_its_best_weights_and_not_its_last_ones(tmp_path: Path) -> None:
    job = (*JOB, "steps=40", "train.ema=null", "monitor=-top1", "train.patience=1")  # the worst are the best here
    run = train_here(tmp_path / "run", *job).path
    facts = summary(run)
    assert (facts["stopped_early"] != "", facts["step"], facts["best_step"]) == (True, 8, 4)
    assert read_card(run / "model.safetensors").step == 4
    assert evaluated(run) == facts["test"]


def pictures(folder: Path, split: str = "test") -> Path:
    """Ninety digits as files, with a column of labels and one of numbers; every third is for `split`."""
    images, labels = Digits().train().images, Digits().train().labels
    from torchvision.io import write_png

    folder.mkdir()
    rows = []
    for number in range(90):
        write_png(images[number].expand(3, -1, -1), str(folder / f"{number}.png"))
        of = [split, "val", "train"][number % 3]
        rows.append([f"{number}.png", f"{int(labels[number])};even", int(labels[number]) / 10, of])
    with (folder / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label", "value", "split"], *rows])
    return folder / "list.csv"


SMALL = ("dataset=csv", "dataset.decode_size=8", "augment=none", "steps=3", "batch=10", "train.eval_batch=7", NARROW)
TASKS = {
    "multilabel": ("task=multilabel",),
    "regression": ("task=regression", "dataset.label_column=value"),
}


@pytest.mark.parametrize("task", TASKS)
def test_labels_and_numbers_are_tested_as_evaluate_does(tmp_path: Path, task: str) -> None:
    file = pictures(tmp_path / "pictures")
    job = (*SMALL, f"dataset.path={file}", "dataset.test_split=test", *TASKS[task])
    run = train_here(tmp_path / "run", *job).path
    figures = summary(run)["test"]
    assert len(figures) == 4
    assert evaluated(run) == figures
    assert json.loads((run / "evaluation-test.json").read_text())["images"] == 30


def test_broken_images_of_the_test_split_are_left_out_as_elsewhere(tmp_path: Path) -> None:
    file = pictures(tmp_path / "pictures")
    (file.parent / "3.png").write_bytes(b"no image")
    job = (*SMALL, f"dataset.path={file}", "dataset.test_split=test", *TASKS["regression"])
    with pytest.raises(InputError, match=r"3\.png, cannot be decoded .*dataset.skip=N"):
        train_here(tmp_path / "run", *job)
    run = train_here(tmp_path / "run", *job, "dataset.skip=1").path
    assert evaluated(run) == summary(run)["test"]
    assert summary(run)["skipped"] == json.loads((run / "evaluation-test.json").read_text())["skipped"] == 1


def test_a_resume_with_another_test_split_or_none_is_refused(tmp_path: Path) -> None:
    file = pictures(tmp_path / "pictures")
    job = (*SMALL, f"dataset.path={file}", *TASKS["multilabel"])
    for path, own, other in (("with", "test", "null"), ("without", "null", "test")):
        run = train_here(tmp_path / path, *job, f"dataset.test_split={own}").path
        with pytest.raises(InputError, match=r"is a checkpoint of another run \(test"):
            train_here(run, *job, f"dataset.test_split={other}", "steps=6")


def test_without_a_test_split_evaluate_says_how_to_name_one(tmp_path: Path) -> None:
    run = train_here(
        tmp_path / "run", *SMALL, f"dataset.path={pictures(tmp_path / 'pictures', 'other')}", *TASKS["multilabel"]
    )
    assert summary(run.path)["test"] is None
    with pytest.raises(InputError, match=r"no test split; name it with dataset.test_split=NAME"):
        evaluate(str(run.path), (), split="test", device="cpu", out=None)


def test_a_run_that_ends_early_without_best_weights_tests_the_last(tmp_path: Path) -> None:
    file = pictures(tmp_path / "pictures")
    (file.parent / "90.png").write_bytes((file.parent / "0.png").read_bytes())
    file.write_text(f"{file.read_text()}90.png,rare,0,train\n")
    never = ("metric=recall", "metric.recall.average=none", "monitor=recall/rare", "train.patience=1")
    job = (*SMALL, f"dataset.path={file}", "dataset.test_split=test", *never, "train.eval_every=1")
    run = train_here(tmp_path / "run", *job)
    assert run.read_summary()["status"] == "completed"
    assert run.read_summary()["test"].keys() >= {"loss", "top1"}
    assert "recall/rare has had no value" in run.read_summary()["stopped_early"]
