"""`lockstep prove`: what it runs, what it lets pass, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers import built, forked, forks, result, running_fork
from lockstep.core.errors import InputError, LockstepError, NumericalError, Stopped
from lockstep.core.run_dir import RunDir
from lockstep.diagnostics import prove
from lockstep.diagnostics.prove import PROOF_OVERRIDES, Case, RunResult, cases, compare_results, for_strategy, texts
from lockstep.runtime.signals import StopNow
from lockstep.strategy.base import Auto, Single
from lockstep.strategy.ddp import DDP, AllReduce
from processes import wait_for

OTHERS = ("accelerate", "allreduce", "allreduce_hooks", "fsdp", "pipeline", "zero")
LOOSE, EXACT = Case("ddp 2", (), "single"), Case("strict 2", (), "strict 1", exact=True)
REFERENCE = RunResult(
    losses=[2.0, 1.0],
    weights={"a": torch.tensor([4.0, -1.0], dtype=torch.float64), "b": torch.zeros(2, dtype=torch.float64)},
    samples=[(0, 1, 5, 77), (0, 1, 3, 78), (0, 2, 4, 79), (1, 3, 5, 80)],
)


@pytest.mark.slow
def test_what_a_config_can_be_run_by_is_the_run_of_one_rank_and_the_rest_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks, and a killed run of them. A linear model has no stages for a pipeline."""
    some, refused = ["single", "ddp 2", "ddp 2 killed"], ["pipeline 2", "pipeline 2 killed"]
    planned = [case for case in cases([2], micro_batches=None) if case.name in some + refused]
    monkeypatch.setattr(prove, "cases", lambda *sizes, **named: planned)
    monkeypatch.setattr(prove, "running", running_fork)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prove.prove(["model=linear"], steps=4, ranks="2")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines if line.endswith("pass")] == some
    assert any(
        "pipeline 2 was not tried: strategy=pipeline has 2 stages, but this model can be cut into 1" in line
        for line in lines
    )
    assert [line for line in lines if "pipeline 2 killed" in line and "refused" in line]
    assert lines[-1] == "all 3 pass, 2 refused"
    estimates = [line for line in lines if "it took" in line]
    assert re.fullmatch(r"  \(it took \d+:\d\d, so all take \d+:\d\d or more\)", *estimates)
    assert not list(tmp_path.glob("lockstep-prove-*"))


@pytest.mark.parametrize(
    ("error", "stays"),
    [(NumericalError, True), (InputError, False), (StopNow, False)],
)
def test_the_folder_of_the_runs_stays_only_to_look_at_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], stays: bool
) -> None:
    def failing(*arguments: object) -> None:
        raise error("single: it failed")

    monkeypatch.setattr(prove, "run_case", failing)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(error, match="kept in .*lockstep-prove-" if stays else "it failed$"):
        prove.prove(["model=linear"], steps=4, ranks="2")
    assert len(list(tmp_path.iterdir())) == stays


@pytest.mark.slow
def test_a_proof_that_is_stopped_leaves_nothing(tmp_path: Path) -> None:
    process = forks().start("lockstep", "prove", "model=linear", "--steps=1000000", TMPDIR=str(tmp_path))
    wait_for(lambda: bool(list(tmp_path.glob("lockstep-prove-*/single/metrics.jsonl"))))
    process.send_signal(signal.SIGTERM)
    done = result(process)
    assert (done.code, done.err) == (75, "lockstep: stopped before it was done; the same command does it again\n")
    assert list(tmp_path.iterdir()) == []


def nudged(by: float) -> dict[str, torch.Tensor]:
    return {"a": REFERENCE.weights["a"] + torch.tensor([0.0, by]), "b": REFERENCE.weights["b"]}


def test_a_run_passes_within_summation_order_and_in_any_order_of_its_samples() -> None:
    result = RunResult([2.0, 1.0 + 1e-14], nudged(1e-12), REFERENCE.samples[::-1])
    comparison, equal = compare_results(LOOSE, result, REFERENCE), compare_results(EXACT, REFERENCE, REFERENCE)
    assert (texts(comparison), comparison["passes"]) == (["1.0e-14", "2.5e-13", "4 same"], True)
    assert (texts(equal), equal["passes"]) == (["same", "same bits", "4 same"], True)


@pytest.mark.parametrize(
    ("case", "result"),
    [
        (LOOSE, dataclasses.replace(REFERENCE, losses=[2.0, 1.0 + 1e-11])),
        (LOOSE, dataclasses.replace(REFERENCE, losses=[2.0, float("nan")])),
        (LOOSE, dataclasses.replace(REFERENCE, weights=nudged(1e-9))),
        (LOOSE, dataclasses.replace(REFERENCE, weights=nudged(float("nan")))),
        (EXACT, dataclasses.replace(REFERENCE, weights=nudged(1e-15))),
        (LOOSE, dataclasses.replace(REFERENCE, samples=REFERENCE.samples[1:])),
        (LOOSE, dataclasses.replace(REFERENCE, samples=[*REFERENCE.samples, REFERENCE.samples[0]])),
        (LOOSE, dataclasses.replace(REFERENCE, samples=[(0, 1, 5, 76), *REFERENCE.samples[1:]])),
        (LOOSE, dataclasses.replace(REFERENCE, samples=[(0, 2, 5, 77), *REFERENCE.samples[1:]])),
    ],
)
def test_a_run_fails_by_a_loss_a_weight_a_bit_or_a_sample(case: Case, result: RunResult) -> None:
    comparison = compare_results(case, result, REFERENCE)
    assert not comparison["passes"]
    shown = texts(json.loads(json.dumps(comparison, allow_nan=False)))
    assert shown != ["same", "same bits", "4 same"], "a NaN is not 0"


def names_of(planned: list[Case]) -> list[str]:
    return [case.name for case in planned]


@pytest.mark.parametrize("everything", [False, True])
def test_every_run_comes_behind_what_it_is_compared_with(everything: bool) -> None:
    names = names_of(planned := cases([2, 3, 4], micro_batches=3, everything=everything))
    assert all(case.reference in names[: number + 1] for number, case in enumerate(planned))
    assert len(names) == len(set(names))


def test_each_strategy_runs_once_ddp_on_every_size_and_each_kind_of_state_is_killed_once() -> None:
    names = names_of(cases([2, 3, 4], micro_batches=3))
    ranks = [name for name in names if name.split()[0] not in ("single", "dp", "strict")]
    assert {name for name in ranks if "killed" not in name and "x" not in name} == {
        *(f"{name} 2" for name in OTHERS),
        *(f"ddp {size}" for size in (2, 3, 4)),
    }
    assert [name for name in names if "killed" in name] == [
        f"{name} 2 killed" for name in ("ddp", "fsdp", "pipeline", "zero")
    ]
    assert [name for name in names if " x " in name] == ["single x 3", "ddp 2 x 3"]
    assert [name for name in names if "strict" in name] == ["strict 1", "strict 2"]
    assert not any(" x " in name for name in names_of(cases([2], micro_batches=None)))


def test_all_runs_every_strategy_and_every_kill_on_every_size() -> None:
    names = set(names_of(cases([2, 3, 4], micro_batches=3, everything=True)))
    assert {f"{name} {size}" for name in ("ddp", *OTHERS) for size in (2, 3, 4)} < names
    assert {f"{name} {size} killed" for name in ("ddp", "fsdp", "zero", "pipeline") for size in (2, 3, 4)} < names
    assert {"single x 3", "ddp 2 x 3", "ddp 3 x 3", "ddp 4 x 3", "strict 1", "strict 2", "strict 4"} < names


def test_a_strategy_of_the_users_comes_first_on_every_size_and_is_killed() -> None:
    names = names_of(cases([2, 3], micro_batches=3, own={"mine": AllReduce()}))
    first = ["single", "single x 3", "mine 2", "mine 2 x 3", "mine 2 killed", "mine 3", "ddp 2"]
    assert names[: len(first)] == first
    assert names_of(cases([2], micro_batches=None, own={"mine": Single()}))[:3] == ["single", "mine", "ddp 2"]
    usual = names_of(cases([2, 3], micro_batches=3))
    assert names_of(cases([2, 3], micro_batches=3, own={"auto": Auto()})) == usual
    assert {*names_of(cases([2, 3], micro_batches=3, own={"ddp": DDP()}))} == {*usual}


MINE = """
import lockstep
from lockstep.strategy import AllReduce
from torch import nn


@lockstep.option("strategy")
class Mine(AllReduce):
    scale: float = 1.0

    def reduce(self, replica: nn.Module) -> None:
        super().reduce(replica)
        for parameter in replica.parameters():
            parameter.grad *= self.scale
"""
FIRST = """
from lockstep.config import extensions
from lockstep.diagnostics import prove

extensions.use(["own"])
cases = prove.cases
prove.cases = lambda *sizes, **named: cases(*sizes, **named)[:3]
prove.prove(["strategy=mine", "strategy.scale={}", "model=linear", "device=cpu"], steps=2, ranks="2")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "pass"), (2.0, "FAIL")])
def test_a_project_proves_its_own_strategy(tmp_path: Path, scale: float, verdict: str) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text(MINE)
    done = forked("-c", FIRST.format(scale), cwd=tmp_path, TMPDIR=str(tmp_path))
    rows = [line.split() for line in done.out.splitlines() if line.endswith(("pass", "FAIL"))]
    assert [(row[0], row[-1]) for row in rows[:3]] == [("single", "pass")] * 2 + [("mine", verdict)], done.err


def test_the_keys_of_the_users_strategy_are_for_its_own_runs() -> None:
    overrides = ["strategy=pipeline", "strategy.schedule=gpipe", "batch=64"]
    planned = {case.name: case for case in cases([2], micro_batches=None)}
    assert for_strategy(planned["pipeline 2"], overrides) == overrides
    assert for_strategy(planned["single"], overrides) == ["strategy=pipeline", "batch=64"]
    # The user's strategy would be refused beside repro=strict, and the user's repro=strict beside a strategy.
    assert {"strategy=auto", "repro=strict"} < set(planned["strict 2"].overrides)
    assert all("repro=exact" in case.overrides for name, case in planned.items() if "strict" not in name)


def test_the_users_config_is_run_as_it_is() -> None:
    changed = {override.partition("=")[0] for override in PROOF_OVERRIDES}
    for case in cases([2, 3, 4], micro_batches=3):
        changed |= {override.partition("=")[0] for override in case.overrides}
    assert not any(key.startswith(("model", "augment", "optimizer", "dataset", "batch")) for key in changed)


@pytest.mark.parametrize(
    ("words", "steps", "ranks", "sentence"),
    [
        ([], 20, "5", "--ranks is '5', expected some of 1, 2, 3 and 4"),
        ([], 20, "²", "--ranks is '²', expected some of 1, 2, 3 and 4"),
        ([], 1, None, "--steps is 1, expected from 2 to 1,000,000"),
        (["model=whitenet", "dataset.input_size=12", "train.micro_batches=2"], 20, None, "use train.micro_batches=1"),
    ],
)
def test_a_mistake_is_a_sentence(words: list[str], steps: int, ranks: str | None, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        prove.prove(words, steps=steps, ranks=ranks)


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(None, [2, 3, 4]), ("2", [2]), ("4, 2,4", [2, 4]), ("1", []), (" 3 ,1", [3])]
)
def test_the_numbers_of_ranks_are_those_above_one_in_order(
    ranks: str | None, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert prove._sizes(ranks) == sizes


@pytest.mark.parametrize(("gpus", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (8, [2, 3, 4])])
def test_without_a_number_of_ranks_all_for_which_there_are_gpus_are_run(
    gpus: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert prove._sizes(None) == sizes


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (("batch=3",), 3),
        (("batch=2",), None),
        (("batch=64", "train.micro_batches=4"), 6),
        (("batch=64", "train.micro_batches=auto"), 3),
        (("batch=64", "model=whitenet", "dataset.input_size=12"), None),
    ],
)
def test_another_number_of_micro_batches_is_one_that_changes_no_run(
    words: tuple[str, ...], number: int | None
) -> None:
    assert prove._other_micro_batches(built("dataset=digits", "model=linear", *words)) == number


def test_a_batch_that_is_no_number_is_refused() -> None:
    with pytest.raises(InputError, match="batch is auto, expected the global batch as a number, such as batch=64"):
        prove._other_micro_batches(built("model=linear", "batch=auto"))


def test_a_run_of_another_length_is_not_the_same_run() -> None:
    for losses, steps in (([2.0], 1), ([2.0, 1.0, 0.5], 3)):
        comparison = compare_results(LOOSE, dataclasses.replace(REFERENCE, losses=losses), REFERENCE)
        assert comparison == {"steps": steps, "passes": False, "expected": 2}
        assert texts(comparison) == [f"{steps} steps", "of 2", ""]


def test_differences_are_relative_and_a_sample_that_is_there_twice_is_told() -> None:
    result = dataclasses.replace(REFERENCE, losses=[2.0, 1.5], weights=nudged(2.0))
    comparison = compare_results(LOOSE, result, REFERENCE)
    assert {key: comparison[key] for key in ("loss", "weights", "images", "samples")} == {
        "loss": 0.5,
        "weights": 0.5,
        "images": 4,
        "samples": "same",
    }
    twice = dataclasses.replace(REFERENCE, samples=[*REFERENCE.samples[:3], REFERENCE.samples[0]])
    assert compare_results(LOOSE, twice, REFERENCE)["samples"] == "not once each"
    other = dataclasses.replace(REFERENCE, samples=[*REFERENCE.samples[:3], (1, 3, 4, 80)])
    comparison = compare_results(LOOSE, other, REFERENCE)
    assert (comparison["samples"], comparison["passes"]) == ("others", False)
    lost = dataclasses.replace(REFERENCE, losses=[2.0, float("nan")])
    comparison = compare_results(LOOSE, lost, REFERENCE)
    assert (comparison["loss"], texts(comparison)[0], texts(comparison)[1]) == (None, "nan", "same bits")


@pytest.mark.parametrize(
    "words", [["batch=8"], ["strategy=auto", "+strategy.x=1"], ["strategy=ddp", "+strategy.x=1"]]
)
def test_the_keys_of_a_strategy_that_is_not_named_or_is_the_same_stay(words: list[str]) -> None:
    assert for_strategy(Case("ddp 2", ("strategy=ddp",), "single"), words) == words
    other = for_strategy(Case("zero 2", ("strategy=zero",), "single"), words)
    assert other == [word for word in words if words[0] != "strategy=ddp" or "strategy." not in word]


@pytest.mark.parametrize(
    ("error", "case", "verdict"),
    [
        (InputError("no"), Case("zero 2", ("strategy=zero",), "single"), "refused"),
        (InputError("no"), Case("zero 2 killed", ("strategy=zero",), "zero 2", killed=True), None),
        (InputError("no"), Case("ddp 2", ("strategy=ddp",), "single"), None),
        (InputError("no"), Case("single", ("strategy=single",), "single"), None),
        (NumericalError("no"), Case("zero 2", ("strategy=zero",), "single"), "FAIL"),
        (LockstepError("no"), Case("ddp 2", ("strategy=ddp",), "single"), "FAIL"),
        (NumericalError("no"), Case("single", ("strategy=single",), "single"), None),
        (Stopped("no"), Case("zero 2", ("strategy=zero",), "single"), None),
    ],
    ids=str,
)
def test_a_strategy_may_refuse_a_config_or_fail_and_one_rank_may_not(
    error: LockstepError,
    case: Case,
    verdict: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders: list[Path] = []

    def fail(case: Case, folder: Path, overrides: list[str], steps: int) -> RunResult:
        folders.append(folder)
        raise error

    monkeypatch.setattr(prove, "run_case", fail)
    for form in ("table", "json"):
        if verdict is None:
            with pytest.raises(type(error)):
                prove._run(case, tmp_path, [], 4, form)
        else:
            assert prove._run(case, tmp_path, [], 4, form) == verdict
    assert {*folders} == {tmp_path / case.name.replace(" ", "-")}
    sentence = f"  {case.name} was not tried: no\n" if verdict == "refused" else "  no\n"
    assert capsys.readouterr().out == sentence * (verdict is not None)


@pytest.mark.parametrize(
    ("words", "steps", "every"),
    [
        ([], 20, "100%"),
        (["train.patience=3"], 20, "4"),
        (["train.patience=3"], 4, "1"),
        (["schedule=plateau"], 20, "4"),
    ],
)
def test_a_run_whose_scores_decide_is_evaluated_five_times(
    words: list[str], steps: int, every: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(prove, "_compare_all", lambda *values: calls.append(values))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prove.prove(["model=linear", *words], steps=steps, ranks="2", everything=True)
    ((planned, folder, overrides, number, form),) = calls
    assert (overrides[-1], number, form) == (f"train.eval_every={every}", steps, "table")
    assert "fsdp 2 killed" in names_of(planned)
    assert "single x 3" in names_of(planned), "the config's number of micro-batches is 1"
    assert not folder.exists()


def test_each_run_is_compared_with_its_reference_and_what_was_refused_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = [Case(name, (), reference) for name, reference in (("single", "single"), ("zero 2", "single"))]
    planned += [Case("zero 2 killed", (), "zero 2", exact=True, killed=True), Case("ddp 2", (), "single")]
    results: dict[str, RunResult | str] = {"single": REFERENCE, "zero 2": "refused", "ddp 2": REFERENCE}
    words: list[list[str]] = []

    def run(case: Case, folder: Path, overrides: list[str], steps: int, form: str) -> RunResult | str:
        words.append(overrides)
        return results[case.name]

    monkeypatch.setattr(prove, "_run", run)
    prove._compare_all(planned, tmp_path, ["batch=8"], 4, "table")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"4 runs of 4 steps, in {tmp_path}"
    shown = [line.split() for line in out if line.endswith(("pass", "refused"))]
    assert [row[:1] for row in shown] == [["single"], ["zero"], ["zero"], ["ddp"], ["all"]]
    assert (shown[0][1], out[-1]) == ("same", "all 2 pass, 2 refused"), "the first one has no reference"
    assert words == [["batch=8", *PROOF_OVERRIDES, "steps=4"]] * 3
    assert [place for place, line in enumerate(out) if "it took" in line] == [
        next(place for place, line in enumerate(out) if line.split()[:1] == ["single"]) + 1
    ]
    results["ddp 2"] = dataclasses.replace(REFERENCE, losses=[2.0, 1.5])
    with pytest.raises(LockstepError, match=r"^not the same run: ddp 2$"):
        prove._compare_all(planned, tmp_path, [], 4, "json")
    rows = json.loads(capsys.readouterr().out)
    assert [(row["run"], row["against"], row["verdict"]) for row in rows] == [
        ("single", None, "pass"),
        ("zero 2", "single", "refused"),
        ("zero 2 killed", "zero 2", "refused"),
        ("ddp 2", "single", "FAIL"),
    ]
    results |= {"zero 2": results["ddp 2"], "zero 2 killed": results["ddp 2"], "ddp 2": REFERENCE}
    with pytest.raises(LockstepError, match=r"^not the same run: zero 2$"):
        prove._compare_all(planned, tmp_path, [], 4, "json")
    capsys.readouterr()
    prove._compare_all(planned[:1], tmp_path, [], 4, "table")
    out = capsys.readouterr().out.splitlines()
    assert (out[-1], any("it took" in line for line in out)) == ("all 1 pass", False)


@pytest.mark.parametrize(("steps", "fits"), [(2, True), (1_000_000, True), (1_000_001, False), (0, False)])
def test_a_proof_has_from_two_to_a_million_steps(
    steps: int, fits: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    numbers: list[int] = []
    monkeypatch.setattr(prove, "_compare_all", lambda planned, folder, words, steps, form: numbers.append(steps))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if fits:
        prove.prove(["model=linear"], steps=steps, ranks="2", form="json")
        assert numbers == [steps]
    else:
        with pytest.raises(InputError, match=rf"^--steps is {steps}, expected from 2 to 1,000,000: --steps=20$"):
            prove.prove(["model=linear"], steps=steps, ranks="2")


def test_a_proof_takes_the_line_of_a_run_without_what_it_sets_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(prove, "_compare_all", lambda *values: calls.append(values))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = ["steps=500", "precision=bf16", "launcher.threads=4", "logger=tensorboard", "train.eval_every=7"]
    prove.prove(["model=linear", "batch=8", *own, "strategy=zero", "seed=3"], steps=10, ranks="2,3", form="json")
    ((planned, folder, words, _, form),) = calls
    assert words == ["model=linear", "batch=8", "strategy=zero", "seed=3", "train.eval_every=100%"]
    assert (form, folder.parent, folder.name[:14]) == ("json", tmp_path, "lockstep-prove")
    assert f"prove trains --steps=10 steps in float64; ignored: {' '.join(own)}" in capsys.readouterr().err
    names = names_of(planned)
    assert {"zero 2", "zero 3", "ddp 2", "ddp 3"} < {*names}
    assert names.index("zero 3") < names.index("ddp 2"), "the strategy of the config comes first"
    with pytest.raises(InputError, match=r"^resume=latest: prove trains from the initial weights; remove it"):
        prove.prove(["resume=latest"], steps=10, ranks="2")


def test_the_cases_have_the_overrides_that_tell_them_apart() -> None:
    planned = {case.name: case for case in cases([2, 3], micro_batches=3)}
    assert planned["single"] == Case("single", ("strategy=single", "launcher.ranks=1", "repro=exact"), "single")
    words = ("strategy=single", "launcher.ranks=1", "train.micro_batches=3", "repro=exact")
    assert planned["single x 3"] == Case("single x 3", words, "single")
    words = ("strategy=zero", "launcher.ranks=2")
    assert planned["zero 2"] == Case("zero 2", (*words, "repro=exact"), "single")
    words = (*words, "checkpoint.every=1", "checkpoint.keep=1000000", "repro=exact")
    assert planned["zero 2 killed"] == Case("zero 2 killed", words, "zero 2", exact=True, killed=True)
    words = ("strategy=auto", "repro=strict", "launcher.ranks=2")
    assert planned["strict 2"] == Case("strict 2", words, "strict 1", exact=True)
    assert planned["ddp 3"].overrides == ("strategy=ddp", "launcher.ranks=3", "repro=exact")
    for sizes, strict in (([2, 3, 4], [1, 2, 4]), ([3], [1]), ([], [1])):
        names = names_of(cases(sizes, micro_batches=None, everything=True))
        assert [name for name in names if "strict" in name] == [f"strict {ranks}" for ranks in strict]


@pytest.mark.parametrize(
    ("loss", "weight", "passes"),
    [(0.9e-12, 0.9e-10, True), (1.2e-12, 0.0, False), (0.0, 1.2e-10, False), (-1.2e-12, 0.0, False)],
)
def test_a_loss_may_differ_by_1e_12_and_a_weight_by_1e_10(loss: float, weight: float, passes: bool) -> None:
    """The largest weight is 4."""
    result = RunResult([2.0 * (1 + loss), 1.0], nudged(4 * weight), REFERENCE.samples)
    assert compare_results(LOOSE, result, REFERENCE)["passes"] == passes


def test_a_row_has_its_cells_under_its_heads(capsys: pytest.CaptureFixture[str]) -> None:
    prove.print_row("run", "against", "loss", "weights", "samples", "")
    prove.print_row("ddp 2 x 3", "single", "1.0e-14", "same bits", "640 same", "pass")
    prove.print_row("zero 2", "single", "", "", "", "refused")
    assert capsys.readouterr().out.splitlines() == [
        "  run                  against               loss    weights     samples",
        "  ddp 2 x 3            single             1.0e-14  same bits    640 same  pass",
        "  zero 2               single                                             refused",
    ]


def test_the_time_of_the_first_run_says_how_long_all_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([100.0, 165.0])
    planned = [Case("single", (), "single"), Case("ddp 2", (), "single"), Case("ddp 3", (), "single")]
    monkeypatch.setattr(prove, "_run", lambda *facts: REFERENCE)
    monkeypatch.setattr(prove.time, "monotonic", lambda: next(now, 165.0))
    prove._compare_all(planned, tmp_path, [], 4, "table")
    lines = [line for line in capsys.readouterr().out.splitlines() if "it took" in line]
    assert lines == ["  (it took 1:05, so all take 3:15 or more)"]


class Ended:
    """A run that has ended with a code and a text on its standard error."""

    def __init__(self, code: int, err: str = "") -> None:
        self.returncode, self.err = code, err

    def communicate(self) -> tuple[str, str]:
        return "", self.err


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands of the runs, each of which ends as the object at the end of the list says."""
    commands: list[Any] = []

    @contextmanager
    def run(command: list[str]) -> Iterator[Ended]:
        commands.insert(0, command)
        yield commands[-1]

    monkeypatch.setattr(prove, "running", run)
    return commands


def test_the_result_of_a_run_is_read_from_its_own_folder_and_all_its_ranks(
    tmp_path: Path, ends: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, killed = tmp_path / "runs" / "ddp-2", list[Any]()
    run = RunDir.at(folder)
    lines = [{"step": 1, "loss/train": 2.0}, {"step": 1, "loss/val": 9.0}, {"step": 2, "loss/train": 1.5}]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.logs.mkdir(exist_ok=True)
    for rank in (0, 1):
        sample = {"epoch": 0, "step": 1 + rank, "index": 7 + rank, "hash": 70 + rank, "rank": rank}
        (run.logs / f"rank{rank}.samples.jsonl").write_text(json.dumps(sample) + "\n")
    newest = run.checkpoints / "step-00000002"
    newest.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, newest / "model.safetensors")
    monkeypatch.setattr(prove, "latest_valid", lambda path: {run.checkpoints: newest}[path])
    monkeypatch.setattr(prove, "_kill_halfway", lambda *facts: killed.append(facts))
    ends.append(Ended(0))
    case = Case("ddp 2", ("strategy=ddp",), "single")
    for one in (case, dataclasses.replace(case, killed=True)):
        result = prove.run_case(one, folder, ["batch=8"], 4)
        assert result.losses == [2.0, 1.5]
        assert {name: tensor.tolist() for name, tensor in result.weights.items()} == {"a": [1.0, 1.0]}
        assert sorted(result.samples) == [(0, 1, 7, 70), (0, 2, 8, 71)]
    words = ["batch=8", "strategy=ddp", f"hydra.run.dir={folder}", f"output_root={folder.parent}"]
    command = [sys.executable, "-m", "lockstep", "train", *words]
    assert ends[:-1] == [command] * 2
    assert [(words, run_dir.path, steps) for words, run_dir, steps in killed] == [(command, folder, 4)]


@pytest.mark.parametrize(
    ("code", "err", "error", "sentence"),
    [
        (2, "lockstep: batch is odd\n", InputError, "batch is odd"),
        (76, "lockstep: the loss is nan\n", NumericalError, "ddp 2: the loss is nan"),
        (75, "lockstep: stopped\n", Stopped, "ddp 2: stopped"),
        (70, "ValueError: no\n", LockstepError, "ddp 2: ValueError: no"),
        (-9, "", LockstepError, "ddp 2: it ended with signal 9 (Killed)"),
    ],
)
def test_a_run_that_fails_has_the_error_of_its_code(
    code: int, err: str, error: type[LockstepError], sentence: str, tmp_path: Path, ends: list[Any]
) -> None:
    ends.append(Ended(code, err))
    with pytest.raises(error) as raised:
        prove.run_case(Case("ddp 2", (), "single"), tmp_path / "ddp-2", [], 4)
    assert (type(raised.value), str(raised.value)) == (error, sentence)


@pytest.mark.parametrize(("steps", "name"), [(2, "step-00000001"), (3, "step-00000001"), (20, "step-00000010")])
def test_a_run_is_killed_once_half_of_its_steps_are_saved(
    steps: int, name: str, tmp_path: Path, ends: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            (run.checkpoints / name).mkdir(parents=True)

    run, waits = RunDir(tmp_path), list[float]()
    monkeypatch.setattr(prove.time, "sleep", wait)
    ends.append(SimpleNamespace(poll=lambda: None if len(waits) < 9 else 0))
    prove._kill_halfway(["train"], run, steps)
    assert (len(waits), ends[0]) == (3, ["train"])


def test_a_run_that_ends_before_half_of_its_steps_are_saved_was_not_killed(tmp_path: Path, ends: list[Any]) -> None:
    codes = iter([None, None, 0, 0])
    ends.append(SimpleNamespace(poll=lambda: next(codes)))
    says = rf"^the run in {tmp_path} ended before it could be killed; use more --steps$"
    with pytest.raises(LockstepError, match=says):
        prove._kill_halfway(["train"], RunDir(tmp_path), 20)


def test_a_job_of_schedules_one_after_the_other_is_evaluated_five_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(prove, "_compare_all", lambda *values: calls.append(values[2][-1]))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for schedule in ("chain", "cosine"):
        prove.prove(["model=linear", f"schedule={schedule}"], steps=19, ranks="2")
    assert calls == ["train.eval_every=3", "train.eval_every=100%"]


@pytest.mark.parametrize(
    ("words", "own"), [([], ["auto"]), (["strategy=zero"], ["zero"]), (["strategy=auto"], ["auto"])]
)
def test_the_strategy_of_a_config_is_among_the_cases_also_where_it_is_not_typed(
    words: list[str], own: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def planned(sizes: list[int], **options: Any) -> list[Case]:
        calls.append((sizes, [*options["own"]], options["micro_batches"], options["everything"]))
        return []

    calls: list[Any] = []
    monkeypatch.setattr(prove, "cases", planned)
    monkeypatch.setattr(prove, "_compare_all", lambda *values: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prove.prove(["model=linear", "train.micro_batches=2", *words], steps=4, ranks="3,2")
    assert calls == [([2, 3], own, 4, False)]
