"""A run that starts from weights: its head, by the names of the classes; from a checkpoint, its score is its own."""

import argparse
import csv
import io
import json
import re
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers import records, run_until, train_here
from lockstep.checkpoint.weights import load_start, read_card
from lockstep.core.errors import InputError
from lockstep.core.model import head_parameters
from lockstep.core.model_card import ModelCard
from lockstep.core.protocols import Model
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.models import DigitNet, Linear, Timm, WhiteNet

NAMES = ["ant", "bee", "cat", "dog", "emu"]
CARD: dict[str, Any] = {part: {"_target_": "x"} for part in ("model", "precision", "loss")}
CARD |= {"image_shape": (3, 32, 32), "input_shape": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.2,) * 3}
CARD |= {"eval_crop": 1.0, "eval_views": 1, "eval_batch": 8, "trained_on": {}, "lockstep": "1"}


class ConvHead(nn.Module):
    """Logits by a 1x1 convolution without a bias, in channels-last order."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3)
        self.head = nn.Conv2d(8, classes, 1, bias=False).to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images)).mean((2, 3))


def build(model: Model | type[ConvHead], classes: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    built = model(classes) if isinstance(model, type) else model.build(classes, (3, 32, 32))
    for tensor in built.parameters():  # some heads start as zeros
        nn.init.normal_(tensor, std=0.1)
    return built.double().eval()


def save(model: nn.Module, path: Path, names: list[str], classes: int) -> None:
    card = ModelCard(**CARD, classes=classes, class_names=tuple(names))
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path, card.metadata())


SMALL = {"depth": 1, "embed_dim": 24, "num_heads": 2}
DISTILLED = Timm(name="deit_tiny_distilled_patch16_224", options=SMALL)
OF_TIMM = [Timm(name="test_resnet"), Timm(name="test_convnext"), DISTILLED]
HEADS = [Linear(), DigitNet(), WhiteNet(), ConvHead, *OF_TIMM, Timm(name="levit_128s", options={"img_size": 32})]
SOME = ["cat", "yak", "ant", "zebu", "gnu"]  # of the same number


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Linear(), ["emu", "ant", "dog", "cat", "bee"]),
        (Linear(), ["bee", "dog"]),
        (Linear(), ["yak", "emu", "ant", "zebu", "dog", "cat", "bee"]),
        *((model, SOME) for model in HEADS),
    ],
    ids=repr,
)
@torch.no_grad()
def test_a_class_keeps_its_logit_by_name_and_new_ones_are_random(
    tmp_path: Path, model: Any, names: list[str]
) -> None:
    trained, new, untouched = build(model, 5, 1), build(model, len(names), 2), build(model, len(names), 2)
    save(trained, tmp_path / "weights.safetensors", NAMES, 5)
    note = load_start(new, tmp_path / "weights.safetensors", names)
    images = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    logits, expected = new(images), trained(images)
    for label, name in enumerate(names):
        if name in NAMES:
            assert torch.allclose(logits[:, label], expected[:, NAMES.index(name)], rtol=1e-12, atol=1e-12)
    new_rows = [label for label, name in enumerate(names) if name not in NAMES]
    for name in head_parameters(new):
        assert torch.equal(new.state_dict()[name][new_rows], untouched.state_dict()[name][new_rows])
    assert f"by class name; new: {sorted({*names} - {*NAMES})}, dropped: {sorted({*NAMES} - {*names})}" in note


@pytest.mark.parametrize(
    ("there", "here", "rows", "note"),
    [
        (NAMES, NAMES, [0, 1, 2, 3, 4], ""),
        ([], [], [0, 1, 2, 3, 4], ""),
        (NAMES, [], [0, 1, 2, 3, 4], ""),
        ([], ["0", "1", "2", "3", "4"], [0, 1, 2, 3, 4], ""),
        ([], ["4", "3", "2", "1", "0"], [4, 3, 2, 1, 0], "is matched by class name; new: [], dropped: []"),
        (["cafe\u0301", *NAMES[1:]], ["caf\u00e9", *NAMES[1:]], [0, 1, 2, 3, 4], ""),
        (None, NAMES, [0, 1, 2, 3, 4], f"does not name its classes; their order is taken to be {NAMES}"),
        (None, [], [0, 1, 2, 3, 4], ""),
        (NAMES, ["v", "w", "x", "y", "z"], [], "not fit these classes: 1.weight, 1.bias start from random weights"),
        ([], NAMES, [], "not fit these classes: 1.weight, 1.bias start from random weights"),
    ],
)
def test_a_head_is_taken_as_it_is_only_for_the_same_classes(
    tmp_path: Path, there: list[str] | None, here: list[str], rows: list[int], note: str
) -> None:
    trained, new = (build(Linear(), 5, seed=seed).state_dict() for seed in (1, 2))
    model = build(Linear(), 5, seed=2)
    if there is None:
        save_file(trained, tmp_path / "weights.safetensors")
    else:
        save(build(Linear(), 5, seed=1), tmp_path / "weights.safetensors", there, 5)
    sentence = load_start(model, tmp_path / "weights.safetensors", here)
    assert sentence.endswith(note)
    assert bool(sentence) == bool(note)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained[name][rows] if rows else new[name])


def test_rows_of_another_precision_are_taken_in_that_of_the_model(tmp_path: Path) -> None:
    trained, model = build(Linear(), 5, seed=1).half(), build(Linear(), 2, seed=2)
    save(trained, tmp_path / "weights.safetensors", NAMES, 5)
    load_start(model, tmp_path / "weights.safetensors", ["dog", "ant"])
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor, trained.state_dict()[name][[3, 0]].double())


def test_all_rows_are_new_where_no_class_is_the_same_or_the_file_has_none(tmp_path: Path) -> None:
    trained, file = build(DigitNet(), 5, seed=1), tmp_path / "weights.safetensors"
    backbone = {name: rows for name, rows in trained.state_dict().items() if name not in head_parameters(trained)}
    for write in (lambda: save(trained, file, NAMES, 5), lambda: save_file(backbone, file)):
        write()
        new = build(DigitNet(), 3, seed=2)
        head = {name: new.state_dict()[name].clone() for name in head_parameters(new)}
        assert "start from random weights" in load_start(new, file, ["v", "w", "x"])
        for name, tensor in new.state_dict().items():
            assert torch.equal(tensor, head[name] if name in head else trained.state_dict()[name])


WRAPPED = ["", "module._orig_mod.", "_orig_mod.module.", "model.", "net."]
NESTED = {
    "plain": lambda state: state,
    "averaged": lambda state: {**state, "n_averaged": torch.tensor(3)},
    "state_dict": lambda state: {"state_dict": state, "epoch": 3, "args": argparse.Namespace(bytearray="bytearray")},
    "model": lambda state: {"model": state, "optimizer": {"state": {}}, "args": argparse.Namespace(lr=0.1)},
    "model_state_dict": lambda state: {"epoch": 1, "model_state_dict": state},
    "several": lambda state: {"model": {"other": torch.ones(1)}, "model_state_dict": {}, "state_dict": state},
    "of two": lambda state: {"model": {"other": torch.ones(1)}, "model_state_dict": state},
}


@pytest.mark.parametrize(
    ("prefix", "nested", "suffix"),
    [
        *((prefix, "plain", ".pth") for prefix in WRAPPED),
        *(("module.", nested, ".pth") for nested in NESTED),
        *(("module.", "plain", suffix) for suffix in (".pt", ".ckpt", ".pth.tar", ".old.pth", ".safetensors")),
    ],
)
def test_the_weights_of_other_programs_are_taken(tmp_path: Path, prefix: str, nested: str, suffix: str) -> None:
    torch.manual_seed(0)
    trained = timm.create_model("test_resnet", num_classes=3).to(memory_format=torch.channels_last)
    state = {f"{prefix}{name}": tensor for name, tensor in trained.state_dict().items()}
    file = tmp_path / f"it's mine{suffix}"
    if suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, file)
    else:
        torch.save(NESTED[nested](state), file, _use_new_zipfile_serialization=".old" not in suffix)
    model = timm.create_model("test_resnet", num_classes=3)
    assert load_start(model, file) == ""
    right = trained.state_dict()
    assert all(torch.equal(tensor, right[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("channels", [1, 5])
def test_weights_of_colours_are_adapted_to_other_channels_as_timm_does_it(tmp_path: Path, channels: int) -> None:
    file, name = tmp_path / "model.safetensors", "test_resnet.r160_in1k"
    save_file(timm.create_model(name, num_classes=5).state_dict(), file)
    overlay = {"file": str(file), "num_classes": 5}
    options = {"num_classes": 5, "in_chans": channels, "pretrained_cfg_overlay": overlay}
    expected = timm.create_model(name, pretrained=True, **options)
    model = Timm(name=name).build(5, (channels, 32, 32))
    note = load_start(model, file)
    assert note == f"conv1.0.weight of {file} is adapted from 3 to {channels} channels"
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[key]), key


def test_a_part_of_a_model_that_is_called_like_a_wrapper_keeps_its_name(tmp_path: Path) -> None:
    trained, model = (nn.ModuleDict({"net": nn.ModuleDict({"fc": nn.Linear(2, 2)})}) for _ in range(2))
    state = {f"module.{name}": tensor for name, tensor in trained.state_dict().items()}
    torch.save(state, tmp_path / "a.pth")
    (tmp_path / "link.pth").symlink_to("a.pth")
    assert load_start(model, tmp_path / "link.pth") == ""
    assert all(map(torch.equal, model.state_dict().values(), trained.state_dict().values()))


@pytest.mark.parametrize("content", ["code", "damaged", "number", "empty"])
def test_what_could_run_code_or_is_damaged_is_refused_and_runs_nothing(tmp_path: Path, content: str) -> None:
    file, ran = tmp_path / "a.pth", tmp_path / "ran"
    if content == "code":
        torch.save(Opener(str(ran)), file)
    elif content == "number":
        torch.save(3, file)
    else:
        file.write_bytes(b"PK\x03\x04 no zip" * (content == "damaged"))
    with pytest.raises(InputError, match=r"has no weights that can be read safely .*torch.save\(model.state_dict"):
        load_start(nn.Linear(2, 2), file)
    assert not ran.exists()


class Foreign:
    """A class that torch does not know."""


def _archive(file: Path, content: Any, *, zipped: bool = True) -> None:
    torch.save(content, file, _use_new_zipfile_serialization=zipped)


def _cut(file: Path) -> None:
    _archive(file, nn.Linear(2, 2).state_dict())
    file.write_bytes(file.read_bytes()[:-200])


def _tar(file: Path) -> None:
    with tarfile.open(file, "w") as archive:
        archive.addfile(tarfile.TarInfo("sys_info"), io.BytesIO())


def _script(file: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), file)


LIGHTNING = {"state_dict": {}, "callbacks": [Foreign()], "hyper_parameters": argparse.Namespace(lr=0.1)}
UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "module": (lambda file: _archive(file, nn.Linear(2, 2)), "it has objects of torch.nn.modules.linear.Linear"),
    "old module": (lambda file: _archive(file, nn.Linear(2, 2), zipped=False), "it has objects of torch.nn.modules"),
    "lightning": (lambda file: _archive(file, LIGHTNING), "it has objects of test_init_from.Foreign"),
    "script": (_script, "a/code/__torch__/torch/nn/modules/linear.py in it is compressed"),
    "tar": (_tar, "it begins with b'sys_info"),
    "cut": (_cut, "it begins with b'PK"),
    "text": (lambda file: file.write_text("hello\n"), "it begins with b'hello"),
    "page": (lambda file: file.write_text("\n<!DOCTYPE html><p>Sign in"), r"it begins with b'\n<!DOCTYPE html>',"),
    "lfs": (
        lambda file: file.write_text("version https://git-lfs.github.com\n"),
        "it begins with b'version https://',",
    ),
    "empty": (Path.touch, "it is empty"),
    "list": (lambda file: _archive(file, [1, 2]), "it begins with b'PK"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_file_that_is_not_read_is_named_without_torchs_advice_to_run_it(tmp_path: Path, kind: str) -> None:
    write, reason = UNREADABLE[kind]
    write(tmp_path / "a.pth")
    (file := tmp_path / "link.pth").symlink_to("a.pth")
    with pytest.raises(InputError) as raised:
        load_start(nn.Linear(2, 2), file)
    sentence = str(raised.value)
    assert f"init_from: {file} has no weights that can be read safely ({reason}" in sentence
    assert not re.search("weights_only|safe_globals|trust|pickle|\n", sentence)


def test_a_damaged_file_of_safetensors_is_named_with_the_key_that_chose_it(tmp_path: Path) -> None:
    (file := tmp_path / "a.safetensors").write_bytes(b"not a file of weights")
    with pytest.raises(InputError, match=f"^init_from: {re.escape(str(file))} "):
        load_start(nn.Linear(2, 2), file)


class Opener:
    """An object that opens a file for writing when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.path, "w")


STILL = "optimizer.lr=1e-12"  # with this rate no later step is better than the ones before
JOB = ("model=linear", "batch=64", "augment=none", "train.eval_every=5", "checkpoint.every=5", "checkpoint.keep=9")


@pytest.fixture(scope="module", params=["", "train.ema=0.5"])
def first(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, str]:
    """A run with its best score before its last step, and the override of its average."""
    folder = tmp_path_factory.mktemp("first") / "run"
    average = (request.param,) if request.param else ()
    train_here(folder, *JOB, *average, "optimizer.lr=0.02", "steps=20")
    return train_here(folder, *JOB, *average, STILL, "steps=30"), request.param


def check_own_best(run: RunDir, *, after: int) -> None:
    """Check all that a folder says of the best weights against its own figures and files."""
    summary, average = json.loads(run.summary.read_text()), "acc/val_ema_top1"
    lines = [line for line in records(run) if "acc/val_top1" in line]
    scores = {line["step"]: line.get(average, line["acc/val_top1"]) for line in lines}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert min(scores) > after
    assert (summary["best"], summary["best_step"]) == (scores[best], best)
    folder = run.checkpoints / run.best.read_text().strip()
    assert folder.name == f"step-{best:08d}"
    scored = load_file(folder / ("ema.safetensors" if average in lines[0] else "model.safetensors"))
    exported = load_file(run.weights)
    assert all(torch.equal(exported[name], tensor) for name, tensor in scored.items())
    assert (read_card(run.weights).step, read_card(run.weights).scores["top1"]) == (best, scores[best])
    assert json.loads(run.validation.read_text())["step"] == best
    assert {int(row["step"]) for row in csv.DictReader(run.table.read_text().splitlines())} == {*scores}


@pytest.mark.parametrize(("start", "word"), [("best", STILL), ("last", "optimizer.lr=0.02")])
def test_a_new_run_has_the_best_weights_of_its_own_evaluations(
    first: tuple[RunDir, str], tmp_path: Path, start: str, word: str
) -> None:
    earlier, average = first
    checkpoint = earlier.checkpoints / getattr(earlier, start).read_text().strip()
    words = (*JOB, *([average] if average else []), "steps=50", word)
    run = train_here(tmp_path / "run", *words, f"resume={checkpoint}")
    check_own_best(run, after=int(checkpoint.name[5:]))
    second = run.checkpoints / run.best.read_text().strip()
    forked = train_here(tmp_path / "second", *words, STILL, "steps=60", f"resume={second}")
    check_own_best(forked, after=int(second.name[5:]))


@pytest.mark.parametrize("stop_at", [1, 7])
def test_a_stopped_new_run_goes_on_to_the_same_best(first: tuple[RunDir, str], tmp_path: Path, stop_at: int) -> None:
    earlier, average = first
    checkpoint = earlier.checkpoints / earlier.best.read_text().strip()
    words = (*JOB, *([average] if average else []), STILL, "steps=50", f"resume={checkpoint}")
    whole = train_here(tmp_path / "whole", *words)
    cut = train_here(tmp_path / "cut", *words, stop_at=stop_at)
    if stop_at == 1:  # killed before its first checkpoint was whole
        shutil.rmtree(cut.checkpoints)
        cut.checkpoints.mkdir()
        cut.weights.unlink(missing_ok=True)
    train_here(cut.path, *words)
    check_own_best(cut, after=int(checkpoint.name[5:]))
    assert cut.weights.read_bytes() == whole.weights.read_bytes()


def test_a_run_that_goes_on_in_its_folder_keeps_its_best(first: tuple[RunDir, str]) -> None:
    check_own_best(first[0], after=0)
    assert json.loads(first[0].summary.read_text())["best_step"] <= 20


def test_a_new_run_begins_with_the_weights_of_a_file_which_a_resume_needs_no_longer(tmp_path: Path) -> None:
    words = ("model=linear", "batch=64", "augment=none", "device=cpu", "telemetry.report=never")
    trained = train_here(tmp_path / "trained", *words, "optimizer.lr=0.02", "steps=2").weights
    start = load_file(trained)
    words = (*words, f"init_from={trained}", STILL)
    run = train_here(tmp_path / "run", *words, "steps=2", stop_at=1)
    trained.unlink()
    run_until(World.solo(), run, None)
    torch.testing.assert_close(load_file(run.weights), start)


@pytest.mark.parametrize("names", [NAMES, ["ant", "yak"], ["v", "w"]])
def test_a_stem_and_a_head_that_are_not_taken_as_they_are_are_both_told(tmp_path: Path, names: list[str]) -> None:
    file, name = tmp_path / "weights.safetensors", "test_resnet"
    save(timm.create_model(name, num_classes=5), file, NAMES, 5)
    model = Timm(name=name).build(len(names), (1, 32, 32))
    head = {
        "emu": "",
        "yak": f"; the head of {file} is matched by class name; new: ['yak'], dropped: ['bee', 'cat', 'dog', 'emu']",
        "w": f"; the head of {file} does not fit these classes: fc.weight, fc.bias start from random weights",
    }
    assert (
        load_start(model, file, names) == f"conv1.0.weight of {file} is adapted from 3 to 1 channels{head[names[-1]]}"
    )


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_counter_of_averages_is_taken_by_a_model_that_has_one(tmp_path: Path, prefix: str) -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("n_averaged", torch.tensor(0))

    trained, model = Counting(), Counting()
    trained.n_averaged += 7  # type: ignore[operator]
    state = {f"{prefix}{name}": tensor for name, tensor in trained.state_dict().items()}
    save_file(state, tmp_path / "a.safetensors")
    assert load_start(model, tmp_path / "a.safetensors") == ""
    assert int(model.n_averaged) == 7  # type: ignore[arg-type]


def test_an_rgb_stem_of_another_size_is_of_another_model(tmp_path: Path) -> None:
    state = timm.create_model("test_resnet", num_classes=5).state_dict()
    for other in (torch.zeros(8, 3, 3, 3), torch.zeros(16, 4, 3, 3), torch.zeros(16, 3, 5, 5)):
        save_file({**state, "conv1.0.weight": other}, tmp_path / "a.safetensors")
        assert other.shape != state["conv1.0.weight"].shape
        with pytest.raises(InputError, match=r"is of another model: 1 tensors differ, e\.g\. conv1\.0\.weight"):
            load_start(Timm(name="test_resnet").build(5, (1, 32, 32)), tmp_path / "a.safetensors")


def test_the_head_takes_rows_in_the_format_of_the_model(tmp_path: Path) -> None:
    trained = build(Linear(), 5, seed=1)
    save(trained, tmp_path / "weights.safetensors", NAMES, 5)
    model = build(Linear(), 2, seed=2).float()
    load_start(model, tmp_path / "weights.safetensors", ["emu", "ant"])
    weight = model.state_dict()["1.weight"]
    assert weight.dtype is torch.float32
    assert torch.equal(weight, trained.state_dict()["1.weight"][[4, 0]].float())
