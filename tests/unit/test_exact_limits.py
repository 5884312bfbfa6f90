"""Values at their threshold, in small functions of the core and the launchers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import center_crop

import lockstep
from lockstep.api import Result
from lockstep.config.options import classes_of
from lockstep.config.schema import TrainBlock
from lockstep.core.errors import MOST_ALIKE, SHOWN_CHARACTERS, SHOWN_DIGITS, InputError, first_of, shown
from lockstep.core.fields import rule_of
from lockstep.core.figures import number_or_text
from lockstep.core.formats import FORMAT_NUMBERS, FileFormat, NewerFormat, check_format, stamp
from lockstep.core.launch_env import launched_place
from lockstep.core.model import (
    UpdateScope,
    best_classes,
    blocks,
    forward_on_meta,
    has_batchnorm,
    has_shards,
    head_layers,
    head_parameters,
    infinite_buffers,
    is_broken,
    is_sound,
    load_whole,
    log_odds,
    model_mode,
    named_layers,
    own_part,
    own_parts,
    part_like,
    probabilities,
    tensors_in,
    whole,
    wire,
    within,
)
from lockstep.core.model_card import (
    MOST_CHANNELS,
    SIGMOID,
    SOFTMAX,
    VALUES,
    TrainedInput,
    centre_start,
    evaluated_size,
    per_channel,
    stored_side,
)
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
from lockstep.core.tags import TOP1, TOP5, VAL_TOP5, Monitor, telling
from lockstep.data.datasets import Digits
from lockstep.data.datasets.preprocess import preprocess, whole_size
from lockstep.diagnostics.ladder_table import _median
from lockstep.inference.scoring import text_with_unit
from lockstep.launcher.elastic import MOST_NODES, NODES, RENDEZVOUS, Elastic
from lockstep.models.nets import check_side
from lockstep.runtime.commands import ending
from lockstep.runtime.host import format_bytes
from lockstep.runtime.program import LONGEST_LINE
from lockstep.training.evaluate import Patience

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
        for number in (6, 7, 40, 41):
            best = best_classes(logits, number)
            assert best.shape == (50, min(number, classes))
            assert torch.equal(logits.gather(1, best), logits.sort(1, descending=True).values[:, :number])


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
    beyond = Averaging(8, every, 7)
    assert (beyond.until(7), beyond.due(7)) == (set(), False), "not even its last step"
    with pytest.raises(InputError, match=r"train.swa_from is 8, step 8, but the run has 7 steps"):
        beyond.check(8)


def test_a_mean_is_continued_up_to_the_last_step_or_begun_after_a_checkpoint_of_an_earlier_one() -> None:
    saved = Averaging(3, 1, 9)
    assert Averaging(6, 1, 9).remedies(saved, 6) == [], "it begins with the step of the checkpoint"
    same, later = "train.swa_from=3 train.swa_every=1", "train.swa_from={}"
    assert Averaging(4, 1, 9).remedies(saved, 6) == [same, later.format(7)]
    assert Averaging(4, 1, 6).remedies(saved, 6) == [same], "no step is left for another one"
    assert Averaging(1, 1, 3).remedies(Averaging(3, 1, 9), 2) == [same, later.format(3)], "at its last step"
    assert Averaging(1, 1, 3).remedies(Averaging(4, 1, 9), 2) == [later.format(3)], "it would begin too late"
    assert Averaging(1, 1, 9).remedies(Averaging(4, 2, 9), 2)[0] == "train.swa_from=4 train.swa_every=2"


def test_a_mean_of_which_only_the_number_of_steps_is_known_goes_on_with_the_same_number() -> None:
    mean = Averaging(4, 1, 9)
    assert {number: mean.remedies(number, 6) for number in (2, 3, 4)} == {
        2: ["train.swa_from=7"],
        3: [],
        4: ["train.swa_from=7"],
    }
    mean.check_resumed(3, 6, 4)
    says = (
        r"^resume: a run of 9 steps averages other steps up to 6 by train.swa_from=50% than the checkpoint, .*; use "
    )
    with pytest.raises(
        InputError, match=rf"{says}train.swa_from=3 train.swa_every=1 to continue it, or train.swa_from=7$"
    ):
        mean.check_resumed(Averaging(3, 1, 9), 6, "50%")


@pytest.mark.parametrize("number", [MOST_ALIKE - 1, MOST_ALIKE, MOST_ALIKE + 1, MOST_ALIKE + 2])
def test_mistakes_of_a_kind_are_told_one_by_one_up_to_the_most(number: int) -> None:
    sentences = [f"mistake {at}" for at in range(number)]
    more = number - MOST_ALIKE
    assert first_of(sentences) == [*sentences[:MOST_ALIKE], *([f"and {more} more"] if more > 0 else [])]
    assert first_of(sentences, 1) == [sentences[0], f"and {number - 1} more"]
    assert first_of(sentences, number) == sentences


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
    check_size(10, "it asks for", 10)
    with pytest.raises(ValueError, match=r"^it asks for 1,001 bytes, expected at most 1,000$"):
        check_size(1001, "it asks for", 1000)
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
    ports = {"a:0": False, "a:1": True, "[::1]:65535": True, "a:65536": False}
    assert {value: RENDEZVOUS.fits(value) for value in ports} == ports
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
    sizes = {
        0: "0 B",
        999: "999 B",
        1000: "1 kB",
        99_999: "100 kB",
        100_000: "0.1 MB",
        9_999_999: "10.0 MB",
        10_000_000: "10 MB",
    }
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


def test_a_frame_has_pixels_also_where_a_mean_is_none() -> None:
    shape = (3, 8, 8)
    card = replace(Digits().preprocessing, image_shape=shape, input_shape=shape, mean=(-1.0, 0.25, 2.0))
    assert card.fill == (0, 64, 255)


@pytest.mark.parametrize("kind", FileFormat)
def test_a_format_is_read_up_to_the_newest_and_a_file_without_a_version_is_of_the_first(kind: FileFormat) -> None:
    newest = FORMAT_NUMBERS[kind]
    facts: list[Any] = [{"format": number, "lockstep": "1.0"} for number in range(1, newest + 1)]
    for known in (*facts, {}, {"format": "x"}, [], None, "text", {**stamp(kind), "more": 1}):
        check_format(kind, known, "file")
    with pytest.raises(NewerFormat, match=rf"^file has format {newest + 1} of a {kind}, .* use Lockstep 9\.1rc1 or"):
        check_format(kind, {"format": newest + 1, "lockstep": "9.1rc1"}, "file")
    numbers: list[Any] = [0, -1, True, "1", 1.0, None, newest + 0.5]
    broken = [{"format": number, "lockstep": "1.0"} for number in numbers] + [{"lockstep": "1.0"}]
    versions: list[Any] = ["", "v1", "1.0 x", "1.0\n", "1'", "1" * 42, None]
    broken += [{"format": newest + 1, "lockstep": version} for version in versions]
    for unknown in broken:
        with pytest.raises(UnreadableFile, match=r"^file has format .* of Lockstep .*, expected 1 to"):
            check_format(kind, unknown, "file")


def test_a_newer_format_is_told_with_both_versions_and_a_broken_one_with_what_it_says() -> None:
    assert stamp(FileFormat.sweep) == {"format": FORMAT_NUMBERS[FileFormat.sweep], "lockstep": lockstep.__version__}
    newest = FORMAT_NUMBERS[FileFormat.sweep]
    with pytest.raises(NewerFormat) as newer:
        check_format(FileFormat.sweep, {"format": 99, "lockstep": "9.1"}, "a/file")
    assert str(newer.value) == (
        f"a/file has format 99 of a sweep, and Lockstep {lockstep.__version__} reads up to {newest}; "
        "use Lockstep 9.1 or later: pip install 'lockstep>=9.1'"
    )
    with pytest.raises(UnreadableFile) as broken:
        check_format(FileFormat.sweep, {"format": "x", "lockstep": "9.1"}, "a/file")
    assert str(broken.value) == f"a/file has format 'x' of Lockstep '9.1', expected 1 to {newest}"


def shown_result(objective: float | None) -> str:
    return repr(Result(folder=Path(), objective=objective, summary={}, metrics=[], weights=Path()))


STEPS = make_plan(examples=6, batch=6, micro_batches=1, **PLAN)
SHOWN: dict[str, tuple[Any, str, str]] = {
    "a result": (shown_result, "objective 0 at", "objective no score at"),
    "an evaluation": (lambda value: text_with_unit(TOP1, value), "0.00 %", "–"),
    "patience": (
        lambda value: Patience(limit=1).ended([(1, value), (2, value)], Monitor(TOP1), STEPS),
        "has not been better than 0.00 %",
        "has had no value",
    ),
    "the rate of a rung": (lambda value: str(_median([value, None])), "0.0", "None"),
}


@pytest.mark.parametrize("place", SHOWN)
def test_a_score_of_zero_is_a_score_and_no_missing_one(place: str) -> None:
    show, zero, missing = SHOWN[place]
    assert zero in show(0.0)
    assert missing in show(None)


class Looks(nn.Module):
    """Keeps what it is called with; its parameter has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.norm = nn.BatchNorm1d(2, dtype=torch.float64)
        self.calls: list[Any] = []

    def forward(self, images: Tensor) -> Tensor:
        own = (self.first, self.second, self.norm.running_mean)
        self.calls.append((images.shape, images.dtype, {tensor.device.type for tensor in (images, *own)}))
        self.calls.append((self.training, self.norm.training, torch.is_grad_enabled()))
        return self.norm(images.flatten(1)) * self.first + self.second


def test_a_model_is_called_on_the_meta_device_with_one_image_in_its_own_format_and_stays_as_it_is() -> None:
    model = Looks()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    forward_on_meta(model, (1, 1, 2))
    assert model.calls == [((1, 1, 1, 2), torch.float64, {"meta"}), (False, False, False)]
    assert (model.training, model.norm.training) == (True, True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_tensors_and_batch_norms_are_found_wherever_they_are() -> None:
    one, two, three = (torch.tensor(number) for number in range(3))
    assert [*map(int, tensors_in({"a": [one, (two, {"b": three})], "c": "text", "d": None}))] == [0, 1, 2]
    models = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2))), nn.Sequential(nn.Linear(2, 2))
    assert [*map(has_batchnorm, models)] == [True, False]


def test_the_head_is_what_timm_names_of_the_layers_that_there_are() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    named: dict[str, tuple[Any, tuple[str, ...]]] = {
        "one": ({"classifier": "0"}, ("0",)),
        "two": ({"classifier": ("0", "1")}, ("0", "1")),
        "one that is gone": ({"classifier": ("0", "head_dist")}, ("0",)),
        "none of them": ({"classifier": "head"}, ("2",)),
        "no name": ({"classifier": None}, ("2",)),
        "no key": ({}, ("2",)),
        "no facts": (None, ("2",)),
        "facts of another library": ("facts", ("2",)),
    }
    for why, (facts, layers) in named.items():
        model.pretrained_cfg = facts
        assert head_layers(model) == layers, why
        assert head_parameters(model) == tuple(f"{layer}.{name}" for layer in layers for name in ("weight", "bias"))
    model.pretrained_cfg = {"first_conv": "12"}
    assert named_layers(model, "first_conv") == ("12",)


def test_a_block_is_a_group_of_layers_or_one_that_is_large_and_names_may_begin_alike() -> None:
    model = nn.Module()
    model.a, model.ab = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    model.layer, model.nothing = nn.Linear(2, 2), nn.ReLU()
    model.body = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)])
    groups = [model.a, model.ab, model.body[0]]
    assert [*blocks(model)] == [*blocks(model, large=7)] == groups
    assert [*blocks(model, large=6)] == [model.a, model.ab, model.layer, *model.body], "it has six numbers"


def test_buffers_that_are_no_numbers_are_not_infinite_by_design() -> None:
    model = nn.BatchNorm1d(3)
    for name, number in (("lowest", -torch.inf), ("broken", torch.nan), ("some", 1.0)):
        model.register_buffer(name, torch.tensor([number, 1.0]))
    assert infinite_buffers(model) == {"lowest"}


def test_outputs_become_probabilities_as_the_loss_has_them_and_odds_that_are_finite_or_nan() -> None:
    logits = torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, 0.0]])
    shares = {VALUES: logits, SIGMOID: torch.sigmoid(logits), SOFTMAX: torch.softmax(logits, 1)}
    for kind, expected in shares.items():
        assert torch.equal(probabilities(logits, kind), expected)
    assert torch.equal(log_odds(logits, SIGMOID), logits.double())
    assert log_odds(logits, VALUES) is logits
    for kind in (SIGMOID, SOFTMAX):
        broken = torch.tensor([[torch.inf, 0.0], [-torch.inf, 0.0], [torch.nan, 0.0], [torch.inf, torch.inf]])
        odds = log_odds(broken, kind)
        assert odds.dtype is torch.float64
        assert not odds.isinf().any()
        untouched = broken.double()
        log_odds(untouched, kind)
        torch.testing.assert_close(untouched, broken.double(), rtol=0, atol=0, equal_nan=True)
    lowest = torch.finfo(torch.float64).min
    assert log_odds(torch.tensor([[-torch.inf, 0.0]]), SOFTMAX).tolist() == [[lowest, -lowest]]


def test_an_example_is_broken_if_its_class_is_negative_or_any_of_its_values_is_none() -> None:
    assert is_broken(torch.tensor([0, -1, 1])).tolist() == [False, True, False]
    nan = torch.nan
    assert is_broken(torch.tensor([[0.0, -1.0], [nan, 1.0], [1.0, nan], [nan, nan]])).tolist() == [False, *[True] * 3]


def test_a_part_of_other_ranks_is_left_out_and_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nn.Linear(2, 2)
    assert not has_shards(model)
    assert [part.requires_grad for part in own_parts(model.parameters())] == [False, False]
    assert own_parts(model.parameters())[0].data_ptr() == model.weight.data_ptr()
    model.bias.full_tensor = lambda: None  # as a tensor has that is cut
    assert has_shards(model)
    away: Any = nn.Linear(2, 2)
    away.bias = nn.Parameter(torch.empty(2, device="meta"))
    assert has_shards(away)
    assert [part.shape for part in own_parts(away.parameters())] == [(2, 2)]
    assert part_like(away.bias, torch.ones(2)).is_meta
    assert part_like(away.weight, tensor := torch.ones(2, 2)) is tensor
    for backend, expected in (("gloo", "cpu"), ("nccl", "meta")):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        assert wire(torch.device("meta")).type == expected


def test_whole_tensors_of_another_model_are_refused_and_those_of_the_same_are_copied() -> None:
    model, tensors = nn.Linear(2, 2), {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    load_whole(model, tensors)
    assert torch.equal(model.weight, tensors["weight"])
    assert model.weight.requires_grad
    for wrong in ({**tensors, "more": torch.ones(1)}, {"bias": torch.ones(2)}, {**tensors, "bias": torch.ones(3)}):
        with pytest.raises(RuntimeError, match=r"(Unexpected|Missing) key|size mismatch"):
            load_whole(model, wrong)
    model.bias = nn.Parameter(torch.empty(2, device="meta"))  # as a parameter is that is on another rank
    load_whole(model, {**tensors, "weight": torch.zeros(2, 2)})
    assert (model.bias.is_meta, model.weight.tolist()) == (True, [[0, 0], [0, 0]])
    with pytest.raises(RuntimeError, match="size mismatch for bias"):
        load_whole(model, {**tensors, "bias": torch.ones(3)})
    assert UpdateScope.element < UpdateScope.parameter < UpdateScope.model


def test_the_centre_of_an_image_is_torchvisions_to_the_pixel_also_of_a_smaller_one() -> None:
    for side in range(1, 12):
        for part in range(1, 12):
            rows = torch.arange(1, side + 1)[None, :, None].expand(1, side, part)
            seen = center_crop(rows, [part, part])[0, :, 0].tolist()
            at = next(at for at, row in enumerate(seen) if row)  # a frame has zeros
            assert centre_start(side, part) == seen[at] - 1 - at, (side, part)


def test_what_is_evaluated_follows_from_the_input_or_is_a_share_and_never_nothing() -> None:
    assert [stored_side(seen, crop) for seen, crop in ((224, 0.875), (48, 0.875), (48, 0.86), (32, 1.0))] == [
        256,
        54,
        55,
        32,
    ]
    assert evaluated_size((54, 100), 0.875, (48, 32)) == (48, 88), "87.5 of 100 are rounded to the even number"
    assert evaluated_size((1, 3), 0.1, (5, 5)) == (1, 1)
    oblong = {"image_shape": (1, 54, 100), "input_shape": (1, 48, 32), "eval_crop": 0.875}
    assert replace(Digits().preprocessing, **oblong).centre == (48, 88)
    assert evaluated_size((10, 11), 0.65, (5, 5)) == (6, 7), "of 6.5 and 7.15"


def test_numbers_of_channels_are_kept_or_averaged_for_another_number_of_channels() -> None:
    cases = {((1.0, 2.0, 6.0), 1): (3.0,), ((0.5,), 3): (0.5,) * 3, ((1.0, 3.0), 2): (1.0, 3.0)}
    assert {case: per_channel(*case) for case in cases} == cases
    trained = TrainedInput(input_shape=(3, 8, 8), eval_crop=1.0, mean=(1.0, 2.0, 6.0), std=(1.0, 1.0, 4.0))
    assert trained.normalisation(1) == ((3.0,), (2.0,))
    assert trained.normalisation(3) == (trained.mean, trained.std)


@pytest.mark.parametrize(
    ("sides", "expected"), [((3, 4000), (1, 32)), ((4000, 3), (32, 1)), ((4000, 4000), (32, 32))]
)
def test_a_very_long_image_in_a_frame_keeps_a_pixel_of_each_side(
    sides: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert whole_size(sides, (32, 32), "pad") == expected


@pytest.mark.parametrize(("size", "fits"), [(65_536, True), (65_537, False)])
def test_a_job_has_as_many_ranks_as_may_be(size: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": size - 1, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, str(value))
    if fits:
        assert (launched_place().rank, launched_place().size) == (size - 1, size)
    else:
        says = "^the environment has WORLD_SIZE='65537', expected a number from 1 to 65536; let a launcher set it "
        with pytest.raises(InputError, match=says + r"\(torchrun\), or remove RANK and WORLD_SIZE$"):
            launched_place()


def test_a_look_at_a_model_that_fails_gives_each_module_its_own_mode_back() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2).eval())
    with pytest.raises(ValueError, match="odd"), model_mode(model, training=False):
        raise ValueError("odd")
    assert [module.training for module in model.modules()] == [True, True, False]


def test_an_image_for_a_look_has_the_format_of_the_first_weights_that_are_no_whole_numbers() -> None:
    class Counts(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.inner, self.formats = inner, list[Any]()

        def forward(self, images: Tensor) -> Tensor:
            self.formats.append((images.dtype, self.count.device.type))
            return self.inner(images)

    for inner, dtype in ((nn.Linear(2, 2).bfloat16(), torch.bfloat16), (nn.ReLU(), torch.float32)):
        model = Counts(inner)
        forward_on_meta(model, (1, 1, 2))
        assert model.formats == [(dtype, "meta")]
        assert model.count.device.type == "cpu"


def test_a_tensor_is_sound_if_its_numbers_are_finite_or_may_be_infinite() -> None:
    inf, nan = torch.inf, torch.nan
    rows = {
        (1.0, 2.0): (True, True),
        (1.0, -inf): (False, True),
        (nan, 1.0): (False, False),
        (nan, inf): (False,) * 2,
    }
    for row, expected in rows.items():
        sound = [is_sound(torch.tensor(row), infinite=infinite) for infinite in (False, True)]
        assert [(one.shape, bool(one)) for one in sound] == [((), answer) for answer in expected]


class Cut:
    """A tensor of which each rank has a part, with what is called on it."""

    device_mesh = SimpleNamespace(device_type="meta")
    placements, is_meta = ("cut",), False

    def __init__(self, calls: tuple[Any, ...] = ()) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        if name not in ("detach", "to", "full_tensor", "to_local"):
            raise AttributeError(name)
        return lambda *words: Cut((*self.calls, name, *words))


def test_the_whole_of_a_cut_tensor_is_made_on_its_device_and_its_part_without_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut: Any = Cut()
    assert whole(cut).calls == ("detach", "to", "meta", "full_tensor")  # type: ignore[attr-defined]
    assert own_part(cut).calls == ("to_local",)  # type: ignore[attr-defined]
    tensor = torch.ones(2)
    assert (whole(tensor), own_part(tensor)) == (tensor, tensor)
    monkeypatch.setattr("torch.distributed.tensor.distribute_tensor", lambda *words, **named: (*words, named))
    on_device, *words = part_like(cut, tensor)
    assert on_device.is_meta
    assert words == [cut.device_mesh, cut.placements, {"src_data_rank": None}]


def test_a_mean_that_begins_too_late_is_told_with_its_step_and_its_remedy() -> None:
    with pytest.raises(InputError) as caught:
        Averaging(1200, 1, 1100).check("60ep")
    assert str(caught.value) == (
        "train.swa_from is 60ep, step 1,200, but the run has 1,100 steps, so nothing is averaged; "
        "use train.swa_from=75%"
    )
    with pytest.raises(InputError, match=r"^resume: a run of 9,000 steps averages other steps up to 6,000 by"):
        Averaging(4000, 1, 9000).check_resumed(Averaging(3000, 1, 9000), 6000, 4000)


def test_blocks_are_the_finest_groups_that_a_model_names() -> None:
    class Staged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(4)]
            self.stages = nn.Sequential(nn.Sequential(*pairs[:2]), nn.Sequential(*pairs[2:]))

        def group_matcher(self, coarse: bool) -> dict[str, str]:
            return {"blocks": r"stages\.(\d+)" if coarse else r"stages\.(\d+)\.(\d+)"}

    model = Staged()
    assert [*blocks(model)] == [*model.stages[0], *model.stages[1]]


# Numbers above which a key of a data set, a loader or an augmentation is refused. The lists of keys do not show them.
LARGEST: dict[str, tuple[float, tuple[str, ...]]] = {
    "loader.prefetch": (1024, ("auto", "streaming")),
    "loader.resident_gb": (1e6, ("auto",)),
    "augment.pad": (1024, ("crop_flip", "randaugment", "three_augment")),
    "augment.ratio": (1000, ("standard", "augmix")),
    "dataset.channels": (MOST_CHANNELS, ("folder", "csv", "torchvision")),
    "dataset.examples": (10**9, ("fake",)),
    "dataset.classes": (10**6, ("fake",)),
    "dataset.skip": (10**9, ("folder", "hf", "torchvision")),
    "dataset.folds": (1000, ("folder", "digits")),
    "dataset.limit": (1e9, ("webdataset", "mnist")),
}


@pytest.mark.parametrize("key", LARGEST)
def test_a_key_takes_its_largest_value_and_no_larger_one(key: str) -> None:
    group, _, name = key.partition(".")
    largest, options = LARGEST[key]
    for option in options:
        rule = rule_of(classes_of(group)[option], name)
        assert rule is not None
        assert [rule.fits(value) for value in (largest - 1, largest, largest + 1)] == [True, True, False], option
    if name == "folds":
        fold = rule_of(classes_of("dataset")["digits"], "fold")
        assert fold is not None
        assert [fold.fits(number) for number in (0, largest - 1, largest)] == [True, True, False]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("micro_batches", "passes"), [(1, 1), (2, 2), (7, 7), ("auto", 1)])
def test_a_step_has_a_pass_for_each_micro_batch(micro_batches: int | str, passes: int, graph: bool) -> None:
    assert TrainBlock(micro_batches=micro_batches, cuda_graph=graph).passes == passes
