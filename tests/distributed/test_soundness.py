"""Numbers that go bad, weights that come apart and a rank that is slow, in real ranks with the fault put in."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers import NARROW, Case, launch, records, run_dir, run_until, train_here
from lockstep.checkpoint.reading import latest_valid
from lockstep.core import log
from lockstep.core.data_protocols import Shard
from lockstep.core.errors import LockstepError, NumericalError
from lockstep.core.run_dir import RunDir
from lockstep.job import worker
from lockstep.precision import BF16
from lockstep.telemetry import time_spent
from lockstep.training import run_record
from lockstep.training.train_step import TrainStep
from lockstep.training.trainer import Trainer

pytestmark = pytest.mark.slow

STEPS = 30
COMMON = (
    "batch=100",
    f"steps={STEPS}",
    "optimizer=sgd",
    "optimizer.lr=0.05",
    NARROW,
    "model.dropout=0",
    "strategy=ddp",
    "telemetry.interval=5",
    "checkpoint.every=5",
    "train.eval_every=100%",
)
AT = 8


def nan_input_on_one_rank(trainer: TrainStep, shard: Shard) -> None:
    if shard.step == AT and trainer.world.rank == 1:
        shard.images.fill_(float("nan"))


def nan_weight_behind_a_log_point(trainer: TrainStep, shard: Shard) -> None:
    # Step 10 is logged and saved: its own loss is still sound, its weights are not.
    if shard.step == 10:
        trainer.state.model.register_full_backward_hook(poison)


def poison(module: torch.nn.Module, *_: object) -> None:
    next(module.parameters()).data.view(-1)[0] = float("inf")


def absurd_loss(trainer: TrainStep, shard: Shard) -> None:
    if shard.step == AT:
        list(trainer.state.model.parameters())[-2].data.mul_(1e6)


def flipped_bit(trainer: TrainStep, shard: Shard) -> None:
    if shard.step == AT and trainer.world.rank == 1:
        word = next(trainer.state.model.parameters()).data.view(torch.int32).view(-1)
        word[3] ^= 1 << 12


def slow_rank(trainer: TrainStep, shard: Shard) -> None:
    if trainer.world.rank == 1:
        time.sleep(0.3)


def nothing(trainer: TrainStep, shard: Shard) -> None:
    """No fault."""


FAULTS: dict[str, Callable[[TrainStep, Shard], None]] = {
    fault.__name__: fault
    for fault in (
        nan_input_on_one_rank,
        nan_weight_behind_a_log_point,
        absurd_loss,
        flipped_bit,
        slow_rank,
        nothing,
    )
}


@contextmanager
def injected(name: str) -> Iterator[None]:
    """Every step of the trainers in this process begins with the fault, and keeping a bad one takes main a while."""
    whole, write = TrainStep.__call__, run_record.write_incident

    def step(self: TrainStep, shard: Shard) -> dict[str, Any]:
        FAULTS[name](self, shard)
        return whole(self, shard)

    def write_slowly(error: NumericalError, trainer: Trainer, weights: dict[str, Tensor], run: RunDir) -> None:
        time.sleep(0.5)
        write(error, trainer, weights, run)

    TrainStep.__call__, run_record.write_incident = step, write_slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainStep.__call__, run_record.write_incident = whole, write  # type: ignore[method-assign]


@contextmanager
def by_its_own_time(own: bool) -> Iterator[None]:
    """How busy a rank is, is measured by the processor's time of it, which other load does not change."""
    whole = time_spent.time
    if own:
        time_spent.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    try:
        yield
    finally:
        time_spent.time = whole


def entry(folder: Path) -> None:
    """What a rank does: each fault in a job of its own, and word of how it ended."""
    with worker.join(device="cpu", backend="gloo", timeout=240, threads=1) as joined:
        for name in FAULTS:
            run = RunDir(folder / name)
            ended = {"exit_code": 0, "sentence": ""}
            clock, logs = by_its_own_time(name == "nothing"), log.rank_logging(run, joined.rank, separate=False)
            try:
                with injected(name), clock, logs:
                    run_until(joined, run, None)
            except LockstepError as error:
                ended = {"exit_code": error.exit_code, "sentence": str(error)}
            ended["kept"] = (run.incident / "incident.json").exists()
            (folder / f"{name}.rank{joined.rank}.json").write_text(json.dumps(ended))


def exit_as_rank(folder: Path) -> None:
    entry(folder)
    sys.exit(0)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All faults on three ranks; returns the folder."""
    folder = tmp_path_factory.mktemp("faults")
    for name in FAULTS:
        more = {"slow_rank": ("steps=15",), "nothing": ("train.micro_batches=auto",)}
        case = Case(folder / name, (*COMMON, *more.get(name, ())))
        run_dir(case.path, "launcher.ranks=3", "launcher.threads=1", *case.overrides)
    launch(entry, folder, 3)
    return folder


@pytest.mark.parametrize(("bad", "tolerated"), [(1, True), (4, False)])
def test_steps_that_a_loss_scaler_skips_are_no_fault_until_it_has_nothing_left_to_halve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int, tolerated: bool
) -> None:
    # A scaler on the CPU, which fp16 itself is refused on: it halves from 4.
    scaled = torch.amp.GradScaler("cpu", init_scale=4.0)
    monkeypatch.setattr(BF16, "scaler", lambda self, device: scaled)
    whole = TrainStep.__call__

    def step(self: TrainStep, shard: Shard) -> dict[str, Any]:
        shard.images.mul_(float("nan") if AT <= shard.step < AT + bad else 1.0)
        return whole(self, shard)

    monkeypatch.setattr(TrainStep, "__call__", step)
    job = (NARROW, "batch=100", "steps=20", "precision=bf16", "optimizer=sgd", "telemetry.interval=5")
    if tolerated:
        run = train_here(tmp_path / "run", *job)
        assert last_is_finite(run.path)
        assert [line["loss/train"] is None for line in records(run) if "loss/train" in line] == [
            False,
            True,
            False,
            False,
        ]
        assert scaled.get_scale() == 2.0
    else:
        with pytest.raises(NumericalError, match="first at step 8"):
            train_here(tmp_path / "run", *job)


def words(folder: Path, name: str) -> list[tuple[int, str]]:
    """Exit code and sentence of every rank."""
    errors = [json.loads((folder / f"{name}.rank{rank}.json").read_text()) for rank in range(3)]
    return [(error["exit_code"], error["sentence"]) for error in errors]


def last_is_finite(run: Path) -> bool:
    newest = latest_valid(run / "checkpoints")
    assert newest is not None
    return all(bool(tensor.isfinite().all()) for tensor in load_file(newest / "model.safetensors").values())


@pytest.mark.parametrize(
    ("name", "step", "sentence"),
    [
        ("nan_input_on_one_rank", AT, "the loss is nan between steps 6 and 10, first at step 8"),
        ("nan_weight_behind_a_log_point", 10, "the weights are not finite after step 10"),
        ("absurd_loss", AT, "first at step 8 (above 2,303, 1,000 times the loss of a guess, it has diverged); "),
    ],
)
def test_bad_numbers_end_all_ranks_alike_and_leave_what_shows_them(
    ended: Path, name: str, step: int, sentence: str
) -> None:
    messages = words(ended, name)
    assert len(set(messages)) == 1, "one decision on all ranks"
    assert messages[0][0] == 76
    assert sentence in messages[0][1]
    assert last_is_finite(ended / name)
    newest = latest_valid(ended / name / "checkpoints")
    assert newest is not None
    assert newest.name == "step-00000005"
    facts = json.loads((ended / name / "incident" / "incident.json").read_text())
    assert (facts["step"], facts["checkpoint"]) == (step, "step-00000005")
    batch = torch.load(ended / name / "incident" / "batch.pt", weights_only=True)
    assert batch["indices"].tolist() == facts["samples"]
    assert batch["images"].shape == (100, 1, 8, 8)
    assert (ended / name / "incident" / "model.safetensors").is_file()


def test_no_rank_leaves_before_main_has_kept_the_bad_step(ended: Path) -> None:
    for rank in range(3):
        assert json.loads((ended / f"nan_input_on_one_rank.rank{rank}.json").read_text())["kept"]


def test_a_flipped_bit_is_found_by_the_next_log_point_and_never_saved(ended: Path) -> None:
    messages = words(ended, "flipped_bit")
    assert len(set(messages)) == 1
    assert messages[0][0] == 70
    assert "the weights of rank 1 differ from the others' at step 10" in messages[0][1]
    newest = latest_valid(ended / "flipped_bit" / "checkpoints")
    assert newest is not None
    assert newest.name == "step-00000005"


def test_a_rank_that_is_slow_is_named_within_twenty_steps(ended: Path) -> None:
    assert words(ended, "slow_rank")[0] == (0, "")
    log = (ended / "slow_rank" / "train.log").read_text()
    assert log.count("is slow: at each step the others wait") == 1
    assert "rank 1 is slow" in log


def test_no_rank_is_named_where_none_is_slow_and_nothing_is_kept(ended: Path) -> None:
    assert words(ended, "nothing") == [(0, "")] * 3
    assert records(ended / "nothing")[-1]["step"] == STEPS
    assert "is slow" not in (ended / "nothing" / "train.log").read_text()
    assert not (ended / "nothing" / "incident").exists()
