"""Values at their threshold, in small functions of the core and the launchers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from lockstep.core.errors import MOST_ALIKE, SHOWN_CHARACTERS, SHOWN_DIGITS, InputError, first_of, shown
from lockstep.core.figures import number_or_text
from lockstep.core.launch_env import launched_place
from lockstep.core.model import best_classes, head_layers, log_odds, model_mode, within
from lockstep.core.model_card import SOFTMAX
from lockstep.core.plan import Averaging, at_step, make_plan
from lockstep.core.run_dir import NAME_LIMIT, slug
from lockstep.core.safe_read import (
    DEPTH,
    MOST_BYTES,
    WHOLE,
    UnreadableFile,
    check_size,
    checked,
    read_json,
    read_yaml,
)
from lockstep.core.tags import TOP1, TOP5, VAL_TOP5, telling
from lockstep.data.datasets import Digits
from lockstep.data.datasets.preprocess import preprocess
from lockstep.launcher.elastic import MOST_NODES, NODES, Elastic
from lockstep.models.nets import check_side
from lockstep.runtime.commands import ending
from lockstep.runtime.host import format_bytes
from lockstep.runtime.program import LONGEST_LINE

LONG_NUMBER = "a number of more than 30 digits"
PLAN: dict[str, Any] = {"epochs": 1, "total_steps": None, "log_every": 1, "eval_every": 1, "save_every": 1}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_are_numbered_below_the_size_of_the_world(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", str(size))
    for rank in range(size):
        monkeypatch.setenv("RANK", str(rank))
        assert (launched_place().rank, launched_place().local_rank) == (rank, rank)
    for rank in ("-1", str(size)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(InputError, match=f"RANK='{rank}', expected a number from 0 to {size - 1};"):
            launched_place()


def test_of_equal_logits_the_first_class_is_the_first_of_five_and_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    for classes in (1, 2, 5, 6, 40):
        logits = torch.randint(0, 2, (50, classes), generator=generator).bfloat16()
        five = best_classes(logits)
        for number in range(1, 6):
            assert torch.equal(best_classes(logits, number), five[:, :number])


def test_equal_logits_have_equal_log_odds_which_are_those_of_their_probabilities() -> None:
    logits = torch.randn(500, 5, generator=torch.Generator().manual_seed(0))
    logits[:, 3] = logits[:, 1] = torch.where(torch.arange(500) % 2 == 0, logits.max(1).values, logits[:, 1])
    odds = log_odds(logits, SOFTMAX)
    assert torch.equal(odds[:, 1], odds[:, 3])
    shares = logits.double().softmax(1)
    torch.testing.assert_close(odds, (shares / (1 - shares)).log(), rtol=1e-9, atol=1e-9)


def test_each_module_has_its_own_mode_back_after_a_look_at_the_model() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()))
    model[1][0].eval()
    modes = [module.training for module in model.modules()]
    for training in (False, True):
        with model_mode(model, training=training):
            assert {module.training for module in model.modules()} == {training}
        assert [module.training for module in model.modules()] == modes


def test_the_top_five_of_five_classes_tells_nothing_and_of_six_something() -> None:
    for figures in ({TOP1: 1, TOP5: 2}, {"acc/val_top1": 1, VAL_TOP5: 2}):
        numbers = {classes: len(telling(figures, classes)) for classes in (1, 5, 6, None)}
        assert numbers == {1: 1, 5: 1, 6: 2, None: 2}


def test_a_name_is_within_a_module_behind_a_dot_alone_and_the_head_is_the_last_layer() -> None:
    names = ("fc", "fc.weight", "fc2.weight", "fc_norm.weight", "a.fc.weight")
    assert [name for name in names if within(name, "fc")] == ["fc", "fc.weight"]
    assert [name for name in names if within(name, "")] == [*names]
    assert head_layers(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1), nn.ReLU())) == ("1",)


def test_a_size_begins_with_the_step_after_its_start() -> None:
    values = {0: "a", 2: "b", 5: "c"}
    assert [at_step(values, step) for step in range(1, 8)] == ["a", "a", "b", "b", "b", "c", "c"]


def test_a_plan_takes_all_examples_in_a_batch_and_single_ones_in_a_micro_batch_and_no_fewer() -> None:
    plan = make_plan(examples=6, batch=6, micro_batches=6, **PLAN)
    assert (plan.steps_per_epoch, plan.total_steps) == (1, 1)
    with pytest.raises(InputError, match=r"batch is 7, .* use batch=6 or less"):
        make_plan(examples=6, batch=7, micro_batches=1, **PLAN)
    with pytest.raises(InputError, match=r"train.micro_batches is 7, .* use train.micro_batches=6 or less"):
        make_plan(examples=6, batch=6, micro_batches=7, **PLAN)
    rarely = make_plan(examples=6, batch=6, micro_batches=1, **{**PLAN, "eval_every": "1%", "epochs": 3})
    assert rarely.eval_every == 1, "at least a step"


@pytest.mark.parametrize("every", [1, 3])
def test_a_mean_may_begin_at_the_last_step_and_always_has_it(every: int) -> None:
    for start in range(1, 8):
        mean = Averaging(start, every, 7)
        expected = {step for step in range(start, 8) if step % every == 0} | {7}
        assert mean.until(7) == {step for step in range(1, 8) if mean.due(step)} == expected
        mean.check(start)
    with pytest.raises(InputError, match=r"train.swa_from is 8, step 8, but the run has 7 steps"):
        Averaging(8, 1, 7).check(8)


def test_a_mean_is_continued_up_to_the_last_step_or_begun_after_a_checkpoint_of_an_earlier_one() -> None:
    saved = Averaging(3, 1, 9)
    assert Averaging(6, 1, 9).remedies(saved, 6) == [], "it begins with the step of the checkpoint"
    same, later = "train.swa_from=3 train.swa_every=1", "train.swa_from={}"
    assert Averaging(4, 1, 9).remedies(saved, 6) == [same, later.format(7)]
    assert Averaging(4, 1, 6).remedies(saved, 6) == [same], "no step is left for another one"
    assert Averaging(1, 1, 3).remedies(Averaging(3, 1, 9), 2) == [same, later.format(3)], "at its last step"


@pytest.mark.parametrize("number", [MOST_ALIKE - 1, MOST_ALIKE, MOST_ALIKE + 1, MOST_ALIKE + 2])
def test_mistakes_of_a_kind_are_told_one_by_one_up_to_the_most(number: int) -> None:
    sentences = [f"mistake {at}" for at in range(number)]
    more = number - MOST_ALIKE
    assert first_of(sentences) == [*sentences[:MOST_ALIKE], *([f"and {more} more"] if more > 0 else [])]


def test_a_folder_name_is_cut_behind_the_most_bytes_and_then_has_a_hash_of_the_text() -> None:
    names = {
        number: slug("é" * (number // 2) + "x" * (number % 2)) for number in range(NAME_LIMIT - 1, NAME_LIMIT + 3)
    }
    whole = [number for number, name in names.items() if len(name.encode()) == number]
    assert whole == [NAME_LIMIT - 1, NAME_LIMIT]
    assert all(len(name.encode()) <= NAME_LIMIT for name in names.values())
    assert slug("x" * NAME_LIMIT) == "x" * NAME_LIMIT
    longer = {slug("x" * NAME_LIMIT + end) for end in "ab"}
    assert len(longer) == 2
    assert {name[: NAME_LIMIT - 9] for name in longer} == {"x" * (NAME_LIMIT - 9)}


@pytest.mark.parametrize("reader", [read_json, read_yaml])
def test_lists_are_read_as_many_levels_deep_as_may_be(reader: Any, tmp_path: Path) -> None:
    for levels in (DEPTH - 1, DEPTH, DEPTH + 1):
        (file := tmp_path / "file").write_text("[" * levels + "]" * levels)
        if levels <= DEPTH:
            assert isinstance(reader(file), list)
        else:
            with pytest.raises(UnreadableFile, match="it is too deep"):
                reader(file)


def test_as_many_bytes_as_may_be_are_decoded_and_as_large_whole_numbers_read() -> None:
    check_size(MOST_BYTES)
    with pytest.raises(ValueError, match=f"it has {MOST_BYTES + 1:,} bytes, expected at most {MOST_BYTES:,}$"):
        check_size(MOST_BYTES + 1)
    assert [checked(number) for number in (-WHOLE, WHOLE - 1)] == [-WHOLE, WHOLE - 1]
    for number in (-WHOLE - 1, WHOLE):
        with pytest.raises(ValueError, match="neither a number nor a text"):
            checked(number)


def test_a_value_is_cut_behind_the_most_characters() -> None:
    texts = {number: shown("x" * (number - 2)) for number in (SHOWN_CHARACTERS, SHOWN_CHARACTERS + 1)}
    assert texts[SHOWN_CHARACTERS] == f"'{'x' * (SHOWN_CHARACTERS - 2)}'"
    assert texts[SHOWN_CHARACTERS + 1] == f"'{'x' * (SHOWN_CHARACTERS - 4)}..."
    for sign in (1, -1):
        numbers = {10**SHOWN_DIGITS - 1: str(sign * (10**SHOWN_DIGITS - 1)), 10**SHOWN_DIGITS: LONG_NUMBER}
        assert {number: shown(sign * number) for number in numbers} == numbers


def test_a_range_of_machines_grows_up_to_the_most_and_their_numbers_end_below_it() -> None:
    most = str(MOST_NODES)
    fits = {1: True, MOST_NODES: True, MOST_NODES + 1: False, 0: False, "2:2": True, f"1:{most}": True, "3:2": False}
    assert {value: NODES.fits(value) for value in fits} == fits
    ranges = {1: ((1, 1), 3), "2:4": ((2, 4), 12), "4:4": ((4, 4), 12)}
    launchers = {nodes: Elastic(ranks=3, nodes=nodes) for nodes in ranges}
    assert {nodes: (own.node_range, own.world_size) for nodes, own in launchers.items()} == ranges
    for number, refused in ((1, False), (2, True)):
        elastic = Elastic(nodes=2, rendezvous="[::1]:29500", node_rank=number)
        if refused:
            with pytest.raises(InputError, match=r"launcher.node_rank is 2, expected a number from 0 to 1$"):
                elastic._meeting()
        else:
            assert elastic._meeting() == ("::1", 29500)


@pytest.mark.parametrize(("height", "width", "fits"), [(9, 9, True), (8, 9, False), (9, 8, False), (9, 50, True)])
def test_the_shorter_side_decides_and_the_least_side_is_enough(height: int, width: int, fits: bool) -> None:
    if fits:
        check_side("whitenet", (3, height, width), least=9, usual=32)
    else:
        with pytest.raises(InputError, match=f"images of 9x9 pixels or more, the data set gives {height}x{width};"):
            check_side("whitenet", (3, height, width), least=9, usual=32)


def test_a_value_is_a_number_if_it_is_finite() -> None:
    values = {
        "0.5": 0.5,
        "1e-3": 0.001,
        "-2": -2.0,
        "nan": "nan",
        "inf": "inf",
        "-Infinity": "-Infinity",
        "sgd": "sgd",
    }
    assert {text: number_or_text(text) for text in values} == values


def test_bytes_are_told_in_the_unit_that_they_fill() -> None:
    sizes = {99_999: "100 kB", 100_000: "0.1 MB", 9_999_999: "10.0 MB", 10_000_000: "10 MB"}
    sizes |= {999_999_999: "1000 MB", 1_000_000_000: "1.0 GB"}
    assert {size: format_bytes(size) for size in sizes} == sizes


@pytest.mark.parametrize(
    ("code", "err", "says"),
    [
        (1, "", "it ended with exit code 1"),
        (-9, " \n--\n", "it ended with signal 9 (Killed)"),
        (1, "Traceback:\nValueError: no\n    ^^^^\n", "ValueError: no"),
        (2, "lockstep: the first\n  lockstep: the last\nnoise of a library\n", "the last"),
        (2, f"lockstep: {'x' * LONGEST_LINE}", "x" * LONGEST_LINE),
        (2, f"{'x' * LONGEST_LINE}y", "x" * LONGEST_LINE),
    ],
)
def test_a_command_ended_with_its_last_sentence_or_last_line_with_words(code: int, err: str, says: str) -> None:
    assert ending(code, err) == says


@pytest.mark.parametrize("channels", [1, 3])
def test_a_frame_has_the_pixels_nearest_to_the_means_also_in_an_exported_folder(channels: int) -> None:
    shape = (channels, 3, 3)
    for pixel in range(0, 256, 5):
        means = tuple((pixel + off) / 255 for off in (-0.49, 0.0, 0.49)[:channels])
        card = replace(Digits().preprocessing, image_shape=shape, input_shape=shape, mean=means, fit="pad")
        assert card.fill == (pixel,) * channels
        facts = {**vars(card), "eval_crop": 1.0, "interpolation": "bilinear"}
        framed = preprocess(Image.new("RGB", (3, 1)), facts)
        assert framed.shape == (1, *shape)
        assert (framed[:, :, [0, 2]] == pixel).all()
