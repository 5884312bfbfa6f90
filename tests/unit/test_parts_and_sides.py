"""What small, square or single inputs hide: oblong images, several chunks, and ranks of several machines."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.core.errors import InputError
from lockstep.core.figures import csv_row, read_figures
from lockstep.core.run_dir import RunDir
from lockstep.launcher import attach
from lockstep.launcher.elastic import Elastic
from lockstep.launcher.spawn import first_failure
from lockstep.models import nets
from lockstep.models.nets import SAMPLE, BasicNet, DigitNet, MaxPoolTo, WhiteNet, whitening_filters
from lockstep.models.wide_resnet import WideResNet
from lockstep.models.zoo import Timm
from lockstep.runtime import user_code
from lockstep.runtime.user_code import UserCode, changes

pytestmark = pytest.mark.numerics


@pytest.mark.parametrize("sides", [(9, 12), (12, 9), (11, 30), (20, 9)])
@pytest.mark.parametrize(
    "option", [BasicNet(), DigitNet(width=8), WhiteNet(widths=[8, 8, 8]), WideResNet(depth=10, width=1)]
)
def test_a_network_takes_oblong_images(option: Any, sides: tuple[int, int]) -> None:
    model = option.build(5, (3, *sides)).eval()
    assert model(torch.zeros(2, 3, *sides)).shape == (2, 5)


@pytest.mark.parametrize("sides", [(64, 32), (32, 64)])
def test_a_transformer_is_built_for_the_height_and_the_width(sides: tuple[int, int]) -> None:
    model: Any = Timm(name="test_vit").build(3, (3, *sides))
    assert tuple(model.patch_embed.img_size) == sides
    chosen: Any = Timm(name="test_vit", options={"img_size": 48}).build(3, (3, 48, 48))
    assert tuple(chosen.patch_embed.img_size) == (48, 48)


@pytest.mark.parametrize("cells", [1, 2])
@pytest.mark.parametrize("sides", [(2, 2), (3, 8), (8, 3), (5, 2), (7, 6)])
def test_pooling_to_cells_is_torchs_adaptive_pooling_where_the_cells_do_not_overlap(
    cells: int, sides: tuple[int, int]
) -> None:
    features = torch.randn(2, 3, *sides)
    even = features[..., : sides[0] - sides[0] % cells, : sides[1] - sides[1] % cells]
    assert torch.equal(MaxPoolTo(cells)(even), F.adaptive_max_pool2d(even, cells))
    assert MaxPoolTo(cells)(features).shape == (2, 3, cells, cells)
    assert torch.equal(MaxPoolTo(cells)(features).amax((2, 3)), features.amax((2, 3))), "no pixel is left out"


@pytest.mark.parametrize("chunk", [1, 3, 4, 8])
def test_the_whitening_is_of_all_images_however_many_are_unfolded_at_a_time(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = (
        torch.randn(8, 3, 5, 7, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9)[:, None, None, None]
    )
    patches = F.unfold(images.double(), 2).transpose(0, 1).flatten(1)
    monkeypatch.setattr(nets, "PATCH_CHUNK", chunk)
    filters = whitening_filters(images)
    half = filters[:12].flatten(1)
    torch.testing.assert_close(filters[12:], -filters[:12], rtol=0, atol=0)
    outputs = half @ patches
    covariance = outputs @ outputs.T / patches.shape[1]
    torch.testing.assert_close(covariance, torch.eye(12, dtype=torch.float64), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("channels", "sides", "number"),
    [(3, (32, 32), SAMPLE), (1, (32, 32), SAMPLE), (3, (16, 32), SAMPLE), (3, (32, 64), 2500), (1, (3000, 3000), 1)],
)
def test_the_whitening_is_of_as_many_pixels_of_large_images(
    channels: int, sides: tuple[int, int], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []

    def images(number: int) -> Tensor:
        numbers.append(number)
        return torch.empty(1, device="meta").expand(number, channels, *sides)

    monkeypatch.setattr(nets, "whitening_filters", lambda images: torch.zeros(8 * channels, channels, 2, 2))
    option = WhiteNet(widths=[8, 8, 8])
    option.initialise(option.build(2, (channels, 16, 16)), images)
    assert numbers == [1, number]


def test_a_shortcut_is_for_three_convolutions_and_more() -> None:
    for depth, shortcuts in ((1, 0), (2, 0), (3, 3), (4, 3)):
        model = WhiteNet(widths=[8, 8, 8], depth=depth).build(2, (3, 16, 16))
        assert sum(isinstance(module, nets._Residual) for module in model.modules()) == shortcuts


def test_the_first_group_of_a_wide_residual_network_keeps_the_side_and_the_others_halve_it() -> None:
    model = WideResNet(depth=10, width=1).build(2, (3, 32, 24))
    sides: list[Any] = []
    for module in model:  # type: ignore[attr-defined]
        if type(module).__name__ == "Block":
            module.register_forward_hook(lambda _, args, output: sides.append(tuple(output.shape[1:])))
    model(torch.zeros(2, 3, 32, 24))
    assert sides == [(16, 32, 24), (32, 16, 12), (64, 8, 6)]
    for depth, near in ((11, 10), (15, 10), (16, None), (17, 16), (21, 16)):
        if near is None:
            WideResNet(depth=depth)
        else:
            with pytest.raises(InputError, match=f"model.depth={near}$"):
                WideResNet(depth=depth)


def test_figures_up_to_a_step_have_its_evaluation_only_half_a_step_later(tmp_path: Path) -> None:
    lines = [{"step": 6, "loss/train": 1.0}, {"step": 6, "loss/val": 2.0}, {"step": 7, "loss/train": 3.0}]
    (file := tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    numbers = {5.5: 0, 6: 1, 6.5: 2, 6.75: 2, 7: 3}
    assert {after: len([*read_figures(file, after)]) for after in numbers} == numbers


def test_a_number_in_a_table_is_no_formula_whatever_its_sign() -> None:
    cells = {-1: "-1", -1.5: "-1.5", 2.5e-07: "2.5e-07", -2.5e-07: "-2.5e-07", "+3": "+3", "-x": "'-x", "=1": "'=1"}
    assert csv_row([*cells]) == ",".join(cells.values())


@pytest.mark.parametrize(
    ("machines", "places"),
    [
        ("aaa", [(0, 3), (1, 3), (2, 3)]),
        ("aabb", [(0, 2), (1, 2), (0, 2), (1, 2)]),
        ("abab", [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ],
)
def test_a_rank_counts_the_ranks_of_its_own_machine(
    machines: str, places: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "_arrival", lambda store, attempt, rank: (machines[rank], len(machines)))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", str(len(machines)))
    for rank, (local_rank, local_size) in enumerate(places):
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("RANK", str(rank))
        attach.find_local_ranks(SimpleNamespace(), "0")  # type: ignore[arg-type]
        place = attach.launched_place()
        assert (place.local_rank, place.local_size) == (local_rank, local_size)


def test_machines_are_in_the_order_of_their_numbers_behind_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.runtime.addresses.is_own_address", lambda *_: False)
    names = [
        Elastic(nodes=12, ranks=1, rendezvous="10.0.0.1:29500", node_rank=number)._launch_config(1, 1).local_addr
        for number in (1, 2, 3, 10, 11)
    ]
    assert names == sorted(names)
    assert all(name > "10.0.0.1" for name in names), "main's machine is the first one"


def test_where_a_rank_was_is_what_the_first_error_says_of_it(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "run")
    usual = {"known": True, "exit_code": 70, "traceback": "", "sentence": "no step was finished"}
    for rank, (moment, places) in enumerate(((2.0, {"0": "later", "1": "later"}), (1.0, {"1": "was in step"}))):
        facts = {**usual, "rank": rank, "time": moment, "places": places}
        run.rank_error(rank).write_text(json.dumps(facts))
    failure = first_failure(run, {0: 70, 1: 70})
    assert str(failure) == "no step was finished; rank 0 later, rank 1 was in step"


def test_the_log_of_the_first_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    run = RunDir.at(tmp_path / "run")
    failure = first_failure(run, {0: 70, 2: -9, 1: -11})
    assert f"; see {run.rank_log(1)}" in str(failure)
    assert "rank 1 was ended by SIGSEGV, rank 2 was ended by SIGKILL" in str(failure)


@pytest.mark.parametrize("number", [user_code.FILES_SHOWN, user_code.FILES_SHOWN + 1, user_code.FILES_SHOWN + 2])
def test_changed_files_are_named_up_to_the_most(number: int) -> None:
    files = {f"{at}.py": "old" for at in range(number)}
    now = UserCode({"sha256": "b", "files": dict.fromkeys(files, "new")}, b"")
    more = number - user_code.FILES_SHOWN
    names = [*sorted(files)[: user_code.FILES_SHOWN], *([f"{more} more"] if more else [])]
    assert changes({"own": {"sha256": "a", "files": files}}, {"own": now}) == {"own": ", ".join(names)}


def test_files_are_listed_up_to_the_most() -> None:
    for number, listed in ((user_code.FILES_LISTED, user_code.FILES_LISTED), (user_code.FILES_LISTED + 1, 0)):
        assert len(user_code._facts({f"{at}.py": "0" * 64 for at in range(number)}, {})["files"]) == listed
