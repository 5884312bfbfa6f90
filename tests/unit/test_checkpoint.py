"""Checkpoints: a damaged one is refused, the newest valid one is used, and a failed write does not end a run."""

import errno
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lockstep.checkpoint import files, reading, writing
from lockstep.checkpoint.files import find_corruption, manifest_text, whole_weights
from lockstep.checkpoint.reading import check_fingerprint, latest_valid, load_newest, newest_of_run
from lockstep.checkpoint.state import check_plain, host_copies, map_tensors
from lockstep.checkpoint.weights import find_card, load_start, read_card, weights_file
from lockstep.checkpoint.writing import RETRY_S, Checkpointer
from lockstep.core.errors import InputError, StorageError
from lockstep.core.model_card import ModelCard
from lockstep.core.run import candidates
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_read import UnreadableFile
from lockstep.optim.optimizers import SGD, AdamW, Timm
from lockstep.training.averages import EMA

FILES = ("manifest.json", "facts.json", "state.pt", "model.safetensors", "ema.safetensors")
IDENTITY = {"model": "Net()", "batch": 64, "seed": 3, "monitor": "top1"}


@dataclass
class Parts:
    """The objects whose state a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ema: AveragedModel
    scaler: torch.amp.GradScaler

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 1, 6, 6)).square().mean().backward()
            self.optimizer.step()
            self.ema.update_parameters(self.model)

    def everything(self) -> list[Any]:
        """The state of all parts, copied."""
        return [host_copies(dict(part.state_dict())) for part in vars(self).values()]


def parts(seed: int = 0, optimizer: Any = None) -> Parts:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0 ** (seed + 3), "_growth_tracker": seed + 5})
    ema = EMA(model, 0.9)
    ema.update_parameters(model)
    return Parts(model, (optimizer or AdamW()).build(model), ema, scaler)


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.at(tmp_path / "run")


def writer(run_dir: RunDir, /, **options: Any) -> Checkpointer:
    options = {"fingerprint": IDENTITY, "keep": 3, "keep_best": 1, "writes": True, **options}
    return Checkpointer(run_dir=run_dir, **options)


PARTS = {"model": "models.Linear", "precision": "precision.FP32", "loss": "losses.CrossEntropy"}
FACTS: dict[str, Any] = {part: {"_target_": f"lockstep.{name}"} for part, name in PARTS.items()}
FACTS |= {"classes": 3, "class_names": (), "image_shape": (1, 6, 6), "input_shape": (1, 6, 6), "eval_crop": 1.0}
FACTS |= {"mean": (0.0,), "std": (1.0,), "eval_views": 1, "eval_batch": 8, "trained_on": {}, "lockstep": "1"}
CARD = ModelCard(**FACTS)
TRAIL = {"losses": [0.5], "steps": [1], "examples": [4], "hits": 3}
EPOCH = {"number": 0, "loss": 0.0, "hits": 0, "examples": 0}


def progress(step: int, best: bool = True, score: float | None = None) -> dict[str, Any]:
    window = {"flushed": 0, "trails": [TRAIL], "epoch": EPOCH}
    figures = {} if score is None else {"top1": score}
    scores = [] if score is None else [(step, score)]
    of_best = {"best": 12.5, "best_step": step if best else 0, "best_figures": {}}
    return {"step": step, "scores": scores, "figures": figures, "window": window, **of_best}


def save(
    target: Checkpointer, step: int, contents: Parts | None = None, best: bool = False, score: float | None = None
) -> None:
    target.save(**vars(contents or parts()), progress=progress(step, best, score))


def saved(run: RunDir, *steps: int, **options: Any) -> list[Path]:
    """Save checkpoints of these steps; the last one is the best."""
    target = writer(run, **options)
    for step in steps:
        save(target, step, best=step == steps[-1])
    target.close()
    return [run.checkpoints / f"step-{step:08}" for step in steps]


def restore(path: Path, contents: Parts) -> dict[str, Any]:
    return reading.restore_from(reading.read_checkpoint(path), **vars(contents))


@pytest.mark.parametrize(
    "optimizer", [AdamW(), SGD(momentum=0.9), Timm(opt="lamb"), Timm(opt="muon", lr=0.01)], ids=repr
)
def test_everything_comes_back_as_it_was(run: RunDir, optimizer: Any) -> None:
    trained = parts(0, optimizer)
    trained.train(3)
    target = writer(run)
    save(target, 3, trained)
    target.close()
    resumed = parts(1, optimizer)
    assert restore(run.checkpoints / "step-00000003", resumed) == progress(3, best=False)
    assert same(resumed.everything(), trained.everything())


def test_a_checkpoint_holds_the_state_of_its_step_although_training_goes_on(run: RunDir) -> None:
    trained, target = parts(), writer(run)
    before, trained_on = trained.everything(), threading.Event()
    target.pool.submit(trained_on.wait)  # delays the write until after the next step
    facts = progress(1)
    target.save(**vars(trained), progress=facts)
    trained.train(1)
    facts.update(step=2, best_step=0)
    trained_on.set()
    target.close()
    resumed = parts(1)
    assert restore(run.checkpoints / "step-00000001", resumed) == progress(1)
    assert same(resumed.everything(), before)


def test_weights_of_any_layout_shared_or_without_an_average_are_kept(run: RunDir) -> None:
    contents, target = parts(), writer(run)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(4, 4)).to(memory_format=torch.channels_last)
    model[2].weight = model[1].weight
    contents.model, contents.optimizer = model, SGD().build(model)
    target.save(**{**vars(contents), "ema": None}, progress=progress(1))
    target.close()
    assert same(load_file(run.weights), dict(model.state_dict()))
    with pytest.raises(InputError, match=r"has no averaged weights; use train\.ema=null"):
        restore(run.checkpoints / "step-00000001", contents)


def steps_left(run: RunDir) -> list[int]:
    return [int(path.name[5:]) for path in candidates(run.checkpoints)]


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_and_a_file_cut_short_huge_or_missing_are_found(run: RunDir, name: str) -> None:
    (path,) = saved(run, 1)
    bits = 8 * (path / name).stat().st_size
    # Another version of Lockstep in the manifest changes nothing.
    first = 8 * (path / name).read_bytes().index(b'"bytes"') if name == "manifest.json" else 0
    for bit in {*range(first, bits, max(1, bits // 50)), *range(16), *range(bits - 16, bits)}:
        flip(path / name, bit)
        assert find_corruption(path), f"bit {bit} of {name}"
        flip(path / name, bit)
    assert find_corruption(path) == ""
    os.truncate(path / name, (path / name).stat().st_size - 8)
    assert find_corruption(path)
    if name != "manifest.json":
        os.truncate(path / name, bits // 8 + 1)
        assert find_corruption(path) == f"{name} has {bits // 8 + 1} bytes, expected {bits // 8}"
    os.truncate(path / name, 2**42)  # a file of holes, which must not be read to its end
    assert name in find_corruption(path)
    assert "bytes, expected" in find_corruption(path)
    (path / name).unlink()
    assert name in find_corruption(path)


@pytest.mark.parametrize("content", ["", "[]", '{"sha256": {}}', "[" * 100_000])
def test_an_invalid_manifest_is_damage(run: RunDir, content: str) -> None:
    (path,) = saved(run, 1)
    (path / "manifest.json").write_text(content)
    assert find_corruption(path)


def test_a_checkpoint_of_a_newer_version_is_no_damage_that_an_older_one_is_resumed_for(run: RunDir) -> None:
    _, newest = saved(run, 1, 2)
    manifest = json.loads((newest / "manifest.json").read_text())
    (newest / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(InputError, match="has format 99"):
        latest_valid(run.checkpoints)


def test_a_disk_that_fails_is_no_damage(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(run, 1, 2)

    def failing(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(files, "sha256", failing)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        latest_valid(run.checkpoints)


def test_a_damaged_checkpoint_is_not_loaded(run: RunDir) -> None:
    (path,) = saved(run, 1)
    flip(path / "model.safetensors", 999)
    damaged = rf"^resume: checkpoint {re.escape(str(path))} is damaged"
    reason = r"\(model.safetensors does not match its sha256\)"
    with pytest.raises(InputError, match=rf"{damaged} {reason}; name another one$"):
        reading.read_checkpoint(path)
    (path / "facts.json").write_text("{")
    with pytest.raises(InputError, match=rf"{damaged} \(facts\.json .*\); name another one$"):
        check_fingerprint(IDENTITY, path)


def test_the_newest_good_checkpoint_is_found_with_a_warning_for_each_bad_one(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = saved(run, 9, 10, 11)
    assert latest_valid(run.checkpoints) == third
    flip(third / "state.pt", 100)
    (second / "facts.json").unlink()
    assert latest_valid(run.checkpoints) == first
    warnings = capsys.readouterr().out.splitlines()
    assert warnings[0] == (
        f"warning: checkpoint {third} is damaged (state.pt does not match its sha256); trying the one before it"
    )
    gone = "facts.json is missing"
    assert warnings[1:] == [f"warning: checkpoint {second} is damaged ({gone}); trying the one before it"]
    sentences: list[str] = []
    assert newest_of_run(run, sentences.append) == first
    assert [f"warning: {sentence}" for sentence in sentences] == warnings
    flip(first / "ema.safetensors", 100)
    assert latest_valid(run.checkpoints) is None
    end = "is damaged (ema.safetensors does not match its sha256); there is none before it"
    assert capsys.readouterr().out.splitlines()[2:] == [f"warning: checkpoint {first} {end}"]


@pytest.mark.parametrize("number", range(7))
def test_four_differences_of_two_runs_are_told_and_how_many_more_there_are(number: int) -> None:
    here = {f"key{at}": at for at in range(9)}
    there = {key: value if value >= number else -1 for key, value in here.items()}
    sentences = [f"key{at}: here {at}, there -1" for at in range(min(number, 4))]
    more = [f"and {number - 4} more"] if number > 4 else []
    assert reading.describe_differences(here, there) == "; ".join([*sentences, *more])


def test_a_run_goes_on_from_its_own_checkpoint_before_the_one_that_it_began_with(run: RunDir, tmp_path: Path) -> None:
    (named,) = saved(RunDir.at(tmp_path / "other"), 7)
    for expected in (named, *saved(run, 2)):
        loaded = load_newest(run if expected != named else RunDir(tmp_path / "new"), named)
        assert loaded is not None
        assert loaded.path == expected
    flip(named / "model.safetensors", 999)
    with pytest.raises(InputError, match=rf"^resume: checkpoint {re.escape(str(named))} is damaged \(model"):
        load_newest(RunDir(tmp_path / "new"), named)


def test_a_run_that_has_saved_nothing_yet_starts_from_nothing(run: RunDir) -> None:
    saved(run, 1, writes=False)
    assert list(run.checkpoints.iterdir()) == [], "a rank that does not write leaves nothing"
    assert newest_of_run(run) is None
    run.metrics.write_text('{"step": 1}\n')
    (run.path / "events.out.tfevents.1").write_bytes(b"")
    (run.checkpoints / ".step-00000001.tmp").mkdir()  # as a killed save leaves it
    assert newest_of_run(run) is None


@pytest.mark.parametrize("lost", ["checkpoints", "pointers", "all but the weights"])
def test_a_run_that_lost_its_checkpoints_is_not_taken_for_one_that_never_had_any(run: RunDir, lost: str) -> None:
    run.metrics.write_text('{"step": 1}\n')
    event = run.path / "events.out.tfevents.1"
    event.write_bytes(b"")
    saved(run, 1)
    for file in run.checkpoints.iterdir():
        if lost != "pointers" or file.is_file():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    for path, name in ((run.metrics, "the log"), (run.weights, "the weights"), (event, "TensorBoard's file")):
        if lost.startswith("all") and not lost.endswith(name):
            path.unlink()
    if lost == "pointers":
        assert newest_of_run(run) == run.checkpoints / "step-00000001"
        flip(run.checkpoints / "step-00000001" / "state.pt", 1)
    with pytest.raises(InputError, match=r"resume: no checkpoint in .* is complete .* nothing was changed"):
        newest_of_run(run)


def test_a_run_whose_checkpoints_are_all_damaged_says_what_is_left_of_it(run: RunDir) -> None:
    first, second = saved(run, 9, 10)
    flip(first / "facts.json", 100)
    flip(second / "state.pt", 100)
    run.overrides.write_text("- steps=20\n- name='a b'\n")
    with pytest.raises(InputError) as caught:
        load_newest(run)
    message = str(caught.value)
    assert "(step-00000010: state.pt does not match its sha256; step-00000009: facts.json does not match" in message
    assert f"init_from={second} uses the undamaged weights" in message
    assert """`lockstep train steps=20 'name='"'"'a b'"'"''`""" in message


@pytest.mark.parametrize(
    ("whole", "usable"), [((9, 10, 0), 10), ((9, 0), 9), ((0,), 0), ((), None)], ids=["all", "older", "run", "none"]
)
def test_the_newest_whole_weights_of_a_damaged_run_are_proposed_and_then_those_of_the_run(
    run: RunDir, whole: tuple[int, ...], usable: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = saved(run, 9, 10)
    for path in (first, second):
        flip(path / "facts.json", 100)
    places = {9: first, 10: second, 0: run.path}
    monkeypatch.setattr(files, "whole_weights", lambda path: path in [places[step] for step in whole])
    with pytest.raises(InputError) as caught:
        load_newest(run)
    proposed = re.search(r"; init_from=(\S+) uses the undamaged weights", str(caught.value))
    assert (proposed and proposed[1]) == (None if usable is None else str(places[usable]))


@pytest.mark.parametrize(
    ("keep_best", "left"), [(1, [6, 2]), (2, [6, 4, 2]), (3, [6, 4, 2, 1]), (9, [6, 5, 4, 2, 1])]
)
def test_the_best_are_kept_by_score_and_the_earliest_of_equals(run: RunDir, keep_best: int, left: list[int]) -> None:
    target = writer(run, keep=1, keep_best=keep_best)
    for step, score in enumerate([70.0, 90.0, None, 80.0, 60.0, None], start=1):
        save(target, step, score=score)
    target.close()
    assert steps_left(run) == left
    again = writer(run, keep=1, keep_best=1)  # a resume decides by the same scores
    save(again, 7, score=90.0)
    again.close()
    assert steps_left(run) == [7, 2]


def test_best_weights_of_an_earlier_version_which_have_no_state_are_kept_and_not_resumed_from(run: RunDir) -> None:
    target = writer(run, keep=1, keep_best=2)
    for step, score in ((1, 90.0), (2, 80.0)):
        save(target, step, score=score)
        target.wait()
        (path := run.checkpoints / f"step-{step:08}").joinpath("state.pt").unlink()
        (path / "manifest.json").write_text(manifest_text(path))
    save(target, 3, score=70.0)
    target.close()
    assert steps_left(run) == [3, 2, 1]
    assert whole_weights(path)
    with pytest.raises(InputError, match=r"is damaged .it has weights only.; name another one"):
        reading.read_checkpoint(path)


def test_no_older_checkpoint_is_removed_for_one_that_cannot_be_read_back(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(run, 1)

    def torn(self: Path, target: Path) -> Path:
        """Flip a bit of a file while its folder is renamed, as a faulty disk would."""
        flip(self / "state.pt", 99)
        return Path(shutil.move(self, target))

    monkeypatch.setattr(Path, "rename", torn)
    saved(run, 2, keep=1)
    monkeypatch.undo()
    assert "step-00000002 cannot be read back (state.pt does not match its sha256); no" in capsys.readouterr().out
    assert latest_valid(run.checkpoints) == run.checkpoints / "step-00000001"
    saved(run, 3, keep=1)
    assert steps_left(run) == [3]


def test_checkpoints_come_by_their_step_also_after_a_hundred_million(run: RunDir) -> None:
    for step in (99_999_999, 100_000_000, 7):
        (run.checkpoints / f"step-{step:08d}").mkdir(parents=True)
    assert [int(path.name[5:]) for path in candidates(run.checkpoints)] == [100_000_000, 99_999_999, 7]


@pytest.mark.parametrize("left", ["nothing", "older", "older of its size"])
def test_an_export_that_a_kill_interrupted_is_repaired(run: RunDir, left: str) -> None:
    (best,) = saved(run, 4)
    expected = run.weights.read_bytes()
    run.best.unlink()
    run.weights.unlink()
    if left == "older of its size":
        run.weights.write_bytes(bytes(len(expected)))
    elif left == "older":
        run.weights.write_bytes(b"older weights")
    writer(run, writes=False).repair_export(4)
    assert run.weights.exists() is (left != "nothing")
    writer(run).repair_export(4)
    assert run.weights.read_bytes() == expected
    assert run.best.read_text() == best.name
    run.weights.write_bytes(b"none")
    writer(run).repair_export(0)
    assert run.weights.read_bytes() == b"none", "step 0 is no best one"


def test_a_file_of_holes_in_the_place_of_weights_is_not_read_to_its_end(run: RunDir) -> None:
    (best,) = saved(run, 4)
    expected = run.weights.read_bytes()
    os.truncate(run.weights, 2**42)
    writer(run).repair_export(4)
    assert run.weights.read_bytes() == expected
    os.truncate(best / "model.safetensors", 2**42)
    assert not whole_weights(best)


def test_a_later_save_leaves_the_best_weights_that_wait_for_their_export(run: RunDir, full_disk: Any) -> None:
    target, best = writer(run), parts(1)
    best.train(2)
    expected = {name: tensor.clone() for name, tensor in best.ema.module.state_dict().items()}
    with full_disk(100):
        save(target, 1, best, best=True)
        target.wait()
    save(target, 2, parts(5))
    target.close()
    assert same(load_file(run.weights), expected)


def test_the_card_of_weights_has_the_score_of_their_own_evaluation(run: RunDir) -> None:
    target = writer(run, card=CARD)
    save(target, 1, best=True, score=50.0)
    not_scored = progress(2, best=False) | {"scores": [(1, 50.0)], "figures": {"top1": 50.0}}  # those of step 1
    target.save(**vars(parts()), progress=not_scored)
    target.close()
    cards = {path: read_card(path) for path in sorted(run.checkpoints.glob("step-*/*.safetensors"))}
    assert [(path.name, card.step, card.scores, card.averaged) for path, card in cards.items()] == [
        ("ema.safetensors", 1, {"top1": 50.0}, True),
        ("model.safetensors", 1, {}, False),
        ("ema.safetensors", 2, {}, True),
        ("model.safetensors", 2, {}, False),
    ]
    assert read_card(run.weights) == next(iter(cards.values()))
    scores = [(1, 50.0), (3, 40.0), (5, 60.0)]
    of_step = [
        files.score_of({"scores": scores[:number], "step": step}) for number, step in ((3, 3), (3, 4), (1, 3), (0, 1))
    ]
    assert of_step == [40.0, None, None, None]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_kill_at_any_moment_of_a_save_loses_no_checkpoint(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    """Before each change of a name, what a kill would leave is copied. Some steps are saved again."""
    left: list[RunDir] = []
    run.metrics.write_text("logged")

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            if path.is_relative_to(run.path):
                left.append(RunDir(tmp_path / f"left-{len(left)}"))
                shutil.copytree(run.path, left[-1].path)
            return change(path, *arguments, **options)

        return call

    target, steps = writer(run, keep=keep), (1, 1, 1, 2, 2, 3)
    for name in ("rename", "replace", "unlink"):
        monkeypatch.setattr(Path, name, watched(getattr(Path, name)))
    for step in steps:
        save(target, step, best=step == 1, score=float(step == 1))
        target.wait()
        assert steps_left(run) == sorted({1, step, *range(step - keep + 1, step)} - {0}, reverse=True)
    monkeypatch.undo()
    newest = []
    for folder in left:
        path = newest_of_run(folder)  # raises where a run looks like one that has lost its checkpoints
        newest.append(0 if path is None else int(path.name[5:]))
        for other in candidates(folder.checkpoints):
            assert find_corruption(other) == "", other
        for pointer in (folder.last, folder.best):
            assert not pointer.exists() or (folder.checkpoints / pointer.read_text()).is_dir(), folder
        repaired = writer(folder, keep=keep)
        repaired.repair_export(best_step=1)
        assert folder.weights.exists() == bool(newest[-1]), folder
    assert newest == sorted(newest), "no resume goes back"
    assert {*newest} == {0, 1, 2, 3}


def test_an_export_that_fails_frees_the_checkpoints_that_are_to_go(run: RunDir) -> None:
    target = writer(run, keep=1, keep_best=0)
    run.weights.mkdir()  # in the place of the export
    for step in (1, 2, 3):
        save(target, step, best=True)
        target.wait()
        assert target.failure == "is a directory"
        assert steps_left(run) == [step]
    (best,) = (load_file(path) for path in run.checkpoints.glob("*/ema.safetensors"))
    run.weights.rmdir()
    save(target, 4, parts(5))
    target.close()
    assert same(load_file(run.weights), best), "a later save tries it again"


def test_checkpoints_that_are_to_go_do_so_although_the_newest_cannot_be_named(run: RunDir) -> None:
    target = writer(run, keep=1, keep_best=0)
    run.last.mkdir()  # in the place of the name
    for step in (1, 2):
        save(target, step)
        target.wait()
        assert target.failure
        assert steps_left(run) == [step]
    run.last.rmdir()
    save(target, 3)
    target.close()
    assert (run.last.read_text(), steps_left(run)) == ("step-00000003", [3])


def test_a_write_that_fails_is_a_warning_and_an_error_when_it_was_the_last(
    run: RunDir, full_disk: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    target = writer(run)
    with full_disk(1700):  # too small for the optimizer's state (1.8 kB), not for the weights (1.6 kB)
        save(target, 1)
        target.wait()
    assert "a checkpoint could not be written (file too large); the run continues" in capsys.readouterr().out
    assert latest_valid(run.checkpoints) is None
    with pytest.raises(StorageError, match="the last checkpoint could not be written"):
        target.close()


@pytest.mark.parametrize("every_s", [None, 3600.0, 10.0], ids=["steps decide", "time decides", "time comes first"])
def test_a_failed_write_is_reported_retried_later_and_its_end_is_reported(
    run: RunDir, full_disk: Any, capsys: pytest.CaptureFixture[str], every_s: float | None
) -> None:
    target = writer(run, every_s=every_s)
    with full_disk(100):
        save(target, 1)
        while target.pending is not None:
            assert not target.overdue()
        assert "a checkpoint could not be written" in capsys.readouterr().out
        target.saved_at -= min(RETRY_S, every_s or RETRY_S)
        assert target.overdue()
        save(target, 2)
        target.wait()
    assert capsys.readouterr().out == "", "a second failure in a row is no news"
    assert list(run.checkpoints.iterdir()) == [], "what was begun does not take up the full disk"
    save(target, 3)
    target.close()
    assert capsys.readouterr().out == "checkpoints are written again\n"
    assert not target.overdue()


def test_each_save_sets_back_the_clock_of_the_next_one_whatever_has_asked_for_it(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    target = writer(run, every_s=60.0, saved_at=now[0])
    for step in (1, 2):
        now[0] += 59.9
        assert not target.overdue()
        now[0] += 0.1
        assert target.overdue(), "exactly at its time"
        now[0] += 5.0
        save(target, step)
        assert not target.overdue()
    now[0] += 30.0
    save(target, 3)  # by its step
    now[0] += 59.0
    assert not target.overdue()
    target.close()
    assert not writer(run, every_s=60.0, saved_at=0.0, writes=False).overdue(), "only main has a clock"


@pytest.mark.parametrize(
    ("keep", "after"),
    [
        (1, {2: [5, 4, 3, 2], 3: [5, 4, 3], 4: [5, 4], 5: [5], 6: [6]}),
        (2, {2: [5, 4, 3, 2, 1], 3: [5, 4, 3, 2], 4: [5, 4, 3], 5: [5, 4], 6: [6, 5]}),
    ],
)
def test_a_resume_from_an_earlier_step_keeps_the_later_checkpoints_until_it_has_come_there(
    run: RunDir, keep: int, after: dict[int, list[int]]
) -> None:
    saved(run, 1, 2, 3, 4, 5, keep=9)
    target = writer(run, keep=keep, keep_best=0)
    for step, left in after.items():
        save(target, step)
        target.wait()
        assert steps_left(run) == left
        newest = next(path for path in candidates(run.checkpoints) if int(path.name[5:]) == step)
        assert run.last.read_text() == newest.name
        assert len([path for path in candidates(run.checkpoints) if int(path.name[5:]) == step]) == 1, "replaced"
    target.close()


def test_leftovers_of_an_interrupted_write_are_overwritten(run: RunDir) -> None:
    for step in (1, 7):
        torn = run.checkpoints / f".step-0000000{step}.tmp"
        torn.mkdir()
        (torn / "junk").write_text("half")
    (path,) = saved(run, 1)
    assert {file.name for file in path.iterdir()} == set(FILES)
    assert {file.name for file in run.checkpoints.iterdir()} == {path.name, "last", "best"}


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"batch": 32}, "batch: here 32, there 64"),
        ({"files": {}}, "files.a: here nothing, there 1"),
        ({"files": {"a": 1, "b": 2}}, "files.b: here 2, there nothing"),
        ({"test": {"a": 1}}, "test.a: here 1, there nothing"),
        ({"files": None}, "files.a: here nothing, there 1"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_difference(
    run: RunDir, changed: dict[str, Any], difference: str
) -> None:
    identity = {**IDENTITY, "files": {"a": 1}}
    (path,) = saved(run, 1, fingerprint=identity)
    check_fingerprint(identity, path)
    says = rf"\({re.escape(difference)}\); resume with the same values.*init_from=PATH"
    with pytest.raises(InputError, match=says):
        check_fingerprint({**identity, **changed}, path)


def test_tensors_that_do_not_fit_are_the_users_mistake(run: RunDir) -> None:
    (path,) = saved(run, 1)
    contents = parts()
    contents.model = nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"does not fit this model .*; resume with the values that the run had"):
        restore(path, contents)


@pytest.mark.parametrize("place", ["run folder", "checkpoint", "file"])
def test_weights_are_found_in_a_run_folder_a_checkpoint_and_a_file(run: RunDir, place: str) -> None:
    (path,) = saved(run, 1)
    source = {"run folder": run.path, "checkpoint": path, "file": path / "model.safetensors"}[place]
    model = parts(3).model
    load_start(model, source)
    assert same(dict(model.state_dict()), dict(parts(0).model.state_dict()))


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.bin", "a.ckpt", "a.pth.tar"])
def test_a_file_of_another_program_starts_a_training_and_is_no_trained_model(tmp_path: Path, name: str) -> None:
    torch.save({}, file := tmp_path / name)
    assert weights_file(file) == file
    remedy = "expected a .safetensors file or a run folder; init_from= takes weights of other programs"
    with pytest.raises(InputError) as caught:
        weights_file(file, "weights")
    assert str(caught.value) == f"weights: there are no weights at {file}, {remedy}"


def test_weights_that_are_missing_broken_or_of_another_model_are_refused(run: RunDir, tmp_path: Path) -> None:
    saved(run, 1)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    says = "is of another model: 2 tensors differ, e.g. 0.bias (here (8,), there (4,)), 0.weight (here"
    with pytest.raises(InputError, match=re.escape(says)):
        load_start(model, run.path)
    with pytest.raises(InputError, match="there are no weights at"):
        load_start(parts().model, tmp_path / "none")
    run.weights.write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"model.safetensors cannot be read"):
        load_start(parts().model, run.path)


def replace_file(path: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint and write a manifest that matches it."""
    (path / name).write_bytes(content)
    (path / "manifest.json").write_text(manifest_text(path))


@pytest.mark.parametrize(
    ("name", "listed"), [("../secret", True), ("extra", True), ("facts.json", False), ("model.safetensors", False)]
)
def test_a_manifest_of_other_files_is_damage(run: RunDir, name: str, listed: bool) -> None:
    (path,) = saved(run, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    for part, value in (("bytes", 3), ("sha256", "0" * 64)):
        manifest[part] = {**manifest[part], name: value}
        if not listed:
            del manifest[part][name]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert find_corruption(path) == "manifest.json does not list the files of a checkpoint"


@pytest.mark.parametrize("name", ["manifest.json", "state.pt"])
def test_a_link_or_a_pipe_in_the_place_of_a_file_or_folder_is_damage(run: RunDir, tmp_path: Path, name: str) -> None:
    first, second, third = saved(run, 1, 2, 3)
    third.rename(tmp_path / "elsewhere")
    third.symlink_to(tmp_path / "elsewhere")
    assert latest_valid(run.checkpoints) == second
    with pytest.raises(InputError, match="the folder is a symbolic link"):
        reading.read_checkpoint(third)
    (second / name).rename(tmp_path / name)
    (second / name).symlink_to(tmp_path / name)
    assert find_corruption(second) == f"{name} is a symbolic link, expected a plain file"
    (first / name).unlink()
    os.mkfifo(first / name)
    assert find_corruption(first) == f"{name} is a pipe, expected a plain file"


@pytest.mark.parametrize("facts", [[], {"identity": 2}, {"progress": {"step": "2"}}])
def test_other_facts_are_damage_and_no_traceback(run: RunDir, facts: Any) -> None:
    first, second = saved(run, 1, 2)
    ours = {"identity": IDENTITY, "progress": progress(2)}
    replace_file(second, "facts.json", json.dumps({**ours, **facts} if facts else facts).encode())
    assert find_corruption(second) == "facts.json is not the facts of a checkpoint"
    with pytest.raises(InputError, match=r"step-00000002 is damaged \(facts.json"):
        check_fingerprint(IDENTITY, second)
    assert latest_valid(run.checkpoints) == first


def test_a_state_that_would_run_code_is_refused_unread(run: RunDir, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    (path,) = saved(run, 1)
    torch.save({"optimizer": Hostile()}, tmp_path / "state.pt")
    replace_file(path, "state.pt", (tmp_path / "state.pt").read_bytes())
    with pytest.raises(InputError, match=r"step-00000001 is damaged \(state.pt contains more than"):
        reading.read_checkpoint(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("state", [[], {}, {"optimizer": {"param_groups": 3}}])
def test_a_state_of_other_types_does_not_fit(run: RunDir, tmp_path: Path, state: object) -> None:
    (path,) = saved(run, 1)
    torch.save(state, tmp_path / "state.pt")
    replace_file(path, "state.pt", (tmp_path / "state.pt").read_bytes())
    with pytest.raises(InputError, match="does not fit this model"):
        restore(path, parts())


SYSTEM_CALLS = ("open", "fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "scandir", "listdir", "stat")


@contextmanager
def failing(number: int, code: int) -> Iterator[list[str]]:
    """Have the `number`-th of these system calls fail once, in any thread; yields the names of all calls."""
    calls: list[str] = []

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            if len(calls) == number:
                raise OSError(code, os.strerror(code), str(arguments[0]))
            return call(*arguments, **options)

        return attempt

    with pytest.MonkeyPatch.context() as patch:
        for name in SYSTEM_CALLS:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        yield calls


@pytest.mark.slow
def test_no_failed_system_call_of_a_save_ends_the_training(tmp_path: Path) -> None:
    codes = [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EBUSY, errno.ENOTEMPTY, errno.EACCES, errno.ENOSPC]
    contents, first = parts(), RunDir.at(tmp_path / "first")
    saved(first, 1)

    def attempted(number: int) -> tuple[RunDir, Checkpointer, list[str]]:
        """A second save, in which this system call fails."""
        run = RunDir(Path(shutil.copytree(first.path, tmp_path / str(number))))
        target = writer(run, keep=1, keep_best=0)
        with failing(number, codes[number % len(codes)]) as calls:
            save(target, 2, contents, best=True)
            target.wait()
        return run, target, calls

    _, whole, calls = attempted(0)
    whole.close()
    assert {"open", "fsync", "rename", "unlink", "rmdir"} <= {*calls}
    for number in range(1, len(calls) + 1):
        run, target, _ = attempted(number)
        where = f"call {number}: {calls[number - 1]}"
        assert latest_valid(run.checkpoints) is not None, where
        save(target, 3, contents)
        target.close()
        newest = latest_valid(run.checkpoints)
        assert newest == run.checkpoints / "step-00000003", where
        assert same(load_file(run.weights), load_file(newest / "model.safetensors")), where


def test_a_file_that_a_resume_needs_is_missed_at_the_next_checkpoint(run: RunDir) -> None:
    needed = (run.config, run.composed)
    for path in needed:
        path.touch()
    target = writer(run, needed=needed)
    save(target, 1)
    target.wait()
    run.composed.unlink()
    save(target, 2)
    with pytest.raises(StorageError, match=f"{run.composed} was removed while the run used it"):
        target.wait()


def test_old_checkpoints_that_cannot_be_removed_are_one_warning_and_tried_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "no", str(path))

    monkeypatch.setattr(files, "remove", refuse)
    target, is_said = writer(run, keep=1), []
    warning = "an old checkpoint could not be removed (permission denied); the run tries again"
    for step in (1, 2, 3):
        save(target, step, best=True)
        target.wait()
        is_said.append(warning in capsys.readouterr().out)
    monkeypatch.undo()
    assert is_said == [False, True, False]
    assert steps_left(run) == [3, 2, 1]
    save(target, 4, best=True)
    target.wait()
    assert steps_left(run) == [4]


def test_a_checkpoint_gets_its_name_when_all_that_a_resume_reads_is_on_the_disk(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, rename = list[str](), Path.rename

    def renamed(path: Path, target: Path) -> Path:
        events.append(f"rename {target.name}")
        return rename(path, target)

    monkeypatch.setattr(writing, "sync", lambda path: events.append(path.name))
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(writing, "write_atomic", lambda path, text: events.append(f"write {path.name}"))
    for path in (run.metrics, run.table):
        path.touch()
    saves, folders = list[tuple[int, str]](), list[Path]()
    target = writer(run, on_saved=lambda step, folder: (saves.append((step, folder.name)), folders.append(folder)))
    save(target, 1, best=True)
    target.wait()
    target.wait()
    assert saves == [(1, "step-00000001")], "it is told once"
    assert folders == [run.checkpoints / "step-00000001"]
    before = events[: events.index("rename step-00000001")]
    assert sorted(before) == sorted([*FILES, ".step-00000001.tmp", "metrics.jsonl", "metrics.csv", ".hydra", "run"])
    after = ["checkpoints", "write last", "write best", "run"]  # the last one has the export
    assert events[len(before) + 1 :] == after
    assert target.unexported is None, "it is written once"
    run.table.unlink()
    save(target, 2)
    target.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        target.pool.submit(print)


def during(error: Exception, first: Exception) -> Exception:
    error.__context__ = first
    return error


@pytest.mark.parametrize(
    ("error", "cause", "reason"),
    [
        (OSError(errno.ENOSPC, "x"), None, "no space left on device"),
        (OSError(errno.ENOSPC, "x"), KeyError("odd"), "no space left on device"),
        (RuntimeError("PytorchStreamWriter failed"), OSError(errno.EFBIG, "x"), "file too large"),
        (RuntimeError("odd"), during(ValueError("odd"), OSError(errno.EFBIG, "x")), "file too large"),
        (RuntimeError("odd"), None, "odd"),
        (StorageError("a sentence"), None, "a sentence"),
    ],
)
def test_a_write_that_failed_has_the_reason_of_the_system(
    error: Exception, cause: Exception | None, reason: str
) -> None:
    error.__context__ = cause
    assert writing._reason(error) == reason


FAILURES = [OSError(5, "odd"), RuntimeError("odd"), SafetensorError("odd"), StorageError("odd")]


@pytest.mark.parametrize(
    "error", [*FAILURES, UnreadableFile(Path("a"), "is odd")], ids=lambda error: type(error).__name__
)
def test_no_error_of_a_write_ends_the_training(
    error: Exception, run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    target = writer(run)
    with monkeypatch.context() as patch:
        patch.setattr(files, "manifest_text", fail)
        save(target, 1)
        target.wait()
    assert "a checkpoint could not be written (" in capsys.readouterr().out
    save(target, 2)
    target.close()
    assert steps_left(run) == [2]


def test_equal_weights_and_facts_give_equal_bytes_whatever_their_order_and_their_letters(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, 2), "scalar": torch.tensor(7), "empty": torch.zeros(0, 3)}
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool):
        tensors[str(dtype)] = torch.tensor([0.0, 1.0, 3.0]).to(dtype)
    metadata = {"name": "caf\u00e9 \u6f22", "x": "1", "lockstep": "2"}
    contents = set()
    for number, names in enumerate((["name", "x", "lockstep"], ["lockstep", "name", "x"])):
        files.save_weights(
            tensors, file := tmp_path / f"{number}.safetensors", {name: metadata[name] for name in names}
        )
        contents.add(file.read_bytes())
        shapes, facts = files.header(file)
        assert shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        assert {name: facts[name] for name in metadata} == metadata
        (tmp_path / "plain").touch()
        assert file.stat().st_mode == (tmp_path / "plain").stat().st_mode, "as of any other file"
        (link := tmp_path / f"link{number}.safetensors").symlink_to(file)
        assert same(files.load_weights(link), tensors)
        assert files.header(link) == (shapes, facts)
    assert len(contents) == 1
    files.save_weights(tensors, tmp_path / "bare.safetensors")
    assert {*files.header(tmp_path / "bare.safetensors")[1]} == {files.SEAL}


def test_the_facts_of_many_micro_batches_are_read(run: RunDir) -> None:
    (path,) = saved(run, 1)
    facts = json.loads((path / "facts.json").read_text())
    facts["progress"]["window"]["trails"] = [{**TRAIL, "losses": [0.123456789] * 150_000}]
    replace_file(path, "facts.json", json.dumps(facts).encode())
    assert (path / "facts.json").stat().st_size > 10**6
    assert reading.undamaged_facts(path) == facts


def test_weights_without_a_tensor_or_with_a_broken_manifest_are_not_whole(run: RunDir) -> None:
    (path,) = saved(run, 1)
    assert whole_weights(run.path)
    flip(run.weights, 8 * run.weights.stat().st_size - 1)
    assert not whole_weights(run.path)
    files.save_weights({}, run.weights)
    assert not whole_weights(run.path)
    flip(path / "state.pt", 9)
    assert whole_weights(path), "its weights can be used"
    weights = path / "model.safetensors"
    for bit in (0, 4 * weights.stat().st_size, 8 * weights.stat().st_size - 1):
        flip(weights, bit)
        assert not whole_weights(path)
        flip(weights, bit)
    assert whole_weights(path)
    (path / "manifest.json").write_text("{}")
    assert not whole_weights(path)


@pytest.mark.parametrize(
    "facts",
    [
        {"identity": {}, "progress": {"step": 1}},
        {"identity": {"monitor": 3}, "progress": {"step": 1, "scores": []}},
        {"identity": {"monitor": "top1"}, "progress": {"step": 1}},
        {"identity": {"monitor": "top1"}, "progress": {"step": 1, "scores": 3}},
        {"identity": {"monitor": "top1"}, "progress": {"step": 1, "scores": [[1, "x"]]}},
    ],
)
def test_a_checkpoint_with_a_score_that_nobody_can_read_has_none(run: RunDir, facts: dict[str, Any]) -> None:
    first, second = saved(run, 1, 2)
    replace_file(second, "facts.json", json.dumps(facts).encode())
    assert files.best_scored([second, first], 2) == []


def test_a_score_of_zero_is_one_and_better_than_one_below(run: RunDir) -> None:
    target = writer(run, keep=9)
    for step, score in enumerate((-2.0, 0.0, -1.0, None), start=1):
        save(target, step, score=score)
    target.close()
    assert [path.name[-1] for path in files.best_scored(candidates(run.checkpoints), 9)] == [*"231"]


def test_a_checkpoint_takes_the_place_of_one_of_its_step(run: RunDir) -> None:
    saved(run, 1, 2)
    saved(run, 2)
    assert [path.name for path in candidates(run.checkpoints)] == ["step-000000002", "step-00000001"]


def test_a_write_that_still_runs_is_waited_for_before_the_next(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(call: Callable[..., Any], *facts: Any) -> Any:
        """A write that ends when it is waited for."""
        result = cache(lambda: call(*facts))
        return SimpleNamespace(done=lambda: False, exception=result, result=result)

    target = writer(run)
    monkeypatch.setattr(target, "pool", SimpleNamespace(submit=submit, shutdown=target.pool.shutdown))
    for step, left in ((1, []), (2, [1]), (3, [2, 1])):
        save(target, step)
        assert steps_left(run) == left
    target.close()
    assert steps_left(run) == [3, 2, 1]


def test_copies_are_dense_and_their_own_and_keep_the_kinds_of_their_containers() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    tree = {"a": (tensor.T, 3), "b": [tensor], "c": None}
    copies = host_copies(tree)
    assert (type(copies["a"]), type(copies["b"]), copies["a"][1], copies["c"]) == (tuple, list, 3, None)
    assert copies["a"][0].is_contiguous()
    tensor += 1
    assert copies["b"][0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copies["a"][0].tolist() == [[0, 3], [1, 4], [2, 5]]


class Pair(NamedTuple):
    """A tuple with names."""

    first: int
    second: int


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"a": [1, (2.0, None, True, "x")], 3: torch.ones(1), "b": nn.Parameter(torch.ones(1))}, ""),
        ({"a": {1}}, "x['a'] is of type set"),
        ({"a": [0, {"b": object()}]}, "x['a'][1]['b'] is of type object"),
        ({(1, b"x"): 1}, "a key of x[1] is of type bytes"),
        ({"a": Pair(1, 2)}, "x['a'] is of type Pair"),
        ({"a": np.float64(1)}, "x['a'] is of type float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_state_has_what_is_loaded_again_as_numbers_and_texts(tree: Any, place: str) -> None:
    if place:
        with pytest.raises(InputError, match=f"^{re.escape(place)}, expected tensors, numbers and texts"):
            check_plain(tree, "x")
    else:
        check_plain(tree, "x")


def test_a_folder_that_is_called_like_a_file_of_weights_is_a_folder(run: RunDir, tmp_path: Path) -> None:
    saved(run, 1)
    for name in ("a.safetensors", "b.pth"):
        shutil.copytree(run.path, tmp_path / name)
        assert weights_file(tmp_path / name) == tmp_path / name / "model.safetensors"
    (tmp_path / "c.pth").touch()
    with pytest.raises(InputError, match=r"^weights: there are no weights at .*; init_from= takes weights of other"):
        weights_file(tmp_path / "c.pth", "weights")
    with pytest.raises(InputError, match=r"expected a .safetensors file or a run folder$"):
        weights_file(tmp_path / "nowhere" / "d.pth", "weights")
    (bad := tmp_path / "bad.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"^mine: .*bad.safetensors cannot be read"):
        read_card(bad, "mine")


def test_of_a_sweep_the_best_job_is_proposed_before_the_latest_one(tmp_path: Path) -> None:
    for name in ("latest", "best"):
        (tmp_path / name).write_text("000-a")
        with pytest.raises(InputError, match=rf"a run folder, such as {re.escape(str(tmp_path / name))}$"):
            weights_file(tmp_path)


@pytest.mark.parametrize("left", ["last", "best", "weights", "checkpoints"])
def test_any_trace_of_a_checkpoint_says_that_a_run_had_one(run: RunDir, left: str) -> None:
    (path,) = saved(run, 1)
    flip(path / "state.pt", 1)
    for file in (run.last, run.best, run.weights, path):
        if file not in (getattr(run, left, None), path if left == "checkpoints" else None):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    sentences = list[str]()
    with pytest.raises(
        InputError, match=r"resume: no checkpoint in .* is complete \((there is no checkpoint left|step-)"
    ):
        newest_of_run(run, sentences.append)
    assert sentences == [], "the error says it all"


def test_the_damage_of_a_newer_checkpoint_is_told_to_whoever_asks(run: RunDir) -> None:
    _, second = saved(run, 1, 2)
    flip(second / "state.pt", 1)
    sentences = list[str]()
    assert newest_of_run(run, sentences.append) == run.checkpoints / "step-00000001"
    (sentence,) = sentences
    assert sentence.startswith(f"checkpoint {second} is damaged (")


def test_a_manifest_lists_the_files_by_name_whatever_the_order_of_the_folder(tmp_path: Path) -> None:
    names = [f"{number:02}" for number in range(40)]
    for name in reversed(names):
        (tmp_path / name).write_text(name)
    written = json.loads(manifest_text(tmp_path))
    assert [*written["bytes"]] == [*written["sha256"]] == names


def test_large_files_are_hashed_to_their_end(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(3 * 10**6)
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(b"")
    written = json.loads(manifest_text(tmp_path))
    assert written["bytes"] == {"a": len(content), "b": 0}
    assert written["sha256"] == {
        name: hashlib.sha256(data).hexdigest() for name, data in (("a", content), ("b", b""))
    }
    with (tmp_path / "c").open("wb") as holes:
        holes.truncate(size := 65 * 2**20)
        before = files.sha256(tmp_path / "c")
        holes.seek(size - 1)
        holes.write(b"1")
    assert files.sha256(tmp_path / "c") != before
    files.save_weights({"a": torch.arange(7 * 10**5)}, file := tmp_path / "large.safetensors")
    for place in (len(content) // 2, 8 * 10**5 * 7 - 1):
        flip(file, 8 * place)
        with pytest.raises(InputError, match=f"^{file} is damaged, or was changed"):
            files.load_weights(file)
        flip(file, 8 * place)
    assert torch.equal(files.load_weights(file)["a"], torch.arange(7 * 10**5))


@pytest.mark.parametrize(("monitor", "left"), [("top1", [6, 2]), ("-loss", [6, 3]), ("loss", [6, 2])])
def test_the_best_score_is_the_lowest_where_less_is_better(run: RunDir, monitor: str, left: list[int]) -> None:
    target = writer(run, keep=1, keep_best=1, fingerprint={**IDENTITY, "monitor": monitor})
    for step, score in enumerate([0.7, 0.9, 0.2, 0.8, 0.2, None], start=1):
        save(target, step, score=score)
    target.close()
    assert steps_left(run) == left


def size_of(*folders: Path) -> int:
    return sum(file.stat().st_size for folder in folders for file in folder.iterdir())


def test_a_damaged_checkpoint_goes_and_a_whole_one_stays_in_its_place(run: RunDir, tmp_path: Path) -> None:
    first, second, third = saved(run, 1, 2, 3)
    flip(third / "state.pt", 9)
    before = files.removable(run, 1)
    assert (before.stay, before.go) == ((second,), (third, first))
    (first / "link").symlink_to(tmp_path)
    assert files.removable(run, 1).size == before.size + len(str(tmp_path))


@pytest.mark.parametrize("status", ["completed", "stopped"])
def test_what_all_could_remove_of_a_completed_run_is_counted(run: RunDir, status: str) -> None:
    target = writer(run, keep=9)
    for step, score in enumerate((5.0, 9.0, 3.0, 4.0), start=1):
        save(target, step, best=step == 2, score=score)
    target.close()
    paths = {step: run.checkpoints / f"step-{step:08}" for step in (1, 2, 3, 4)}
    (torn := run.checkpoints / ".step-00000005.tmp").mkdir()
    (torn / "model.safetensors").write_bytes(bytes(1000))
    run.write_summary(status=status)
    completed = status == "completed"
    one, two, every = (
        files.removable(run, 1),
        files.removable(run, 2),
        files.removable(run, 1, everything=True),
    )
    assert one.stay == (paths[4], paths[2])
    assert one.go == (paths[3], paths[1], torn)
    assert one.size == size_of(paths[3], paths[1]) + 1000
    assert one.more == (size_of(paths[4], paths[2]) if completed else 0)
    assert (two.stay, two.go) == ((paths[4], paths[3], paths[2]), (paths[1], torn))
    assert (every.stay, every.more) == (((), 0) if completed else (one.stay, one.more))
    flip(run.weights, 8 * run.weights.stat().st_size - 1)
    assert (files.removable(run, 1, everything=True).stay, files.removable(run, 1).more) == (one.stay, 0)


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors", "state.pt"])
def test_a_file_with_its_hash_that_no_library_can_load_is_damage(run: RunDir, name: str) -> None:
    (path,) = saved(run, 1)
    replace_file(path, name, b"PK no tensors\nat all")
    assert find_corruption(path) == ""
    with pytest.raises(InputError) as caught:
        reading.read_checkpoint(path)
    assert str(caught.value).startswith(f"resume: checkpoint {path} is damaged (")
    assert str(caught.value).endswith("); name another one")
    assert "\n" not in str(caught.value)
    assert ("state.pt cannot be loaded (" in str(caught.value)) == (name == "state.pt")
    with pytest.raises(InputError, match="is damaged"):
        load_newest(run)


def test_an_empty_or_a_compressed_state_is_not_loaded(run: RunDir, tmp_path: Path) -> None:
    (path,) = saved(run, 1)
    for content, reason in ((b"", "it is empty"), (b"x\nbytearray\n", "it has an array of bytes")):
        replace_file(path, "state.pt", content)
        with pytest.raises(ValueError, match=rf"^state\.pt cannot be loaded \({reason}\)$"):
            files.read_state(path)


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("name", ["a/data.pkl", "a/data/0"])
def test_no_member_of_an_archive_may_be_compressed_in_any_way(tmp_path: Path, name: str, kind: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        for member in ("a/data.pkl", "a/data/0", "a/version"):
            archive.writestr(member, b"content", kind if member == name else zipfile.ZIP_STORED)
    refused = pytest.raises(ValueError, match=f"^{name} in it is compressed$")
    with refused if kind != zipfile.ZIP_STORED else nullcontext():
        files.check_archive(tmp_path / "a.pt")


def test_the_pickle_in_an_archive_is_not_larger_than_anything_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, str]] = []
    monkeypatch.setattr(files, "check_size", lambda size, what: sizes.append((size, what)))
    torch.save({"a": torch.zeros(1000)}, tmp_path / "a.pt")
    files.check_archive(tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        members = {member.filename: member.file_size for member in archive.infolist()}
    assert sizes == [(size * name.endswith(".pkl"), f"{name} in it has") for name, size in members.items()]
    assert members["a/data.pkl"] > 0


def test_the_sizes_and_the_hashes_in_a_manifest_are_of_the_same_files(run: RunDir) -> None:
    (path,) = saved(run, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    for part in ("bytes", "sha256"):
        changed = {**manifest, part: {name: value for name, value in manifest[part].items() if name != "state.pt"}}
        (path / "manifest.json").write_text(json.dumps(changed))
        assert find_corruption(path) == "manifest.json does not list the files of a checkpoint"
        assert not whole_weights(path)
    (path / "manifest.json").write_text(json.dumps({**manifest, "bytes": {**manifest["bytes"], "state.pt": 1}}))
    size = (path / "state.pt").stat().st_size
    assert find_corruption(path) == f"state.pt has {size} bytes, expected 1"


@pytest.mark.parametrize(
    ("here", "there", "sentence"),
    [
        ({"names": ["a", "b"]}, {"names": ["a", "c"]}, "names[1]: here b, there c"),
        ({"names": ["a", "b"]}, {"names": ["a"]}, "names[1]: here b, there nothing"),
        ({"names": ["a"]}, {"names": ["a", "b"]}, "names[1]: here nothing, there b"),
        ({"names": [None, "a"]}, {"names": ["b", "a"]}, "names[0]: here None, there b"),
        ({"size": [8, 9]}, {"size": [9, 8]}, "size: here [8, 9], there [9, 8]"),
        ({"size": [8, 9]}, {"size": [8, 9]}, ""),
        ({"a": 0}, {"a": None}, "a: here 0, there nothing"),
        ({"a": None}, {"a": 0}, "a: here nothing, there 0"),
        ({"a": None}, {}, ""),
        ({"a": 1}, {"a": 1, "b": 2}, ""),
        ({"b": 1, "a": 1}, {"a": 2, "b": 2}, "b: here 1, there 2; a: here 1, there 2"),
        ({"of": {"x": 1, "y": 2}}, {"of": {"x": 1, "y": 3}}, "of.y: here 2, there 3"),
    ],
)
def test_the_differences_of_two_runs_are_named_key_by_key(
    here: dict[str, Any], there: dict[str, Any], sentence: str
) -> None:
    assert reading.describe_differences(here, there) == sentence


def test_a_loss_scale_goes_on_under_the_options_of_today_and_where_there_is_a_scaler(run: RunDir) -> None:
    (path,) = saved(run, 1)  # with a scale of 8
    for enabled in (True, False):
        contents = parts(1)
        contents.scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=7, enabled=enabled)
        restore(path, contents)
        state = contents.scaler.state_dict()
        assert (state.get("scale"), state.get("_growth_tracker"), state.get("growth_interval")) == (
            (8.0, 5, 7) if enabled else (None, None, None)
        )
    contents.scaler = torch.amp.GradScaler("cpu", enabled=False)
    target = writer(run)
    save(target, 2, contents)
    target.close()
    resumed = parts(2)
    restore(run.checkpoints / "step-00000002", resumed)
    assert resumed.scaler.state_dict()["scale"] == 2.0**5, "of a run without a scaler"


def test_an_average_that_has_not_begun_is_no_file_and_begins_after_the_resume(run: RunDir) -> None:
    contents = parts(0)
    contents.ema = EMA(contents.model, 0.9)
    target = writer(run)
    save(target, 1, contents, best=True)
    target.close()
    path = run.checkpoints / "step-00000001"
    assert not (path / "ema.safetensors").exists()
    (path / "ema.safetensors").write_bytes(b"of nobody")  # the manifest does not list it
    assert reading.read_checkpoint(path).ema is None
    assert same(load_file(run.weights), dict(contents.model.state_dict())), "the weights themselves are scored"
    resumed = parts(1)
    before = host_copies(dict(resumed.ema.module.state_dict()))
    assert resumed.ema.n_averaged == 1
    restore(path, resumed)
    assert resumed.ema.n_averaged == 0
    assert same(dict(resumed.ema.module.state_dict()), before)
    run.weights.unlink()
    writer(run).repair_export(1)
    assert same(load_file(run.weights), dict(contents.model.state_dict()))


def test_a_run_without_an_average_resumes_from_one_with_it(run: RunDir) -> None:
    (path,) = saved(run, 1)
    contents = vars(parts(1)) | {"ema": None}
    assert reading.restore_from(reading.read_checkpoint(path), **contents)["step"] == 1
    assert same(dict(contents["model"].state_dict()), dict(parts(0).model.state_dict()))


@pytest.mark.parametrize("number", [1, 3, 5])
def test_the_first_three_tensors_of_another_model_are_told_and_how_many_there_are(run: RunDir, number: int) -> None:
    saved(run, 1)
    model = parts(3).model
    before = host_copies(dict(model.state_dict()))
    reading.load_exported(model, run.weights)
    exported = dict(model.state_dict())
    assert not same(exported, before)
    assert same(exported, dict(parts(0).model.state_dict()))
    other = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(number)))
    shapes = {f"{at}.weight": (2, 2) for at in range(number)}
    reading.check_shapes(other, shapes, Path("w"), "mine")
    changed = dict.fromkeys(shapes, (2, 3))
    examples = ", ".join(f"{name} (here (2, 2), there (2, 3))" for name in [*shapes][:3])
    with pytest.raises(InputError) as caught:
        reading.check_shapes(other, changed, Path("w"), "mine")
    assert str(caught.value) == f"mine: w is of another model: {number} tensors differ, e.g. {examples}"
    reading.check_shapes(other, changed, Path("w"), "mine", leave_out=[*shapes])
    with pytest.raises(InputError, match=r"1 tensors differ, e\.g\. more \(here None, there \(1,\)\)$"):
        reading.check_shapes(other, {**shapes, "more": (1,)}, Path("w"), "mine")
    with pytest.raises(InputError, match=r"1 tensors differ, e\.g\. 0\.weight \(here \(2, 2\), there None\)$"):
        reading.check_shapes(other, {n: shape for n, shape in shapes.items() if n != "0.weight"}, Path("w"), "mine")


def test_exported_weights_of_another_model_are_refused_by_their_key(run: RunDir) -> None:
    saved(run, 1)
    model = nn.Linear(2, 2)
    before = host_copies(dict(model.state_dict()))
    with pytest.raises(InputError, match=rf"^weights: {re.escape(str(run.weights))} is of another model"):
        reading.load_exported(model, run.weights)
    with pytest.raises(InputError, match=rf"^task\.teacher: {re.escape(str(run.weights))} is of another model"):
        reading.check_tensors(model, run.weights, "task.teacher")
    (buffered := parts(3).model).register_buffer("more", torch.zeros(1))
    with pytest.raises(InputError, match=r" 1 tensors differ, e\.g\. more \(here \(1,\), there None\)$"):
        reading.check_tensors(buffered, run.weights, "task.teacher")
    assert same(dict(model.state_dict()), before)


def test_exported_weights_that_were_changed_are_not_loaded(run: RunDir) -> None:
    saved(run, 1)
    model = parts(3).model
    before = host_copies(dict(model.state_dict()))
    flip(run.weights, 8 * run.weights.stat().st_size - 1)
    with pytest.raises(InputError, match=rf"^{re.escape(str(run.weights))} is damaged, or was changed"):
        reading.load_exported(model, run.weights)
    assert same(dict(model.state_dict()), before)


@pytest.mark.parametrize(
    ("content", "command"),
    [
        (None, "the command of this run and another hydra.run.dir=FOLDER"),
        ("steps: 20\n", "the command of this run and another hydra.run.dir=FOLDER"),
        ("- steps=20\n", "lockstep train steps=20"),
    ],
)
def test_a_run_that_lost_everything_says_how_to_start_over(run: RunDir, content: str | None, command: str) -> None:
    saved(run, 1)
    shutil.rmtree(run.checkpoints)
    run.weights.write_bytes(b"none either")
    if content is not None:
        run.overrides.write_text(content)
    with pytest.raises(InputError) as caught:
        newest_of_run(run)
    assert str(caught.value) == (
        f"resume: no checkpoint in {run.checkpoints} is complete (there is no checkpoint left); nothing was changed; "
        f"put one back, or start over elsewhere with `{command}`; to start over here, remove the folder"
    )


def test_the_last_failure_is_told_with_the_folder_and_the_reason(run: RunDir, full_disk: Any) -> None:
    target = writer(run)
    with full_disk(100):
        save(target, 1)
        with pytest.raises(StorageError) as caught:
            target.close()
    assert str(caught.value) == f"the last checkpoint could not be written to {run.path} (file too large)"


def test_the_state_of_callbacks_is_saved_where_there_is_one(run: RunDir) -> None:
    target = writer(run)
    for step, callbacks in ((1, None), (2, {}), (3, {"mine": {"seen": 3}})):
        target.save(**vars(parts()), progress=progress(step), callbacks=callbacks)
    target.close()
    states = [files.read_state(run.checkpoints / f"step-{step:08}") for step in (1, 2, 3)]
    assert [state.get("callbacks", "none") for state in states] == ["none", "none", {"mine": {"seen": 3}}]
    assert [state["ema_updates"] for state in states] == [1, 1, 1]


def test_the_tensors_of_callbacks_are_those_of_the_step_although_they_change_before_they_are_written(
    run: RunDir,
) -> None:
    target, seen, changed = writer(run), torch.ones(2), threading.Event()
    target.pool.submit(changed.wait)
    target.save(**vars(parts()), progress=progress(1), callbacks={"mine": {"seen": seen}})
    seen += 1
    changed.set()
    target.close()
    (path,) = candidates(run.checkpoints)
    assert files.read_state(path)["callbacks"]["mine"]["seen"].tolist() == [1, 1]


def test_the_first_file_that_is_gone_is_named(run: RunDir) -> None:
    target = writer(run, needed=(run.config, run.composed, run.overrides))
    run.config.touch()
    save(target, 1)
    with pytest.raises(
        StorageError, match=f"^{re.escape(str(run.composed))} was removed .* nobody can resume the run$"
    ):
        target.wait()
    assert target.pending is None


def test_a_damaged_best_checkpoint_is_not_exported(run: RunDir) -> None:
    (best,) = saved(run, 4)
    exported = run.weights.read_bytes()
    run.best.unlink()
    for name in ("state.pt", "ema.safetensors"):
        flip(best / name, 99)
        run.weights.write_bytes(b"older")
        writer(run).repair_export(4)
        assert run.weights.read_bytes() == b"older"
        assert not run.best.exists()
        flip(best / name, 99)
    run.weights.write_bytes(exported)
    writer(run).repair_export(4)
    assert not run.best.exists(), "nothing is to be done"


def test_copies_have_no_gradient_and_their_own_memory_also_of_a_part() -> None:
    weight = nn.Parameter(torch.arange(6.0).view(2, 3))
    whole, part = host_copies([weight, weight[:1]])
    assert (whole.requires_grad, part.requires_grad) == (False, False)
    assert (type(whole), part.untyped_storage().nbytes()) == (torch.Tensor, 12)
    assert map_tensors((1, [torch.ones(1)], {"a": "b"}), lambda tensor: tensor + 1) == (
        1,
        [torch.tensor([2.0])],
        {"a": "b"},
    )


def test_a_card_that_cannot_be_read_is_the_users_mistake_and_other_weights_have_none(tmp_path: Path) -> None:
    for name, metadata in (("plain", None), ("other", {"format": "pt"}), ("broken", {"lockstep": "{"})):
        save_file({"a": torch.zeros(1)}, tmp_path / f"{name}.safetensors", metadata)
    assert find_card(tmp_path / "plain.safetensors") is find_card(tmp_path / "other.safetensors") is None
    assert find_card(tmp_path / "gone.safetensors") is None
    for read in (find_card, read_card):
        with pytest.raises(InputError, match=r"^weights: .*broken\.safetensors cannot be used: "):
            read(tmp_path / "broken.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"\xff" * 9)
    for name in ("plain", "cut"):
        with pytest.raises(InputError, match=rf"^mine: .*{name}\.safetensors "):
            read_card(tmp_path / f"{name}.safetensors", "mine")


def test_a_path_without_weights_is_told_with_a_similar_one(run: RunDir, tmp_path: Path) -> None:
    saved(run, 1)
    begin = "expected a .safetensors file or a run folder"
    for path, end in (
        (tmp_path / "runn", f"{begin}. Did you mean {run.path}?"),
        (run.checkpoints, f"{begin}, such as {run.best}"),
        (tmp_path / "nothing like it", begin),
    ):
        with pytest.raises(InputError) as caught:
            weights_file(path, "mine")
        assert str(caught.value) == f"mine: there are no weights at {path}, {end}"


def test_facts_that_are_changed_by_hand_are_not_the_facts(run: RunDir) -> None:
    (path,) = saved(run, 1)
    content = (path / "facts.json").read_text()
    (path / "facts.json").write_text(content.replace('"batch": 64', '"batch": 65'))
    assert content != (path / "facts.json").read_text()
    for read in (reading.undamaged_facts, lambda path: check_fingerprint(IDENTITY, path)):
        with pytest.raises(InputError) as caught:
            read(path)
        says = f"resume: checkpoint {path} is damaged (facts.json does not match its sha256); name another one"
        assert str(caught.value) == says
    (path / "facts.json").write_text(content)
    assert reading.undamaged_facts(path) == json.loads(content)


def test_what_a_link_leads_to_stays_where_the_link_is_removed(tmp_path: Path) -> None:
    for name in ("folder", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    (link := tmp_path / "link").symlink_to(tmp_path / "folder")
    (broken := tmp_path / "broken").symlink_to(tmp_path / "gone")
    for path in (link, broken, tmp_path / "other", tmp_path / "folder" / "file"):
        files.delete(path)
        assert not os.path.lexists(path)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_checkpoint_has_no_name_of_one_from_the_first_moment_of_its_removal(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = saved(run, 1, 2)
    names: list[str] = []
    monkeypatch.setattr(files, "delete", lambda path: names.append(path.name))
    files.remove(first)
    assert candidates(run.checkpoints) == [second]
    torn = run.checkpoints / ".step-00000003.tmp"
    torn.mkdir()
    files.remove(torn)
    assert names == [".step-00000001.old.tmp", ".step-00000003.tmp"]
    assert {path.name for path in run.checkpoints.glob(".*")} == {*names}


def test_what_a_killed_writer_has_left_of_any_kind_is_removed_by_the_next_one(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (run.checkpoints / ".step-00000009.tmp").write_text("a file")
    (run.checkpoints / ".step-00000008.old.tmp").symlink_to(tmp_path / "mine")
    (run.checkpoints / ".0123456789abcdef.tmp").touch()  # of the file `last`
    (run.checkpoints / "notes.tmp").touch()
    (path,) = saved(run, 1)
    assert {file.name for file in run.checkpoints.iterdir()} == {path.name, "last", "best", "notes.tmp"}
    assert (tmp_path / "mine").is_dir()


def test_what_cannot_be_removed_of_a_killed_writer_stays_and_the_checkpoint_is_written(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        tried.append(path.name)
        raise PermissionError(errno.EACCES, "no", str(path))

    tried: list[str] = []
    monkeypatch.setattr(files, "delete", refuse)
    (run.checkpoints / ".step-00000009.tmp").mkdir()
    (path,) = saved(run, 1)
    assert tried == [".step-00000009.tmp"]
    assert find_corruption(path) == ""
    assert capsys.readouterr().out == ""


BROKEN_STATES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no optimizer": lambda state: state.pop("optimizer"),
    "a number": lambda state: state.update(optimizer=3),
    "no entries": lambda state: state["optimizer"].update(state=3),
    "another shape": lambda state: state["optimizer"]["state"]["0.weight"].update(exp_avg=torch.zeros(7)),
    "another kind of optimizer": lambda state: state["optimizer"]["state"]["0.weight"].pop("exp_avg"),
    "no scale": lambda state: state["scaler"].pop("scale"),
    "no scaler": lambda state: state.pop("scaler"),
    "no count": lambda state: state.update(ema_updates=None),
}


@pytest.mark.parametrize("broken", BROKEN_STATES)
def test_a_state_in_which_something_is_wrong_does_not_fit(run: RunDir, tmp_path: Path, broken: str) -> None:
    trained = parts()
    trained.train(1)
    target = writer(run)
    save(target, 1, trained)
    target.close()
    path = run.checkpoints / "step-00000001"
    state = files.read_state(path)
    restore(path, parts(1))
    BROKEN_STATES[broken](state)
    torch.save(state, tmp_path / "state.pt")
    replace_file(path, "state.pt", (tmp_path / "state.pt").read_bytes())
    says = rf"(?s)^resume: {re.escape(str(path))} does not fit this model \(.*\); .* with init_from=PATH$"
    with pytest.raises(InputError, match=says):
        restore(path, parts(1))


def test_the_facts_of_the_same_run_are_returned_with_what_the_expected_ones_do_not_have(run: RunDir) -> None:
    (path,) = saved(run, 3, fingerprint={**IDENTITY, "newer": 1})
    facts = check_fingerprint(IDENTITY, path)
    assert (facts["identity"], facts["progress"]["step"]) == ({**IDENTITY, "newer": 1}, 3)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("odd\nand long"), "state.pt cannot be loaded (odd)"),
        (OSError(5, "odd"), "state.pt cannot be loaded ([Errno 5] odd)"),
        (pickle.UnpicklingError("run it anyway"), "state.pt contains more than tensors and plain values"),
        (RuntimeError("set weights_only=False"), "state.pt contains more than tensors and plain values"),
    ],
)
def test_a_state_that_torch_cannot_load_is_told_in_one_line_without_its_advice(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def load(*arguments: Any, **options: Any) -> Any:
        calls.append((arguments, options))
        raise error

    calls: list[Any] = []
    (path,) = saved(run, 1)
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        files.read_state(path)
    assert calls == [((path / "state.pt",), {"map_location": "cpu", "weights_only": True, "mmap": True})]
