"""Keys of earlier versions: an old name is read with a note, and a newer key changes nothing in a run."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers import ROOT, created
from lockstep.config import components, composition, options
from lockstep.config.history import as_before, present_key, present_values, present_words
from lockstep.config.schema import Job, TrainBlock
from lockstep.core import log
from lockstep.core.fields import former_names, ranged, values_before, with_history
from lockstep.core.run_dir import RunDir
from lockstep.inference.evaluate import data_of
from lockstep.metrics import F1
from lockstep.models.nets import DigitNet, Network
from lockstep.optim.optimizers import AdamW
from lockstep.records.ledger import Ledger
from lockstep.records.runs import read_runs, settings
from lockstep.training.resolved_job import describe

VERSIONS = sorted((ROOT / "tests" / "data").iterdir())


@pytest.fixture
def renamed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A key of an option and one of a block have had other names; the notes that are shown."""
    notes: list[str] = []
    for cls, key, names in ((AdamW, "lr", ("rate",)), (TrainBlock, "mixup", ("mix",))):
        field = cls.__dataclass_fields__[key]
        changed: Any = with_history(dataclasses.field(), names=names)
        monkeypatch.setattr(field, "metadata", {**field.metadata, **changed.metadata})
    monkeypatch.setattr(log, "note", notes.append)
    return notes


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files of a version, as the current folder."""
    copy = Path(shutil.copytree(request.param, tmp_path / "files"))
    monkeypatch.chdir(copy)
    return copy


def replace_in(folder: Path, old: str, new: str) -> None:
    for path in (path for path in folder.rglob("*") if path.suffix in (".yaml", ".json", ".txt")):
        if "checkpoints" not in path.parts:
            path.write_text(path.read_text().replace(old, new))


def test_a_field_has_its_history_and_its_rule() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Part:
        rate: float = with_history(ranged(0.5, least=0, most=1), names=("lr", "step"), before=0.1)
        other: int = 3

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Derived(Part):
        rate: float = 0.7

    assert former_names(Derived) == {"lr": "rate", "step": "rate"}
    assert values_before(Derived) == {"rate": 0.1}
    assert (Part().rate, Derived().rate) == (0.5, 0.7)


def test_an_old_name_becomes_the_present_one_with_a_note(renamed: list[str]) -> None:
    words = ["optimizer.rate=8", "+train.mix=0.1", "train.mixup=0.2", "~optimizer.rate", "model=digitnet", "-m"]
    words += ["train.mix=train.mix"]
    present = ["optimizer.lr=8", "+train.mixup=0.1", "train.mixup=0.2", "~optimizer.lr", "model=digitnet", "-m"]
    present += ["train.mixup=train.mix"]  # a value is the user's
    assert present_words(words) == composition.typed_words(words[:0]) + present
    assert renamed[0] == "optimizer.rate is now optimizer.lr, and goes with Lockstep 2.0"
    assert len(renamed) == 4
    assert present_key("metric.mine.channels") == "metric.mine.channels"
    stored = {"optimizer": {"_target_": "x", "rate": 8}, "train": {"mix": 0.1}, "epochs": 3}
    assert present_values(stored) == {"optimizer": {"_target_": "x", "lr": 8}, "train": {"mixup": 0.1}, "epochs": 3}


def test_a_run_with_an_old_name_is_resumed_evaluated_and_compared(renamed: list[str], folder: Path) -> None:
    replace_in(folder, "optimizer.lr", "optimizer.rate")
    replace_in(folder, "  lr: 0.01", "  rate: 0.01")
    assert "rate: 0.01" in (folder / "run" / "config.yaml").read_text()
    old, new = (settings(read_runs(path)[0]) for path in (folder / "run", VERSIONS[-1] / "run"))
    assert old == new
    with composition.composing():
        assert data_of(RunDir(folder / "run"), ("dataset.path=photos",)).path == "photos"
    run, job = created("resume=run", "steps=16", "output_root=outputs")
    assert (job.optimizer.lr, job.steps) == (0.01, 16)
    assert {*renamed[:2]} == {"optimizer.rate is now optimizer.lr, and goes with Lockstep 2.0"}
    assert "optimizer.lr=0.01" in run.overrides.read_text()


def test_the_identity_in_a_checkpoint_is_the_same_in_each_version() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Net:
        width: int = 4
        slope: float = with_history(0.0, names=("leak", "alpha"), before=0.1)

    assert describe(Net(width=8, slope=0.2)) == "Net(width=8, slope=0.2)"
    assert describe(Net(width=8, slope=0.2), lasting=True) == "Net(width=8, leak=0.2)"
    assert describe(Net(slope=0.1), lasting=True) == describe(Net()) == "Net()"


def test_a_sweep_with_an_old_name_is_the_same_sweep(
    renamed: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(folder / "sweep")
    before, records = ledger.identity(), ledger.records()
    replace_in(folder, "train.ema", "train.average")
    field = TrainBlock.__dataclass_fields__["ema"]
    changed: Any = with_history(dataclasses.field(), names=("average",))
    monkeypatch.setattr(field, "metadata", {**field.metadata, **changed.metadata})
    replace_in(folder, '"ema": 0.9', '"average": 0.9')
    assert ledger.identity() == before
    assert ledger.records() == records


def test_a_key_that_is_newer_than_a_run_does_what_the_run_did(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, old in (("dropout", 0.25), ("grad_checkpointing", True)):
        for cls in (DigitNet, Network):
            if (field := cls.__dataclass_fields__.get(key)) is not None:
                changed = with_history(dataclasses.field(), before=old).metadata
                monkeypatch.setattr(field, "metadata", {**field.metadata, **changed})
    for file in ("config.yaml", ".hydra/config.yaml"):
        path = folder / "run" / file
        values = yaml.safe_load(path.read_text())
        del values["model"]["dropout"], values["model"]["grad_checkpointing"]
        path.write_text(yaml.safe_dump(values))
    node = yaml.safe_load((folder / "run" / "config.yaml").read_text())["model"]
    of_file = components.build_stored("model", node)
    assert (of_file.dropout, of_file.grad_checkpointing) == (0.25, True)
    copy = shutil.copytree(folder / "run", folder / "copy")
    for _ in range(2):  # also when the folder has been written again
        _, job = created("resume=run", "steps=16", "output_root=outputs")
        assert (job.model.dropout, job.model.grad_checkpointing) == (0.25, True)
    _, job = created(f"resume={copy}", "steps=16", "model.grad_checkpointing=false", "output_root=outputs")
    assert (job.model.dropout, job.model.grad_checkpointing) == (0.25, False)


def test_only_modules_that_rename_keys_are_imported_for_a_key_that_no_option_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sources = {"this": "slope: float = with_history(0.0, before=0.1)", "wave": 'with_history(1, names=("lr",))'}
    imported = list[str]()
    monkeypatch.setattr(options, "_sources", lambda group: sources)
    monkeypatch.setattr("importlib.import_module", imported.append)
    options.import_renamed.cache_clear()
    assert present_key("model.size_of_mine") == "model.size_of_mine"
    assert imported == ["wave"]
    options.import_renamed.cache_clear()


@pytest.mark.parametrize(
    ("cls", "key", "place"),
    [(Job, "batch", ""), (TrainBlock, "ema", "train."), (AdamW, "lr", "optimizer."), (F1, "average", "metric.mine.")],
)
def test_a_key_of_any_depth_has_its_present_name_and_the_keys_around_it_keep_theirs(
    cls: type, key: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = cls.__dataclass_fields__[key]  # type: ignore[attr-defined]
    changed: Any = with_history(dataclasses.field(), names=("former",))
    monkeypatch.setattr(field, "metadata", {**field.metadata, **changed.metadata})
    for word in (f"{place}former", *[f"{place}former.below"] * bool(place)):
        assert present_key(word) == word.replace("former", key)
    for word in (f"{place}formerly", f"other.{place}former", "former.former", f"{place}{key}"):
        assert present_key(word) == word
    nested: dict[str, Any] = {"former": {"former": 1}, "other": 2}
    expected = {key: {"former": 1}, "other": 2}
    for name in reversed(place.split(".")[:-1]):
        nested, expected = {name: nested}, {name: expected}
    assert present_values(nested) == expected


def test_a_part_does_what_it_did_unless_the_key_is_typed_kept_or_of_another_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    field = F1.__dataclass_fields__["average"]
    changed: Any = with_history(dataclasses.field(), before="micro")
    monkeypatch.setattr(field, "metadata", {**field.metadata, **changed.metadata})
    stored: dict[str, Any] = {"_target_": "lockstep.metrics.F1"}
    own = {"mine": F1(), "more": F1()}

    def averages(node: Any, *typed: str) -> list[str]:
        return [part.average for part in as_before(own, node, typed, "metric.").values()]

    usual = F1().average
    assert averages({"mine": stored, "more": stored}) == ["micro", "micro"]
    assert averages({"mine": stored, "more": stored}, "metric.more.average") == ["micro", usual]
    assert averages({"mine": stored, "more": stored}, "average", "more.average", "metric.average") == [
        "micro",
        "micro",
    ]
    assert averages({"mine": {**stored, "average": "none"}, "more": {"_target_": "x.F1"}}) == ["none", usual]
    assert averages({"mine": stored}) == ["micro", usual], "the other one is new"
    assert averages(None) == averages([]) == [usual, usual]


def test_a_ledger_of_before_is_read_in_silence(renamed: list[str], folder: Path) -> None:
    ledger = Ledger(folder / "sweep")
    words = ledger.identity().words, [record.overrides for record in ledger.records()]
    field = TrainBlock.__dataclass_fields__["ema"]
    with pytest.MonkeyPatch.context() as patch:
        changed: Any = with_history(dataclasses.field(), names=("average",))
        patch.setattr(field, "metadata", {**field.metadata, **changed.metadata})
        replace_in(folder, "train.ema", "train.average")
        assert (ledger.identity().words, [record.overrides for record in ledger.records()]) == words
    assert renamed == []


def test_a_component_is_built_from_the_old_names_of_its_keys(renamed: list[str]) -> None:
    built = components.build("optimizer", {"_target_": "lockstep.optim.AdamW", "rate": 0.5})
    assert built == AdamW(lr=0.5)
    assert renamed == [], "a note is for a line"
    assert present_words(["optimizer.rate=8"], say=False) == ["optimizer.lr=8"]
    assert renamed == []


def test_a_stored_component_has_its_own_values_where_it_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    field = AdamW.__dataclass_fields__["lr"]
    changed: Any = with_history(dataclasses.field(), before=0.125)
    monkeypatch.setattr(field, "metadata", {**field.metadata, **changed.metadata})
    node = {"_target_": "lockstep.optim.AdamW"}
    assert components.build_stored("optimizer", node).lr == 0.125
    assert components.build_stored("optimizer", {**node, "lr": 0.5}).lr == 0.5
    assert components.build("optimizer", node) == AdamW()


@pytest.mark.parametrize("part", [3, "text", [1], None, AdamW], ids=str)
def test_what_is_no_part_with_keys_stays_as_it_is(part: Any) -> None:
    assert as_before(part, {"lr": 1}, ()) is part
