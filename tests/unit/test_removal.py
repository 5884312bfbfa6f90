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
from lockstep.checkpoint.files import Removable, best_scored, removable
from lockstep.checkpoint.reading import load_newest
from lockstep.checkpoint.state import optimizer_state
from lockstep.cli import clean as cleaning
from lockstep.cli.clean import clean
from lockstep.core.errors import InputError, StorageError
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


def test_what_all_would_remove_is_shown_before(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cleaned(run, yes=False, everything=True, form="json") == [8, 6, 4, 2]
    (row,) = json.loads(capsys.readouterr().out)
    assert row["checkpoints"] == [f"step-{step:08}" for step in (8, 6, 4, 2)]


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
    assert not run.lock.exists(), "a job may resume"
    assert load_newest(run) is not None
    load_predictor(run.path, device="cpu")


def test_as_many_of_the_newest_stay_as_are_to_be_kept(run: RunDir) -> None:
    best = {int(path.name[5:]) for path in best_scored(candidates(run.checkpoints), 1)}
    assert {*cleaned(run, keep=3)} == {8, 6, 4} | best
    assert {*cleaned(run, keep=2)} == {8, 6} | best


def test_a_damaged_newest_checkpoint_does_not_count(run: RunDir) -> None:
    (run.checkpoints / "step-00000008" / "state.pt").write_bytes(b"")
    assert 6 in cleaned(run)
    for path in candidates(run.checkpoints):
        (path / "facts.json").unlink()
    before = steps(run)
    assert cleaned(run) == before  # none is whole


@pytest.mark.parametrize("yes", [True, False])
def test_a_run_that_is_running_keeps_everything(run: RunDir, yes: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Lock()) as lock:
        lock.take(run.lock)
        assert cleaned(run, everything=True, yes=yes) == [8, 6, 4, 2]
    warning, last = capsys.readouterr().out.splitlines()
    assert "is in use by another job" in warning
    assert last == "there is nothing to remove"


def test_no_job_can_take_a_run_while_its_checkpoints_are_removed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = list[Path]()

    def remove(path: Path) -> None:
        removed.append(path)
        with closing(Lock()) as lock, pytest.raises(InputError, match="is in use by another job"):
            lock.take(run.lock)

    monkeypatch.setattr(cleaning, "remove", remove)
    cleaned(run)
    assert removed


@pytest.mark.parametrize(("status", "left"), [("completed", []), ("stopped", [8])])
def test_all_means_completed_runs_whose_weights_stay(run: RunDir, status: str, left: list[int]) -> None:
    run.write_summary(status=status)
    assert [step for step in cleaned(run, everything=True) if step in (8, *left)] == left
    load_predictor(run.path, device="cpu")


@pytest.mark.parametrize("content", [None, b"", b"flipped"])
def test_a_completed_run_without_whole_weights_keeps_its_checkpoints(run: RunDir, content: bytes | None) -> None:
    weights = run.path / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    if content is not None:
        weights.write_bytes(content and whole[:-1] + bytes([whole[-1] ^ 1]))
    assert 8 in cleaned(run, everything=True)


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


def test_what_a_link_in_a_checkpoint_leads_to_is_not_freed(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(10**6))
    before = removable(run, 1)
    (before.go[0] / "link").symlink_to(tmp_path / "large")
    assert removable(run, 1).size == before.size + len(str(tmp_path / "large"))
    cleaned(run)
    assert (tmp_path / "large").stat().st_size == 10**6


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


def plan(*names: str, stay: tuple[str, ...] = (), size: int = 0, more: int = 0) -> Removable:
    return Removable(go=[Path(name) for name in names], stay=[Path(name) for name in stay], size=size, more=more)


PLANS: dict[str, tuple[dict[str, Removable | None], dict[str, Any], list[str]]] = {
    "nothing": ({"a": plan(stay=("s1",)), "b": None}, {"yes": True}, ["there is nothing to remove"]),
    "one": (
        {"a": plan("s1", stay=("s2",), size=1000), "b": plan()},
        {"yes": True},
        ["a: s1 (s2 stays)", "removed 1 checkpoint of 1 run, 1 kB"],
    ),
    "several": (
        {"a": plan("s1", "s2", stay=("s3", "s4"), size=1000), "b": plan("s1", size=2000)},
        {"yes": False},
        [
            *("a: s1, s2 (s3, s4 stay)", "b: s1 (none stays)", "3 checkpoints of 2 runs, 3 kB can go; nothing is"),
        ],
    ),
    "all": (
        {"a": plan("s1", size=5), "b": plan(more=3000)},
        {"yes": False, "everything": True, "keep": 3},
        [
            *("a: s1 (none stays)", "can go; nothing is removed yet: lockstep clean x 'y z' --keep 3 --all --yes"),
            "--all frees 3 kB more: the checkpoints of completed runs; their weights stay",
        ],
    ),
    "keep": ({"a": plan("s1", size=5)}, {"yes": False, "keep": 2}, ["(none stays)", "clean x 'y z' --keep 2 --yes"]),
    "usual": ({"a": plan("s1", size=5)}, {"yes": False}, ["(none stays)", "yet: lockstep clean x 'y z' --yes"]),
}


@pytest.mark.parametrize("name", PLANS)
def test_what_goes_and_what_stays_is_counted_in_words(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans, options, lines = PLANS[name]
    options = {"keep": 1, "everything": False, **options}
    calls: list[tuple[str, int, bool, bool]] = []

    def clean_run(run: RunDir, keep: int, *, everything: bool, yes: bool) -> Removable | None:
        calls.append((str(run.path), keep, everything, yes))
        return plans[str(run.path)]

    monkeypatch.setattr(cleaning, "_runs", lambda folders: [RunDir(Path(path)) for path in plans])
    monkeypatch.setattr(cleaning, "_clean_run", clean_run)
    clean(["x", "y z"], **options)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == len(lines)
    assert all(line in text for line, text in zip(lines, shown, strict=True)), shown
    assert calls == [(path, options["keep"], options["everything"], options["yes"]) for path in plans]
    clean(["x", "y z"], **options, form="json")
    rows = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in rows] == [path for path, of in plans.items() if of is not None and of.go]
    assert all(row["removed"] is options["yes"] for row in rows)
    assert [row["stay"] for row in rows] == [[path.name for path in of.stay] for of in plans.values() if of and of.go]


def test_runs_come_in_the_order_of_their_paths_each_once_and_none_of_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_at(path: Path, *, checkpoints: bool = True) -> Path:
        run = RunDir.at(path)
        run.overrides.write_text("[]\n")
        if checkpoints:
            run.checkpoints.mkdir(exist_ok=True)
        else:
            shutil.rmtree(run.checkpoints, ignore_errors=True)
        return run.path

    root = tmp_path / "root"
    for name in ("b", "a", "c/deeper"):
        run_at(root / name)
    run_at(root / "without", checkpoints=False)
    linked = run_at(root / "linked", checkpoints=False)
    (linked / "checkpoints").symlink_to(run_at(tmp_path / "elsewhere") / "checkpoints")
    (root / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "way").symlink_to(root)
    names = [path.relative_to(root) for path in (root / "a", root / "b", root / "c" / "deeper")]
    assert [run.path.resolve().relative_to(root.resolve()) for run in cleaning._runs([str(root)])] == names
    ways = [str(root / "b"), str(root), str(tmp_path / "way")]
    assert [run.path.resolve().relative_to(root.resolve()) for run in cleaning._runs(ways)] == names
    denied = PermissionError(13, "Permission denied")

    def is_dir(path: Path) -> bool:
        if path.name == "checkpoints":
            raise denied
        return True

    monkeypatch.setattr(Path, "is_dir", is_dir)
    assert not cleaning._has_checkpoints(RunDir(root / "a"))
    assert f"{root / 'a'} cannot be read (Permission denied): all of its checkpoints stay" in capsys.readouterr().out


def test_a_run_of_a_later_version_keeps_its_checkpoints(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(run.summary.read_text())
    run.summary.write_text(json.dumps({**facts, "format": 999}))
    assert cleaned(run, everything=True) == [8, 6, 4, 2]
    assert "all of its checkpoints stay" in capsys.readouterr().out
    with closing(Lock()) as lock:
        lock.take(run.lock)  # it was released


@pytest.mark.parametrize("is_best", [True, False])
def test_what_all_would_free_has_nothing_of_the_best_run_of_a_sweep(
    is_best: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Ledger, "best", "a" if is_best else "b")
    monkeypatch.setattr(cleaning, "_runs", lambda folders: [RunDir(tmp_path / "a")])
    monkeypatch.setattr(cleaning, "_clean_run", lambda run, keep, *, everything, yes: plan("s1", size=5, more=3000))
    clean(["x"], keep=1, everything=False, yes=False)
    assert ("--all frees 3 kB more" in capsys.readouterr().out) is not is_best


def test_the_size_of_what_goes_stands_in_a_column_before_its_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"a": 5, "b": 12_345_678}
    monkeypatch.setattr(cleaning, "_runs", lambda folders: [RunDir(Path(name)) for name in sizes])
    plans = {name: plan("s1", size=size) for name, size in sizes.items()}
    monkeypatch.setattr(cleaning, "_clean_run", lambda run, *_, **__: plans[str(run.path)])
    clean(["x"], keep=1, everything=False, yes=True)
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.index("a: s1") == second.index("b: s1") == 11
    assert second.startswith("    12 MB  b")
    assert last == "removed 2 checkpoints of 2 runs, 12 MB"


def test_why_a_run_keeps_all_is_said_without_the_remedy_of_a_resume(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(Lock()) as lock:
        lock.take(run.lock)
        cleaned(run)
    (line, last) = capsys.readouterr().out.splitlines()
    assert ";" not in line
    assert line.endswith(": all of its checkpoints stay")
    assert last == "there is nothing to remove"


def test_a_checkpoint_that_cannot_be_removed_is_a_storage_error_of_its_folder(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cleaning, "remove", refuse)
    with pytest.raises(StorageError, match=rf"^{run.checkpoints} cannot be written \(Permission denied\)$"):
        cleaned(run)
    with closing(Lock()) as lock:
        lock.take(run.lock)  # it was released
    assert steps(run) == [8, 6, 4, 2]
