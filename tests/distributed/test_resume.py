"""A run that is stopped and resumed is the run that was not stopped, to the last bit on the same ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from helpers import FAKE, NARROW, Case, gang, losses, records, train_here, weights
from lockstep.checkpoint import reading
from lockstep.checkpoint.reading import latest_valid, undamaged_facts
from lockstep.core.run import candidates

# 242 examples in batches of 50: five steps an epoch, so that stops fall inside epochs and on their ends.
DATA = (*FAKE, "dataset.examples=242", "batch=50")
SETTINGS = (
    "epochs=2",
    "optimizer=sgd",
    "optimizer.lr=0.05",
    "train.ema=0.9",
    "train.micro_batches=2",
    NARROW,
    "model.dropout=0.3",
    "checkpoint.every=1ep",
)
COMMON = (*DATA, *SETTINGS)
STEPS = 10
NORMED = (*DATA, "model=test_resnet", "model.channels_last=true", "dataset.size=16", "steps=4")
IN_BLOCKS = (*COMMON, "train.eval_batch=20")


def everything(run: Path) -> dict[str, object]:
    """All values of the newest checkpoint, with the options of the optimizer's groups, by their places."""
    newest = latest_valid(run / "checkpoints")
    assert newest is not None
    loaded = reading.read_checkpoint(newest)
    flat, parts = {}, [("", {"model": loaded.model, "ema": loaded.ema, "state": loaded.state, "facts": loaded.facts})]
    for place, part in parts:  # which grows
        if isinstance(part, dict | list):
            named = part.items() if isinstance(part, dict) else enumerate(part)
            parts += [(f"{place}/{name}", value) for name, value in named]
        else:
            flat[place] = part.numpy().tobytes() if isinstance(part, torch.Tensor) else part
    return flat


@pytest.fixture(scope="module")
def whole_in_blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_here(tmp_path_factory.mktemp("blocks") / "run", *IN_BLOCKS).path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_here(tmp_path_factory.mktemp("whole") / "run", *COMMON).path


@pytest.mark.parametrize("stop", [1, 5, 6])
def test_one_rank_resumes_to_the_bit_from_any_step(whole: Path, tmp_path: Path, stop: int) -> None:
    run = train_here(tmp_path / "run", *COMMON, stop_at=stop).path
    assert records(run)[-1]["step"] <= stop
    train_here(run, *COMMON)
    assert everything(run) == everything(whole)
    assert losses(run) == losses(whole)


def test_a_run_all_in_bfloat16_resumes_to_the_bit(tmp_path: Path) -> None:
    # Of 32 pixels: on a map of a single one, some versions of oneDNN leave gradients of a strided convolution unset.
    pure = (*NORMED, "dataset.size=32", "precision=bf16_pure", "optimizer=muon", "steps=3")
    reference = weights(train_here(tmp_path / "whole", *pure))
    run = train_here(tmp_path / "run", *pure, stop_at=2).path
    actual = weights(train_here(run, *pure))
    assert {str(tensor.dtype) for tensor in actual.values()} == {"torch.bfloat16", "torch.float32", "torch.int64"}
    assert all(torch.equal(actual[name], reference[name]) for name in reference)


# Before the mean begins; behind an update without an evaluation; and in the blocks of its statistics.
@pytest.mark.parametrize("stop", [{"stop_at": 2}, {"stop_at": 4}, {"stop_in": 7}])
def test_a_plain_mean_of_weights_resumes_to_the_bit(tmp_path: Path, stop: dict[str, int]) -> None:
    job = (*NORMED, "train.swa_from=3", "train.swa_every=1", "train.eval_every=5", "steps=6", "train.eval_batch=40")
    whole = train_here(tmp_path / "whole", *job).path
    run = train_here(tmp_path / "run", *job, **stop).path
    train_here(run, *job)
    assert everything(run) == everything(whole)
    assert untimed(run) == untimed(whole)


def untimed(run: Path) -> list[dict[str, object]]:
    """What a run has logged, without what depends on the clock."""
    return [
        {key: value for key, value in record.items() if key != "time" and not key.startswith("perf/")}
        for record in records(run)
    ]


# Asked for once within each step, between its two micro-batches, and four times in each of the evaluations of model
# and average after steps 5 and 10: once before them, and behind each of their blocks.
@pytest.mark.parametrize(("place", "step"), [(3, 2), (7, 5), (16, 7), (24, 10)])
def test_a_stop_within_a_step_or_an_evaluation_leaves_no_trace(
    tmp_path: Path, whole_in_blocks: Path, place: int, step: int
) -> None:
    run = train_here(tmp_path / "run", *IN_BLOCKS, stop_in=place).path
    (newest, *_) = candidates(run / "checkpoints")
    assert undamaged_facts(newest)["progress"]["step"] == step
    train_here(run, *IN_BLOCKS)
    assert everything(run) == everything(whole_in_blocks)
    assert untimed(run) == untimed(whole_in_blocks)


def test_statistics_of_a_step_that_was_cut_are_taken_back(tmp_path: Path) -> None:
    job = (*DATA, "model=test_resnet", "dataset.size=16", "steps=3", "train.micro_batches=3")
    expected = weights(train_here(tmp_path / "whole", *job))
    run = train_here(tmp_path / "run", *job, stop_in=4).path
    train_here(run, *job)
    assert all(torch.equal(weights(run)[name], tensor) for name, tensor in expected.items())


def test_one_rank_of_several_stops_an_evaluation_for_all(tmp_path: Path) -> None:
    job = (*COMMON, "steps=7", "train.micro_batches=1", "train.eval_batch=20", "strategy=ddp")
    gang(tmp_path / "gang", 2, [Case(tmp_path / "whole", job), Case(tmp_path / "run", job, stop_in=2)])
    (newest, *_) = candidates(tmp_path / "run" / "checkpoints")
    progress = undamaged_facts(newest)["progress"]
    assert progress["step"] == 5 not in dict(progress["scores"])
    gang(tmp_path / "again", 2, [Case(tmp_path / "run", job)])
    assert everything(tmp_path / "run") == everything(tmp_path / "whole")
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")


ENDING = (*DATA, NARROW, "model.dropout=0.3", "steps=4", "train.eval_every=4", "train.eval_batch=20")
# Of a rank: asked for in the last evaluation, and after the last step, when only its save is left.
AT_THE_END = {"evaluation": {"stop_in": 2}, "save": {"stop_at": 4}}
SOLO = {"single": ("optimizer=sgd", "train.ema=0.9"), "dp": ("strategy=dp",)}
# Those that hold copies save as `ddp` does.
TOGETHER = ("ddp", "fsdp", "zero", "pipeline", "strict")


@pytest.mark.parametrize("place", AT_THE_END)
@pytest.mark.parametrize("options", SOLO)
def test_a_stop_at_the_very_end_changes_no_bit(tmp_path: Path, options: str, place: str) -> None:
    job = (*ENDING, *SOLO[options])
    whole = train_here(tmp_path / "whole", *job).path
    run = train_here(tmp_path / "run", *job, **AT_THE_END[place]).path
    (newest, *_) = candidates(run / "checkpoints")
    assert undamaged_facts(newest)["progress"]["step"] == 4
    train_here(run, *job)
    assert everything(run) == everything(whole)
    assert untimed(run) == untimed(whole)
    files = {path: path.read_bytes() for path in sorted((run / "checkpoints").rglob("*")) if path.is_file()}
    train_here(run, *job)
    assert {path: path.read_bytes() for path in sorted((run / "checkpoints").rglob("*")) if path.is_file()} == files


@pytest.mark.slow
def test_a_stop_of_several_ranks_at_the_very_end_changes_no_bit(tmp_path: Path) -> None:
    jobs = {strategy: (*ENDING, f"strategy={strategy}") for strategy in TOGETHER}
    whole = [Case(tmp_path / f"{name}-whole", job) for name, job in jobs.items()]
    # Each in one of the two places, and `ddp` in both.
    places = [*zip(jobs, itertools.cycle(AT_THE_END), strict=False), ("ddp", "save")]
    stopped = [Case(tmp_path / f"{name}-{place}", jobs[name], **AT_THE_END[place]) for name, place in places]
    gang(tmp_path / "gang", 2, [*whole, *stopped])
    gang(tmp_path / "again", 2, [Case(case.path, case.overrides) for case in stopped])
    for case in stopped:
        reference = tmp_path / f"{case.path.name.partition('-')[0]}-whole"
        assert everything(case.path) == everything(reference), case.path.name
        assert untimed(case.path) == untimed(reference), case.path.name


RARE = (*COMMON, "telemetry.interval=4")


@pytest.fixture(scope="module")
def rare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_here(tmp_path_factory.mktemp("rare") / "run", *RARE).path


@pytest.mark.parametrize("stop", [2, 5])
def test_a_log_point_counts_the_steps_before_the_stop_too(rare: Path, tmp_path: Path, stop: int) -> None:
    run = train_here(tmp_path / "run", *RARE, stop_at=stop).path
    train_here(run, *RARE)
    assert losses(run) == losses(rare)


@pytest.mark.slow
def test_several_ranks_resume_to_the_bit_and_other_ranks_go_on_to_summation_order(tmp_path: Path) -> None:
    here, two = (*COMMON, "precision=fp64"), (*COMMON, "precision=fp64", "strategy=ddp")
    paths = {name: tmp_path / name for name in ("whole", "stopped", "elastic")}
    gang(
        tmp_path / "gang",
        2,
        [
            Case(paths["whole"], two),
            Case(paths["stopped"], two, stop_at=3),
            Case(paths["elastic"], two, stop_at=6),
        ],
    )
    gang(tmp_path / "again", 2, [Case(paths["stopped"], two)])
    assert everything(paths["stopped"]) == everything(paths["whole"])
    assert losses(paths["stopped"]) == losses(paths["whole"])
    train_here(paths["elastic"], *here)
    for name, tensor in weights(paths["whole"]).items():
        torch.testing.assert_close(weights(paths["elastic"])[name], tensor, rtol=1e-10, atol=1e-12)
    pairs = zip(losses(paths["elastic"]), losses(paths["whole"]), strict=True)
    assert max(abs(a - b) / b for a, b in pairs) < 1e-12


def test_a_checkpoint_by_the_clock_is_written_at_a_step_that_all_ranks_agree_on(tmp_path: Path) -> None:
    job = (
        "batch=300",
        *SETTINGS,
        "strategy=ddp",
        "checkpoint.every=0.001s",
        "train.eval_every=100%",
        "checkpoint.keep=100",
    )
    gang(tmp_path / "gang", 2, [Case(tmp_path / "run", job)])
    saved = [int(path.name[-8:]) for path in candidates(tmp_path / "run" / "checkpoints")][::-1]
    assert saved[-1] == STEPS
    # Heard at once where a step is long, and at the next where it is short: after a long one, none is under way.
    assert saved[0] <= 2
    assert all(later - earlier <= 2 for earlier, later in itertools.pairwise(saved))


def test_a_network_with_batch_norm_in_nhwc_resumes_to_the_bit_under_adamw(tmp_path: Path) -> None:
    expected = weights(train_here(tmp_path / "whole", *NORMED))
    run = train_here(tmp_path / "run", *NORMED, stop_at=2).path
    train_here(run, *NORMED)
    actual = weights(run)
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
