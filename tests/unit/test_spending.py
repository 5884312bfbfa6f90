"""What a run costs over all its parts, and the budget that ends it."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sklearn.datasets import load_digits

from helpers import built, composed, run_dir, train_here
from lockstep.config.schema import BudgetBlock
from lockstep.core.errors import InputError, Stopped
from lockstep.core.run import Run
from lockstep.core.run_dir import RunDir
from lockstep.core.world import World
from lockstep.job.validate import check_effects
from lockstep.records.record import Record
from lockstep.report.run_page import facts_of
from lockstep.report.sweep_page import costs_of
from lockstep.runtime.signals import StopRequest
from lockstep.telemetry.hardware_watch import HardwareWatch, Spending, rates
from lockstep.telemetry.progress import format_duration
from lockstep.training import experiment
from lockstep.training.resolved_job import load_job


def spending(folder: Path, *, joules: float | None = 7.2e6, **budget: float) -> Spending:
    """The spending of a run on two GPUs at three dollars an hour, with a state to save."""
    stop = StopRequest()
    stop.begun = True
    monitor: Any = SimpleNamespace(joules=joules)
    facts: dict[str, Any] = {"gpus": 2, "usd_per_gpu_hour": 3.0, "counts_energy": True, "stop": stop}
    return Spending(run_dir=RunDir(folder), budget=BudgetBlock(**budget), watch=monitor, **facts)


def test_hours_energy_and_money_add_up_over_the_parts_of_a_run(tmp_path: Path) -> None:
    first = spending(tmp_path)
    first.began -= 1800
    assert first.so_far() == pytest.approx({"hours": 0.5, "gpu_hours": 1.0, "kwh": 2.0, "usd": 3.0}, rel=1e-3)
    first.saved(100, tmp_path)
    second = spending(tmp_path, hours=1.4)
    second.began -= 3600
    second.check()
    assert second.stop.requested, "the budget is that of all parts"
    assert second.so_far() == pytest.approx({"hours": 1.5, "gpu_hours": 3.0, "kwh": 4.0, "usd": 9.0}, rel=1e-3)
    second.end("completed")
    assert Run(tmp_path).spent == pytest.approx(second.so_far(), rel=1e-3)


def test_a_killed_session_counts_up_to_what_it_wrote_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 s until its last checkpoint, 30 s more until a log point that is written, and 5 s until the kill."""
    now = 1000.0
    monkeypatch.setattr("lockstep.telemetry.hardware_watch.time", SimpleNamespace(monotonic=lambda: now))
    for number in (1, 2):
        session = spending(tmp_path, joules=7.2e6)
        session.trained = lambda: {"images": 500.0, "training_seconds": 80.0, "waiting_seconds": 8.0}
        before = Run(tmp_path).spent
        session.write(0, {})
        assert Run(tmp_path).spent == before, "it has just begun"
        now += 100
        session.saved(10, tmp_path)
        for seconds in (20, 10, 5):
            now += seconds
            session.write(20, {})
        spent = Run(tmp_path).spent
        assert spent["hours"] == pytest.approx(number * 130 / 3600)
        assert (spent["kwh"], spent["usd"]) == pytest.approx((number * 2.0, number * 130 / 3600 * 2 * 3.0))
        trained = (spent["images"], spent["training_seconds"], spent["waiting_seconds"])
        assert trained == (number * 500, number * 80, number * 8)
        assert RunDir(tmp_path).read_summary()["seconds"] == pytest.approx(number * 130)
    assert rates(Run(tmp_path).spent) == {"img_per_s": 6.25, "data_wait_pct": 10}
    assert rates({"images": 0.0, "training_seconds": 0.0, "waiting_seconds": 0.0}) == {
        "img_per_s": 0,
        "data_wait_pct": 0,
    }


@pytest.mark.parametrize("budget", [{"hours": 0.4}, {"kwh": 1.9}, {"kwh": 2.0}, {"usd": 2.9}])
def test_a_budget_that_is_used_up_asks_for_a_stop_with_its_reason(tmp_path: Path, budget: dict[str, float]) -> None:
    spent = spending(tmp_path, **budget)
    if "hours" in budget or "usd" in budget:
        spent.check()
        assert not spent.stop.requested
    spent.began -= 1800
    spent.stop.begun = False
    spent.check()
    assert not spent.stop.requested, "there is nothing to save"
    spent.stop.begun = True
    spent.check()
    ((name, most),) = budget.items()
    assert spent.stop.requested
    assert spent.stop.reason.startswith(f"budget.{name}={most:g} is used up (")


def test_of_two_budgets_that_are_used_up_the_last_one_is_the_reason(tmp_path: Path) -> None:
    spent = spending(tmp_path, kwh=1.0, usd=2.9)
    spent.began -= 3600
    spent.check()
    assert spent.stop.reason.startswith("budget.usd=2.9 is used up (")


def test_a_budget_of_energy_needs_a_machine_that_tells_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"budget\.kwh is 2, but this machine does not tell .* use budget\.hours"):
        spending(tmp_path, joules=None, kwh=2.0)
    assert "kwh" not in spending(tmp_path, joules=None).so_far()
    assert spending(tmp_path, joules=0.0, kwh=2.0).so_far()["kwh"] == 0
    several = spending(tmp_path)
    several.counts_energy = False
    assert "kwh" not in several.so_far(), "the energy of one machine of several is not that of the run"


@pytest.mark.parametrize("outcome", ["completed", "stopped", "failed"])
def test_a_run_has_its_costs_however_it_ends(outcome: Any, tmp_path: Path) -> None:
    spent = spending(tmp_path)
    spent.began -= 3600
    spent.end(outcome)
    assert Run(tmp_path).spent["gpu_hours"] == pytest.approx(2.0, rel=1e-3)


def test_a_cost_without_a_number_counts_nothing(tmp_path: Path) -> None:
    RunDir(tmp_path).summary.write_text(json.dumps({"spent": {"usd": None, "gpu_hours": 2}}))
    resumed = spending(tmp_path)
    resumed.began -= 3600
    assert resumed.so_far() == pytest.approx({"hours": 1.0, "gpu_hours": 4.0, "kwh": 2.0, "usd": 6.0}, rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (("budget.usd=1", "device=cpu"), "use budget.hours"),
        (("budget.usd=1", "device=cuda"), "use budget.hours, or add cost.usd_per_gpu_hour=PRICE"),
    ],
)
def test_a_budget_in_money_needs_a_price(overrides: tuple[str, ...], remedy: str) -> None:
    with pytest.raises(InputError, match=r"budget\.usd is 1") as raised:
        check_effects(built(*overrides))
    assert str(raised.value).endswith(remedy)
    check_effects(built("budget.usd=1", "device=cuda", "cost.usd_per_gpu_hour=2"))


def test_a_run_stops_at_its_budget_and_goes_on_with_a_larger_one_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ("model=linear", "steps=300", "batch=50", "train.eval_every=100%", "checkpoint.every=100%")
    monkeypatch.setattr(HardwareWatch, "period", 0.01)
    whole = train_here(tmp_path / "whole", *job)
    run = run_dir(tmp_path / "cut", *job, "budget.hours=1e-6")
    with pytest.raises(Stopped, match=r"saved: budget\.hours=1e-06 is used up .*; a larger one lets the"):
        experiment.run(load_job(run.config), run, World.solo())
    assert 0 < json.loads(run.summary.read_text())["step"] < 300
    spent = json.loads(run.summary.read_text())["spent"]["hours"]
    assert spent >= 1e-6
    resumed = train_here(tmp_path / "cut", *job)
    assert resumed.weights.read_bytes() == whole.weights.read_bytes()
    assert json.loads(resumed.summary.read_text())["spent"]["hours"] > spent


def test_the_config_of_a_run_from_before_there_were_budgets_is_a_job() -> None:
    from lockstep.config import components

    values = {key: value for key, value in composed().items() if key not in ("cost", "budget")}
    assert components.build_job(values).budget == BudgetBlock()


JOB = ("model=linear", "batch=100", "steps=40", "train.eval_every=10")
TRAINED = 1442  # of the 1,797 digits, see docs/configuration.md
# In an epoch of 15 steps, the last one has what is left.
IMAGES = sum(100 if step % 15 else TRAINED - 1400 for step in range(1, 41))


def summary(run: RunDir) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(run.summary.read_text())
    return content


def test_the_figures_of_a_run_are_sums_over_its_sessions(tmp_path: Path) -> None:
    assert len(load_digits().target) == 1797
    sessions = []
    for stop_at in (7, 13, None):  # 20 steps are left
        run = train_here(tmp_path / "000-run", *JOB, stop_at=stop_at)
        sessions.append(summary(run))
    parts = [one["spent"] for one in sessions]
    for key in ("hours", "images", "training_seconds"):
        assert 0 < parts[0][key] < parts[1][key] < parts[2][key]
    assert [part["images"] for part in parts] == [700, 700 + 1300 - 58, IMAGES]
    last, spent = sessions[-1], parts[-1]
    assert last["seconds"] == pytest.approx(3600 * spent["hours"], abs=1e-3)
    assert last["img_per_s"] == pytest.approx(IMAGES / spent["training_seconds"], rel=1e-3)
    waits = 100 * spent["waiting_seconds"] / spent["training_seconds"]
    assert last["data_wait_pct"] == pytest.approx(waits, abs=1e-3)
    assert ("duration", format_duration(last["seconds"])) in facts_of(Run(run.path))["summary"]
    record = Record(number=0, overrides=(), folder=run.path.name)
    assert costs_of(Run(tmp_path / record.folder))["seconds"] == last["seconds"]


def test_a_used_up_budget_says_how_much_was_used_and_what_to_do(tmp_path: Path) -> None:
    spent = spending(tmp_path, hours=100.0, kwh=1.2345678)
    spent.check()
    assert spent.stop.reason == "budget.kwh=1.23457 is used up (2); a larger one lets the run continue"


@pytest.mark.parametrize(("price", "usd"), [(None, {}), (0.0, {"usd": 0.0}), (1.5, {"usd": 3.0})])
def test_a_run_costs_money_where_it_has_a_price(
    price: float | None, usd: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("lockstep.telemetry.hardware_watch.time", SimpleNamespace(monotonic=lambda: now))
    spent = spending(tmp_path, joules=None)
    spent.usd_per_gpu_hour = price
    now = 3600.0
    assert spent.so_far() == {"hours": 1.0, "gpu_hours": 2.0, **usd}
