"""Which checkpoints of a run can be removed, and how large a checkpoint will be."""

import io
import json
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import train_here
from lockstep.checkpoint.files import best_scored
from lockstep.checkpoint.reading import load_newest
from lockstep.checkpoint.state import optimizer_state
from lockstep.cli.clean import clean
from lockstep.core.errors import InputError
from lockstep.core.run import State, candidates
from lockstep.core.run_dir import RunDir
from lockstep.core.safe_write import Lock
from lockstep.inference.predictor import load_predictor
from lockstep.models import DigitNet
from lockstep.optim import SGD, AdamW, Muon, Timm
from lockstep.records.ledger import Identity, Ledger
from lockstep.runtime.host import format_bytes
from lockstep.training.banner import state_bytes


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A completed run: steps 2, 4, 6 and 8, each evaluated, all of them kept."""
    root = tmp_path_factory.mktemp("runs")
    words = ("steps=8", "checkpoint.every=2", "train.eval_every=2", "checkpoint.keep=9", "model.width=8")
    return train_here(root / "sweeps" / "one" / "000-seed=1", *words).path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunDir:
    copied = RunDir(tmp_path / "outputs" / "sweeps" / "one" / "000-seed=1")
    shutil.copytree(trained, copied.path)
    copied.write_summary(status="completed")
    return copied


def steps(run: RunDir) -> list[int]:
    return [int(path.name[5:]) for path in candidates(run.checkpoints)]


def cleaned(run: RunDir, **changed: Any) -> list[int]:
    clean([str(run.path.parents[2])], **{"keep": 1, "everything": False, "yes": True, **changed})
    return steps(run)


def test_nothing_goes_without_yes_and_the_bytes_are_said(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cleaned(run, yes=False) == [8, 6, 4, 2]
    out = capsys.readouterr().out
    best = {path.name for path in best_scored(candidates(run.checkpoints), 1)}
    go = [path for path in candidates(run.checkpoints)[1:] if path.name not in best]
    size = sum(file.stat().st_size for path in go for file in path.iterdir())
    checkpoints = f"{len(go)} checkpoint{'s' * (len(go) > 1)} of 1 run, {format_bytes(size)} can go"
    assert f"{checkpoints}; nothing is removed yet: lockstep clean" in out
    assert all(path.name in out for path in go)
    assert re.search(r" \((step-\d+ stays|step-\d+(, step-\d+)+ stay)\)$", out, re.MULTILINE), out
    assert cleaned(run, yes=False, form="json") == [8, 6, 4, 2]
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["checkpoints"], row["bytes"], row["removed"]) == ([path.name for path in go], size, False)


def test_a_run_to_which_several_paths_lead_is_counted_once(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    root = run.path.parents[2]
    paths = [root, root / "sweeps", root / ".." / root.name]
    clean([*map(str, paths)], keep=1, everything=False, yes=False, form="json")
    assert [Path(row["run"]).resolve() for row in json.loads(capsys.readouterr().out)] == [run.path.resolve()]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_proposed_command_keeps_as_many_as_were_asked_for(
    run: RunDir, keep: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned(run, yes=False, keep=keep)
    assert (f" --keep {keep} --yes" in capsys.readouterr().out) == (keep > 1)


def test_the_newest_and_the_best_stay_and_can_be_used(run: RunDir) -> None:
    (run.checkpoints / ".step-00000009.tmp").mkdir()
    scored = {path.name for path in best_scored(candidates(run.checkpoints), 1)}
    left = cleaned(run)
    assert set(left) == {8, *(int(name[5:]) for name in scored)}
    assert not list(run.checkpoints.glob(".*"))
    assert load_newest(run) is not None
    load_predictor(run.path, device="cpu")


def test_a_damaged_newest_checkpoint_does_not_count(run: RunDir) -> None:
    (run.checkpoints / "step-00000008" / "state.pt").write_bytes(b"")
    assert 6 in cleaned(run)
    for path in candidates(run.checkpoints):
        (path / "facts.json").unlink()
    before = steps(run)
    assert cleaned(run) == before  # none is whole


def test_a_run_that_is_running_keeps_everything(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Lock()) as lock:
        lock.take(run.lock)
        assert cleaned(run, everything=True) == [8, 6, 4, 2]
    assert "is in use by another job" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "left"), [("completed", []), ("stopped", [8])])
def test_all_means_completed_runs_whose_weights_stay(run: RunDir, status: str, left: list[int]) -> None:
    run.write_summary(status=status)
    assert [step for step in cleaned(run, everything=True) if step in (8, *left)] == left
    load_predictor(run.path, device="cpu")


@pytest.mark.parametrize("is_best", [True, False])
def test_the_best_run_of_a_sweep_keeps_what_a_resume_needs(run: RunDir, is_best: bool) -> None:
    ledger = Ledger(run.path.parent)
    ledger.create(Identity(base={}, swept=("seed",), words=()))
    records = ledger.enter([(["a"], "seed=1"), (["b"], "b")])
    for record, objective in zip(records, (2.0, 3.0 - 2 * is_best), strict=True):
        (ledger.folder / record.folder).mkdir(exist_ok=True)  # a job without a folder waits again
        ledger.end(record, State.done, objective=objective)
    assert bool(cleaned(run, everything=True)) == is_best
    assert ledger.best == (run.path.name if is_best else "001-b")


@pytest.mark.parametrize("words", [{"keep": 0}, {"folders": ["nowhere"]}])
def test_what_cannot_be_cleaned_is_one_sentence(tmp_path: Path, words: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"expected 1 or more|is not a folder"):
        clean(**{"folders": [str(tmp_path)], "keep": 1, "everything": False, "yes": True, **words})


@pytest.mark.parametrize(
    "optimizer", [AdamW(), SGD(), SGD(momentum=0.9), Muon(), Timm(opt="lamb"), AdamW(layer_decay=0.9)], ids=repr
)
def test_the_optimizers_share_of_a_checkpoint_is_known_before_the_first_step(optimizer: Any) -> None:
    model = DigitNet().build(10, (1, 8, 8))
    max(model.parameters(), key=torch.numel).requires_grad_(False)  # has no state
    before = torch.random.get_rng_state()
    estimate = state_bytes(optimizer, model)
    assert torch.equal(torch.random.get_rng_state(), before)
    if getattr(optimizer, "layer_decay", None) is not None:
        optimizer = AdamW()
    built = optimizer.build(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    built.step()
    file = io.BytesIO()
    torch.save(optimizer_state(built, model)["state"], file)
    assert estimate is not None
    assert estimate <= len(file.getvalue()) <= estimate + 30_000  # names, counters and torch's own headers
